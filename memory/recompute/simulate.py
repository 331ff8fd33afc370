"""The exact bytes of a sequence: who lives from when to when, before anything is placed.

A forward op that runs makes a new *version* of its buffers, live from that step until its last
read; a read means the latest version. Buffers of other ops have one version, from the first write
to the last access. An output takes over the bytes of an input that dies in the same step where the
op allows it, so the two count once in that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memory.liveness import IntArray
from memory.recompute.problem import Problem


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
        read = dict(zip(op.reads, before, strict=True)) if op.in_place else {}
        for b in op.writes:
            if i >= problem.num_forward and latest[b] >= 0:
                upper[latest[b]] = step + 1
                continue
            latest[b] = len(buffer)
            buffer.append(b)
            lower.append(step)
            upper.append(step + 1)
        offers += [(step, latest[out], read[given]) for out, given in op.in_place if given in read]
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
    for step, new, given in offers:
        if (
            new != given
            and lower[new] == step
            and upper[given] == step + 1
            and donor[new] < 0
            and not has_given[given]
            and problem.size_bytes[buffer[new]] == problem.size_bytes[buffer[given]]
        ):
            donor[new] = given
            has_given[given] = True
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
    own = [v for v in range(len(owner)) if owner[v] == v]
    temps = [(s, problem.ops[i].temp_bytes) for s, i in enumerate(sequence)]
    scratch = [(s, size) for s, size in temps if size]
    sizes = [problem.size_bytes[versions.buffer[v]] for v in own] + [size for _, size in scratch]
    return (
        np.array([versions.lower[v] for v in own] + [s for s, _ in scratch], np.int64),
        np.array([upper[v] for v in own] + [s + 1 for s, _ in scratch], np.int64),
        np.array(sizes, np.int64),
    )
