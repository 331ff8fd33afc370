"""Random recomputation problems."""

from memory.recompute.problem import Problem, ProblemOp


def random_problem(rng, num_forward):
    """Forward ops in a random graph; other ops that read it backwards, some adding in place."""
    sizes, forward, others, made, gradients = [], [], [], [], []

    def new_buffer(size=None):
        sizes.append(rng.randint(0, 9) if size is None else size)
        return len(sizes) - 1

    def in_place(reads, out):
        if not reads or rng.random() < 0.6:
            return ()
        given = rng.choice(reads)
        sizes[out] = sizes[given]
        return ((out, given),)

    for _ in range(num_forward):
        reads = tuple(sorted({rng.choice(made[-4:]) for _ in range(rng.randint(0, 2)) if made}))
        writes = tuple(new_buffer() for _ in range(rng.choice([1, 1, 1, 2])))
        pairs = in_place(reads, writes[0])
        forward.append(ProblemOp(reads, writes, rng.choice([0, 0, 5]), rng.randint(1, 9), pairs))
        made += writes
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
