"""The actor graph in the machine's own numbering, computed once per run.

A *condition* is one end of an edge as its actor sees it: ready tokens at the consumer, free slots
at the producer. It is numbered by the message that refills it, so that a message is its own index
and nothing is decoded on the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.story import addressee
from actors.table import OUTSIDE, MachineTable
from actors.transitions import KIND_BITS, Message, message

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
    every = range(table.num_actors)
    size = max(table.num_actors, len(table.edges)) << KIND_BITS
    owners = [addressee(table, code) for code in range(size)] + [None] * size
    level, refill, limit = [0] * len(owners), [0] * len(owners), [0] * len(owners)
    for index, edge in enumerate(table.edges):
        ready, free = message(Message.READY, index), message(Message.FREE, index)
        is_admission = edge.producer == OUTSIDE
        level[ready] = edge.initial - edge.consume
        refill[ready] = edge.produce
        limit[ready] = _UNLIMITED if is_admission else edge.num_slots - edge.consume
        if is_admission:
            continue  # Free goes to nobody
        limit[free] = edge.num_slots - edge.produce
        level[free] = limit[free] - edge.initial
        refill[free] = edge.consume
    frees = [tuple([message(Message.FREE, e) for e in table.inputs[a]]) for a in every]
    takes = [_takes(table, a) for a in every]
    readies = [tuple([message(Message.READY, e) for e in table.outputs[a]]) for a in every]
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
