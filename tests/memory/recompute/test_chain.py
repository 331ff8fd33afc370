from heapq import heappop, heappush
from random import Random

from memory.recompute.blocks import pinned_buffers
from memory.recompute.chain import block_checkpointing, chain_blocks, chain_plans
from memory.recompute.problem import Problem, ProblemOp, check_sequence
from memory.recompute.simulate import simulate


def chain_step(rng, num_blocks, ops_per_block, *, late_updates=False, has_metrics=False):
    """Blocks whose ops may read the block's input too; weights are updated at once or late."""
    sizes, forward, x = [rng.randint(2, 8)], [ProblemOp((), (0,), 0, 1.0)], 0
    for _ in range(num_blocks):
        inner = [x]
        for k in range(ops_per_block):
            reads = {inner[-1]} | ({x} if k == ops_per_block - 1 and rng.random() < 0.5 else set())
            out = len(sizes)
            sizes.append(rng.randint(2, 8))
            pairs = ()
            if rng.random() < 0.4:
                sizes[out] = sizes[inner[-1]]
                pairs = ((out, inner[-1]),)
            writes = [out]
            if rng.random() < 0.3:
                sizes.append(rng.choice([0, 1]))
                writes.append(out + 1)
            scratch = rng.choice([0, 0, 3])
            forward.append(
                ProblemOp(
                    tuple(sorted(reads)), tuple(writes), scratch, float(rng.randint(1, 9)), pairs
                )
            )
            inner.append(out)
        x = inner[-1]
    if has_metrics:
        forward.append(ProblemOp((x,), (len(sizes),), 0, 1.0))
        sizes.append(5)
    gradient, others, weights = {}, [], []
    for op in reversed(forward):
        reads = [b for b in (*op.reads, *op.writes) if rng.random() < 0.7]
        reads += [gradient[b] for b in op.writes if b in gradient]
        writes = []
        for b in op.reads:
            if b in gradient:
                reads.append(gradient[b])
            gradient.setdefault(b, len(sizes))
            if gradient[b] == len(sizes):
                sizes.append(sizes[b])
            writes.append(gradient[b])
        weights.append(len(sizes))
        sizes.append(rng.randint(1, 3))
        unique = tuple(dict.fromkeys(reads))
        others.append(ProblemOp(unique, (*writes, weights[-1]), rng.choice([0, 0, 4]), 2.0))
        if not late_updates:
            others.append(ProblemOp((weights[-1],), (), 0, 0.5))
    others += [ProblemOp((w,), (), 0, 0.5) for w in weights] if late_updates else []
    return Problem((*forward, *others), tuple(sizes), len(forward))


def steps(count):
    for seed in range(count):
        rng = Random(seed)
        yield chain_step(
            rng,
            rng.randint(2, 6),
            rng.randint(1, 4),
            late_updates=seed % 3 == 0,
            has_metrics=seed % 4 == 0,
        )


def budgets(problem, table):
    most = simulate(problem, problem.store_all).peak_bytes
    least = table.least_bytes
    return sorted({least + (most - least) * k // 5 for k in range(6)})


def test_sequences_are_legal_and_keep_the_budget_and_time_falls_with_it():
    num_chains = 0
    for problem in steps(30):
        table = chain_plans(problem)
        if table is None:
            continue
        num_chains += 1
        times = []
        for budget in budgets(problem, table):
            sequence = table.sequence(budget)
            assert sequence is not None
            check_sequence(problem, sequence)
            usage = simulate(problem, sequence)
            assert usage.peak_bytes <= budget
            times.append(usage.duration)
        assert times == sorted(times, reverse=True)
    assert num_chains > 25


def test_all_the_bytes_of_storing_everything_buy_its_time():
    for problem in steps(25):
        table = chain_plans(problem)
        if table is not None:
            whole = simulate(problem, problem.store_all)
            sequence = table.sequence(whole.peak_bytes)
            assert simulate(problem, sequence).duration == whole.duration


def test_the_least_budget_is_attained_and_nothing_smaller_is_promised():
    for problem in steps(25):
        table = chain_plans(problem)
        if table is not None:
            least = table.least_bytes
            assert simulate(problem, table.sequence(least)).peak_bytes == least
            assert table.sequence(least - 1) is None
            assert table.sequence(0) is None


def test_the_table_knows_the_time_and_bounds_the_bytes_of_its_sequences():
    num_checked = 0
    for problem in steps(25):
        table = chain_plans(problem)
        if table is None:
            continue
        level = table._level(0)  # budgets of so few bytes: one slot is one byte
        assert level.table.slot_bytes == 1
        once = sum(op.duration for op in problem.ops[problem.num_forward :])
        pinned = sum(problem.size_bytes[b] for b in pinned_buffers(problem, chain_blocks(problem)))
        for k, slots in enumerate(level.points.tolist()):
            usage = simulate(problem, table._judge(0, k).sequence)
            assert usage.duration == level.table.least[slots] + once
            assert usage.peak_bytes <= slots + pinned
            num_checked += 1
    assert num_checked > 120


def test_equal_problems_get_equal_sequences_whatever_was_asked_before():
    problem = chain_step(Random(5), 6, 3)
    one, two = chain_plans(problem), chain_plans(problem)
    asked = budgets(problem, one)
    forwards = [one.sequence(b) for b in asked]
    assert [two.sequence(b) for b in reversed(asked)] == forwards[::-1]


def least_time(problem, budget):
    """Dijkstra over all sequences: (other ops done, forward ops seen, forward buffers held)."""
    made = {b for op in problem.ops[: problem.num_forward] for b in op.writes}
    touches = {}
    for i in range(problem.num_forward, len(problem.ops)):
        for b in (*problem.ops[i].reads, *problem.ops[i].writes):
            touches.setdefault(b, []).append(i)
    spans = {b: (t[0], t[-1]) for b, t in touches.items() if b not in made}
    start = (problem.num_forward, frozenset(), frozenset())
    times, heap, count = {start: 0.0}, [(0.0, 0, start)], 0
    while heap:
        time, _, state = heappop(heap)
        if time > times[state]:
            continue
        following, seen, held = state
        if following == len(problem.ops) and len(seen) == problem.num_forward:
            return time
        moves = [(0.0, (following, seen, held - {b})) for b in held]
        for i in (*range(problem.num_forward), following):
            if i == len(problem.ops):
                continue
            op = problem.ops[i]
            is_other = i >= problem.num_forward
            across = {b for b, (lo, hi) in spans.items() if lo < following <= hi}
            if not {b for b in op.reads if b in made} <= held:
                continue
            live = held | across | set(op.writes)
            size = sum(problem.size_bytes[b] for b in live) + op.temp_bytes
            after = (
                (following + 1, seen, held)
                if is_other
                else (following, seen | {i}, held | set(op.writes))
            )
            if size <= budget:
                moves.append((op.duration, after))
            for out, given in op.in_place:  # at most one pair per op here
                is_equal = problem.size_bytes[out] == problem.size_bytes[given]
                if is_equal and given in held and size - problem.size_bytes[given] <= budget:
                    moves.append((op.duration, (after[0], after[1], after[2] - {given})))
        for cost, state in moves:
            if time + cost < times.get(state, float("inf")):
                times[state] = time + cost
                count += 1
                heappush(heap, (time + cost, count, state))
    return None


def test_tiny_chains_never_beat_all_sequences_and_mostly_reach_the_best_of_them():
    num_asked = num_best = num_least = num_tables = 0
    for seed in range(24):
        rng = Random(seed)
        problem = chain_step(rng, rng.randint(1, 2), 2)
        table = chain_plans(problem)
        if table is None:
            continue
        num_tables += 1
        num_least += least_time(problem, table.least_bytes - 1) is None
        for budget in budgets(problem, table)[:4]:
            best = least_time(problem, budget)
            assert best is not None
            found = simulate(problem, table.sequence(budget)).duration
            assert found >= best
            num_asked += 1
            num_best += found == best
    assert num_tables > 20
    assert num_least >= 0.8 * num_tables
    assert num_best >= 0.85 * num_asked


def test_checkpointing_blocks_runs_no_forward_op_more_than_twice():
    for problem in steps(25):
        sequence = block_checkpointing(problem)
        if sequence is not None:
            check_sequence(problem, sequence)
            last = chain_blocks(problem)[-1]
            for i in range(problem.num_forward):
                assert sequence.count(i) <= (1 if i >= last.first else 2)


def test_checkpointing_blocks_holds_their_outputs_and_one_block():
    """Six layers of x -> h -> g -> x', all of 10 bytes, whose gradients read all three."""
    sizes, forward, others = [10], [ProblemOp((), (0,), 0, 1.0)], []
    for k in range(6):
        x = 3 * k
        sizes += [10, 10, 10]
        forward.append(ProblemOp((x,), (x + 1,), 0, 1.0))
        forward.append(ProblemOp((x + 1,), (x + 2,), 0, 1.0))
        forward.append(ProblemOp((x, x + 2), (x + 3,), 0, 1.0))
    for k in reversed(range(6)):
        before = () if k == 5 else (len(sizes) - 1,)
        sizes.append(10)
        reads = (*before, 3 * k, 3 * k + 1, 3 * k + 2)
        others.append(ProblemOp(reads, (len(sizes) - 1,), 0, 1.0))
    problem = Problem((*forward, *others), tuple(sizes), len(forward))
    assert len(chain_blocks(problem)) == 7
    sequence = block_checkpointing(problem)
    # The inputs of all layers, h and g of the last one, and its gradient.
    assert simulate(problem, sequence).peak_bytes == 60 + 20 + 10
    # h and g of the five other layers run again; x' of a layer is held, or not wanted any more.
    assert len(sequence) == len(problem.ops) + 2 * 5


def test_a_problem_that_cannot_be_cut_has_no_table():
    forward = [ProblemOp((), (0, 1)), ProblemOp((0,), (2,)), ProblemOp((1, 2), (3,))]
    problem = Problem((*forward, ProblemOp((0, 1, 2), (4,))), (5, 5, 5, 5, 5), 3)
    assert chain_plans(problem) is None
    assert block_checkpointing(problem) is None


def test_a_deep_model_of_equal_layers_needs_memory_that_hardly_grows():
    def layers(count):
        sizes, forward, others = [64], [ProblemOp((), (0,), 0, 1.0)], []
        for k in range(count):
            sizes += [64, 64]
            forward += [
                ProblemOp((2 * k,), (2 * k + 1,), 0, 1.0),
                ProblemOp((2 * k + 1,), (2 * k + 2,), 0, 1.0),
            ]
        for k in reversed(range(count)):
            before = () if k == count - 1 else (len(sizes) - 1,)
            sizes.append(64)
            others.append(ProblemOp((*before, 2 * k, 2 * k + 1), (len(sizes) - 1,), 0, 2.0))
        return Problem((*forward, *others), tuple(sizes), len(forward))

    least = [chain_plans(layers(count)).least_bytes for count in (10, 40)]
    assert least[1] <= 1.5 * least[0]
