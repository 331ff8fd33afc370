from random import Random

import pytest

from memory.recompute.blocks import NO_BUFFER, find_blocks, gradient_bytes, pinned_buffers
from memory.recompute.problem import Problem, ProblemOp
from memory.recompute.simulate import make_versions


def step(sizes, forward, backward):
    """A problem from (reads, writes) pairs of buffer names."""
    number = {name: k for k, name in enumerate(sizes)}
    ops = [
        ProblemOp(tuple(number[b] for b in reads.split()), tuple(number[b] for b in writes.split()))
        for reads, writes in (*forward, *backward)
    ]
    return Problem(tuple(ops), tuple(sizes.values()), len(forward)), number


def sized(size_bytes, names):
    return dict.fromkeys(names.split(), size_bytes)


def chain_of_two_op_layers(num_layers, extra=0):
    """Each layer: x -> h -> x'; backward reads h and x. `extra`: bytes of statistics per layer."""
    sizes, forward, backward = {"x0": 100}, [("", "x0")], []
    for k in range(num_layers):
        sizes |= {f"h{k}": 100, f"m{k}": extra, f"x{k + 1}": 100}
        forward += [(f"x{k}", f"h{k} m{k}"), (f"h{k}", f"x{k + 1}")]
    sizes |= {f"d{num_layers}": 100}
    backward.append((f"x{num_layers}", f"d{num_layers}"))
    for k in reversed(range(num_layers)):
        sizes |= {f"d{k}": 100, f"w{k}": 10}
        backward += [(f"d{k + 1} h{k} x{k} m{k}", f"d{k} w{k}"), (f"w{k}", "")]
    return sizes, forward, backward


def test_a_chain_is_cut_at_every_buffer_that_alone_goes_on():
    problem, number = step(*chain_of_two_op_layers(2))
    blocks = find_blocks(problem)
    assert [(b.first, b.end) for b in blocks] == [(i, i + 1) for i in range(5)]
    assert [b.output for b in blocks[:-1]] == [number[n] for n in ("x0", "h0", "x1", "h1")]
    assert [b.input for b in blocks[1:]] == [b.output for b in blocks[:-1]]
    assert blocks[0].input == blocks[-1].output == NO_BUFFER
    # Ops 5 to 9 are d2, d1 w1, its update, d0 w0, its update. A layer's gradients read its h and
    # x, so they belong to the block that makes h from x; that of the next x is left without.
    stages = [(b.stage_first, b.stage_end) for b in blocks]
    assert stages == [(10, 10), (8, 10), (8, 8), (6, 8), (5, 6)]


def test_a_residual_chain_is_cut_where_the_sum_goes_on_alone():
    sizes = sized(64, "a b c s t u v ds da dv")
    forward = [("", "a"), ("a", "b"), ("b", "c"), ("c a", "s")]
    forward += [("s", "t"), ("t", "u"), ("u s", "v")]
    backward = [("v", "dv"), ("dv t u", "ds"), ("ds b c", "da")]
    problem, number = step(sizes, forward, backward)
    blocks = find_blocks(problem)
    assert [problem.ops[b.end - 1].writes for b in blocks[:-1]] == [(number["a"],), (number["s"],)]


def test_a_skip_from_the_first_half_to_the_second_makes_one_block_of_all_between():
    sizes = sized(64, "a b c d e de dd dc db da")
    forward = [("", "a"), ("a", "b"), ("b", "c"), ("c", "d"), ("d a", "e")]
    backward = [("e", "de"), ("de d", "dd"), ("dd c", "dc"), ("dc b", "db"), ("db a", "da")]
    problem, number = step(sizes, forward, backward)
    blocks = find_blocks(problem)
    assert [(b.first, b.end) for b in blocks] == [(0, 1), (1, 5)]
    assert blocks[0].output == number["a"]


def test_a_small_skip_is_pinned_and_cuts_nothing():
    sizes = sized(6400, "a b c d e de dd dc db da") | {"mask": 64}
    forward = [("", "a mask"), ("a", "b"), ("b", "c"), ("c", "d"), ("d mask", "e")]
    backward = [("e", "de"), ("de d", "dd"), ("dd c", "dc"), ("dc b", "db"), ("db a mask", "da")]
    problem, number = step(sizes, forward, backward)
    blocks = find_blocks(problem)
    assert len(blocks) == 5
    assert pinned_buffers(problem, blocks) == (number["mask"],)


def test_a_loss_that_is_read_last_of_all_does_not_join_the_blocks():
    sizes, forward, backward = chain_of_two_op_layers(3)
    sizes["loss"] = 1
    forward.append(("x3", "loss"))
    backward.append(("loss", ""))
    problem, number = step(sizes, forward, backward)
    blocks = find_blocks(problem)
    assert len(blocks) >= 4
    assert pinned_buffers(problem, blocks) == (number["loss"],)


def test_statistics_that_only_their_own_stage_reads_are_not_pinned():
    problem, _ = step(*chain_of_two_op_layers(4, extra=1))
    blocks = find_blocks(problem)
    assert len(blocks) == 9
    assert pinned_buffers(problem, blocks) == ()


def test_buffers_without_bytes_and_unread_results_cross_nothing():
    sizes, forward, backward = chain_of_two_op_layers(2)
    plain, _ = step(sizes, forward, backward)
    sizes |= {"ids": 0, "accuracy": 50}
    forward = [("", "x0 ids"), *forward[1:], ("x2 ids", "accuracy")]
    problem, _ = step(sizes, forward, backward)
    shift = [(b.first, b.end) for b in find_blocks(plain)][:-1]
    assert [(b.first, b.end) for b in find_blocks(problem)][: len(shift)] == shift


def test_two_inputs_that_meet_late_are_in_one_block():
    sizes = sized(64, "a b aa bb s t dt ds")
    forward = [("", "a"), ("", "b"), ("a", "aa"), ("b", "bb"), ("aa bb", "s"), ("s", "t")]
    backward = [("t", "dt"), ("dt s", "ds"), ("ds a b", "")]
    problem, _ = step(sizes, forward, backward)
    blocks = find_blocks(problem)
    assert (blocks[1].first, blocks[1].end) == (1, 5)


def random_step(rng):
    """Forward ops that read some earlier buffers; other ops that read any of them, mostly back."""
    num_forward, num_others = rng.randint(1, 14), rng.randint(0, 16)
    sizes = [rng.choice([0, 1, 100, 300]) for _ in range(num_forward)]
    forward = []
    for i in range(num_forward):
        near = [j for j in range(max(0, i - 2), i) if rng.random() < 0.7]
        forward.append(ProblemOp(tuple(near), (i,)))
    others = []
    for k in range(num_others):
        middle = num_forward - 1 - k * num_forward // num_others
        reads = {min(max(middle + rng.choice([-1, 0, 0, 1]), 0), num_forward - 1)}
        if others and rng.random() < 0.8:
            reads.add(len(sizes) - 1)
        sizes.append(rng.choice([0, 10, 200]))
        others.append(ProblemOp(tuple(sorted(reads)), (len(sizes) - 1,)))
    return Problem((*forward, *others), tuple(sizes), num_forward)


@pytest.mark.parametrize("seed", range(150))
def test_blocks_partition_the_ops_and_read_only_what_reaches_them(seed):
    problem = random_step(Random(seed))
    blocks = find_blocks(problem)
    pinned = set(pinned_buffers(problem, blocks))
    forward = [i for b in blocks for i in range(b.first, b.end)]
    others = [i for b in reversed(blocks) for i in range(b.stage_first, b.stage_end)]
    assert forward + others == list(range(len(problem.ops)))
    largest = max(problem.size_bytes[: problem.num_forward], default=0)
    for block in blocks:
        inside = {b for i in range(block.first, block.end) for b in problem.ops[i].writes}
        for i in (*range(block.first, block.end), *range(block.stage_first, block.stage_end)):
            for b in problem.ops[i].reads:
                is_free = b >= problem.num_forward or problem.size_bytes[b] == 0
                assert is_free or b in inside | pinned | {block.input}
    assert all(problem.size_bytes[b] * 64 <= largest for b in pinned)


def test_random_steps_do_have_several_blocks():
    counts = [len(find_blocks(random_step(Random(seed)))) for seed in range(150)]
    assert sum(count > 2 for count in counts) > 50


@pytest.mark.parametrize("seed", range(30))
def test_gradient_bytes_are_those_of_the_versions_that_no_forward_op_makes(seed):
    problem = random_step(Random(seed))
    versions = make_versions(problem, problem.store_all)
    live = [
        sum(
            problem.size_bytes[b]
            for b, lower, upper in zip(versions.buffer, versions.lower, versions.upper, strict=True)
            if b >= problem.num_forward and lower < i < upper
        )
        for i in range(len(problem.ops) + 1)
    ]
    assert gradient_bytes(problem).tolist() == live
