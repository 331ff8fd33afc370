"""One block by itself: its ops over buffers of its own numbering, and what crosses its borders.

Equal blocks become equal values, so what is found out about one holds for all. Bytes that only
pass by (gradients of other blocks) are left out: `around_bytes` says how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memory.recompute.blocks import (
    NO_BUFFER,
    GraphBlock,
    gradient_bytes,
    merge_blocks,
    pinned_buffers,
)
from memory.recompute.problem import Problem, ProblemOp


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """A block's forward ops and stage over local buffers.

    input, output: local numbers, NO_BUFFER where there is none. is_input_kept: the input is read
    after this stage too. entering, leaving: the other buffers that are live before, and after, the
    stage whatever the plan (gradients). recomputable: per buffer whether a forward op makes it
    here. Pinned buffers and buffers without bytes do not appear.
    """

    forward: tuple[ProblemOp, ...]
    stage: tuple[ProblemOp, ...]
    size_bytes: tuple[int, ...]
    input: int
    output: int
    is_input_kept: bool
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    recomputable: tuple[bool, ...]

    @property
    def input_bytes(self) -> int:
        """Return the size of the input; 0 where there is none."""
        return 0 if self.input == NO_BUFFER else self.size_bytes[self.input]


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block of the problem: the local one it equals, and what lies around it there.

    kind: equal for equal local blocks, of those placed together. buffers: the problem's buffer per
    local one. before_bytes: gradients alive where its stage begins. around_bytes: those alive
    during all of its stage that no op of the stage touches.
    """

    block: GraphBlock
    local: LocalBlock
    kind: int
    buffers: tuple[int, ...]
    before_bytes: int
    around_bytes: int


def place_runs(
    problem: Problem, blocks: tuple[GraphBlock, ...], longest: int
) -> tuple[tuple[PlacedBlock, ...], ...]:
    """Return per block the runs that begin with it, shortest first, in local form. O(E longest).

    The first is the block alone, the next it and the block after it as one, up to `longest` blocks.
    """
    accesses = _Accesses.of(problem)
    pinned = frozenset(pinned_buffers(problem, blocks))
    gradients = gradient_bytes(problem)
    kinds: dict[LocalBlock, int] = {}
    placed: list[tuple[PlacedBlock, ...]] = []
    for s in range(len(blocks)):
        earlier = blocks[s - 1] if s else None
        runs = []
        for end in range(s + 1, min(s + longest, len(blocks)) + 1):
            run = merge_blocks(blocks[s:end])
            local, buffers = _local(problem, run, earlier, accesses, pinned)
            kind = kinds.setdefault(local, len(kinds))
            before = int(gradients[run.stage_first])
            inside = sum([local.size_bytes[b] for b in local.entering])
            runs.append(PlacedBlock(run, local, kind, buffers, before, before - inside))
        placed.append(tuple(runs))
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class _Accesses:
    """Per buffer: the forward op that makes it, or -1; its first and last other op; all readers."""

    maker: tuple[int, ...]
    first_other: tuple[int, ...]
    last_other: tuple[int, ...]
    forward_readers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> _Accesses:
        num_ops, num_buffers = len(problem.ops), len(problem.size_bytes)
        first, last = [num_ops] * num_buffers, [-1] * num_buffers
        readers: list[list[int]] = [[] for _ in range(num_buffers)]
        for i, op in enumerate(problem.ops):
            if i < problem.num_forward:
                for b in op.reads:
                    readers[b].append(i)
                continue
            for b in (*op.reads, *op.writes):
                first[b] = min(first[b], i)
                last[b] = i
        return cls(problem.makers, tuple(first), tuple(last), tuple(map(tuple, readers)))


def _local(
    problem: Problem,
    block: GraphBlock,
    earlier: GraphBlock | None,
    accesses: _Accesses,
    pinned: frozenset[int],
) -> tuple[LocalBlock, tuple[int, ...]]:
    number: dict[int, int] = {}

    def rename(buffers: Iterable[int]) -> tuple[int, ...]:
        shown = [b for b in buffers if problem.size_bytes[b] and b not in pinned]
        return tuple(number.setdefault(b, len(number)) for b in shown)

    def rename_op(op: ProblemOp) -> ProblemOp:
        reads, writes = rename(op.reads), rename(op.writes)
        pairs = tuple(
            (number[out], number[given])
            for out, given in op.in_place
            if out in number
            and given in number
            and given in op.reads
            and problem.size_bytes[out] == problem.size_bytes[given]
        )
        return ProblemOp(reads, writes, op.temp_bytes, op.duration, pairs)

    if block.input != NO_BUFFER:
        rename((block.input,))
    forward = tuple(rename_op(op) for op in problem.ops[block.first : block.end])
    stage = tuple(rename_op(op) for op in problem.ops[block.stage_first : block.stage_end])
    maker, first, last = accesses.maker, accesses.first_other, accesses.last_other
    gradients = [b for b in number if maker[b] < 0]
    local = LocalBlock(
        forward,
        stage,
        tuple(problem.size_bytes[b] for b in number),
        number.get(block.input, NO_BUFFER),
        number.get(block.output, NO_BUFFER),
        earlier is not None and _is_kept(accesses, block, earlier),
        tuple(number[b] for b in gradients if first[b] < block.stage_first),
        tuple(number[b] for b in gradients if last[b] >= block.stage_end),
        tuple(block.first <= maker[b] < block.end for b in number),
    )
    return local, tuple(number)


def _is_kept(accesses: _Accesses, block: GraphBlock, earlier: GraphBlock) -> bool:
    """Tell whether the block's input is read after its stage, or may be by recomputation."""
    if block.input == NO_BUFFER:
        return False
    reads_again = any([i < earlier.end for i in accesses.forward_readers[block.input]])
    return reads_again or accesses.last_other[block.input] >= block.stage_end
