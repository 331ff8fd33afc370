"""The state of a machine in columns: its wiring, its invariants, its story, and all that changes.

A *condition* is one end of an edge as its actor sees it: ready tokens at the consumer, free slots
at the producer. It is numbered by the message that refills it, so that a message is its own index
and nothing is decoded on the hot path. `Wiring` holds what never changes, computed once per run.

`MachineState` holds what changes. By message: `level` and `refill` of its condition. By actor:
`state`, `unmet` conditions, `firings` that were started, `has_end` (an input has ended) and
`flush_tokens` of a last firing. By edge: `is_ended`. Then what the caller takes over (`outbox`,
`fireable`, `detached`, `flushing`) and the `ring` of the last messages. The lists stay the same
objects for as long as the machine lives: `Machine.deliver` has them in locals while others change
them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from actors.machine.errors import ProtocolError
from actors.machine.table import OUTSIDE, Edge, MachineTable
from actors.machine.transitions import (
    KIND_BITS,
    KIND_MASK,
    NOBODY,
    Message,
    State,
    kind_of,
    message,
    subject_of,
)
from compiler.contract.errors import InternalError

# The main invariant is conservation: the slots of an edge are at every moment either ready at the
# consumer, free at the producer, held by a firing at one of its ends, or under way in a message.

# A failed firing keeps what it took, so its slots are accounted for as held.
_HOLDING = (int(State.FIRING), int(State.FLUSHING), int(State.FAILED))


def check_edges(
    table: MachineTable,
    level: Sequence[int],
    state: Sequence[int],
    flush_tokens: Sequence[tuple[int, ...]],
    moving: Counter[int],
) -> None:
    """Check that no counter is negative and every edge accounts for exactly its slots.

    `moving` counts the messages under way. Raises InternalError naming the edge.
    """
    for index, edge in enumerate(table.edges):
        ready = level[message(Message.READY, index)] + edge.consume
        if ready < 0:
            _broken(table, edge, f"has {ready} ready tokens")
        if edge.producer == OUTSIDE:
            continue
        free = level[message(Message.FREE, index)] + edge.produce
        if free < 0:
            _broken(table, edge, f"has {free} free slots")
        under_way = (
            edge.produce * moving[message(Message.READY, index)]
            + edge.consume * moving[message(Message.FREE, index)]
            + moving[message(Message.RETURN, index)]
        )
        num_written = edge.produce if state[edge.producer] in _HOLDING else 0
        num_read = 0
        if state[edge.consumer] in _HOLDING:
            tokens = flush_tokens[edge.consumer]
            ports = table.inputs[edge.consumer]
            num_read = tokens[ports.index(index)] if tokens else edge.consume
        total = ready + free + under_way + num_written + num_read
        if total != edge.num_slots:
            _broken(table, edge, f"accounts for {total} of its {edge.num_slots} slots")


def check_actors(
    table: MachineTable,
    level: Sequence[int],
    state: Sequence[int],
    unmet: Sequence[int],
    num_open: int,
    is_halted: bool,
) -> None:
    """Check that unmet conditions are counted right and that no actor waits for nothing.

    Raises InternalError naming the actor.
    """
    for actor, name in enumerate(table.names):
        conditions = [message(Message.READY, e) for e in table.all_inputs(actor)]
        conditions += [message(Message.FREE, e) for e in table.outputs[actor]]
        missing = sum([level[c] < 0 for c in conditions])
        # Not to wait, and to be halted, are conditions like any other: see actors.machine.machine.
        missing += (state[actor] != State.WAITING) + is_halted
        if missing != unmet[actor]:
            raise InternalError(
                f"actor {name!r} counts {unmet[actor]} unmet conditions and has {missing}"
            )
        if not missing:
            raise InternalError(f"actor {name!r} could fire and waits")
    still_open = sum([s != State.ENDED for s in state[: table.num_actors]])
    if num_open != still_open:
        raise InternalError(f"{num_open} actors are counted as not ended, {still_open} are")


def _broken(table: MachineTable, edge: Edge, what: str) -> NoReturn:
    producer = "outside" if edge.producer == OUTSIDE else table.names[edge.producer]
    raise InternalError(
        f"register {edge.name!r} from {producer!r} to {table.names[edge.consumer]!r} {what}"
    )


# The story of an actor is its last messages in words. The machine keeps them as raw ints in a
# bounded ring: only an error, or a reader, pays for the words.

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


def actor_history(
    table: MachineTable, codes: Iterable[int], actor: int, limit: int
) -> tuple[str, ...]:
    """Return the last `limit` messages to `actor` or about the ends of its neighbours' firings."""
    edges = [table.edges[e] for e in table.inputs[actor] + table.outputs[actor]]
    # May hold OUTSIDE, which is the subject of no message.
    near = {actor} | {edge.producer for edge in edges} | {edge.consumer for edge in edges}
    rows = [
        code
        for code in codes
        if addressee(table, code) == actor
        or (code & KIND_MASK in _BY_ACTOR and subject_of(code) in near)
    ]
    return tuple([describe(table, code) for code in rows[-limit:]])


def message_history(
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
            # Read backwards, the first DONE of a flushed actor is that of its last firing.
            sent = [c for c in posts[subject] if not (is_flush and kind_of(c) is Message.FREE)]
            # `rows` is newest first, as the codes are walked; it is turned round at the end.
            rows.extend([describe(table, c) for c in reversed(sent)])
        elif kind in _ORDINARY and table.edges[subject].producer != OUTSIDE:
            continue
        rows.append(describe(table, code))
    return tuple(reversed(rows[:limit]))


def describe_missing(
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


_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Wiring:
    """Columns by message and by actor.

    By message, and padded to twice the length, so that a negative message finds nobody and not the
    last edge: `owner` the actor it is for (the number of actors: nobody); `refill` the count that
    a Ready or Free adds to its condition, else 0; `level` where the condition starts, `limit` where
    all its slots are home. A level is what is there less what a firing takes.

    By actor: `takes` pairs (condition, count) of a firing; `readies` and `frees` what it sends to
    consumers and producers, `posts` both; `num_unmet` the conditions unmet at the start.
    """

    owner: tuple[int, ...]
    refill: tuple[int, ...]
    level: tuple[int, ...]
    limit: tuple[int, ...]
    takes: tuple[tuple[tuple[int, int], ...], ...]
    readies: tuple[tuple[int, ...], ...]
    frees: tuple[tuple[int, ...], ...]
    posts: tuple[tuple[int, ...], ...]
    num_unmet: tuple[int, ...]


def wire(table: MachineTable) -> Wiring:
    """Return the columns of a table. Linear in actors and edges."""
    actors = range(table.num_actors)
    size = max(table.num_actors, len(table.edges)) << KIND_BITS
    # Negative codes index from the end: the padding makes them meet nobody, not the last edge.
    owners = [addressee(table, code) for code in range(size)] + [None] * size
    level, refill, limit = [0] * len(owners), [0] * len(owners), [0] * len(owners)
    for index, edge in enumerate(table.edges):
        ready, free = message(Message.READY, index), message(Message.FREE, index)
        is_admission = edge.producer == OUTSIDE
        level[ready] = edge.initial - edge.consume
        refill[ready] = edge.produce
        # Permits are not slots: as many may be admitted as a user asks for.
        limit[ready] = _UNLIMITED if is_admission else edge.num_slots - edge.consume
        if is_admission:
            continue  # Free goes to nobody
        limit[free] = edge.num_slots - edge.produce
        # An initial token lies in a slot, which is not free then.
        level[free] = limit[free] - edge.initial
        refill[free] = edge.consume
    frees = [tuple([message(Message.FREE, e) for e in table.inputs[a]]) for a in actors]
    takes = [_takes(table, a) for a in actors]
    readies = [tuple([message(Message.READY, e) for e in table.outputs[a]]) for a in actors]
    return Wiring(
        owner=tuple([table.num_actors if owner is None else owner for owner in owners]),
        refill=tuple(refill),
        level=tuple(level),
        limit=tuple(limit),
        takes=tuple(takes),
        readies=tuple(readies),
        frees=tuple(frees),
        posts=tuple([r + f for r, f in zip(readies, frees, strict=True)]),
        num_unmet=tuple([sum([level[code] < 0 for code, _ in row]) for row in takes]),
    )


def _takes(table: MachineTable, actor: int) -> tuple[tuple[int, int], ...]:
    edges = table.edges
    tokens = [(message(Message.READY, e), edges[e].consume) for e in table.all_inputs(actor)]
    slots = [(message(Message.FREE, e), edges[e].produce) for e in table.outputs[actor]]
    return tuple(tokens + slots)


_STORY_ROWS_PER_ACTOR = 16
_STORY_ROWS = 1000
_STORY_LIMIT = 12

_RETURN_TO_FREE = Message.RETURN ^ Message.FREE


class MachineState:
    """The state of one run of an actor graph, as it is before the first message."""

    __slots__ = (
        "detached", "fireable", "firings", "flush_tokens", "flushing", "has_end", "is_ended",
        "is_halted", "level", "limit", "num_open", "outbox", "owner", "refill", "ring", "state",
        "table", "unmet", "wiring",
    )  # fmt: skip

    def __init__(self, table: MachineTable) -> None:
        num_actors = table.num_actors
        self.table = table
        self.wiring = wiring = wire(table)
        self.outbox: list[int] = []
        self.fireable: deque[int] = deque()
        self.detached: deque[int] = deque()
        self.flushing: deque[int] = deque()
        # At least the 1,000 rows that `Machine.last_messages` promises, more where actors are many.
        self.ring: deque[int] = deque(maxlen=_STORY_ROWS_PER_ACTOR * num_actors + _STORY_ROWS)
        self.owner, self.limit = wiring.owner, wiring.limit
        # Copies: `refill` of an actor goes to 0 when it ends, and the wiring keeps the rates.
        self.refill, self.level = list(wiring.refill), list(wiring.level)
        # One entry more than actors: the addressee of messages to nobody.
        self.state = [int(State.WAITING)] * num_actors + [NOBODY]
        self.unmet = list(wiring.num_unmet)
        self.firings = [0] * num_actors
        self.has_end = [False] * num_actors
        self.is_ended = [False] * len(table.edges)
        self.flush_tokens: list[tuple[int, ...]] = [()] * num_actors
        self.num_open = num_actors
        self.is_halted = False

    def add(self, code: int, count: int) -> None:
        """Refill the condition of a message by so many. Raises ProtocolError above its limit."""
        level = self.level[code] + count
        if level > self.limit[code]:
            self.refuse(code)
        # A bool counts as 0 or 1: the condition has become met just now, or it has not.
        self.unmet[self.owner[code]] -= level - count < 0 <= level
        self.level[code] = level

    def take(self, code: int, count: int) -> None:
        """Take so many from the condition of a message."""
        level = self.level[code] - count
        # The reverse: the condition was met and is not any more.
        self.unmet[self.owner[code]] += level < 0 <= level + count
        self.level[code] = level

    def count(self, code: int) -> None:
        """Add what a Ready, Free or Return brings, and note it."""
        if code & KIND_MASK == Message.RETURN:
            free = code ^ _RETURN_TO_FREE
            self.add(free, 1)
            # Where slots come one by one, a whole Free can cross zero and its limit at once, which
            # `deliver` does not look for: from now on the table decides, and `add` looks.
            self.refill[free] = 0
        else:
            self.add(code, self.wiring.refill[code])
        self.ring.append(code)

    def look_up_every_message(self, actor: int) -> None:
        """Have the table decide about every message to an actor from now on.

        While an actor waits or fires, its Ready and Free are COUNT, whatever its state; so their
        cells are not looked up, which saves a tenth of a firing. A refill of 0 ends that.
        """
        for code, _ in self.wiring.takes[actor]:
            self.refill[code] = 0

    def halt(self) -> None:
        """Make being halted an unmet condition of every actor; once."""
        if not self.is_halted:
            self.is_halted = True
            # In place: `Machine.deliver` holds this very list in a local.
            self.unmet[:] = [unmet + 1 for unmet in self.unmet]

    def story(self, actor: int) -> tuple[str, ...]:
        """Return what last happened to an actor and its neighbours: see `Machine.story`."""
        return actor_history(self.table, self.ring, actor, _STORY_LIMIT)

    def refuse(self, code: int) -> NoReturn:
        """Raise the ProtocolError about a message that is not allowed now."""
        actor = addressee(self.table, code)
        if actor is None:
            raise ProtocolError(f"message {code} names no edge or actor of this plan")
        raise ProtocolError(
            f"{describe(self.table, code)} is not allowed now: actor {self.table.names[actor]!r} is"
            f" {State(self.state[actor]).name} in firing {self.firings[actor] - 1}."
            " Its last messages:" + "".join([f"\n  {row}" for row in self.story(actor)])
        )
