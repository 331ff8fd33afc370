"""The search for a perfect packing: one in which no byte is free in any section.

Such a packing cuts a rectangle of time and bytes into rectangles. At a *boundary* between two
sections, what ends on consecutive addresses leaves a hole that what starts there has to fill: a
*segment* is a set of ends and a set of starts with the same bytes. Take segments as vertices and
buffers as edges: every drawing of this graph without crossings gives a packing (Brooks, Smith,
Stone, Tutte 1940). So a sweep over time need not choose orders of buffers. It keeps all of them as
a PQ-tree of what is live (Lempel, Even, Cederbaum 1967): at a segment the ends become consecutive
and give way to the starts, in any order.

What is left to choose is how a boundary divides into segments, as several divisions may add up. One
is likely where its ends were almost consecutive before, and where few others add up by chance. The
sweep keeps the best states, ever more of them, and runs forwards and backwards in turns.
"""

from __future__ import annotations

from math import lgamma, log, pi
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from memory import pq_tree
from memory.liveness import IntArray
from memory.packing import Instance, WorkBudget, live_per_section, members
from memory.pq_tree import PQTree

_MOST_STARTS, _MOST_SETS, _MOST_SEGMENTS = 16, 5000, 100
"""Limits of a boundary: starts whose subsets are looked through, else they stay together; sets of
ends; segments of which a state divides it, best first."""

_SEGMENT, _CHANCE, _ORDERS = -1648, 0.7, 1.5
"""A division's score: the first for each segment but one, which is 1024 log 0.2; less the second
for the logarithm of how many divisions add up by chance; the third for the logarithm of the share
of orders that remain. Fitted to 12 cut rectangles of 400 buffers, where the true division scores
best at 19 of 20 boundaries."""

Segment = tuple[int, int]  # ends and starts, as sets


class DissectionState(NamedTuple):
    """Orders of what is live, and the last boundary: the orders in which a segment's ends meet."""

    score: int
    tree: PQTree
    before: DissectionState | None = None
    segments: tuple[tuple[PQTree, Segment], ...] = ()


_States = list[DissectionState]


def dissect(instance: Instance, work: WorkBudget) -> IntArray | None:
    """Return the offsets of a packing at the bound that leaves no byte free; None proves nothing.

    None, too, where a section has fewer live bytes. A unit of work is a reduction: some 20 us.
    """
    if (live_per_section(instance) < instance.bound).any():
        return None
    ends, starts = [
        [np.flatnonzero(column == edge).tolist() for edge in range(instance.num_sections + 1)]
        for column in (instance.upper, instance.lower)
    ]
    num_started = np.bincount(instance.lower, minlength=instance.num_sections + 1)
    num_live = np.cumsum(num_started - np.bincount(instance.upper))
    size = (instance.size // np.gcd.reduce(instance.size)).tolist()
    for turn in range(64 if num_live.max() <= pq_tree.MOST_LEAVES else 0):
        # As wide as the sweep before in the other direction, then twice as wide.
        states = [DissectionState(0, pq_tree.any_order(starts[0]))]
        for k in range(1, instance.num_sections):
            states = states and _pass(states, [ends[k], starts[k]], size, 1 << turn // 2, work)
            if work.done >= work.limit:
                return None
        if states:
            return _offsets(states[0], instance.size)
        ends, starts = starts[::-1], ends[::-1]
    return None


def _pass(
    states: _States, sides: list[list[int]], size: list[int], width: int, work: WorkBudget
) -> _States:
    """Return the best states behind a boundary of ends and starts."""
    ends, starts = sides
    # A weight tells a buffer by its low bits and its bytes by those above.
    low = 1 << len(size)
    weights = {i: size[i] * low | 1 << i for i in (*ends, *starts)}
    whole = sum([weights[i] for i in ends])
    sums = [0]
    for i in starts if len(ends) > 1 and 1 < len(starts) <= _MOST_STARTS else ():
        sums += [before + weights[i] for before in sums]
    # What fills the whole hole, and the proper subsets of the starts.
    starts_of = {whole // low: [sum([1 << i for i in starts])]}
    for added in sums[1:-1]:
        starts_of.setdefault(added // low, []).append(added % low)
    of_ends = {i: weights[i] for i in ends}
    # Sums of random subsets are spread like a normal distribution of a quarter of this variance.
    spread = max(log(2 * pi * sum([size[i] ** 2 for i in weights]) / 4) / 2, 0.0)
    candidates: list[tuple[int, DissectionState, tuple[Segment, ...]]] = []
    for state in states:
        sets = pq_tree.consecutive_sums(state.tree, of_ends, _MOST_SETS) if len(sums) > 1 else set()
        work.done += len(sets) // 50
        values: dict[Segment, int] = {}
        # Sorted, as the order of a set of large integers is not that of their values.
        for weight in sorted(sets | {whole}):
            fillings = starts_of.get(weight // low, [])
            work.done += bool(fillings)
            reduced = pq_tree.reduce(state.tree, weight % low) if fillings else None
            if reduced is not None:
                value = round(_ORDERS * (reduced.log_orders - state.tree.log_orders))
                values |= {(weight % low, filling): value for filling in fillings}
        for division in _divisions(values, (whole % low, starts_of[whole // low][0])):
            more = len(division) - 1
            chance = len(weights) * log(more + 1) - more * spread - lgamma(more + 2)
            score = state.score + more * _SEGMENT - round(1024 * _CHANCE * chance)
            score += sum([values[segment] for segment in division])
            candidates.append((score, state, division))
    work.done += len(candidates) // 4 + len(sums) // 100
    later: _States = []
    # The sort is stable: the states depend on the instance alone.
    for score, state, division in sorted(candidates, key=itemgetter(0), reverse=True):
        behind = _behind(score, state, division, work) if len(later) < width else None
        later += [behind] if behind is not None else []
    return later


def _divisions(values: dict[Segment, int], whole: Segment) -> list[tuple[Segment, ...]]:
    """Return divisions of the whole into segments that have a value, fewest segments first."""
    divisions: list[tuple[Segment, ...]] = [(whole,)] if whole in values else []
    best = sorted(values, key=values.__getitem__, reverse=True)[:_MOST_SEGMENTS]
    # Segments chosen so far, and what is left behind them.
    rests: list[tuple[tuple[Segment, ...], Segment]] = [((), whole)]
    while rests:
        deeper = []
        for chosen, (rest_ends, rest_starts) in rests:
            # Each segment holds the lowest end that is left, so that no division comes twice.
            lowest = rest_ends & -rest_ends
            for ends, starts in best:
                rest = (rest_ends ^ ends, rest_starts ^ starts)
                if ends & lowest and not (ends & ~rest_ends or starts & ~rest_starts) and all(rest):
                    deeper.append(((*chosen, (ends, starts)), rest))
        divisions += [(*chosen, rest) for chosen, rest in deeper if rest in values]
        rests = deeper[:_MOST_SEGMENTS]
    return divisions


def _behind(
    score: int, state: DissectionState, division: tuple[Segment, ...], work: WorkBudget
) -> DissectionState | None:
    """Return the state behind a boundary that is divided thus; None where ends lie apart."""
    tree, segments = state.tree, []
    for ends, starts in division:
        work.done += 1
        reduced = pq_tree.reduce(tree, ends)
        if reduced is None:
            return None
        segments.append((reduced, (ends, starts)))
        tree = pq_tree.replace(reduced, ends, pq_tree.any_order(members(starts)))
    return DissectionState(score, tree, state, tuple(segments))


def _offsets(state: DissectionState | None, size: IntArray) -> IntArray:
    """Return the offsets of an order of the last state, and of orders before that agree with it."""
    offsets = np.zeros(size.size, np.int64)
    stack = pq_tree.order(state.tree, range(size.size)) if state else []
    offsets[stack] = np.cumsum(size[stack]) - size[stack]
    while state is not None:
        for tree, (ends, starts) in reversed(state.segments):
            place = {i: at for at, i in enumerate(stack)}
            hole = min([place[i] for i in members(starts)])
            stack = pq_tree.order(tree, place | dict.fromkeys(members(ends), hole))
            offsets[stack] = np.cumsum(size[stack]) - size[stack]
        state = state.before
    return offsets
