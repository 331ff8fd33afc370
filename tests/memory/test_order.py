import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from memory.order import Policy, _Ops, better_order


def order_for_peak(
    num_ops, reads, writes, sizes, before=(), *, keep_alive=(), policy=Policy.FREES_FIRST
):
    return _Ops.of(num_ops, reads, writes, sizes, before, keep_alive).in_order(policy)


def peak_bytes(order, reads, writes, sizes, *, keep_alive):
    return _Ops.of(len(order), reads, writes, sizes, (), keep_alive).usage(order)[0]


@st.composite
def programs(draw):
    """A straight-line program: ops read what exists and write new or old buffers; extra edges."""
    num_ops = draw(st.integers(0, 14))
    num_inputs = draw(st.integers(0, 3))
    sizes = [draw(st.integers(0, 9)) for _ in range(num_inputs)]
    reads, writes, predecessors = [], [], []
    for op in range(num_ops):
        known = st.lists(st.sampled_from(range(len(sizes))), max_size=3) if sizes else st.just([])
        reads.append(draw(known))
        overwritten = draw(known) if draw(st.integers(0, 3)) == 0 else []
        made = list(range(len(sizes), len(sizes) + draw(st.integers(0, 2))))
        sizes += [draw(st.integers(0, 9)) for _ in made]
        writes.append(overwritten + made)
        earlier = st.lists(st.sampled_from(range(op)), max_size=2) if op else st.just([])
        predecessors.append(draw(earlier) if draw(st.booleans()) else [])
    kept = draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes else set()
    return num_ops, reads, writes, sizes, predecessors, sorted(kept)


def simulate(order, reads, writes, sizes, kept):
    """Return the most bytes live while an op runs."""
    return max(walk(order, reads, writes, sizes, kept), default=0)


def walk(order, reads, writes, sizes, kept):
    """Walk the order with a set of live buffers; return what is live while each op runs."""
    ops = range(len(reads))
    first_access = {}
    for op in ops:
        first_access |= {b: "read" for b in reads[op] if b not in first_access}
        first_access |= {b: "write" for b in writes[op] if b not in first_access}
    live = {b for b, access in first_access.items() if access == "read"}
    live |= {b for b in kept if b not in first_access}
    left = {b: sum(b in reads[op] or b in writes[op] for op in ops) for b in range(len(sizes))}
    profile = []
    for op in order:
        live |= set(writes[op])
        assert set(reads[op]) <= live
        profile.append(sum(sizes[b] for b in live))
        for b in {*reads[op], *writes[op]}:
            left[b] -= 1
            if left[b] == 0 and b not in kept:
                live.discard(b)
    return profile


def versions_seen(order, reads, writes):
    """What each op reads, as (buffer, op that wrote it last): equal for all legal orders."""
    writer, seen = {}, {}
    for op in order:
        seen[op] = [(b, writer.get(b)) for b in reads[op]]
        for b in writes[op]:
            writer[b] = op
    return seen, writer


@given(programs(), st.sampled_from(Policy))
def test_an_order_runs_every_op_once_after_its_predecessors(program, policy):
    num_ops, reads, writes, sizes, predecessors, kept = program
    order = order_for_peak(
        num_ops, reads, writes, sizes, predecessors, keep_alive=kept, policy=policy
    )
    assert sorted(order) == list(range(num_ops))
    step = {op: i for i, op in enumerate(order)}
    assert all(step[p] < step[op] for op in range(num_ops) for p in predecessors[op])


@given(programs(), st.sampled_from(Policy))
def test_every_op_reads_the_values_it_read_in_the_original_order(program, policy):
    num_ops, reads, writes, sizes, predecessors, kept = program
    order = order_for_peak(
        num_ops, reads, writes, sizes, predecessors, keep_alive=kept, policy=policy
    )
    assert versions_seen(order, reads, writes) == versions_seen(range(num_ops), reads, writes)


@given(programs(), st.sampled_from(Policy))
def test_the_peak_equals_a_walk_with_a_set_of_live_buffers(program, policy):
    num_ops, reads, writes, sizes, predecessors, kept = program
    order = order_for_peak(
        num_ops, reads, writes, sizes, predecessors, keep_alive=kept, policy=policy
    )
    peak = peak_bytes(order, reads, writes, sizes, keep_alive=kept)
    assert peak == simulate(order, reads, writes, sizes, kept)


@given(programs())
def test_the_better_order_is_never_worse_than_the_original(program):
    num_ops, reads, writes, sizes, predecessors, kept = program
    choice = better_order(num_ops, reads, writes, sizes, predecessors, keep_alive=kept)
    before = walk(range(num_ops), reads, writes, sizes, kept)
    after = walk(choice.order, reads, writes, sizes, kept)
    peaks = max(before, default=0), max(after, default=0)
    assert (choice.original_peak_bytes, choice.peak_bytes) == peaks
    if choice.policy is None:
        assert choice.order == tuple(range(num_ops))
    else:
        assert (peaks[1], sum(after)) < (peaks[0], sum(before))


def training_step(num_layers, weight_bytes, activation_bytes):
    """Forward, then backward with dX before dW, then all updates; returns the program and names."""
    names, sizes, reads, writes, ops = {}, [], [], [], []

    def buffer(name, size):
        names[name] = len(sizes)
        sizes.append(size)

    def op(name, read, write):
        ops.append(name)
        reads.append([names[b] for b in read])
        writes.append([names[b] for b in write])

    layers = range(num_layers)
    buffer("x0", activation_bytes)
    for k in layers:
        buffer(f"w{k}", weight_bytes)
        buffer(f"x{k + 1}", activation_bytes)
        op(f"forward{k}", [f"x{k}", f"w{k}"], [f"x{k + 1}"])
    buffer(f"dx{num_layers}", activation_bytes)
    op("loss", [f"x{num_layers}"], [f"dx{num_layers}"])
    for k in reversed(layers):
        buffer(f"dx{k}", activation_bytes)
        buffer(f"dw{k}", weight_bytes)
        op(f"dX{k}", [f"dx{k + 1}", f"w{k}"], [f"dx{k}"])
        op(f"dW{k}", [f"dx{k + 1}", f"x{k}"], [f"dw{k}"])
    for k in layers:
        op(f"update{k}", [f"w{k}", f"dw{k}"], [f"w{k}"])
    kept = [names[f"w{k}"] for k in layers]
    return (len(ops), reads, writes, sizes), kept, ops


def test_updates_run_as_soon_as_their_gradient_exists():
    program, kept, ops = training_step(4, weight_bytes=1000, activation_bytes=10)
    choice = better_order(*program, keep_alive=kept)
    names = [ops[op] for op in choice.order]
    for k in range(4):
        gradient = max(names.index(f"dW{k}"), names.index(f"dX{k}"))
        assert names.index(f"update{k}") == gradient + 1
    # All four gradients lived together; one lives at a time, beside weights and activations.
    assert choice.original_peak_bytes == 4000 + 4000 + 2 * 10
    assert choice.peak_bytes == 4000 + 1000 + 5 * 10 + 10


def test_the_weight_gradient_goes_first_where_that_frees_an_activation():
    program, kept, ops = training_step(1, weight_bytes=1, activation_bytes=100)
    order = order_for_peak(*program, keep_alive=kept)
    assert [ops[op] for op in order] == ["forward0", "loss", "dW0", "dX0", "update0"]


def test_of_equal_peaks_the_order_with_fewer_bytes_times_steps_wins():
    # The peak is op 0's. Of what follows, op 2 frees 5 bytes and op 1 frees nothing.
    program = (3, [[], [], [1]], [[0, 1], [2], []], [9, 5, 1])
    choice = better_order(*program, keep_alive=[2])
    assert (choice.original_peak_bytes, choice.peak_bytes) == (14, 14)
    assert choice.order == (0, 2, 1)


def test_the_original_order_stays_where_nothing_is_gained():
    chain = (4, [[], [0], [1], [2]], [[0], [1], [2], [3]], [8, 8, 8, 8])
    assert order_for_peak(*chain) == (0, 1, 2, 3)
    independent = (3, [[], [], []], [[0], [1], [2]], [5, 5, 5])
    for policy in Policy:
        assert order_for_peak(*independent, keep_alive=[0, 1, 2], policy=policy) == (0, 1, 2)


def test_least_growth_runs_the_branch_that_allocates_less():
    program = (2, [[], []], [[0], [1]], [9, 1])
    order = order_for_peak(*program, keep_alive=[0, 1], policy=Policy.LEAST_GROWTH)
    assert order == (1, 0)


def test_writing_a_buffer_again_allocates_nothing():
    program = (3, [[], [], []], [[0], [1], [0]], [8, 4])
    order = order_for_peak(*program, keep_alive=[0, 1], policy=Policy.LEAST_GROWTH)
    assert order == (1, 0, 2)
    program = (3, [[], [], []], [[0], [1], [0]], [4, 8])
    order = order_for_peak(*program, keep_alive=[0, 1], policy=Policy.LEAST_GROWTH)
    assert order == (0, 2, 1)


def test_an_extra_edge_holds_an_op_back():
    program = (3, [[], [], [0]], [[0], [1], []], [4, 4])
    assert order_for_peak(*program, keep_alive=[1]) == (0, 2, 1)
    assert order_for_peak(*program, [[], [], [1]], keep_alive=[1]) == (0, 1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        (1, [[]], [[3]], [8]),
        (2, [[]], [[], []], []),
        (1, [[]], [[]], [], [[], []]),
        (2, [[], []], [[], []], [], [[1], []]),
        (1, [[]], [[]], [], [[0]]),
    ],
)
def test_a_program_that_is_not_one_is_refused(arguments):
    with raises(ValueError):
        order_for_peak(*arguments)


def test_a_kept_buffer_that_does_not_exist_is_refused():
    with raises(ValueError):
        better_order(1, [[]], [[0]], [8], keep_alive=[1])
