import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.attrs import Attrs
from compiler.graph import Accumulation, GraphBuilder, Output, SourceLocation, UpdateRule
from compiler.lowering.storage import assign_storage
from compiler.ops.activation import GELU, SILU
from compiler.ops.binary import ADD, MUL
from compiler.ops.elementwise import SQUARE
from compiler.ops.matmul import MATMUL
from compiler.ops.reduce import MEAN
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.ops.sources import CONSTANT, INPUT, SCRATCH, VARIABLE
from compiler.ops.update import SGD_UPDATE
from compiler.passes import autodiff, order, outputs, rates, remake_activations, simplify
from compiler.passes.check import check
from compiler.types import Phase

ROWS, WIDTH = 4, 6
REMADE = ("gelu_grad_output", "silu_grad_output")


class Job:
    """A training job under construction: plain descent over square weights, at rate 1."""

    def __init__(self):
        self.b = GraphBuilder()
        rng = np.random.default_rng(5)
        self.feeds = {"x": rng.normal(size=(ROWS, WIDTH)), "batches": np.array(0)}
        self.x = self.b.one(INPUT, name="x", dtype="float64", shape=(ROWS, WIDTH))
        self.trained = []

    def variable(self, name, shape, dtype="float64", role="parameter"):
        init = (("kind", "zeros"),)
        return self.b.one(VARIABLE, name=name, dtype=dtype, shape=shape, role=role, init=init)

    def linear(self, x):
        name = f"weight{len(self.trained)}"
        weight = self.variable(name, (WIDTH, WIDTH))
        self.feeds[name] = np.random.default_rng(len(self.trained)).normal(size=(WIDTH, WIDTH))
        self.trained.append(weight)
        return self.b.one(MATMUL, x, weight)

    def mean(self, x):
        return self.b.one(MEAN, x, axes=tuple(range(self.b.type_of(x).rank)), keepdims=False)

    def graph(self, result, every=1, **also):
        """Return the graph that the pass gets, for a loss that reads the whole result."""
        objective = self.mean(self.b.one(SQUARE, result))
        self.b.objective = objective
        self.b.outputs = [Output("loss", objective)]
        self.b.outputs += [Output(name, value) for name, value in also.items()]
        rate = self.b.one(CONSTANT, dtype="float64", shape=(), data=np.float64(1).tobytes())
        attrs = Attrs({"weight_decay": 0.0})
        self.b.updates = [UpdateRule(SGD_UPDATE, v, (), (rate,), attrs) for v in self.trained]
        if every > 1:
            self.b.accumulation = Accumulation(
                every, self.variable("batches", (), "int64", SCRATCH)
            )
        return simplify.run(autodiff.run(self.b.freeze()))


@pytest.fixture
def job():
    return Job()


def ops_of(graph):
    return [node.op.name for node in graph.nodes]


def num_remade(graph):
    return sum(name in REMADE for name in ops_of(graph))


def kept_outputs(graph):
    """Return, per activation whose output is read behind the forward pass, node and readers."""
    storage = assign_storage(graph)
    found = []
    for node in graph.nodes:
        if node.op not in (GELU, SILU):
            continue
        readers = [
            reader
            for index, reader in enumerate(graph.nodes)
            if storage.is_launch[index]
            and reader.phase is not Phase.FORWARD
            and node.outputs[0] in [storage.root[v] for v in reader.inputs]
        ]
        if readers:
            found.append((node, readers))
    return found


def assert_same_bits(before, after, job, evaluate):
    feeds = dict(job.feeds)
    for node in before.nodes:
        if node.op is VARIABLE and node.attrs["name"].startswith("gradient/"):
            feeds[node.attrs["name"]] = np.zeros(node.attrs["shape"])
    for got, expected in zip(evaluate(after, feeds), evaluate(before, feeds), strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)


def remade(graph, job, evaluate):
    after = check(remake_activations.run(graph), "remake_activations")
    assert_same_bits(graph, after, job, evaluate)
    assert min(after.producers()) == 0  # no value is left without a node
    check(order.run(outputs.run(rates.run(after))), "order")
    return after


@pytest.mark.parametrize("op", [GELU, SILU], ids=str)
def test_the_weight_gradient_behind_an_activation_reads_what_its_gradient_made(job, op, evaluate):
    graph = job.graph(job.linear(job.b.one(op, job.linear(job.x))))
    assert len(kept_outputs(graph)) == 1
    after = remade(graph, job, evaluate)
    assert kept_outputs(after) == []
    (gradient,) = [n for n in after.nodes if n.op.name == f"{op}_grad_output"]
    (turned,) = [n for n in after.nodes if gradient.outputs[1] in n.inputs]
    (reader,) = [n for n in after.nodes if turned.outputs[0] in n.inputs]
    assert (turned.op, reader.op) == (TRANSPOSE, MATMUL)


def test_the_new_launch_has_phase_scope_and_source_of_the_gradient(job):
    with job.b.at("mlp", SourceLocation("train.py", 41)):
        h = job.b.one(GELU, job.linear(job.x))
    after = remake_activations.run(job.graph(job.linear(h)))
    (gradient,) = [n for n in after.nodes if n.op.name in REMADE]
    assert gradient.phase is Phase.BACKWARD
    assert (gradient.scope, gradient.source) == ("mlp", SourceLocation("train.py", 41))


def test_every_layer_of_a_deep_network_is_remade(job, evaluate):
    h = job.x
    for _ in range(5):
        h = job.b.one(ADD, h, job.linear(job.b.one(GELU, job.linear(h))))
    graph = job.graph(h)
    assert len(kept_outputs(graph)) == 5
    after = remade(graph, job, evaluate)
    assert kept_outputs(after) == []
    assert num_remade(after) == 5


def test_views_on_the_output_become_views_on_the_one_made_again(job, evaluate):
    h = job.b.one(GELU, job.linear(job.x))
    h = job.b.one(RESHAPE, h, shape=(2, 2, WIDTH))
    h = job.b.one(TRANSPOSE, h, perm=(1, 0, 2))
    graph = job.graph(job.linear(h))
    after = remade(graph, job, evaluate)
    assert kept_outputs(after) == []
    assert num_remade(after) == 1
    views = [n for n in after.nodes if n.op is RESHAPE and n.phase is Phase.BACKWARD]
    (gradient,) = [n for n in after.nodes if n.op.name in REMADE]
    assert [n for n in views if n.inputs == gradient.outputs[1:]]


def test_an_output_of_the_job_lives_anyway_and_is_left_alone(job):
    h = job.b.one(GELU, job.linear(job.x))
    graph = job.graph(job.linear(h), hidden=h)
    assert kept_outputs(graph)
    assert remake_activations.run(graph) is graph


def test_an_output_of_the_job_that_shows_an_activation_leaves_it_alone(job):
    h = job.b.one(GELU, job.linear(job.x))
    graph = job.graph(job.linear(h), hidden=job.b.one(RESHAPE, h, shape=(ROWS * WIDTH,)))
    assert remake_activations.run(graph) is graph


def test_an_activation_that_its_own_gradient_needs_is_left_alone(job, evaluate):
    graph = job.graph(job.b.one(GELU, job.linear(job.x)))  # the gradient of y * y is 2 y
    assert kept_outputs(graph)
    after = remade(graph, job, evaluate)
    assert num_remade(after) == 0


def test_of_two_activations_in_a_row_the_second_alone_is_remade(job, evaluate):
    first = job.b.one(GELU, job.linear(job.x))
    graph = job.graph(job.linear(job.b.one(SILU, first)))
    after = remade(graph, job, evaluate)
    assert [name for name in ops_of(after) if name in REMADE] == ["silu_grad_output"]
    assert [node.op for node, _ in kept_outputs(after)] == [GELU]


def test_of_two_activations_that_multiply_each_other_one_is_remade(job, evaluate):
    left, right = (job.b.one(op, job.linear(job.x)) for op in (GELU, SILU))
    graph = job.graph(job.linear(job.b.one(MUL, left, right)))
    assert len(kept_outputs(graph)) == 2
    after = remade(graph, job, evaluate)
    assert num_remade(after) == 1
    assert len(kept_outputs(after)) == 1


def test_a_gated_layer_is_remade_though_its_reader_leads_to_other_gradients(job, evaluate):
    gate, value = job.b.one(SILU, job.linear(job.x)), job.linear(job.x)
    graph = job.graph(job.linear(job.b.one(MUL, gate, value)))
    after = remade(graph, job, evaluate)
    assert kept_outputs(after) == []
    assert num_remade(after) == 1


def test_readers_in_several_places_are_moved_together(job, evaluate):
    h = job.b.one(GELU, job.linear(job.x))
    graph = job.graph(job.b.one(ADD, job.linear(h), job.linear(job.linear(h))))
    ((_, readers),) = kept_outputs(graph)
    assert len(readers) == 2
    after = remade(graph, job, evaluate)
    assert kept_outputs(after) == []


def test_of_two_gradients_of_one_activation_the_one_that_can_makes_it_again(job, evaluate):
    h = job.linear(job.x)
    first, twin = job.b.one(GELU, h), job.b.one(GELU, h)
    graph = job.graph(job.b.one(ADD, twin, job.b.one(GELU, first)))
    assert ops_of(graph).count("gelu_grad") == 3  # equal nodes became one, but not their gradients
    after = remade(graph, job, evaluate)
    assert num_remade(after) == 1


def test_sums_over_batches_are_remade_too(job, evaluate):
    graph = job.graph(job.linear(job.b.one(GELU, job.linear(job.x))), every=4)
    after = remade(graph, job, evaluate)
    assert kept_outputs(after) == []
    assert num_remade(after) == 1


def test_a_graph_without_gradients_is_returned_as_it_is(job):
    job.b.outputs = [Output("y", job.b.one(GELU, job.linear(job.x)))]
    graph = job.b.freeze()
    assert remake_activations.run(graph) is graph


@st.composite
def programs(draw):
    """A list of instructions (what, two earlier tensors); all tensors are [ROWS, WIDTH]."""
    what = st.sampled_from(("gelu", "silu", "linear", "add", "mul", "shown"))
    earlier = st.integers(0, 99)
    return draw(st.lists(st.tuples(what, earlier, earlier), min_size=3, max_size=14))


def traced(job, program):
    tensors = [job.linear(job.x)]
    for what, i, j in program:
        a, b = tensors[-1 - i % min(3, len(tensors))], tensors[j % len(tensors)]
        if what in ("gelu", "silu"):
            made = job.b.one({"gelu": GELU, "silu": SILU}[what], a)
        elif what == "linear":
            made = job.linear(a)
        elif what == "shown":
            turned = job.b.one(RESHAPE, a, shape=(WIDTH, ROWS))
            made = job.b.one(TRANSPOSE, turned, perm=(1, 0))
        else:
            made = job.b.one({"add": ADD, "mul": MUL}[what], a, b)
        tensors.append(made)
    total = tensors[0]
    for tensor in tensors[1:]:
        total = job.b.one(ADD, total, tensor)
    return job.graph(total)


def reaches(graph, readers, gradient):
    """Whether the gradient needs what the readers make, found by walking down from it."""
    producers = graph.producers()
    seen, waiting = set(), [gradient]
    while waiting:
        node = waiting.pop()
        for value in node.inputs:
            if producers[value] not in seen:
                seen.add(producers[value])
                waiting.append(graph.nodes[producers[value]])
    return any(graph.nodes[i] in readers for i in seen) or gradient in readers


@settings(max_examples=150, deadline=None)
@given(program=programs())
def test_any_graph_keeps_its_bits_and_every_activation_left_alone_had_to_be(
    program, evaluate_graphs
):
    job = Job()
    graph = traced(job, program)
    with np.errstate(all="ignore"):
        after = remade(graph, job, evaluate_graphs)
    assert num_remade(after) == len(kept_outputs(graph)) - len(kept_outputs(after))
    for node, readers in kept_outputs(after):
        for maker in [n for n in after.nodes if n.op.name == f"{node.op}_grad"]:
            assert maker.inputs[1] != node.inputs[0] or reaches(after, readers, maker)
