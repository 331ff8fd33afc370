"""Articulation blocks: where one buffer alone carries the forward pass on.

A *block* is a run of forward ops and the *stage* of other ops (gradients, updates) that reads what
the block made. No pairing of forward and backward is given; both follow from who reads what.

A *cut* lies between two forward ops where exactly one buffer made before is read by a forward op
after it: the *output* of the block before, the *input* of the block after. The other ops keep their
order, so stages are runs of them, the last block's first. A cut is kept where the backward pass can
be cut as well: at a position after the last reader of anything made after the cut, and not after
the first reader of anything made before it, the output excepted. Of those positions the one with
the fewest bytes of gradients alive is taken, the latest of equals.

Small buffers (statistics, a loss, a mask) do not decide where cuts are. Those that would forbid one
are *pinned*: held from when they are made to their last reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memory.liveness import IntArray
from memory.recompute.problem import Problem

SMALL_PART = 64
"""Small is one part in so many of the size that half of the forward pass's bytes reach."""

NO_BUFFER = -1


@dataclass(frozen=True, slots=True)
class GraphBlock:
    """Forward ops [first, end) and the other ops [stage_first, stage_end) that go back over them.

    input and output: the buffers that cross the cuts before and after, NO_BUFFER at the ends.
    """

    first: int
    end: int
    stage_first: int
    stage_end: int
    input: int
    output: int


@dataclass(frozen=True, slots=True)
class _BufferReaders:
    """Per buffer that a forward op makes and that has bytes: who makes and who reads it.

    last_forward: its maker where no forward op reads it. first_other, last_other: len(ops) and -1
    where only forward ops read it.
    """

    buffer: IntArray
    maker: IntArray
    last_forward: IntArray
    first_other: IntArray
    last_other: IntArray
    is_small: npt.NDArray[np.bool_]

    def without(self, buffers: Sequence[int]) -> _BufferReaders:
        """Return the same without some buffers."""
        kept = ~np.isin(self.buffer, np.array(buffers, np.int64))
        return _BufferReaders(
            self.buffer[kept],
            self.maker[kept],
            self.last_forward[kept],
            self.first_other[kept],
            self.last_other[kept],
            self.is_small[kept],
        )


def find_blocks(problem: Problem) -> tuple[GraphBlock, ...]:
    """Return the blocks in forward order; one block where nothing can be cut. O(E + cuts n).

    Every op belongs to one block. By the rule of this module's docstring, an op of a block reads
    only what its block makes, the block's input, and pinned buffers.
    """
    readers = _readers(problem)
    large = readers.without(readers.buffer[readers.is_small].tolist())
    cuts = [
        cut for cut in _forward_cuts(problem, large) if _window(problem, large, cut) is not None
    ]
    readers = readers.without(_pinned(problem, readers, cuts))
    gradients = gradient_bytes(problem)
    begin, bounds = problem.num_forward, [problem.num_forward]
    for cut in reversed(cuts):
        window = _window(problem, readers, cut)
        if window is None:  # pinning has upcast every window
            raise RuntimeError(f"the cut after forward op {cut[0]} is no longer one")
        low, high = max(begin, window[0]), max(begin, window[1])
        begin = high - int(gradients[low : high + 1][::-1].argmin())
        bounds.append(begin)
    bounds.append(len(problem.ops))
    firsts = [0, *[op + 1 for op, _ in cuts], problem.num_forward]
    crossing = [NO_BUFFER, *[buffer for _, buffer in cuts], NO_BUFFER]
    stages = bounds[::-1]
    return tuple(
        GraphBlock(firsts[b], firsts[b + 1], stages[b + 1], stages[b], crossing[b], crossing[b + 1])
        for b in range(len(cuts) + 1)
    )


def pinned_buffers(problem: Problem, blocks: tuple[GraphBlock, ...]) -> tuple[int, ...]:
    """Return the buffers with bytes that more than their own block and its neighbours read.

    A chain of blocks holds them from when they are made to their last reader. O(E).
    """
    block_of = block_of_ops(problem, blocks)
    maker = problem.makers
    pinned = dict[int, None]()
    for i, op in enumerate(problem.ops):
        for b in op.reads:
            if maker[b] >= 0 and problem.size_bytes[b]:
                home = block_of[maker[b]]
                is_input = blocks[home].output == b and block_of[i] == home + 1
                if block_of[i] != home and not is_input:
                    pinned[b] = None
    return tuple(sorted(pinned))


def block_of_ops(problem: Problem, blocks: tuple[GraphBlock, ...]) -> tuple[int, ...]:
    """Return per op the number of its block."""
    block_of = [0] * len(problem.ops)
    for number, block in enumerate(blocks):
        for i in (*range(block.first, block.end), *range(block.stage_first, block.stage_end)):
            block_of[i] = number
    return tuple(block_of)


def merge_blocks(blocks: Sequence[GraphBlock]) -> GraphBlock:
    """Return neighbouring blocks as one."""
    first, last = blocks[0], blocks[-1]
    return GraphBlock(
        first.first, last.end, last.stage_first, first.stage_end, first.input, last.output
    )


def gradient_bytes(problem: Problem) -> IntArray:
    """Return per op the bytes of buffers that no forward op makes and that are live before it.

    They live so in every sequence, since their ops keep their order; 0 before forward ops and, as
    the last entry, after the last op. O(E).
    """
    maker = problem.makers
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in range(problem.num_forward, len(problem.ops)):
        for b in (*problem.ops[i].reads, *problem.ops[i].writes):
            if maker[b] < 0:
                first.setdefault(b, i)
                last[b] = i
    change = np.zeros(len(problem.ops) + 2, np.int64)
    for b, i in first.items():
        change[i + 1] += problem.size_bytes[b]
        change[last[b] + 1] -= problem.size_bytes[b]
    return np.cumsum(change)[:-1]


def _readers(problem: Problem) -> _BufferReaders:
    maker, num_ops = problem.makers, len(problem.ops)
    last_forward, last_other = list(maker), [-1] * len(maker)
    first_other = [num_ops] * len(maker)
    for i, op in enumerate(problem.ops):
        for b in op.reads:
            if i < problem.num_forward:
                last_forward[b] = i
            else:
                first_other[b] = min(first_other[b], i)
                last_other[b] = i
    chosen = [b for b in range(len(maker)) if maker[b] >= 0 and problem.size_bytes[b] > 0]
    sizes = np.sort(np.array([problem.size_bytes[b] for b in chosen], np.int64))
    half = int(sizes.sum()) // 2
    small = int(sizes[np.cumsum(sizes).searchsorted(half)]) // SMALL_PART if chosen else 0
    is_small = np.array([problem.size_bytes[b] <= small for b in chosen], np.bool_)
    buffer = np.array(chosen, np.int64)
    columns = (maker, last_forward, first_other, last_other)
    of_maker, forward, first, last = [np.array(column, np.int64)[buffer] for column in columns]
    return _BufferReaders(buffer, of_maker, forward, first, last, is_small)


def _forward_cuts(problem: Problem, readers: _BufferReaders) -> list[tuple[int, int]]:
    """Return (op before the cut, the one buffer that crosses), one cut per buffer."""
    count = np.zeros(problem.num_forward + 1, np.int64)
    names = np.zeros(problem.num_forward + 1, np.int64)
    for column, value in ((count, 1), (names, readers.buffer)):
        np.add.at(column, readers.maker, value)
        np.subtract.at(column, readers.last_forward, value)
    count, names = np.cumsum(count), np.cumsum(names)
    cuts: list[tuple[int, int]] = []
    for i in np.flatnonzero(count[: problem.num_forward - 1] == 1).tolist():
        if not cuts or cuts[-1][1] != names[i]:
            cuts.append((i, int(names[i])))
    return cuts


def _window(
    problem: Problem, readers: _BufferReaders, cut: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the first and last position at which the earlier block's stage may begin."""
    op, crossing = cut
    is_after = readers.maker > op
    is_before = ~is_after & (readers.buffer != crossing)
    low = int(readers.last_other[is_after].max(initial=problem.num_forward - 1)) + 1
    high = int(readers.first_other[is_before].min(initial=len(problem.ops)))
    return (low, high) if low <= high else None


def _pinned(problem: Problem, readers: _BufferReaders, cuts: list[tuple[int, int]]) -> list[int]:
    """Return the small buffers that cross a cut, or whose readers leave no place for it."""
    large = readers.without(readers.buffer[readers.is_small].tolist())
    pinned: list[int] = []
    for cut in cuts:
        op, crossing = cut
        window = _window(problem, large, cut)
        if window is None:
            continue
        low, high = window
        is_after = readers.maker > op
        is_before = ~is_after & (readers.buffer != crossing)
        is_late = is_after & (readers.last_other >= high)
        low = max(low, int(readers.last_other[is_after & ~is_late].max(initial=-1)) + 1)
        is_early = is_before & (readers.first_other < low)
        crosses = is_before & (readers.last_forward > op)
        pinned += readers.buffer[crosses | is_late | is_early].tolist()
    return pinned
