"""What saving costs and what not saving costs: many save-sets of one block, judged at once.

A *save-set* is what a block keeps from its forward pass to its stage. What a stage reads and the
set lacks is made again right before its first reader, with all that this needs, and then stays to
its last reader. One pass back over the steps tells, per set, which buffers are still to be read,
and so how many bytes live at every step: exactly what `simulate` says, with one lane per set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memory.liveness import IntArray
from memory.recompute.blocks import NO_BUFFER
from memory.recompute.local import LocalBlock
from memory.recompute.problem import ProblemOp

BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float64]

Lanes: TypeAlias = BoolArray | np.bool_
"""One bool per save-set, or one for all."""


class SweepPass(Enum):
    """Which forward ops run before a stage."""

    FIRST = "first"
    """All of them: the step's own forward pass."""

    AGAIN = "again"
    """Those that make the output and the save-set."""

    ALONE = "alone"
    """Those that make the save-set: the stage follows at once, and no later block asks."""


@dataclass(frozen=True, slots=True)
class SetCosts:
    """Per save-set: bytes and time of a forward pass and the stage, the input's bytes left out.

    saved: live between the two. forward_peak and stage_peak: the most within each; gradients count
    in the stage alone. duration: of the forward ops, made again or not; the stage's own ops cost
    the same in every plan.
    """

    saved: IntArray
    forward_peak: IntArray
    stage_peak: IntArray
    duration: FloatArray


@dataclass(frozen=True, slots=True)
class SweepStep:
    """An op and the lanes in which it runs; None for all.

    makes: whether it is a forward op; index: among those, or among the stage's. born: the buffers
    whose first write it is.
    """

    op: ProblemOp
    index: int
    lanes: BoolArray | None
    born: tuple[int, ...]
    makes: bool

    @property
    def runs(self) -> Lanes:
        """Return per lane whether the op runs."""
        return np.True_ if self.lanes is None else self.lanes


def judge(local: LocalBlock, saved: BoolArray) -> dict[SweepPass, SetCosts]:
    """Return what each save-set costs per kind of pass; saved[lane, buffer], local buffers.

    The output counts as saved in the passes that make it. O(E lanes) per reader that lacks
    something.
    """
    again = _judge_stage(local, saved, SweepPass.AGAIN)
    has_output = local.output != NO_BUFFER
    is_same = not has_output or stage_reads(local, local.output)
    alone = again if is_same else _judge_stage(local, saved, SweepPass.ALONE)
    every = forward_steps(local, None)
    is_whole = len(again.forward) == len(every) and all(
        [bool(np.all(step.runs)) for step in again.forward]
    )
    costs = {SweepPass.FIRST: again.with_forward(local, every)}
    costs[SweepPass.AGAIN] = (
        costs[SweepPass.FIRST] if is_whole else again.with_forward(local, again.forward)
    )
    costs[SweepPass.ALONE] = (
        costs[SweepPass.AGAIN] if is_same else alone.with_forward(local, alone.forward)
    )
    return costs


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage judged: where the sweep stands before it, its peak and time, the forward steps."""

    sweep: _Sweep
    peak: IntArray
    duration: FloatArray
    forward: list[SweepStep]

    def with_forward(self, local: LocalBlock, forward: list[SweepStep]) -> SetCosts:
        """Return the costs with these forward steps before the stage."""
        sweep = self.sweep.copy()
        between = sweep.live_bytes
        peak = np.maximum(sweep.run_back(forward), between)
        kept = local.input_bytes
        duration = self.duration + _duration(forward, len(between))
        return SetCosts(between - kept, peak - kept, self.peak - kept, duration)


def _judge_stage(local: LocalBlock, saved: BoolArray, which: SweepPass) -> _Stage:
    forward, stage = steps_of(local, saved, which)
    sweep = _Sweep(local, len(saved))
    sweep.add(local.leaving)
    if local.is_input_kept:
        sweep.add((local.input,))
    peak = sweep.run_back(stage)
    sweep.remove(local.entering)
    if local.output != NO_BUFFER and which is not SweepPass.ALONE:
        sweep.add((local.output,))  # the next block's input
    return _Stage(sweep, peak, _duration(stage, len(saved)), forward)


def _duration(steps: list[SweepStep], num_lanes: int) -> FloatArray:
    duration = np.zeros(num_lanes)
    for step in steps:
        if step.makes:
            duration += step.op.duration * step.runs
    return duration


@dataclass(frozen=True, slots=True)
class Through:
    """A forward pass that saves the output alone.

    held_peak: its most bytes while the input stays, the input's bytes left out. passing_peak: while
    the input dies at its last reader, included. duration: of its ops.
    """

    held_peak: int
    passing_peak: int
    duration: float


def judge_through(local: LocalBlock, which: SweepPass) -> Through:
    """Return what it costs to run the block's forward ops for its output alone. O(E)."""
    held = [np.array([b == local.output]) for b in range(len(local.size_bytes))]
    steps = forward_steps(local, None if which is SweepPass.FIRST else held)
    kept = [b for b in (local.output,) if b != NO_BUFFER]
    passing = _Sweep(local, 1)
    passing.add(kept)
    holding = _Sweep(local, 1)
    holding.add([*kept, local.input] if local.input != NO_BUFFER else kept)
    return Through(
        int(holding.run_back(steps)[0]) - local.input_bytes,
        int(passing.run_back(steps)[0]),
        sum([step.op.duration for step in steps]),
    )


def steps_of(
    local: LocalBlock, saved: BoolArray, which: SweepPass
) -> tuple[list[SweepStep], list[SweepStep]]:
    """Return the steps of the forward pass and of the stage for saved[lane, buffer]."""
    held = [saved[:, b].copy() for b in range(len(local.size_bytes))]
    if local.output != NO_BUFFER:
        is_held = which is not SweepPass.ALONE or stage_reads(local, local.output)
        held[local.output] = np.full(len(saved), is_held)
    forward = forward_steps(local, None if which is SweepPass.FIRST else held)
    return forward, stage_steps(local, held)


def stage_reads(local: LocalBlock, buffer: int) -> bool:
    """Tell whether an op of the stage reads the buffer."""
    return any([buffer in op.reads for op in local.stage])


def forward_steps(local: LocalBlock, wanted: list[BoolArray] | None) -> list[SweepStep]:
    """Return the forward ops that make what is wanted, per buffer and lane; None for all ops."""
    if wanted is None:
        return [SweepStep(op, i, None, op.writes, True) for i, op in enumerate(local.forward)]
    return _making(local, {b: lanes for b, lanes in enumerate(wanted) if lanes.any()}, None)


def stage_steps(local: LocalBlock, held: list[BoolArray]) -> list[SweepStep]:
    """Return the stage's ops, each after the forward ops that make again what it lacks."""
    available = [lanes.copy() for lanes in held]
    is_written = [b in local.entering for b in range(len(local.size_bytes))]
    steps: list[SweepStep] = []
    for i, op in enumerate(local.stage):
        lacking = [b for b in op.reads if local.recomputable[b] and not available[b].all()]
        if lacking:
            for step in _making(local, {b: ~available[b] for b in lacking}, available):
                steps.append(step)
                for b in step.op.writes:
                    available[b] = available[b] | step.runs
        born = tuple(b for b in op.writes if not is_written[b])
        for b in born:
            is_written[b] = True
        steps.append(SweepStep(op, i, None, born, False))
    return steps


def _making(
    local: LocalBlock, wanted: dict[int, BoolArray], available: list[BoolArray] | None
) -> list[SweepStep]:
    """Return the forward ops that make what is wanted, which grows, from what is available."""
    steps = []
    for i, op in reversed(list(enumerate(local.forward))):
        lanes = None
        for b in op.writes:
            if b in wanted:
                lanes = wanted[b] if lanes is None else lanes | wanted[b]
        if lanes is None or not lanes.any():
            continue
        steps.append(SweepStep(op, i, lanes, op.writes, True))
        for b in op.reads:
            if local.recomputable[b]:
                lacks = lanes if available is None else lanes & ~available[b]
                wanted[b] = wanted[b] | lacks if b in wanted else lacks
    return steps[::-1]


class _Sweep:
    """Walks steps backwards; knows per lane which buffers are still to be read.

    What all lanes agree on is one bool, not an array of them.
    """

    __slots__ = ("_is_live", "_size", "live_bytes")

    def __init__(self, local: LocalBlock, num_lanes: int) -> None:
        self._size = local.size_bytes
        self._is_live: list[Lanes] = [np.False_] * len(local.size_bytes)
        self.live_bytes = np.zeros(num_lanes, np.int64)

    def copy(self) -> _Sweep:
        """Return a sweep that stands where this one does."""
        other = object.__new__(_Sweep)
        other._size, other.live_bytes = self._size, self.live_bytes
        other._is_live = list(self._is_live)
        return other

    def add(self, buffers: Iterable[int]) -> None:
        """Make buffers live."""
        for b in buffers:
            self._set(b, np.True_)

    def remove(self, buffers: Iterable[int]) -> None:
        """Make buffers dead."""
        for b in buffers:
            self._set(b, np.False_)

    def run_back(self, steps: list[SweepStep]) -> IntArray:
        """Walk back over the steps; return the most bytes live at any of them."""
        peak = self.live_bytes
        for step in reversed(steps):
            peak = np.maximum(peak, self._step_back(step))
        return peak

    def _step_back(self, step: SweepStep) -> IntArray:
        op, runs = step.op, step.runs
        touched = op.temp_bytes - self._given_bytes(step)
        for b in dict.fromkeys((*op.writes, *op.reads)):
            touched = touched + _times(~self._is_live[b], self._size[b])
        live = self.live_bytes + touched * runs
        for b in op.writes:
            if b not in step.born:
                self._set(b, self._is_live[b] | runs)
            else:
                self._set(b, np.False_ if runs is np.True_ else self._is_live[b] & ~runs)
        for b in op.reads:
            self._set(b, np.True_ if runs is np.True_ else self._is_live[b] | runs)
        return live

    def _given_bytes(self, step: SweepStep) -> IntArray:
        """Return the bytes that outputs take over from inputs that die in this step."""
        given_bytes = _times(np.False_, 0)
        has_taken: dict[int, Lanes] = {}
        has_given: dict[int, Lanes] = {}
        for out, given in step.op.in_place:
            if out in step.born and out != given:
                no = np.False_
                is_bound = has_taken.get(out, no) | has_given.get(given, no) | self._is_live[given]
                has_taken[out] = has_taken.get(out, no) | ~is_bound
                has_given[given] = has_given.get(given, no) | ~is_bound
                given_bytes = given_bytes + _times(~is_bound, self._size[out])
        return given_bytes

    def _set(self, buffer: int, is_live: Lanes) -> None:
        was_live = self._is_live[buffer]
        if is_live is not was_live:
            change = np.subtract(is_live, was_live, dtype=np.int64)
            self.live_bytes = self.live_bytes + self._size[buffer] * change
            self._is_live[buffer] = is_live


def _times(lanes: Lanes, size_bytes: int) -> IntArray:
    product: IntArray = np.multiply(lanes, size_bytes, dtype=np.int64)
    return product
