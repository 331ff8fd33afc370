import numpy as np
import pytest
import tiers
from graphs import Net, descend, launches
from hypothesis import given, settings
from hypothesis import strategies as st

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.program import Kind
from compiler.fusion import fuse
from compiler.fusion.members import FusionCandidates
from compiler.graph.graph import Graph, SourceLocation, Write
from compiler.ops.families.activation import GELU, RELU, TANH
from compiler.ops.families.arithmetic import ADD, EXP, MUL, NEG, SQUARE, SUB
from compiler.ops.families.normalisation import LAYER_NORM
from compiler.ops.families.updates import INCREMENT, SGD_UPDATE
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN, SUM
from compiler.ops.primitives.shape import BROADCAST_TO, RESHAPE, TRANSPOSE
from compiler.ops.primitives.slicing import SLICE
from compiler.ops.primitives.sources import VARIABLE
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check
from compiler.storage import order
from compiler.storage.order import needed_per_step

R, C = 6, 8


@pytest.fixture
def net():
    return Net()


def members(graph):
    """Return, per launch, the ops in it."""
    return [n.attrs["members"] if n.op.name == "fused" else n.op.name for n in launches(graph)]


def fused(graph, feeds, evaluate, rtol=1e-9):
    """Run the pass, and check that every output and variable is what it was."""
    after = check(fuse.run(graph), "fuse")
    for got, expected in zip(evaluate(after, feeds), evaluate(graph, feeds), strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, rtol, 1e-9, err_msg=name)
    check(order.run(after), "order")
    return after


def program_of(graph, index=0):
    groups = [n for n in launches(graph) if n.op.name == "fused"]
    return groups[index].attrs["program"]


def test_a_chain_becomes_one_group_that_reads_and_writes_its_ends_only(net, evaluate):
    x, bias = net.input(R, C), net.input(C)
    h = net.b.emit_one(GELU, net.b.emit_one(ADD, x, bias))
    after = fused(net.done(y=net.b.emit_one(MUL, h, x)), net.feeds, evaluate)
    assert members(after) == [("add", "gelu", "mul")]
    (node,) = launches(after)
    assert (len(node.inputs), len(node.outputs)) == (2, 1)
    assert [i.kind for i in program_of(after).inputs] == [Kind.FULL, Kind.COLUMN]


def test_what_is_read_elsewhere_too_becomes_an_output(net, evaluate):
    x = net.input(R, C)
    h = net.b.emit_one(NEG, x)
    y = net.b.emit_one(MATMUL, net.b.emit_one(EXP, h), net.input(C, C))
    after = fused(net.done(h=h, y=y), net.feeds, evaluate)
    assert members(after) == [("neg", "exp"), "matmul"]
    assert len(launches(after)[0].outputs) == 2


def test_reshapes_between_members_cost_nothing(net, evaluate):
    x = net.input(2, 3, C)
    h = net.b.emit_one(RESHAPE, net.b.emit_one(NEG, x), shape=(R, C))
    h = net.b.emit_one(RESHAPE, net.b.emit_one(ADD, h, net.input(R, C)), shape=(2, 3, C))
    after = fused(net.done(y=net.b.emit_one(EXP, h)), net.feeds, evaluate)
    assert members(after) == [("neg", "add", "exp")]
    assert RESHAPE not in [n.op for n in after.nodes]


def test_a_broadcast_is_read_where_it_is_narrow(net, evaluate):
    x, row = net.input(R, C), net.input(R, 1)
    wide = net.b.emit_one(BROADCAST_TO, row, shape=(R, C))
    wider = net.b.emit_one(BROADCAST_TO, net.number(3.0), shape=(R, C))
    y = net.b.emit_one(ADD, net.b.emit_one(MUL, x, wide), wider)
    after = fused(net.done(y=y), net.feeds, evaluate)
    assert members(after) == [("mul", "add")]
    assert [i.kind for i in program_of(after).inputs] == [Kind.FULL, Kind.ROW]
    assert program_of(after).instructions[1].constants == (3.0,)


def test_rows_that_repeat_are_read_by_every_and_count(net, evaluate):
    x, positions, heads = net.input(2, 3, 4, C), net.input(4, C), net.input(3, 1, 1)
    y = net.b.emit_one(MUL, net.b.emit_one(ADD, x, positions), heads)
    after = fused(net.done(y=y), net.feeds, evaluate)
    assert members(after) == [("add", "mul")]
    found = [(i.kind, i.every, i.count) for i in program_of(after).inputs]
    assert found == [(Kind.FULL, 1, 0), (Kind.FULL, 1, 4), (Kind.ROW, 4, 3)]


def test_a_norm_written_by_hand_is_one_group(net, evaluate):
    x, gain = net.input(2, 3, C), net.input(C)
    mean = net.b.emit_one(MEAN, net.b.emit_one(SQUARE, x), axes=(2,), keepdims=True)
    scale = net.b.emit_one(EXP, net.b.emit_one(ADD, mean, net.number(1e-5)))
    y = net.b.emit_one(MUL, net.b.emit_one(MUL, x, scale), gain)
    after = fused(net.done(y=y), net.feeds, evaluate)
    assert members(after) == [("square", "mean", "add", "exp", "mul", "mul")]


def test_a_row_statistic_that_broadcasts_along_columns_is_read_from_memory(net, evaluate):
    x = net.input(C, C)
    total = net.b.emit_one(SUM, x, axes=(1,), keepdims=False)  # [C]: broadcasts as a column
    after = fused(net.done(y=net.b.emit_one(ADD, x, total)), net.feeds, evaluate)
    assert members(after) == [("sum",), ("add",)]


def test_a_sum_over_rows_ends_a_group(net, evaluate):
    x = net.input(R, C)
    h = net.b.emit_one(EXP, x)
    total = net.b.emit_one(SUM, h, axes=(0,), keepdims=False)
    after = fused(net.done(y=net.b.emit_one(MUL, h, total)), net.feeds, evaluate)
    assert members(after) == [("exp", "sum"), ("mul",)]


def test_transposed_operands_are_copied_to_where_rows_can_be_read(net, evaluate):
    x = net.b.emit_one(TRANSPOSE, net.input(C, R), perm=(1, 0))
    y = net.b.emit_one(EXP, net.b.emit_one(ADD, x, net.input(R, C)))
    after = fused(net.done(y=y), net.feeds, evaluate)
    assert members(after) == ["copy", ("add", "exp")]


def test_a_cut_of_columns_is_read_where_it_lies(net, evaluate):
    x = net.input(2, R, 3 * C)
    cut = net.b.emit_one(SLICE, x, starts=(0, 0, C), stops=(2, R, 2 * C), steps=(1, 1, 1))
    after = fused(net.done(y=net.b.emit_one(EXP, cut)), net.feeds, evaluate)
    assert members(after) == [("exp",)]


def test_every_other_column_is_copied_to_where_rows_can_be_read(net, evaluate):
    cut = net.b.emit_one(SLICE, net.input(R, 2 * C), starts=(0, 0), stops=(R, 2 * C), steps=(1, 2))
    after = fused(net.done(y=net.b.emit_one(EXP, cut)), net.feeds, evaluate)
    assert members(after) == ["copy", ("exp",)]


def test_a_group_does_not_close_around_what_stands_between_its_ends(net, evaluate):
    x = net.input(C, C)
    h = net.b.emit_one(EXP, x)
    y = net.b.emit_one(ADD, h, net.b.emit_one(MATMUL, h, net.input(C, C)))
    after = fused(net.done(y=y), net.feeds, evaluate)
    assert members(after) == [("exp",), "matmul", ("add",)]


def test_siblings_that_read_one_tensor_meet(net, evaluate):
    dy = net.b.emit_one(MATMUL, net.input(R, C), net.input(C, C))
    a, b = net.b.emit_one(MUL, dy, net.input(R, C)), net.b.emit_one(MUL, dy, net.input(R, C))
    after = fused(net.done(a=a, b=b), net.feeds, evaluate)
    assert members(after) == ["matmul", ("mul", "mul")]


def test_two_groups_become_one_where_their_results_meet(net, evaluate):
    x = net.b.emit_one(EXP, net.input(R, C))
    y = net.b.emit_one(NEG, net.input(R, C))
    after = fused(net.done(z=net.b.emit_one(ADD, x, y)), net.feeds, evaluate)
    assert members(after) == [("exp", "neg", "add")]


def test_a_group_stops_growing_at_its_limits(net, evaluate):
    h = net.input(R, C)
    for _ in range(100):
        h = net.b.emit_one(ADD, h, net.number(1.0))
    after = fused(net.done(y=h), net.feeds, evaluate)
    assert len(launches(after)) == 2
    total = net.input(R, C)
    for _ in range(30):
        total = net.b.emit_one(ADD, total, net.input(R, C))
    for node in launches(fused(net.done(y=total), net.feeds, evaluate)):
        assert len(node.inputs) <= fuse.MAX_FULL_INPUTS


def trained(net, loss, trained_variables, every=1):
    descend(net.b, loss, trained_variables, every=every)
    net.feeds["batches"] = np.array(0)
    return batches.copy_outputs(
        batches.split_rates(simplify.simplify_graph(autodiff.differentiate(net.b.freeze())))
    )


def test_on_request_a_forward_group_ends_at_what_the_backward_pass_keeps(net, evaluate):
    w = net.variable(C)
    moved = net.b.emit_one(ADD, net.b.emit_one(MUL, net.input(R, C), w), net.input(R, C))
    kept = net.b.emit_one(TANH, moved)  # its gradient reads it, and it is made of two tensors
    bent = net.b.emit_one(EXP, net.b.emit_one(NEG, kept))
    loss = net.b.emit_one(MEAN, bent, axes=(0, 1), keepdims=False)
    graph = trained(net, loss, [w])
    assert members(fuse.run(graph))[0] == ("mul", "add", "tanh", "neg", "exp", "mean")
    after = check(fuse.run(graph, ends_at_saved=True), "fuse")
    assert members(after)[:2] == [("mul", "add", "tanh"), ("neg", "exp", "mean")]
    for got, expected in zip(evaluate(after, net.feeds), evaluate(graph, net.feeds), strict=True):
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, 1e-12, err_msg=name)


def loss_of_a_bent_product(net):
    x, w = net.input(R, C), net.variable(C)
    bent = net.b.emit_one(TANH, net.b.emit_one(MUL, x, w))
    return net.b.emit_one(MEAN, bent, axes=(0, 1), keepdims=False), w


@pytest.mark.parametrize("every", [1, 3])
def test_neither_phases_nor_rates_mix(net, every):
    loss, w = loss_of_a_bent_product(net)
    staged = fuse.stage_reductions(trained(net, loss, [w], every))
    per_step = needed_per_step(staged)
    found = fuse.find_clusters(FusionCandidates(staged))
    rows = [[(staged.nodes[m.node].phase, per_step[m.node]) for m in g.members] for g in found]
    assert all(len(set(row)) == 1 for row in rows)
    assert len({row[0] for row in rows}) > 1
    check(order.run(check(fuse.run(staged), "fuse")), "order")


def test_readers_of_an_old_value_stay_before_its_update(net, evaluate):
    """The group must not hold both a reader of the old value and one of the new."""
    x, w = net.input(R, C), net.variable(R, C)
    old = net.b.emit_one(MUL, x, w)
    grad = net.b.emit_one(NEG, old)
    (new,) = net.b.emit(SGD_UPDATE, (w, grad, net.number(0.1)), {"weight_decay": 0.0})
    late = net.b.emit_one(ADD, net.b.emit_one(EXP, x), new)
    net.b.writes = [Write(w, new)]
    after = fused(net.done(late=late), net.feeds, evaluate)
    assert members(after) == [("mul", "neg", "exp"), "sgd_update", ("add",)]


def test_counters_are_read_before_they_are_incremented(net, evaluate):
    step = net.variable(dtype="int64")
    net.feeds["var0"] = np.array(4)
    share = net.b.emit_one(MUL, net.b.emit_one(ADD, step, step), step)
    (counted,) = net.b.emit(INCREMENT, (step,), {})
    net.b.writes = [Write(step, counted)]
    fused(net.done(share=share), net.feeds, evaluate)


def test_a_group_has_the_line_and_scope_of_its_last_member(net):
    x = net.input(R, C)
    with net.b.at("first", SourceLocation("train.py", 1)):
        h = net.b.emit_one(NEG, x)
    with net.b.at("last", SourceLocation("train.py", 2)):
        y = net.b.emit_one(EXP, h)
    (node,) = launches(fuse.run(net.done(y=y)))
    assert (node.scope, str(node.source)) == ("last", "train.py:2")


def test_a_graph_without_such_ops_is_returned_as_it_is(net):
    graph = net.done(y=net.b.emit_one(MATMUL, net.input(R, C), net.input(C, R)))
    assert fuse.run(graph) is graph


def test_numbers_that_a_program_cannot_hold_stay_operands(net, evaluate):
    x = net.input(R, C)
    y = x
    for number in (-0.0, np.inf, 2.0):
        y = net.b.emit_one(SUB, y, net.number(number))
    after = fused(net.done(y=y), net.feeds, evaluate)
    assert len(launches(after)[0].inputs) == 3


def block(net, width, rows):
    """Return the forward part of a small transformer block, without attention."""
    x = net.input(2, rows // 2, width, dtype="float32")
    gain, shift = (net.variable(width, dtype="float32") for _ in range(2))
    y, *_ = net.b.emit(LAYER_NORM, (x, gain, shift), {"eps": 1e-5})
    flat = net.b.emit_one(RESHAPE, y, shape=(rows, width))
    up = net.b.emit_one(MATMUL, flat, net.variable(width, 4 * width, dtype="float32"))
    h = net.b.emit_one(GELU, net.b.emit_one(ADD, up, net.variable(4 * width, dtype="float32")))
    down = net.b.emit_one(MATMUL, h, net.variable(4 * width, width, dtype="float32"))
    down = net.b.emit_one(ADD, down, net.variable(width, dtype="float32"))
    return net.b.emit_one(ADD, x, net.b.emit_one(RESHAPE, down, shape=(2, rows // 2, width)))


GOLDEN = """\
forward  layer_norm                          6x8   3 -> 4
forward  matmul
forward  add gelu                            6x32  2 -> 2
forward  matmul
forward  add add square mean                 6x8   3 -> 2
forward  mean                                1x6   1 -> 1
backward mul sum                             6x8   1 -> 2
backward matmul
backward gelu gelu_grad sum                  6x32  2 -> 3
backward matmul
backward matmul
backward matmul
backward layer_norm_grad                     6x8   5 -> 2
"""


def described(graph):
    lines = []
    for node in launches(graph):
        if node.op.name != "fused":
            lines.append(f"{node.phase.value:<8} {node.op.name}")
            continue
        names = " ".join(node.attrs["members"])
        space = f"{node.attrs['rows']}x{node.attrs['columns']}"
        sizes = f"{len(node.inputs)} -> {len(node.outputs)}"
        lines.append(f"{node.phase.value:<8} {names:<35} {space:<5} {sizes}")
    return lines


def test_the_groups_of_a_transformer_block_are_these(net, evaluate):
    y = block(net, 8, 6)
    loss = net.b.emit_one(MEAN, net.b.emit_one(SQUARE, y), axes=(0, 1, 2), keepdims=False)
    variables = [n.outputs[0] for n in net.b.nodes if n.op is VARIABLE]
    descend(net.b, loss, variables, 1.0)
    graph = batches.copy_outputs(
        batches.split_rates(simplify.simplify_graph(autodiff.differentiate(net.b.freeze())))
    )
    after = fused(graph, net.feeds, evaluate, rtol=1e-3)
    assert [line for line in described(after) if "sgd_update" not in line] == GOLDEN.splitlines()


@st.composite
def programs(draw):
    """A list of instructions (what, two earlier tensors)."""
    what = st.sampled_from(
        ("relu", "neg", "add", "mul", "row", "column", "norm", "turn", "shown", "product", "bias")
    )
    earlier = st.integers(0, 99)
    return draw(st.lists(st.tuples(what, earlier, earlier), min_size=2, max_size=16))


def built(net, program, trains):
    """Return a graph of tensors [R, C] whose sum, or all of them, is the result."""
    b = net.b
    weights = [net.variable(C, C), net.variable(C), net.variable(R, 1)]
    first = b.emit_one(ADD, b.emit_one(MUL, net.input(R, C), weights[2]), weights[1])
    tensors = [b.emit_one(MATMUL, first, weights[0])]
    for what, i, j in program:
        x, y = tensors[-1 - i % min(4, len(tensors))], tensors[j % len(tensors)]
        if what in ("relu", "neg"):
            made = b.emit_one({"relu": RELU, "neg": NEG}[what], x)
        elif what in ("add", "mul"):
            made = b.emit_one({"add": ADD, "mul": MUL}[what], x, b.emit_one(TANH, y))
        elif what == "row":
            made = b.emit_one(SUB, x, b.emit_one(MEAN, y, axes=(1,), keepdims=True))
        elif what == "column":
            made = b.emit_one(SUB, x, b.emit_one(MEAN, y, axes=(0,), keepdims=False))
        elif what == "norm":
            made = b.emit(LAYER_NORM, (x, weights[1], weights[1]), {"eps": 0.1})[0]
        elif what == "turn":
            made = b.emit_one(RESHAPE, b.emit_one(TRANSPOSE, x, perm=(1, 0)), shape=(R, C))
        elif what == "shown":
            parts = b.emit_one(RESHAPE, x, shape=(2, R // 2, C))
            made = b.emit_one(RESHAPE, b.emit_one(TANH, parts), shape=(R, C))
        elif what == "product":
            made = b.emit_one(TANH, b.emit_one(MATMUL, x, weights[0]))
        else:
            made = b.emit_one(ADD, x, weights[1])
        tensors.append(made)
    total = tensors[0]
    for tensor in tensors[1:]:
        total = b.emit_one(ADD, total, b.emit_one(TANH, tensor))
    if not trains:
        return net.done(total=total, last=tensors[-1])
    loss = b.emit_one(MEAN, b.emit_one(SQUARE, total), axes=(0, 1), keepdims=False)
    return trained(net, loss, weights)


@settings(max_examples=tiers.examples(120), deadline=None)
@given(program=programs(), trains=st.booleans())
def test_any_graph_keeps_its_meaning_and_an_order_exists(program, trains, evaluate_graphs):
    net = Net()
    graph = built(net, program, trains)
    with np.errstate(all="ignore"):
        after = fused(graph, net.feeds, evaluate_graphs, rtol=1e-6)
    assert len(launches(after)) <= len(launches(graph)) + 2  # a mean over all takes two
    assert simplify.prune(after) == after


def chain_of(length):
    net = Net()
    h = net.input(R, C)
    for i in range(length):
        h = net.b.emit_one(MATMUL, h, net.input(C, C)) if i % 5 == 0 else net.b.emit_one(TANH, h)
    return net.done(y=h)


@pytest.fixture
def placements(monkeypatch):
    """Count how often a candidate is placed, in the last number of the list."""
    counts = []
    place = FusionCandidates._placed

    def counted(self, *arguments):
        counts[-1] += 1
        return place(self, *arguments)

    monkeypatch.setattr(FusionCandidates, "_placed", counted)
    return counts


def test_the_work_grows_as_the_graph_does(placements):
    for length in (200, 400, 800):
        placements.append(0)
        fuse.run(chain_of(length))
    assert placements[2] - placements[1] <= 2.1 * (placements[1] - placements[0])
    assert placements[0] < 4 * 200


def test_graphs_are_plain_values_still(net):
    graph = fuse.run(net.done(y=net.b.emit_one(EXP, net.input(R, C))))
    assert isinstance(graph, Graph)
    assert hash(graph.nodes[-1].attrs) == hash(graph.nodes[-1].attrs)


def test_the_work_grows_as_a_chain_whose_backward_pass_could_all_wait(placements):
    for length in (50, 100, 200):
        net = Net()
        placements.append(0)
        h = w = net.variable(R, C)
        for _ in range(length):
            h = net.b.emit_one(MUL, net.b.emit_one(TANH, h), h)
        loss = net.b.emit_one(
            MEAN, h, axes=(0, 1), keepdims=False
        )  # linear: its gradient is a number
        fuse.run(trained(net, loss, [w]))
    assert placements[2] - placements[1] <= 2.2 * (placements[1] - placements[0])
