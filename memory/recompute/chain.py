"""Recomputation over a chain of blocks: for any byte budget, a sequence out of a table.

Tables round to slots, and say nothing of pinned buffers; `simulate` has the last word on every
sequence. Where it shows room in the budget, a plan of more slots is tried. What is found is the
best over the blocks and options that are declared, up to that rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.liveness import IntArray
from memory.recompute.blocks import GraphBlock, find_blocks, merge_blocks
from memory.recompute.chain_table import BlockChain, BlockRun, Keep, SlotTable
from memory.recompute.local import PlacedBlock, place_runs
from memory.recompute.options import BlockOptions, block_options, candidates, joined_options
from memory.recompute.problem import Problem
from memory.recompute.save_sets import SweepPass, SweepStep, forward_steps, steps_of
from memory.recompute.simulate import simulate

MAX_BLOCKS = 128
"""Longer chains are made of pairs of blocks, so that their tables stay affordable."""

MAX_TERMS = 160_000
"""Most terms per slot of a table; chains of many unequal blocks are paired until they keep it."""

MAX_RUN = 4
"""Neighbouring blocks that may be kept as one."""

TABLE_WORK = 170_000_000
"""Terms of one table: what decides on its slots, between MIN_SLOTS and MAX_SLOTS."""

MIN_SLOTS, MAX_SLOTS = 1000, 2000

RANGE = 4
"""One table serves budgets from its largest down to this part of it; then a finer one does."""

MAX_LEVELS = 8
MAX_TRIALS = 8
"""Sequences tried per budget: half of them where the ratio of bytes to slots points."""


MAX_CANDIDATES = 32
"""A block of more buffers that may be saved or not is no block of a chain, but most of a graph.

Blocks of convolution networks and transformers have up to 8. Judging the save-sets of one with
200, as a net with a skip between any two layers has, took half a minute, and choosing buffers one
by one does as well there.
"""


MAX_KINDS = 64
"""Kinds of blocks with options of their own; a chain of more is left to other methods.

Networks repeat themselves: ResNet-50 has 37 blocks of 20 kinds, a GPT of any depth 6.
"""


def chain_plans(problem: Problem) -> ChainTable | None:
    """Return the plans of a chain of blocks for all budgets.

    None where there are no two blocks, one of them is too large (MAX_CANDIDATES), or hardly any two
    of them are alike (MAX_KINDS). Tables are made when a budget first asks for them.
    """
    blocks = chain_blocks(problem)
    while len(blocks) > MAX_BLOCKS:
        blocks = _in_pairs(blocks)
    while len(blocks) >= 2 and _is_chain_of_few(problem, blocks):
        chain = _make_chain(problem, blocks)
        if chain.num_terms <= MAX_TERMS or len(blocks) == 2:
            return ChainTable(problem, chain)
        blocks = _in_pairs(blocks)
    return None


def _is_chain_of_few(problem: Problem, blocks: tuple[GraphBlock, ...]) -> bool:
    """Whether the blocks are of few kinds, none of them too large."""
    alone = {runs[0].kind: runs[0].local for runs in place_runs(problem, blocks, 1)}
    return len(alone) <= MAX_KINDS and all(
        [len(candidates(local)[0]) <= MAX_CANDIDATES for local in alone.values()]
    )


def block_checkpointing(problem: Problem) -> tuple[int, ...] | None:
    """Return the sequence in which every block saves its output alone; None without two blocks.

    Before its stage a block runs again as a whole, as far as the stage needs it. The last block's
    stage follows at once, so that block keeps everything.
    """
    blocks = chain_blocks(problem)
    if len(blocks) < 2:
        return None
    placed = [runs[0] for runs in place_runs(problem, blocks, 1)]
    emitter = _ScheduleEmitter()
    sequence: list[int] = []
    for part in placed[:-1]:
        sequence += emitter.through(part, SweepPass.FIRST)
    for k, part in reversed(list(enumerate(placed))):
        which = SweepPass.FIRST if k == len(placed) - 1 else SweepPass.ALONE
        read = {b for op in part.local.stage for b in op.reads}
        saves = tuple(b for b in sorted(read) if part.local.recomputable[b])
        for steps in emitter.kept(part, saves, which):
            sequence += steps
    return tuple(sequence)


def chain_blocks(problem: Problem) -> tuple[GraphBlock, ...]:
    """Return the blocks a chain is made of: those without a stage of their own join the former."""
    joined: list[GraphBlock] = []
    for block in find_blocks(problem):
        if joined and block.stage_first == block.stage_end:
            joined[-1] = merge_blocks((joined[-1], block))
        else:
            joined.append(block)
    return tuple(joined)


class ChainTable:
    """The plans of one problem: `sequence` for a budget, `least_bytes` for the smallest one."""

    __slots__ = ("_chain", "_emitter", "_judged", "_least", "_levels", "_problem", "_top_bytes")

    def __init__(self, problem: Problem, chain: BlockChain) -> None:
        self._problem = problem
        self._chain = chain
        self._top_bytes = simulate(problem, problem.store_all).peak_bytes
        self._emitter = _ScheduleEmitter()
        self._levels: dict[int, _Level] = {}
        self._judged: dict[tuple[int, int], _ChainPlan] = {}
        self._least: _ChainPlan | None = None

    @property
    def least_bytes(self) -> int:
        """Return the smallest budget for which there is a sequence."""
        return self._least_plan().peak_bytes

    def sequence(self, budget_bytes: int) -> tuple[int, ...] | None:
        """Return a sequence whose simulated peak is within the budget; None where none is found.

        Deterministic, and independent of what was asked before. A larger budget may, by rounding,
        get a sequence that takes slightly more time.
        """
        level = 0
        while level + 1 < MAX_LEVELS and budget_bytes * RANGE ** (level + 1) <= self._top_bytes:
            level += 1
        plan = self._search(level, budget_bytes)
        if plan is None:
            least = self._least_plan()
            return least.sequence if least.peak_bytes <= budget_bytes else None
        return plan.sequence

    def _search(self, level: int, budget_bytes: int) -> _ChainPlan | None:
        """Return the plan of the most slots within the budget, as far as the trials find it."""
        points = self._level(level).points
        fitting, low, high = None, -1, len(points)
        slots = budget_bytes / self._level(level).table.slot_bytes
        for trial in range(MAX_TRIALS):
            if high - low <= 1:
                break
            k = int(np.searchsorted(points, int(slots), side="right")) - 1
            k = min(max(k, low + 1), high - 1) if trial < MAX_TRIALS // 2 else (low + high) // 2
            plan = self._judge(level, k)
            if plan.peak_bytes <= budget_bytes:
                fitting, low = plan, k
            else:
                high = k
            slots = float(points[k]) * budget_bytes / max(1, plan.peak_bytes)
        return fitting

    def _least_plan(self) -> _ChainPlan:
        """Return the plan of the smallest peak among those of the fewest slots on each level."""
        if self._least is None:
            best = None
            for level in range(MAX_LEVELS):
                points = self._level(level).points
                for k in range(min(3, len(points))):
                    plan = self._judge(level, k)
                    if best is None or plan.peak_bytes < best.peak_bytes:
                        best = plan
                if best is None or best.peak_bytes * RANGE ** (level + 1) > self._top_bytes:
                    break
            if best is None:
                best = _ChainPlan(self._problem.store_all, self._top_bytes)
            self._least = best
        return self._least

    def _level(self, level: int) -> _Level:
        if level not in self._levels:
            num_slots = TABLE_WORK // self._chain.num_terms
            limit = self._top_bytes * 9 // (8 * RANGE**level) + 1  # more than asked: see _search
            table = SlotTable(self._chain, limit, min(max(num_slots, MIN_SLOTS), MAX_SLOTS))
            least = table.least
            is_lower = least < np.concatenate(([np.inf], least[:-1]))
            self._levels[level] = _Level(table, np.flatnonzero(is_lower))
        return self._levels[level]

    def _judge(self, level: int, k: int) -> _ChainPlan:
        """Return the plan of the k-th point of a level."""
        key = (level, k)
        if key not in self._judged:
            held = self._level(level)
            sequence = self._emit(held.table, int(held.points[k]))
            self._judged[key] = _ChainPlan(sequence, simulate(self._problem, sequence).peak_bytes)
        return self._judged[key]

    def _emit(self, table: SlotTable, slots: int) -> tuple[int, ...]:
        chain, sequence = self._chain, list[int]()
        todo: list[tuple[int, int, int] | list[int]] = [(0, chain.length - 1, slots)]
        while todo:
            part = todo.pop()
            if isinstance(part, list):
                sequence += part
                continue
            s, t, slots = part
            choice, left = table.choice(s, t, slots)
            if isinstance(choice, Keep):
                run = chain.runs[s][choice.num_blocks - 1]
                forward, stage = self._emitter.kept(run.placed, choice.option.saves, choice.which)
                sequence += forward
                todo.append(stage)
                if s + choice.num_blocks <= t:
                    todo.append((s + choice.num_blocks, t, left))
                continue
            which = SweepPass.FIRST if t == chain.length - 1 else SweepPass.AGAIN
            for runs in chain.runs[s : choice.middle]:
                sequence += self._emitter.through(runs[0].placed, which)
            todo.append((s, choice.middle - 1, slots))
            todo.append((choice.middle, t, left))
        return tuple(sequence)


@dataclass(frozen=True, slots=True)
class _Level:
    """A table and the numbers of slots at which the whole chain gets faster, ascending."""

    table: SlotTable
    points: IntArray


@dataclass(frozen=True, slots=True)
class _ChainPlan:
    sequence: tuple[int, ...]
    peak_bytes: int


class _ScheduleEmitter:
    """Turns blocks and options into ops of the problem; equal blocks are worked out once."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...] | None, SweepPass], list[list[SweepStep]]] = {}

    def through(self, placed: PlacedBlock, which: SweepPass) -> list[int]:
        """Return the forward ops of a block that saves its output alone."""
        local = placed.local
        key = (placed.kind, None, which)
        if key not in self._known:
            held = [np.array([b == local.output]) for b in range(len(local.size_bytes))]
            self._known[key] = [forward_steps(local, None if which is SweepPass.FIRST else held)]
        return _placed_ops(placed.block, self._known[key][0])

    def kept(
        self, placed: PlacedBlock, saves: tuple[int, ...], which: SweepPass
    ) -> tuple[list[int], list[int]]:
        """Return the forward ops that save something, and the stage with what it makes again."""
        local = placed.local
        key = (placed.kind, saves, which)
        if key not in self._known:
            sets = np.zeros((1, len(local.size_bytes)), np.bool_)
            sets[0, list(saves)] = True
            self._known[key] = list(steps_of(local, sets, which))
        forward, stage = self._known[key]
        return _placed_ops(placed.block, forward), _placed_ops(placed.block, stage)


def _placed_ops(block: GraphBlock, steps: list[SweepStep]) -> list[int]:
    return [(block.first if step.makes else block.stage_first) + step.index for step in steps]


def _in_pairs(blocks: tuple[GraphBlock, ...]) -> tuple[GraphBlock, ...]:
    return tuple(merge_blocks(blocks[k : k + 2]) for k in range(0, len(blocks), 2))


def _make_chain(problem: Problem, blocks: tuple[GraphBlock, ...]) -> BlockChain:
    """Return the chain with the options of every run of up to MAX_RUN blocks."""
    placed = place_runs(problem, blocks, MAX_RUN)
    known: dict[int, BlockOptions] = {}
    for runs in placed:
        if runs[0].kind not in known:
            known[runs[0].kind] = block_options(runs[0].local)
    for s, runs in enumerate(placed):
        for length, run in enumerate(runs[1:], start=1):
            if run.kind not in known:
                earlier, later = runs[length - 1], placed[s + length][0]
                known[run.kind] = joined_options(
                    run, (earlier, known[earlier.kind]), (later, known[later.kind])
                )
    return BlockChain.of(tuple(tuple(BlockRun(r, known[r.kind]) for r in runs) for runs in placed))
