"""The story of an actor: its last messages in words, for every error.

The machine keeps the last messages as raw ints in a bounded ring; only an error, or a reader, pays
for the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.table import OUTSIDE, MachineTable
from actors.transitions import KIND_MASK, Message, kind_of, message, subject_of

_BY_ACTOR = (Message.DONE, Message.FAILED, Message.EXHAUSTED)
_THING = {Message.READY: "tokens", Message.FREE: "slots"}
_ORDINARY = (Message.READY, Message.FREE)


def addressee(table: MachineTable, code: int) -> int | None:
    """Return the actor that a message is for, or None when it is for nobody."""
    if code < 0 or code & KIND_MASK not in Message._value2member_map_:
        return None
    kind, subject = kind_of(code), subject_of(code)
    if kind in _BY_ACTOR:
        is_known = subject < table.num_actors
        if kind is Message.EXHAUSTED and is_known and table.admission[subject] is None:
            return None
        return subject if is_known else None
    if subject >= len(table.edges):
        return None
    edge = table.edges[subject]
    if kind in (Message.READY, Message.END):
        return edge.consumer
    return edge.producer if edge.producer != OUTSIDE else None


def describe(table: MachineTable, code: int) -> str:
    """Return a message in words: "READY 'batch' data -> step"."""
    actor = addressee(table, code)
    if actor is None:
        return f"unknown message {code}"
    kind = kind_of(code)
    if kind in _BY_ACTOR:
        return f"{kind.name} {table.names[actor]}"
    edge = table.edges[subject_of(code)]
    producer = "outside" if edge.producer == OUTSIDE else table.names[edge.producer]
    consumer = table.names[edge.consumer]
    ends = (producer, consumer) if kind in (Message.READY, Message.END) else (consumer, producer)
    return f"{kind.name} {edge.name!r} {ends[0]} -> {ends[1]}"


def tell(table: MachineTable, codes: Iterable[int], actor: int, limit: int) -> tuple[str, ...]:
    """Return the last `limit` messages to `actor` or about the ends of its neighbours' firings."""
    edges = [table.edges[e] for e in table.inputs[actor] + table.outputs[actor]]
    near = {actor} | {edge.producer for edge in edges} | {edge.consumer for edge in edges}
    rows = [
        code
        for code in codes
        if addressee(table, code) == actor
        or (code & KIND_MASK in _BY_ACTOR and subject_of(code) in near)
    ]
    return tuple([describe(table, code) for code in rows[-limit:]])


def tell_all(
    table: MachineTable,
    posts: Sequence[tuple[int, ...]],
    flushed: Iterable[int],
    codes: Sequence[int],
    limit: int,
) -> tuple[str, ...]:
    """Return the last `limit` messages in the order in which they were sent.

    A Ready or Free between actors is told where the DONE that sends it is, whether or not it was
    noted when it was received. The last DONE of the actors `flushed` ends a flushed firing, which
    sends no Free.
    """
    rows: list[str] = []
    last = set(flushed)
    for code in reversed(codes):
        if len(rows) >= limit:
            break
        kind, subject = kind_of(code), subject_of(code)
        if kind is Message.DONE:
            is_flush = subject in last
            last.discard(subject)
            sent = [c for c in posts[subject] if not (is_flush and kind_of(c) is Message.FREE)]
            rows.extend([describe(table, c) for c in reversed(sent)])
        elif kind in _ORDINARY and table.edges[subject].producer != OUTSIDE:
            continue
        rows.append(describe(table, code))
    return tuple(reversed(rows[:limit]))


def missing(
    table: MachineTable, takes: Iterable[tuple[int, int]], level: Sequence[int]
) -> tuple[str, ...]:
    """Return in words what the conditions lack that a firing `takes` from."""
    return tuple(
        [
            f"{-level[code]} more {_THING[kind_of(code)]} of {table.edges[subject_of(code)].name!r}"
            for code, _ in takes
            if level[code] < 0
        ]
    )


def causes(
    table: MachineTable, start_causes: Sequence[int], actor: int
) -> tuple[tuple[str, str, int], ...]:
    """Return how many firings of an actor each thing started that was the last one missing.

    The rows are (kind, register, count) of every input ("input"), of every output ("register": a
    slot came free), and of its own previous firing ("self", without a register).
    """
    tokens = [
        ("input", table.edges[e].name, start_causes[message(Message.READY, e)])
        for e in table.all_inputs(actor)
    ]
    slots = [
        (
            "register",
            table.edges[e].name,
            start_causes[message(Message.FREE, e)] + start_causes[message(Message.RETURN, e)],
        )
        for e in table.outputs[actor]
    ]
    return (*tokens, *slots, ("self", "", start_causes[message(Message.DONE, actor)]))
