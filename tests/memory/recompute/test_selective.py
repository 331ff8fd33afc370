from dataclasses import replace
from heapq import heappop, heappush
from itertools import combinations
from math import isqrt
from random import Random

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import check_sequence, simulate

from memory.recompute.planner import block_checkpointing
from memory.recompute.problem import Problem, ProblemOp, floor_op
from memory.recompute.selective import Selective


def training_step(rng, num_forward, *, is_chain=False):
    """A random network and its gradients: op i backwards reads what its forward op did, or less."""
    sizes, forward = [], []
    for i in range(num_forward):
        reads = ((i - 1,) if i else ()) if is_chain else some(rng, range(i))
        sizes.append(rng.randint(1, 9))
        pairs = ()
        if reads and rng.random() < 0.3:
            sizes[i] = sizes[reads[-1]]
            pairs = ((i, reads[-1]),)
        forward.append(ProblemOp(reads, (i,), rng.choice([0, 0, 2]), rng.randint(1, 9), pairs))
    backward = []
    for i in reversed(range(num_forward)):
        needs = tuple(b for b in (*forward[i].reads, i) if rng.random() < 0.7)
        before = (len(sizes) - 1,) if backward else ()
        sizes.append(rng.randint(1, 9))
        reads = tuple(dict.fromkeys((*needs, *before)))
        backward.append(
            ProblemOp(reads, (len(sizes) - 1,), rng.choice([0, 0, 2]), rng.randint(1, 9))
        )
    return Problem((*forward, *backward), tuple(sizes), num_forward)


def some(rng, earlier):
    return tuple(sorted({rng.choice(earlier[-3:]) for _ in range(rng.randint(1, 2)) if earlier}))


def exhaustive(problem, budget):
    """Return the least time of any sequence within the budget, None where there is none.

    Dijkstra over (other ops done, forward ops run once, forward buffers held). Buffers may be let
    go at any time; an op in place takes over the bytes of an input that is let go right then.
    """
    first, last = {}, {}
    for i, op in enumerate(problem.ops[problem.num_forward :]):
        for b in (*op.reads, *op.writes):
            first.setdefault(b, i)
            last[b] = i
    made = {b for op in problem.ops[: problem.num_forward] for b in op.writes}
    num_others = len(problem.ops) - problem.num_forward
    start = (0, 0, frozenset())
    best, heap = {start: 0}, [(0, 0, start)]
    while heap:
        time, _, state = heappop(heap)
        if best[state] < time:
            continue
        done, ran, held = state
        if done == num_others and ran == (1 << problem.num_forward) - 1:
            return time
        moves = [(0, (done, ran, held - {b})) for b in held]
        fixed = {b for b in first if b not in made and first[b] < done <= last[b]}
        others = [problem.num_forward + done] if done < num_others else []
        for i in (*range(problem.num_forward), *others):
            op, is_forward = problem.ops[i], i < problem.num_forward
            at_hand = held | fixed
            if not set(op.reads) <= at_hand or (is_forward and set(op.writes) & held):
                continue
            total = sum(problem.size_bytes[b] for b in at_hand | set(op.writes)) + op.temp_bytes
            following = held | set(op.writes) if is_forward else held
            mark = ran | 1 << i if is_forward else ran
            for count in range(len(op.in_place) + 1):
                for pairs in combinations(op.in_place, count):
                    given = {b for _, b in pairs}
                    shared = sum(problem.size_bytes[b] for b in given)
                    if given <= held and total - shared <= budget:
                        state = (done + (not is_forward), mark, frozenset(following - given))
                        moves.append((op.duration, state))
        for cost, state in moves:
            if time + cost < best.get(state, 1 << 30):
                best[state] = time + cost
                heappush(heap, (time + cost, len(best), state))
    return None


def budgets(problem):
    """A few budgets between the floor and the bytes of saving everything."""
    most = simulate(problem, problem.store_all).peak_bytes
    floor = floor_op(problem).size_bytes
    return sorted({floor + (most - floor) * k // 4 for k in range(5)})


def test_the_greedy_never_beats_all_sequences_and_reaches_the_best_of_them_in_most_cases():
    num_feasible = num_missed = num_best = total = total_best = 0
    for seed in range(60):
        rng = Random(seed)
        problem = training_step(rng, rng.randint(3, 5), is_chain=seed % 3 == 0)
        search = Selective(problem)
        for budget in budgets(problem):
            best = exhaustive(problem, budget)
            sequence = search.sequence(budget)
            if best is None:
                assert sequence is None
                continue
            num_feasible += 1
            if sequence is None:
                num_missed += 1
                continue
            time = simulate(problem, sequence).duration
            assert time >= best
            num_best += time == best
            total, total_best = total + time, total_best + best
    assert num_feasible > 200
    assert num_best >= 0.9 * num_feasible
    assert num_missed <= 0.05 * num_feasible
    assert total <= 1.01 * total_best


def test_the_smallest_sequence_is_as_small_as_any_in_most_cases():
    num_smallest, num_seeds = 0, tiers.size(40, merge=10)
    for seed in range(num_seeds):
        rng = Random(seed)
        problem = training_step(rng, rng.randint(2, 4), is_chain=seed % 3 == 0)
        sequence = Selective(problem).smallest(floor_op(problem).size_bytes)
        check_sequence(problem, sequence)
        smallest = simulate(problem, sequence).peak_bytes
        assert exhaustive(problem, smallest) is not None
        num_smallest += exhaustive(problem, smallest - 1) is None
    assert num_smallest >= 0.9 * num_seeds


def test_an_answer_does_not_depend_on_those_before():
    problem = training_step(Random(7), 30)
    most = simulate(problem, problem.store_all).peak_bytes
    asked = [int(most * fraction) for fraction in (0.5, 0.9, 0.4, 0.7, 0.5)]
    search = Selective(problem)
    answers = [search.sequence(budget) for budget in asked]
    assert answers == [Selective(problem).sequence(budget) for budget in asked]
    assert None not in answers


def test_a_skip_of_a_network_shaped_like_a_u_is_dropped_where_it_spans_the_peak():
    # 0 -> 1 -> 2 -> 3, and 3 reads the skip 0 as well; the large buffer in the middle is the peak.
    forward = (
        ProblemOp((), (0,), 0, 1.0),
        ProblemOp((0,), (1,), 0, 1.0),
        ProblemOp((1,), (2,), 0, 1.0),
        ProblemOp((2,), (3,), 0, 1.0),
        ProblemOp((3, 0), (4,), 0, 1.0),
    )
    problem = Problem((*forward, ProblemOp((4,), (5,), 0, 1.0)), (8, 4, 20, 4, 4, 4), 5)
    assert simulate(problem, problem.store_all).peak_bytes == 32
    assert Selective(problem).sequence(24) == (0, 1, 2, 3, 0, 4, 5)
    assert Selective(problem).sequence(23) is None


@pytest.mark.parametrize("num_forward", [16, 64, 144])
def test_equal_ops_in_a_chain_fit_into_twice_the_root_of_their_bytes_for_one_more_forward_pass(
    num_forward,
):
    forward = [ProblemOp((i - 1,) if i else (), (i,), 0, 1.0) for i in range(num_forward)]
    last = range(num_forward - 1, 2 * num_forward - 1)
    backward = [
        ProblemOp((num_forward - 1 - k, *((b,) if k else ())), (b + 1,), 0, 1.0)
        for k, b in enumerate(last)
    ]
    problem = Problem((*forward, *backward), (1,) * 2 * num_forward, num_forward)
    sequence = Selective(problem).sequence(2 * isqrt(num_forward) + 2)
    assert sequence is not None
    assert simulate(problem, sequence).duration <= 3 * num_forward


def test_a_first_run_that_only_the_backward_reads_just_runs_later():
    forward = (ProblemOp((), (0,), 0, 1.0), ProblemOp((), (1,), 0, 1.0))
    problem = Problem((*forward, ProblemOp((1,), (2,)), ProblemOp((0, 2), ())), (8, 8, 1), 2)
    assert Selective(problem).sequence(10) == (1, 2, 0, 3)


def test_a_problem_without_ops_has_the_empty_sequence():
    assert Selective(Problem((), (), 0)).sequence(0) == ()


@st.composite
def problems(draw):
    rng = Random(draw(st.integers(0, 1 << 32)))
    return training_step(rng, draw(st.integers(1, 30)), is_chain=draw(st.booleans()))


@given(problems(), st.floats(0, 1))
@settings(max_examples=tiers.examples(60), deadline=None)  # a shared machine may pause
def test_a_sequence_computes_the_same_within_its_budget(problem, fraction):
    most = simulate(problem, problem.store_all).peak_bytes
    budget = int(fraction * most)
    sequence = Selective(problem).sequence(budget)
    if sequence is not None:
        check_sequence(problem, sequence)
        assert simulate(problem, sequence).peak_bytes <= budget
        assert simulate(problem, sequence).duration >= simulate(problem, problem.store_all).duration


@given(problems())
@settings(max_examples=tiers.size(40, merge=8), deadline=None)  # a shared machine may pause
def test_the_smallest_sequence_is_between_the_floor_and_all_that_fit(problem):
    search = Selective(problem)
    floor = floor_op(problem).size_bytes
    sequence = search.smallest(floor)
    check_sequence(problem, sequence)
    smallest = simulate(problem, sequence).peak_bytes
    assert floor <= smallest <= simulate(problem, problem.store_all).peak_bytes


def test_what_runs_once_is_kept_and_what_reads_it_may_run_again():
    # 0 -> 1 (once) -> 2 -> 3 -> 4, and gradients that read what 1, 2 and 0 have made.
    forward = tuple(ProblemOp((i - 1,) if i else (), (i,), 0, 1.0, (), i == 1) for i in range(5))
    others = (ProblemOp((4, 2), (5,), 0, 1.0), ProblemOp((5, 1, 0), (6,), 0, 1.0))
    problem = Problem((*forward, *others), (8, 1, 8, 20, 4, 4, 4), 5)
    assert problem.makers == (0, -1, 2, 3, 4, -1, -1)
    assert simulate(problem, problem.store_all).peak_bytes == 8 + 1 + 8 + 20 + 4
    sequence = Selective(problem).sequence(29)
    assert simulate(problem, sequence).peak_bytes == 29
    assert sequence == (0, 1, 2, 3, 4, 2, 5, 0, 6)


@pytest.mark.parametrize("seed", range(20))
def test_no_sequence_runs_twice_what_is_to_run_once(seed):
    rng = Random(seed)
    problem = training_step(rng, 14)
    once = {rng.randrange(14) for _ in range(5)}
    ops = [replace(op, is_once=i in once) for i, op in enumerate(problem.ops)]
    problem = replace(problem, ops=tuple(ops))
    search = Selective(problem)
    found = [search.sequence(budget) for budget in budgets(problem)]
    found += [search.smallest(floor_op(problem).size_bytes), block_checkpointing(problem)]
    for sequence in [sequence for sequence in found if sequence is not None]:
        check_sequence(problem, sequence)
        fixed = [i for i in sequence if i in once or i >= problem.num_forward]
        assert fixed == [i for i in problem.store_all if i in once or i >= problem.num_forward]
        assert simulate(problem, sequence).peak_bytes >= floor_op(problem).size_bytes
