"""Random recomputation problems, and the judges of sequences: their order, bytes and time."""

from typing import NamedTuple

import numpy as np

from memory.recompute.problem import Problem, ProblemOp, make_versions


class Usage(NamedTuple):
    """The most live bytes of a sequence, the first step with them, and its time."""

    peak_bytes: int
    peak_step: int
    duration: float


def random_problem(rng, num_forward):
    """Forward ops in a random graph; other ops that read it backwards, some adding in place."""
    sizes, forward, others, pool, gradients = [], [], [], [], []

    def new_buffer(size=None):
        sizes.append(rng.randint(0, 9) if size is None else size)
        return len(sizes) - 1

    def in_place(reads, out):
        if not reads or rng.random() < 0.6:
            return ()
        source = rng.choice(reads)
        sizes[out] = sizes[source]
        return ((out, source),)

    for _ in range(num_forward):
        reads = tuple(sorted({rng.choice(pool[-4:]) for _ in range(rng.randint(0, 2)) if pool}))
        writes = tuple(new_buffer() for _ in range(rng.choice([1, 1, 1, 2])))
        pairs = in_place(reads, writes[0])
        forward.append(ProblemOp(reads, writes, rng.choice([0, 0, 5]), rng.randint(1, 9), pairs))
        pool += writes
    for op in reversed(forward):
        reads = {b for b in (*op.reads, *op.writes) if rng.random() < 0.5} | set(gradients[-1:])
        if gradients and rng.random() < 0.3:
            gradient, pairs = rng.choice(gradients), ()
            reads |= {gradient}
        else:
            gradient = new_buffer()
            gradients.append(gradient)
            pairs = in_place(tuple(sorted(reads)), gradient)
        ops = tuple(sorted(reads))
        others.append(ProblemOp(ops, (gradient,), rng.choice([0, 0, 5]), rng.randint(1, 9), pairs))
    return Problem((*forward, *others), tuple(sizes), num_forward)


def check_sequence(problem, sequence):
    """Check that a sequence computes what the problem's own order computes. O(E).

    Raises:
        ValueError: an op that is not forward is missing, repeated or, where it may not wait, out of
            order; a forward op is missing; or a buffer is read before it is written.
    """
    others = [i for i in sequence if i >= problem.num_forward]
    in_order = [[i for i in row if not problem.ops[i].may_wait] for row in (others, sorted(others))]
    if sorted(others) != list(range(problem.num_forward, len(problem.ops))) or (
        in_order[0] != in_order[1]
    ):
        raise ValueError("expected every op that is not forward once, in the problem's order")
    is_written = [False] * len(problem.size_bytes)
    has_run = [False] * len(problem.ops)
    for step, i in enumerate(sequence):
        has_run[i] = True
        for b in problem.ops[i].reads:
            if not is_written[b]:
                raise ValueError(f"step {step} (op {i}) reads buffer {b} before it is written")
        for b in problem.ops[i].writes:
            is_written[b] = True
    if not all(has_run):
        raise ValueError(f"op {has_run.index(False)} never runs")


def live_bytes_by_step(problem, sequence):
    """Return the bytes live at each step of a legal sequence, scratch included. O(E)."""
    versions = make_versions(problem, sequence)
    size = np.array(problem.size_bytes, np.int64)[list(versions.buffer)]
    change = np.zeros(len(sequence) + 1, np.int64)
    np.add.at(change, np.array(versions.lower, np.int64), size)
    np.subtract.at(change, np.array(versions.upper, np.int64), size)
    live = np.cumsum(change)[:-1]
    live += np.array([problem.ops[i].temp_bytes for i in sequence], np.int64)
    for v, donor in enumerate(versions.donor):
        if donor >= 0:
            live[versions.lower[v]] -= size[v]
    return live


def simulate(problem, sequence):
    """Return what a legal sequence costs. O(E)."""
    if not sequence:
        return Usage(0, 0, 0.0)
    live = live_bytes_by_step(problem, sequence)
    step = int(live.argmax())
    duration = sum([problem.ops[i].duration for i in sequence])
    return Usage(int(live[step]), step, duration)
