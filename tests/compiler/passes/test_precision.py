"""The pass that lets products read bfloat16: types, masters, casts, and what is computed."""

import math
from collections import Counter

import numpy as np
import pytest
import tiers
from graphs import descend, variable
from hypothesis import given, settings
from hypothesis import strategies as st

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.types import DType, Phase
from compiler.graph.graph import GraphBuilder, Output, SourceLocation
from compiler.graph.registry import all_ops, reference
from compiler.ops.families.activation import GELU, RELU, SILU, TANH
from compiler.ops.families.arithmetic import ADD, EXP, LESS, MUL, SQUARE, SUB, WHERE, scaled
from compiler.ops.families.attention import ATTENTION, ATTENTION_GRAD
from compiler.ops.families.loss import CROSS_ENTROPY_ROWS
from compiler.ops.families.normalisation import BATCH_NORM, BATCH_NORM_GRAD, LAYER_NORM, SOFTMAX
from compiler.ops.families.updates import SGD_UPDATE
from compiler.ops.language.vjp import grad_op
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MAX, MEAN, SUM
from compiler.ops.primitives.shape import CAST, RESHAPE, TRANSPOSE, broadcast_value
from compiler.ops.primitives.slicing import CONCAT, SLICE
from compiler.ops.primitives.sources import CONSTANT, INPUT, VARIABLE, constant, scalar
from compiler.passes import autodiff, simplify
from compiler.passes import precision as precision_pass
from compiler.passes.precision import Width, precision
from compiler.pipeline.rewrites import check

LOW, WIDE = DType.BFLOAT16, DType.FLOAT32
N = 4


class Job:
    """A float32 job under construction; `run` gives the graph behind the pass."""

    def __init__(self):
        self.b = GraphBuilder()
        self.feeds = {}
        self.trained = []
        self.x = self.feed("x", (N, N))

    def feed(self, name, shape):
        self.feeds[name] = np.random.default_rng(len(self.feeds)).normal(size=shape)
        return self.b.emit_one(INPUT, name=name, dtype="float32", shape=shape)

    def weight(self, shape=(N, N)):
        name = f"w{len(self.trained)}"
        self.feeds[name] = np.random.default_rng(100 + len(self.feeds)).normal(size=shape) / 2
        self.trained.append(variable(self.b, name, shape))
        return self.trained[-1]

    def linear(self, x, bias=False):
        """Return x @ weight.T, as a linear layer has it."""
        y = self.b.emit_one(MATMUL, x, self.b.emit_one(TRANSPOSE, self.weight(), perm=(1, 0)))
        return self.b.emit_one(ADD, y, self.weight((N,))) if bias else y

    def evaluating(self, *results):
        """Return the graph of a job that returns these values."""
        self.b.outputs = [Output(f"y{i}", value) for i, value in enumerate(results)]
        return simplify.simplify_graph(self.b.freeze())

    def training(self, result):
        """Return the differentiated graph of the mean square of a value."""
        axes = tuple(range(self.b.type_of(result).rank))
        loss = self.b.emit_one(MEAN, self.b.emit_one(SQUARE, result), axes=axes, keepdims=False)
        self.b.outputs = [Output("loss", loss)]
        used = {n.attrs["name"] for n in nodes_of(simplify.prune(self.b.freeze()), VARIABLE)}
        self.b.outputs = []
        trained = [v for v in self.trained if self.b.producer_of(v).attrs["name"] in used]
        descend(self.b, loss, trained, 1.0)
        return simplify.simplify_graph(autodiff.differentiate(self.b.freeze()))


def lowered(graph, rounded_bytes=math.inf):
    """Run the pass and check what it guarantees."""
    result = precision_pass.narrow_products(graph, LOW, rounded_bytes)
    check(result, "precision")
    producers = result.producers()
    casts = [n for n in result.nodes if n.op is CAST and LOW in types_of(result, n)]
    keys = [(n.inputs[0], n.attrs["dtype"]) for n in casts]
    assert len(keys) == len(set(keys)), "a value is cast twice to one type"
    assert not [n for n in casts if result.nodes[producers[n.inputs[0]]] in casts], "a chain"
    assert [(o.name, result.types[o.value]) for o in result.outputs] == [
        (o.name, graph.types[o.value]) for o in graph.outputs
    ]
    assert [result.types[w.value] for w in result.writes] == [
        graph.types[w.value] for w in graph.writes
    ]
    for node in result.nodes:
        if node.op in (VARIABLE, INPUT):
            assert result.types[node.outputs[0]].dtype is not LOW
    wanted = {v for n in result.nodes for v in n.inputs} | set(result.roots())
    assert all(wanted & set(n.outputs) for n in result.nodes), "a node that nobody reads"
    return result


def types_of(graph, node):
    return [graph.types[v].dtype for v in (*node.inputs, *node.outputs)]


def nodes_of(graph, *ops):
    return [n for n in graph.nodes if n.op in ops]


def out_types(graph, op):
    return [str(graph.types[n.outputs[0]].dtype) for n in nodes_of(graph, op)]


def evaluate(graph, feeds):
    """Walk a graph by the references in float64; a cast between floats changes nothing."""
    values = {}
    for node in graph.nodes:
        if node.op in (INPUT, VARIABLE):
            made = (np.asarray(feeds[node.attrs["name"]]),)
        elif node.op is CAST:
            made = (values[node.inputs[0]],)
        else:
            made = reference.get(node.op)(node.attrs, *[values[v] for v in node.inputs])
        for value, array in zip(node.outputs, made, strict=True):
            is_float = graph.types[value].dtype.is_float
            values[value] = array.astype(np.float64) if is_float else array
    return [values[v] for v in graph.roots()]


def test_a_graph_without_products_stays_the_same_object():
    job = Job()
    graph = job.training(job.b.emit_one(MUL, job.x, job.weight()))
    assert precision_pass.narrow_products(graph) is graph


def test_a_weight_is_rounded_once_for_forward_and_backward():
    job = Job()
    h = job.b.emit_one(RELU, job.linear(job.x))
    graph = lowered(job.training(job.linear(h)))
    producers = graph.producers()
    casts = [n for n in nodes_of(graph, CAST) if graph.types[n.outputs[0]].dtype is LOW]
    sources = [graph.nodes[producers[n.inputs[0]]] for n in casts]
    weights = [s.attrs["name"] for s in sources if s.op is VARIABLE]
    assert sorted(weights) == ["w0", "w1"]
    assert all(
        n.phase is Phase.FORWARD for n, s in zip(casts, sources, strict=True) if s.op is VARIABLE
    )


def test_products_read_bfloat16_and_gradients_of_weights_leave_them_unrounded():
    job = Job()
    graph = lowered(job.training(job.linear(job.b.emit_one(GELU, job.linear(job.x)))))
    for node in nodes_of(graph, MATMUL):
        assert [graph.types[v].dtype for v in node.inputs] == [LOW, LOW]
    for node in nodes_of(graph, SGD_UPDATE):
        assert {graph.types[v].dtype for v in node.inputs} == {WIDE}
    forward = [n for n in nodes_of(graph, MATMUL) if n.phase is Phase.FORWARD]
    assert [graph.types[n.outputs[0]].dtype for n in forward] == [LOW, WIDE]
    backward = [n for n in nodes_of(graph, MATMUL) if n.phase is Phase.BACKWARD]
    assert Counter(graph.types[n.outputs[0]].dtype for n in backward) == {LOW: 1, WIDE: 2}


def test_what_stands_between_products_lives_in_bfloat16():
    job = Job()
    h = job.b.emit_one(GELU, job.linear(job.x, bias=True))
    graph = lowered(job.evaluating(job.linear(h)))
    assert out_types(graph, GELU) == ["bfloat16"]
    assert out_types(graph, ADD) == ["bfloat16"]
    assert out_types(graph, MATMUL) == ["bfloat16", "float32"]
    assert len(nodes_of(graph, CAST)) == 4  # the input, two weights, the bias
    assert {types_of(graph, n)[1] for n in nodes_of(graph, CAST)} == {LOW}


def test_a_branch_of_a_residual_sum_is_not_rounded():
    job = Job()
    h = job.b.emit_one(ADD, job.x, job.linear(job.x, bias=True))
    graph = lowered(job.evaluating(h))
    assert out_types(graph, MATMUL) == ["float32"]
    assert out_types(graph, ADD) == ["float32", "float32"]
    assert len(nodes_of(graph, CAST)) == 2


@pytest.mark.parametrize("op", [EXP, SQUARE])
def test_what_only_statistics_read_is_not_rounded(op):
    job = Job()
    y = job.b.emit_one(SUM, job.b.emit_one(op, job.linear(job.x)), axes=(1,), keepdims=False)
    graph = lowered(job.evaluating(y))
    assert out_types(graph, MATMUL) == ["float32"]
    assert out_types(graph, op) == ["float32"]


def test_softmax_norms_and_exponentials_compute_in_float32_between_products():
    job = Job()
    s = job.b.emit_one(SOFTMAX, job.linear(job.x), scale=1.0, causal=False)
    n, *_ = job.b.emit(
        LAYER_NORM, (job.linear(s), job.weight((N,)), job.weight((N,))), {"eps": 0.1}
    )
    graph = lowered(job.training(job.linear(job.b.emit_one(EXP, job.linear(n)))))
    for node in graph.nodes:
        if precision.get(node.op).width is Width.HIGH and node.op is not CAST:
            assert LOW not in types_of(graph, node), node.op


def test_attention_reads_and_makes_bfloat16_but_for_its_statistics():
    job = Job()
    attrs = {"scale": 0.5, "causal": True}
    y, *_ = job.b.emit(ATTENTION, tuple(job.linear(job.x) for _ in range(3)), attrs)
    graph = lowered(job.training(job.linear(y)))
    (forward,), (backward,) = nodes_of(graph, ATTENTION), nodes_of(graph, ATTENTION_GRAD)
    assert types_of(graph, forward) == [*[LOW] * 4, WIDE, WIDE]
    assert types_of(graph, backward) == [*[LOW] * 5, WIDE, WIDE, *[LOW] * 3]
    assert backward.inputs[5:7] == forward.outputs[1:]


def test_a_constant_that_bfloat16_has_not_keeps_its_op_in_float32():
    for number, expected in ((0.5, "bfloat16"), (0.1, "float32")):
        job = Job()
        y = scaled(job.b, job.linear(job.x), number)
        graph = lowered(job.evaluating(job.linear(y)))
        assert out_types(graph, MUL) == [expected]
        made = [n for n in graph.nodes if n.op is CONSTANT]
        assert [n.attrs["dtype"] for n in made] == [expected]


def test_a_full_constant_comes_along_only_as_it_is():
    for number, expected in ((2.0, "bfloat16"), (0.3, "float32")):
        job = Job()
        other = broadcast_value(job.b, scalar(job.b, number, WIDE), (N, N))
        y = job.b.emit_one(CONCAT, job.linear(job.x), other, axis=0)
        graph = lowered(job.evaluating(job.linear(y)))
        assert out_types(graph, CONCAT) == [expected]


def test_comparisons_read_what_is_there_and_choices_follow():
    job = Job()
    h = job.linear(job.x)
    zero = scalar(job.b, 0.0, WIDE)
    y = job.b.emit_one(WHERE, job.b.emit_one(LESS, h, zero), zero, h)
    graph = lowered(job.evaluating(job.linear(y)))
    (less,), (where,) = nodes_of(graph, LESS), nodes_of(graph, WHERE)
    assert types_of(graph, less)[:2] == [WIDE, WIDE]
    assert types_of(graph, where)[1:] == [LOW, LOW, LOW]


def test_the_parts_of_a_value_and_their_sum_stay_low():
    job = Job()
    x = job.linear(job.x)
    low = job.b.emit_one(SLICE, x, starts=(0, 0), stops=(N, N // 2), steps=(1, 1))
    high = job.b.emit_one(SLICE, x, starts=(0, N // 2), stops=(N, N), steps=(1, 1))
    y = job.b.emit_one(CONCAT, high, low, axis=1)
    graph = lowered(job.training(job.linear(y)))
    assert set(out_types(graph, SLICE)) == set(out_types(graph, CONCAT)) == {"bfloat16"}


def test_a_rounding_stands_before_a_view_but_never_grows_over_a_slice():
    job = Job()
    long = job.feed("long", (5 * N, N))
    picked = job.b.emit_one(SLICE, long, starts=(0, 0), stops=(N, N), steps=(1, 1))
    flat = job.b.emit_one(RESHAPE, picked, shape=(1, N, N))
    graph = lowered(job.evaluating(job.linear(flat)))
    (down,) = [n for n in nodes_of(graph, CAST) if graph.types[n.inputs[0]].shape == (N, N)][:1]
    producers = graph.producers()
    assert graph.nodes[producers[down.inputs[0]]].op is SLICE


def test_values_of_other_float_types_are_left_alone():
    job = Job()
    wide = job.b.emit_one(CAST, job.linear(job.x), dtype="float64")
    graph = lowered(job.evaluating(job.b.emit_one(MATMUL, wide, wide)))
    (_, second) = nodes_of(graph, MATMUL)
    assert types_of(graph, second) == [DType.FLOAT64] * 3


def test_an_output_of_the_job_keeps_its_type_even_where_products_read_it_rounded():
    job = Job()
    h = job.b.emit_one(TANH, job.linear(job.x))
    graph = lowered(job.evaluating(h, job.linear(h)))
    assert [graph.types[o.value].dtype for o in graph.outputs] == [WIDE, WIDE]
    assert out_types(graph, TANH) == ["bfloat16"]


def test_scopes_sources_and_phases_are_those_of_the_reader():
    job = Job()
    with job.b.at("head", SourceLocation("train.py", 7)):
        y = job.linear(job.x)
    graph = lowered(job.training(y))
    down = [n for n in nodes_of(graph, CAST) if n.phase is Phase.FORWARD]
    assert {(n.scope, str(n.source)) for n in down} == {("head", "train.py:7")}
    assert {n.phase for n in nodes_of(graph, SGD_UPDATE)} == {Phase.UPDATE}


def test_every_cell_of_the_column_names_an_op_and_most_ops_stay_in_float32():
    low = {str(op) for op in all_ops() if precision.get(op).width is Width.LOW}
    products = {"matmul", "conv", "conv_input_grad", "conv_weight_grad"}
    assert low == products | {"attention", "attention_grad"}
    for name in ("sum", "exp", "log", "pow", "softmax", "layer_norm", "cross_entropy_rows", "cast"):
        (op,) = [op for op in all_ops() if op.name == name]
        assert precision.get(op).width is Width.HIGH


POINTWISE = (RELU, GELU, SILU, TANH, SQUARE)


@st.composite
def jobs(draw):
    """Draw a job of products, bends, sums, reductions and norms, trained or not."""
    job = Job()
    values = [job.x]
    for _ in range(draw(st.integers(1, 9))):
        x = draw(st.sampled_from(values[-4:]))
        y = draw(st.sampled_from(values[-4:]))
        kind = draw(st.integers(0, 8))
        if kind <= 2:
            made = job.linear(x, bias=kind == 1)
        elif kind == 3:
            made = job.b.emit_one(draw(st.sampled_from(POINTWISE)), x)
        elif kind == 4:
            made = job.b.emit_one(draw(st.sampled_from((ADD, SUB))), x, y)
        elif kind == 5:
            made = scaled(job.b, x, draw(st.sampled_from((0.5, 0.3))))
        elif kind == 6:
            made = job.b.emit_one(TRANSPOSE, x, perm=(1, 0))
        elif kind == 7:
            gamma = constant(job.b, np.linspace(0.5, 1.5, N).astype(np.float32))
            made, *_ = job.b.emit(LAYER_NORM, (x, gamma, gamma), {"eps": 1.0})
        else:
            kept = job.b.emit_one(draw(st.sampled_from((MEAN, MAX))), x, axes=(1,), keepdims=True)
            made = job.b.emit_one(SUB, x, kept)
        values.append(made)
    values.append(job.linear(values[-1]))
    is_training = draw(st.booleans())
    graph = job.training(values[-1]) if is_training else job.evaluating(*values[-3:])
    return graph, job.feeds


@settings(max_examples=tiers.examples(150), deadline=None)
@given(jobs())
def test_random_jobs_compute_what_they_did_but_for_roundings(drawn):
    graph, feeds = drawn
    low = lowered(graph)
    for was, is_ in zip(evaluate(graph, feeds), evaluate(low, feeds), strict=True):
        np.testing.assert_allclose(is_, was, rtol=1e-9, atol=1e-9 * np.abs(was).max())


@settings(max_examples=tiers.examples(150), deadline=None)
@given(jobs())
def test_random_jobs_take_no_more_casts_than_one_per_operand_of_a_product(drawn):
    """Values narrower than a matrix (biases, means of rows) come along with what they meet."""
    low = lowered(drawn[0])
    matrices = len({v for n in nodes_of(low, MATMUL) for v in n.inputs})
    downs = [n for n in nodes_of(low, CAST) if low.types[n.outputs[0]].dtype is LOW]
    full = [n for n in downs if low.types[n.outputs[0]].num_elements == N * N]
    assert len(full) <= matrices
    assert len({n.inputs for n in downs}) == len(downs)


@pytest.mark.parametrize("is_wide", [False, True])
def test_wide_logits_are_low_and_their_loss_reads_them_in_float32(is_wide):
    job = Job()
    logits = job.b.emit_one(RESHAPE, job.linear(job.x), shape=(2, 2, N))
    rows = job.b.emit_one(RESHAPE, logits, shape=(N, N))
    labels = job.b.emit_one(INPUT, name="labels", dtype="int32", shape=(N,))
    losses, *_ = job.b.emit(CROSS_ENTROPY_ROWS, (rows, labels))
    size = N * N * 4
    graph = lowered(job.training(losses), size - 1 if is_wide else size)
    forward = [n for n in nodes_of(graph, MATMUL) if n.phase is Phase.FORWARD]
    assert [graph.types[n.outputs[0]].dtype for n in forward] == [LOW if is_wide else WIDE]
    (loss,) = nodes_of(graph, CROSS_ENTROPY_ROWS)
    assert graph.types[loss.inputs[0]].dtype is WIDE
    # The gradient of the weight keeps its sums, however wide the logits are.
    others = [n for n in nodes_of(graph, MATMUL) if n.phase is not Phase.FORWARD]
    assert {graph.types[n.outputs[0]].dtype for n in others} == {WIDE}


def normalised(job, x):
    """Return a batch norm of rows, by statistics and parameters of each column."""
    columns = [job.feed(f"statistic {len(job.feeds)}", (1, N)) for _ in range(4)]
    return job.b.emit_one(BATCH_NORM, x, *columns)


def residual_net(job):
    """Return y = W relu(norm(W x) + norm(W x)), and the sum that is behind the ReLU."""
    total = job.b.emit_one(
        ADD, normalised(job, job.linear(job.x)), normalised(job, job.linear(job.x))
    )
    return job.linear(job.b.emit_one(RELU, total))


@pytest.mark.parametrize("is_wide", [False, True])
def test_what_a_batch_norm_makes_of_a_product_is_rounded_where_it_is_wide(is_wide):
    """It is computed in float32 on float32, whatever it is rounded to, and so is its gradient."""
    job = Job()
    graph = lowered(job.training(residual_net(job)), 4 * N * N - is_wide)
    for node in nodes_of(graph, BATCH_NORM, BATCH_NORM_GRAD):
        assert {*types_of(graph, node)} == {WIDE}
    norms = {v for node in nodes_of(graph, BATCH_NORM) for v in node.outputs}
    readers = Counter([node.op for node in graph.nodes for v in node.inputs if v in norms])
    assert readers == Counter({CAST if is_wide else ADD: 2})
    relu_types = {t for n in nodes_of(graph, RELU, grad_op(RELU)) for t in types_of(graph, n)}
    assert relu_types == {LOW if is_wide else WIDE}


def test_a_wide_batch_norm_of_what_is_no_product_stays():
    job = Job()
    graph = lowered(job.training(job.linear(job.b.emit_one(RELU, normalised(job, job.x)))), 0)
    casts = nodes_of(graph, CAST)
    made = {o for n in nodes_of(graph, BATCH_NORM) for o in n.outputs}
    assert not [n for n in casts if made & {*n.inputs}]


def test_a_wide_batch_norm_that_no_product_reads_stays():
    job = Job()
    graph = lowered(job.evaluating(normalised(job, job.linear(job.x))), 0)
    (norm,) = nodes_of(graph, BATCH_NORM)
    assert norm.outputs[0] in graph.roots()
