"""Checkpointing by blocks: what lies between two articulation points runs again as a whole.

A *cut* lies between two forward ops where exactly one buffer made before is read by a forward op
after it. The other ops keep their order, so a cut counts only where they can be cut as well: what
was made after it has its last reader before what was made before it, the crossing buffer excepted,
has its first. From that reader on comes the *stage* of the block before the cut.

No pairing of forward and backward is given; both follow from who reads what. Small buffers
(statistics, a loss, a mask) do not decide where cuts are: they are held as long as someone reads.
Nor does what is made once (a weight that ranks gather): it cannot run again, and is held anyway.
"""

from __future__ import annotations

from dataclasses import replace

from memory.recompute.problem import Problem

SMALL_PART = 64
"""Small is one part in so many of the size that half of the forward pass's bytes reach."""


def block_checkpointing(problem: Problem) -> tuple[int, ...] | None:
    """Return the sequence in which every block saves its output alone; None without two blocks.

    Before its stage a block runs again, as far as the stage needs it. The last block's stage
    follows at once, so that block keeps everything. O(E).
    """
    order = _late_order(problem)
    problem = replace(problem, ops=tuple([problem.ops[i] for i in order]))
    blocks = _blocks(problem)
    if not blocks:
        return None
    again: dict[int, list[int]] = {}
    first, stage_end = 0, len(problem.ops)
    for stage, end in blocks.items():
        again[stage] = _needed(problem, range(first, end), range(stage, stage_end))
        first, stage_end = end, stage
    return tuple([order[i] for slot in problem.store_all for i in (*again.get(slot, ()), slot)])


def _late_order(problem: Problem) -> tuple[int, ...]:
    """Return the ops in order, but what only forward ones feed, and may wait, before its reader.

    Where it stood it might be in the stage of another block, and the two would count as one.
    """
    num_forward = problem.num_forward
    is_forward = [False] * len(problem.size_bytes)
    order = list(range(num_forward))
    for b in [b for i in order for b in problem.ops[i].writes]:
        is_forward[b] = True
    waiting: dict[int, int] = {}  # by what is made: the op
    for i in range(num_forward, len(problem.ops)):
        op = problem.ops[i]
        is_first = bool(op.writes) and waiting.keys().isdisjoint(op.writes)
        if op.may_wait and is_first and all([is_forward[b] for b in op.reads]):
            waiting |= dict.fromkeys(op.writes, i)
            continue
        read = {waiting[b] for b in (*op.reads, *op.writes) if b in waiting}
        if read:
            waiting = {b: maker for b, maker in waiting.items() if maker not in read}
        order += [*sorted(read), i]
    return (*order, *sorted({*waiting.values()}))


def _blocks(problem: Problem) -> dict[int, int]:
    """Return where the stage of each block but the last begins, and where its forward ops end.

    In forward order. Of blocks whose stages would begin with one op only the first has ops there,
    so they count as one.
    """
    num_forward, num_ops = problem.num_forward, len(problem.ops)
    kept = {b for op in problem.ops if op.is_once for b in op.writes}
    large = _large_buffers(problem) - kept
    last_forward, first_other, last_other = _readers(problem)
    latest = num_forward - 1  # the last op that reads what was made after
    low = [0] * num_forward
    for i in reversed(range(num_forward)):
        low[i] = latest + 1
        latest = max([latest, *[last_other[b] for b in problem.ops[i].writes if b in large]])
    blocks: dict[int, int] = {}
    crossing = dict[int, None]()
    high = num_ops
    for i in range(num_forward - 1):
        op = problem.ops[i]
        crossing |= dict.fromkeys([b for b in op.writes if b in large])
        for b in [b for b in (*op.reads, *op.writes) if b in crossing and last_forward[b] <= i]:
            del crossing[b]
            high = min(high, first_other[b])
        if len(crossing) == 1 and low[i] <= high:
            blocks[high] = i + 1
    return blocks


def _needed(problem: Problem, block: range, stage: range) -> list[int]:
    """Return the forward ops of a block that make what its stage reads, and what they need."""
    wanted = dict.fromkeys([b for i in stage for b in problem.ops[i].reads])
    found: list[int] = []
    for i in reversed(block):
        op = problem.ops[i]
        if not op.is_once and any([b in wanted and problem.size_bytes[b] for b in op.writes]):
            found.append(i)
            wanted |= dict.fromkeys(op.reads)
    return found[::-1]


def _large_buffers(problem: Problem) -> frozenset[int]:
    """Return the buffers of the forward pass that decide where cuts are."""
    made = [b for op in problem.ops[: problem.num_forward] for b in op.writes]
    left, size = sum([problem.size_bytes[b] for b in made]) // 2, 0
    for size in sorted([problem.size_bytes[b] for b in made]):
        left -= size
        if left <= 0:
            break
    return frozenset([b for b in made if problem.size_bytes[b] > size // SMALL_PART])


def _readers(problem: Problem) -> tuple[list[int], list[int], list[int]]:
    """Return per buffer its last forward reader, and the first and the last of the other ones.

    Where there is none: its maker, the number of all ops, and -1.
    """
    num_buffers = len(problem.size_bytes)
    last_forward = list(problem.makers)
    first_other, last_other = [len(problem.ops)] * num_buffers, [-1] * num_buffers
    for i, op in enumerate(problem.ops):
        for b in op.reads:
            if i < problem.num_forward:
                last_forward[b] = i
            else:
                first_other[b] = min(first_other[b], i)
                last_other[b] = i
    return last_forward, first_other, last_other
