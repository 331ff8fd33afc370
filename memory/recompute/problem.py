"""What a recomputation planner is asked: ops on buffers, forward ones first.

A *buffer* is bytes with a size. What lives for the whole step whatever the order (variables,
batches, outputs) is no buffer: leave it out, or give it size 0. Forward ops are those that may run
again; everything that must happen once (gradients, updates, random ops that keep a state) is not.
What must happen once in the midst of them (a collective, which other ranks are at as well) stands
among them as such: what it makes is kept for as long as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProblemOp:
    """One launch: buffers by number, scratch in bytes, time in any unit.

    reads, writes: each buffer once; an op that changes a buffer in place has it in both.
    temp_bytes: live during this op only. in_place: pairs (written, read) of equally large buffers
    that may share bytes when what is read dies here. is_once: a forward op that runs once all the
    same, in its own place. may_wait: another op that may run as late as just before who first
    reads what it makes.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    temp_bytes: int = 0
    duration: float = 0.0
    in_place: tuple[tuple[int, int], ...] = ()
    is_once: bool = False
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A training step without recomputation: `ops` in a legal order, the forward ones first.

    ops[:num_forward] may run again, but for those that run once. Each of their buffers is written
    by one op alone, so running it again makes the same bytes again. The other ops run once
    each, in this order but for those that may wait; buffers that they write may be written several
    times (sums of gradients).
    """

    ops: tuple[ProblemOp, ...]
    size_bytes: tuple[int, ...]
    num_forward: int

    def __post_init__(self) -> None:
        """Raise ValueError where the ops contradict themselves, naming the op and the buffer."""
        if not 0 <= self.num_forward <= len(self.ops):
            raise ValueError(
                f"expected 0 to {len(self.ops)} forward ops, got num_forward={self.num_forward}"
            )
        writer = [-1] * len(self.size_bytes)
        for i, op in enumerate(self.ops):
            for b in (*op.reads, *op.writes):
                if not 0 <= b < len(self.size_bytes):
                    raise ValueError(
                        f"op {i} names buffer {b}, but there are {len(self.size_bytes)} buffers"
                    )
            for b in op.reads:
                if writer[b] < 0:
                    raise ValueError(f"op {i} reads buffer {b}, which no earlier op writes")
            for b in op.writes:
                if i < self.num_forward and writer[b] >= 0:
                    raise ValueError(
                        f"forward op {i} writes buffer {b}, which an earlier op writes: it could"
                        " not run again"
                    )
                if 0 <= writer[b] < self.num_forward <= i:
                    raise ValueError(
                        f"op {i} writes buffer {b}, which forward op {writer[b]} makes: that op"
                        " could not run again"
                    )
                writer[b] = i

    @property
    def makers(self) -> tuple[int, ...]:
        """Return per buffer the forward op that may make it again; -1 where none may. O(E)."""
        maker = [-1] * len(self.size_bytes)
        for i in range(self.num_forward):
            for b in () if self.ops[i].is_once else self.ops[i].writes:
                maker[b] = i
        return tuple(maker)

    @property
    def store_all(self) -> tuple[int, ...]:
        """Return the sequence without recomputation."""
        return tuple(range(len(self.ops)))


def without_idle_runs(problem: Problem, sequence: Sequence[int]) -> tuple[int, ...]:
    """Leave out forward runs whose every buffer is made again before anyone reads it. O(E).

    Each op still runs at least once. No step gets more live bytes.
    """
    is_wanted = [False] * len(problem.size_bytes)
    runs_later = [False] * len(problem.ops)
    kept = []
    for i in reversed(sequence):
        op = problem.ops[i]
        if runs_later[i] and not any([is_wanted[b] for b in op.writes]):
            continue
        runs_later[i] = True
        kept.append(i)
        if i < problem.num_forward:
            for b in op.writes:
                is_wanted[b] = False
        for b in op.reads:
            is_wanted[b] = True
    return tuple(reversed(kept))
