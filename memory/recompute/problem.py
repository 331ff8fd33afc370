"""The problem of a recomputation planner: ops on buffers, its floor, the bytes of a sequence.

A *buffer* is bytes with a size. What lives for the whole step whatever the order (variables,
batches, outputs) is no buffer: leave it out, or give it size 0. Forward ops are those that may run
again; everything that must happen once (gradients, updates, random ops that keep a state) is not.
What must happen once in the midst of them (a collective, which other ranks are at as well) stands
among them as such: what it makes is kept for as long as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memory.liveness import IntArray


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
    runs = []
    for i in reversed(sequence):
        op = problem.ops[i]
        if runs_later[i] and not any([is_wanted[b] for b in op.writes]):
            continue
        runs_later[i] = True
        runs.append(i)
        if i < problem.num_forward:
            for b in op.writes:
                is_wanted[b] = False
        for b in op.reads:
            is_wanted[b] = True
    return tuple(reversed(runs))


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
        for out, old in op.in_place
        if last[old] <= i and problem.size_bytes[out] == problem.size_bytes[old]
    }
    return sum([problem.size_bytes[b] for b in used]) + op.temp_bytes - sum(shared.values())


# The exact bytes of a sequence: who lives from when to when, before anything is placed.
#
# A forward op that runs makes a new *version* of its buffers, live from that step until its last
# read; a read means the latest version. Buffers of other ops have one version, from the first write
# to the last access. An output takes over the bytes of an input that dies in the same step where
# the op allows it, so the two count once in that step.


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of a sequence, in order of creation: buffer and half-open interval of steps.

    donor[v] is the version whose bytes v takes over, -1 where it has bytes of its own.
    """

    buffer: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    donor: tuple[int, ...]


def make_versions(problem: Problem, sequence: Sequence[int]) -> Versions:
    """Return the versions of a sequence that writes each buffer before it reads it. O(E)."""
    latest = [-1] * len(problem.size_bytes)
    buffer: list[int] = []
    lower: list[int] = []
    upper: list[int] = []
    offers: list[tuple[int, int, int]] = []  # (step, new version, version that may give its bytes)
    for step, i in enumerate(sequence):
        op = problem.ops[i]
        before = [latest[b] for b in op.reads]
        for version in before:
            upper[version] = step + 1
        sources = dict(zip(op.reads, before, strict=True)) if op.in_place else {}
        for b in op.writes:
            if i >= problem.num_forward and latest[b] >= 0:
                upper[latest[b]] = step + 1
                continue
            latest[b] = len(buffer)
            buffer.append(b)
            lower.append(step)
            upper.append(step + 1)
        offers += [(step, latest[out], sources[old]) for out, old in op.in_place if old in sources]
    donor = _donors(problem, buffer, lower, upper, offers)
    return Versions(tuple(buffer), tuple(lower), tuple(upper), tuple(donor))


def _donors(
    problem: Problem,
    buffer: list[int],
    lower: list[int],
    upper: list[int],
    offers: list[tuple[int, int, int]],
) -> list[int]:
    donor = [-1] * len(buffer)
    has_given = [False] * len(buffer)
    for step, new, old in offers:
        if (
            new != old
            and lower[new] == step
            and upper[old] == step + 1
            and donor[new] < 0
            and not has_given[old]
            and problem.size_bytes[buffer[new]] == problem.size_bytes[buffer[old]]
        ):
            donor[new] = old
            has_given[old] = True
    return donor


def buffer_intervals(
    problem: Problem, sequence: Sequence[int]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return (lower, upper, size) of what needs an address: versions in place are one. O(E).

    Scratch comes last, one entry per step that has some.
    """
    versions = make_versions(problem, sequence)
    owner = list(range(len(versions.buffer)))
    upper = list(versions.upper)
    for v, donor in enumerate(versions.donor):
        if donor >= 0:
            owner[v] = owner[donor]
            upper[owner[v]] = max(upper[owner[v]], versions.upper[v])
    roots = [v for v in range(len(owner)) if owner[v] == v]
    temps = [(s, problem.ops[i].temp_bytes) for s, i in enumerate(sequence)]
    scratch = [(s, size) for s, size in temps if size]
    sizes = [problem.size_bytes[versions.buffer[v]] for v in roots] + [size for _, size in scratch]
    return (
        np.array([versions.lower[v] for v in roots] + [s for s, _ in scratch], np.int64),
        np.array([upper[v] for v in roots] + [s + 1 for s, _ in scratch], np.int64),
        np.array(sizes, np.int64),
    )
