"""What a block may save: the Pareto front of its save-sets.

Candidates are the buffers inside a block that its stage reads, directly or to make others again.
Up to MAX_ENUMERATED of them, every set is judged. Beyond, two greedy trails are walked, from saving
all and from saving nothing, and every set met on the way is judged. Buffers that are small beside
the others (statistics) are no candidates: they are saved where the stage reads them.

Neighbouring blocks taken as one may also drop what crosses between them. Their sets are the
products of the fronts of both, with and without the crossing buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.recompute.blocks import NO_BUFFER, SMALL_PART
from memory.recompute.local import LocalBlock, PlacedBlock
from memory.recompute.save_sets import (
    BoolArray,
    FloatArray,
    SetCosts,
    SweepPass,
    Through,
    judge,
    judge_through,
)

MAX_ENUMERATED = 11
MAX_ROUNDS = 24
"""Rounds of a greedy trail: with more candidates, each round changes several."""

MAX_FRONT = 28
"""Options kept per front: those that matter least between their neighbours are left out."""

MAX_FACTORS = 20
"""Options of each part that the products of a run are made of."""


@dataclass(frozen=True, slots=True)
class Option:
    """A save-set (local buffers, ascending) and what it costs, as in `SetCosts`."""

    saves: tuple[int, ...]
    saved_bytes: int
    forward_peak: int
    stage_peak: int
    duration: float


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The options of a block for each kind of forward pass, and passing through it."""

    first: tuple[Option, ...]
    again: tuple[Option, ...]
    alone: tuple[Option, ...]
    through_first: Through
    through_again: Through


def block_options(local: LocalBlock) -> BlockOptions:
    """Return the Pareto fronts of a block, in order of their bytes saved."""
    choices, always = candidates(local)
    count = len(choices)
    if count <= MAX_ENUMERATED:
        chosen = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1 == 1
    else:
        chosen = _trails(local, choices, always)
    return _fronts(local, _as_sets(local, choices, always, chosen))


def joined_options(
    run: PlacedBlock,
    earlier: tuple[PlacedBlock, BlockOptions],
    later: tuple[PlacedBlock, BlockOptions],
) -> BlockOptions:
    """Return the Pareto fronts of a run that consists of two neighbouring parts."""
    number = {b: k for k, b in enumerate(run.buffers)}
    sides = [
        [
            [number[part.buffers[b]] for b in options.first[k].saves]
            for k in _spread(len(options.first), MAX_FACTORS)
        ]
        for part, options in (earlier, later)
    ]
    crossing = number.get(earlier[0].block.output, NO_BUFFER)
    saves = [
        (*left, *right, *middle)
        for middle in ((), (crossing,))
        for left in sides[0]
        for right in sides[1]
        if NO_BUFFER not in middle
    ]
    sets = np.zeros((len(saves), len(run.buffers)), np.bool_)
    lane = np.repeat(np.arange(len(saves)), [len(chosen) for chosen in saves])
    sets[lane, np.array([b for chosen in saves for b in chosen], np.int64)] = True
    return _fronts(run.local, np.unique(sets, axis=0))


def candidates(local: LocalBlock) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (buffers that may be saved or not, small ones that are), largest first."""
    is_wanted = [False] * len(local.size_bytes)
    for op in local.stage:
        for b in op.reads:
            is_wanted[b] = local.recomputable[b]
    is_read = tuple(is_wanted)
    for op in reversed(local.forward):
        if any([is_wanted[b] for b in op.writes]):
            for b in op.reads:
                is_wanted[b] = local.recomputable[b]
    wanted = [b for b, is_one in enumerate(is_wanted) if is_one and b != local.output]
    wanted.sort(key=lambda b: -local.size_bytes[b])
    small = local.size_bytes[wanted[0]] // SMALL_PART if wanted else 0
    return (
        tuple(b for b in wanted if local.size_bytes[b] > small),
        tuple(b for b in wanted if local.size_bytes[b] <= small and is_read[b]),
    )


def _as_sets(
    local: LocalBlock, choices: tuple[int, ...], always: tuple[int, ...], chosen: BoolArray
) -> BoolArray:
    sets = np.zeros((len(chosen), len(local.size_bytes)), np.bool_)
    sets[:, list(choices)] = chosen
    sets[:, list(always)] = True
    return sets


def _trails(local: LocalBlock, choices: tuple[int, ...], always: tuple[int, ...]) -> BoolArray:
    """Walk from saving all to saving nothing and back; return all sets judged on the way."""
    count = len(choices)
    size = np.array([local.size_bytes[b] for b in choices], np.float64)
    at_once = -(-count // MAX_ROUNDS)
    judged: list[BoolArray] = []
    for saves_first in (True, False):
        current = np.full(count, saves_first)
        while (current == saves_first).any():
            around = np.concatenate((current[None], current ^ np.eye(count, dtype=np.bool_)))
            judged.append(around)
            costs = judge(local, _as_sets(local, choices, always, around))[SweepPass.AGAIN]
            change = np.abs(costs.duration[1:] - costs.duration[0])
            bytes_per_time = size / np.maximum(change, np.finfo(np.float64).tiny ** 0.5)
            order = np.argsort(-bytes_per_time if saves_first else bytes_per_time, kind="stable")
            left = order[(current == saves_first)[order]]
            current[left[:at_once]] = not saves_first
        judged.append(current[None])
    return np.unique(np.concatenate(judged), axis=0)


def _fronts(local: LocalBlock, sets: BoolArray) -> BlockOptions:
    costs = judge(local, sets)
    first, again, alone = [_front(sets, costs[which]) for which in SweepPass]
    through = [judge_through(local, which) for which in (SweepPass.FIRST, SweepPass.AGAIN)]
    return BlockOptions(first, again, alone, *through)


def _front(sets: BoolArray, costs: SetCosts) -> tuple[Option, ...]:
    """Return the options that none beats in all of bytes saved, both peaks and time."""
    columns: FloatArray = np.stack(
        (costs.saved, costs.duration, costs.stage_peak, costs.forward_peak), axis=1
    )
    left, kept = np.lexsort(columns.T[::-1]), list[int]()
    while left.size:
        best = int(left[0])
        kept.append(best)
        left = left[(columns[left] < columns[best]).any(axis=1)]
    return tuple(
        Option(
            tuple(np.flatnonzero(sets[i]).tolist()),
            int(costs.saved[i]),
            int(costs.forward_peak[i]),
            int(costs.stage_peak[i]),
            float(costs.duration[i]),
        )
        for i in _thinned(columns, kept)
    )


def _thinned(columns: FloatArray, kept: list[int]) -> list[int]:
    """Return at most about MAX_FRONT of a front: of bytes saved and time first, spread evenly."""
    if len(kept) <= MAX_FRONT:
        return kept
    lowest, stairs = np.inf, list[int]()
    for i in kept:
        if columns[i, 1] < lowest:
            lowest = columns[i, 1]
            stairs.append(i)
    others = [i for i in kept if i not in stairs]
    chosen = dict.fromkeys(stairs[k] for k in _spread(len(stairs), MAX_FRONT * 3 // 4))
    chosen |= dict.fromkeys(min(kept, key=lambda i: (columns[i, c], i)) for c in (2, 3))
    chosen |= dict.fromkeys(others[k] for k in _spread(len(others), MAX_FRONT - len(chosen)))
    return [i for i in kept if i in chosen]


def _spread(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return [int(k) for k in np.linspace(0, count - 1, most).round()]
