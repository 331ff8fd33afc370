"""The invariants of the machine, as checks that raise.

The main one is conservation: the slots of an edge are at every moment either ready at the consumer,
free at the producer, held by a firing at one of its ends, or under way in a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from actors.table import OUTSIDE, Edge, MachineTable
from actors.transitions import Message, State, message
from compiler.errors import InternalError

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
        written = edge.produce if state[edge.producer] in _HOLDING else 0
        read = 0
        if state[edge.consumer] in _HOLDING:
            flushed = flush_tokens[edge.consumer]
            ports = table.inputs[edge.consumer]
            read = flushed[ports.index(index)] if flushed else edge.consume
        total = ready + free + under_way + written + read
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
