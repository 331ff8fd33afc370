from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from problems import check_sequence, random_problem, simulate

from memory.recompute.planner import Planner, block_checkpointing
from memory.recompute.problem import Problem, ProblemOp


def step(sizes, forward, backward, once=(), may_wait=()):
    """A problem from (reads, writes) pairs of buffer names, and a name per op."""
    number = {name: k for k, name in enumerate(sizes)}
    ops = [
        ProblemOp(
            tuple(number[b] for b in reads.split()),
            tuple(number[b] for b in writes.split()),
            is_once=writes in once,
            may_wait=writes in may_wait,
        )
        for reads, writes in (*forward, *backward)
    ]
    names = [(writes.split() or ["-"])[0] for _, writes in (*forward, *backward)]
    return Problem(tuple(ops), tuple(sizes.values()), len(forward)), names


def sized(size_bytes, names):
    return dict.fromkeys(names.split(), size_bytes)


def in_words(case):
    """What runs from the first gradient on, by the first buffer that it writes."""
    problem, names = step(*case)
    sequence = block_checkpointing(problem)
    if sequence is None:
        return None
    check_sequence(problem, sequence)
    return " ".join([names[i] for i in sequence[problem.num_forward :]])


def residual(mask=1, early=""):
    """Two layers, x + f(g(x)); the last op reads a mask of the first, its gradient `early`."""
    return (
        sized(6400, "a b c s t u v ds da dv") | {"mask": mask},
        [
            *[("", "a mask"), ("a", "b"), ("b", "c"), ("c a", "s")],
            *[("s", "t"), ("t", "u"), ("u s mask", "v")],
        ],
        [(f"v {early}", "dv"), ("dv t u", "ds"), ("ds b c", "da")],
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param(residual(), "dv ds b c da", id="a sum that goes on alone ends a block"),
        pytest.param(residual(mask=6400), None, id="no cut where a large skip crosses too"),
        pytest.param(residual(early="b"), "dv ds da", id="the backward pass has no place for it"),
    ],
)
def test_a_block_runs_again_right_before_the_gradients_that_read_it(case, words):
    assert in_words(case) == words


def layers(count, size):
    """Layers of x -> h -> g -> x', of equal bytes, whose gradients read x, h and g."""
    sizes, forward, others = [size], [ProblemOp((), (0,), 0, 1.0)], []
    for k in range(count):
        x = 3 * k
        sizes += [size] * 3
        forward.append(ProblemOp((x,), (x + 1,), 0, 1.0))
        forward.append(ProblemOp((x + 1,), (x + 2,), 0, 1.0))
        forward.append(ProblemOp((x, x + 2), (x + 3,), 0, 1.0))
    for k in reversed(range(count)):
        before = () if k == count - 1 else (len(sizes) - 1,)
        sizes.append(size)
        reads = (*before, 3 * k, 3 * k + 1, 3 * k + 2)
        others.append(ProblemOp(reads, (len(sizes) - 1,), 0, 1.0))
    return Problem((*forward, *others), tuple(sizes), len(forward))


def gathered(may_wait):
    """Two layers, each reads a weight that was gathered before; slopes are made ahead of all."""
    return (
        sized(6400, "a v w b c s t u k g dv ds da"),
        [
            *[("", "a"), ("", "v"), ("", "w"), ("a v", "b"), ("b", "c"), ("c a", "s")],
            *[("s w", "t"), ("t", "u"), ("u s", "k")],
        ],
        [("b", "g"), ("k", "dv"), ("dv t u", "ds"), ("ds g c", "da")],
        ("v", "w"),
        may_wait,
    )


def test_what_is_kept_anyway_and_what_may_wait_do_not_join_blocks():
    assert in_words(gathered(may_wait=("g",))) == "dv ds b c g da"
    assert in_words(gathered(may_wait=())) == "g dv ds da"


def test_what_runs_again_in_no_time_costs_nothing_in_whatever_order_the_others_run():
    """Sums of durations in two orders may differ in their last bit, and be less than before."""
    problem, _ = step(*gathered(may_wait=("g",)))
    for times in permutations((0.1, 0.2, 0.3, 0.7)):
        own = zip(problem.ops, (0.0,) * problem.num_forward + times, strict=True)
        ops = tuple([replace(op, duration=time) for op, time in own])
        assert Planner(replace(problem, ops=ops)).blocks.extra == 0.0


def test_all_that_write_a_buffer_run_in_their_order():
    sizes = sized(6400, "a b s t v dv da") | {"g": 6400}
    forward = [("", "a"), ("a", "b"), ("b a", "s"), ("s", "t"), ("t s", "v")]
    others = [("a", "g"), ("b", "g"), ("v t", "dv"), ("dv a b g", "da")]
    problem, _ = step(sizes, forward, others, may_wait=("g",))
    sequence = block_checkpointing(problem)
    check_sequence(problem, sequence)
    assert [i for i in sequence if i in (5, 6)] == [5, 6]


def test_the_outputs_of_blocks_are_held_and_one_block_whole():
    problem = layers(6, 10)
    sequence = block_checkpointing(problem)
    # The inputs of all layers, h and g of the last one, and its gradient.
    assert simulate(problem, sequence).peak_bytes == 60 + 20 + 10
    # h and g of the five other layers run again; x' of a layer is held, or not wanted any more.
    assert len(sequence) == len(problem.ops) + 2 * 5


def test_no_forward_op_runs_more_than_twice_whatever_the_gradients_read():
    num_cut = 0
    for seed in range(60):
        problem = random_problem(Random(seed), 2 + seed % 10)
        sequence = block_checkpointing(problem)
        if sequence is not None:
            num_cut += 1
            check_sequence(problem, sequence)
            assert all(sequence.count(i) <= 2 for i in range(problem.num_forward))
            assert sequence.count(problem.num_forward - 1) == 1  # the last block keeps everything
    assert num_cut > 10
