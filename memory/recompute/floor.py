"""The floor: the op whose working set no plan goes below."""

from __future__ import annotations

from typing import NamedTuple

from memory.recompute.problem import Problem


class Floor(NamedTuple):
    """The op that needs most bytes at once, whatever runs again, and those bytes."""

    op: int
    size_bytes: int


def floor_op(problem: Problem) -> Floor:
    """Return the op with the largest working set; the first of them on ties. O(E).

    A working set is what the op reads and writes and its scratch, less what its outputs may take
    over in place. The ops that are not forward run in one fixed order, so their buffers live in
    every plan from the first of them that writes to the last that uses: what crosses such an op
    counts too. Forward ops may run anywhere, and nothing is known to cross them.

    Raises:
        ValueError: the problem has no ops.
    """
    if not problem.ops:
        raise ValueError("expected a problem with ops: none of them has a floor")
    first, last = _fixed_lives(problem)
    crossing = _crossing_bytes(problem, first, last)
    bytes_of_op = [_own_bytes(problem, i, last) + crossing[i] for i in range(len(problem.ops))]
    op = max(range(len(bytes_of_op)), key=bytes_of_op.__getitem__)
    return Floor(op, bytes_of_op[op])


def _fixed_lives(problem: Problem) -> tuple[list[int], list[int]]:
    """Return per buffer the first and last op of its fixed life; -1 where a forward op may make it.

    Of what a forward op makes once, the part after the forward pass is known.
    """
    first = [-1] * len(problem.size_bytes)
    last = [-1] * len(problem.size_bytes)
    maker = problem.makers
    for i in range(problem.num_forward, len(problem.ops)):
        for b in (*problem.ops[i].reads, *problem.ops[i].writes):
            if maker[b] < 0:
                first[b] = i if first[b] < 0 else first[b]
                last[b] = i
    return first, last


def _crossing_bytes(problem: Problem, first: list[int], last: list[int]) -> list[int]:
    """Return per op the bytes of fixed buffers that live through it and that it does not use."""
    change = [0] * (len(problem.ops) + 1)
    for b, size in enumerate(problem.size_bytes):
        if first[b] >= 0:
            change[first[b]] += size
            change[last[b] + 1] -= size
    crossing, live = [], 0
    for i, op in enumerate(problem.ops):
        live += change[i]
        used = dict.fromkeys((*op.reads, *op.writes))
        crossing.append(live - sum([problem.size_bytes[b] for b in used if 0 <= first[b] <= i]))
    return crossing


def _own_bytes(problem: Problem, i: int, last: list[int]) -> int:
    op = problem.ops[i]
    used = dict.fromkeys((*op.reads, *op.writes))
    shared = {
        out: problem.size_bytes[out]
        for out, given in op.in_place
        if last[given] <= i and problem.size_bytes[out] == problem.size_bytes[given]
    }
    return sum([problem.size_bytes[b] for b in used]) + op.temp_bytes - sum(shared.values())
