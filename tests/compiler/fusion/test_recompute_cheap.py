import numpy as np
import pytest
import tiers
from graphs import descend, on_host, variable
from hypothesis import given, settings
from hypothesis import strategies as st

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.types import Phase
from compiler.fusion import fuse
from compiler.fusion.recompute_cheap import recompute_cheap
from compiler.graph.graph import GraphBuilder, Output, SourceLocation, prune
from compiler.ops.families.activation import GELU, SILU, TANH
from compiler.ops.families.arithmetic import ADD, DIV, EXP, MUL, NEG, RSQRT, SQUARE, SUB
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN
from compiler.ops.primitives.shape import RESHAPE, TRANSPOSE
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check
from compiler.storage import order
from compiler.storage.storage import assign_storage

ROWS, WIDTH = 12, 16


class Job:
    """A training job under construction: plain descent over square weights, at rate 1."""

    def __init__(self):
        self.b = GraphBuilder()
        rng = np.random.default_rng(5)
        self.feeds = {"x": rng.normal(size=(ROWS, WIDTH)), "batches": np.array(0)}
        self.x = self.b.emit_one(INPUT, name="x", dtype="float64", shape=(ROWS, WIDTH))
        self.trained = []

    def weight(self, *shape):
        name = f"weight{len(self.trained)}"
        self.feeds[name] = np.random.default_rng(len(self.trained)).normal(size=shape)
        self.trained.append(variable(self.b, name, shape, "float64"))
        return self.trained[-1]

    def linear(self, x):
        return self.b.emit_one(MATMUL, x, self.weight(WIDTH, WIDTH))

    def apply(self, op, *inputs):
        return self.b.emit_one(op, *inputs)

    def mean(self, x, axes, keepdims):
        return self.b.emit_one(MEAN, x, axes=axes, keepdims=keepdims)

    def norm(self, x):
        """A norm of rows written from primitives; only its gain is trained."""
        d = self.apply(SUB, x, self.mean(x, (1,), True))
        rstd = self.apply(RSQRT, self.mean(self.apply(SQUARE, d), (1,), True))
        return self.apply(MUL, self.apply(MUL, d, rstd), self.weight(WIDTH))

    def graph(self, result, every=1, **also):
        """Return the graph that the pass gets, for a loss that reads the whole result."""
        objective = self.mean(self.apply(SQUARE, result), (0, 1), False)
        descend(self.b, objective, self.trained, 1.0, every=every)
        self.b.outputs += [Output(name, value) for name, value in also.items()]
        return batches.copy_outputs(
            batches.split_rates(simplify.simplify_graph(autodiff.differentiate(self.b.freeze())))
        )


@pytest.fixture
def job():
    return Job()


def kept(graph):
    """Return the ops whose whole tensors launches after the forward pass read, in order."""
    storage, producers = assign_storage(graph), graph.producers()
    late = {
        storage.root[value]
        for index, node in enumerate(graph.nodes)
        if storage.is_launch[index] and node.phase is not Phase.FORWARD
        for value in node.inputs
        if graph.types[value].num_elements >= ROWS * WIDTH
    }
    makers = [(producers[root], graph.nodes[producers[root]]) for root in sorted(late)]
    return [
        node.op.name
        for index, node in makers
        if node.phase is Phase.FORWARD and storage.is_launch[index]
    ]


def again(graph, feeds, evaluate):
    """Run the pass, and check that every output and variable has the bits that it had."""
    after = check(recompute_cheap(graph, on_host), "recompute_cheap")
    feeds = dict(feeds)
    for node in graph.nodes:
        if node.op is VARIABLE and node.attrs["name"].startswith("gradient/"):
            feeds[node.attrs["name"]] = np.zeros(node.attrs["shape"])
    for got, expected in zip(evaluate(after, feeds), evaluate(graph, feeds), strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert len(prune(after).nodes) == len(after.nodes)
    check(order.run(fuse.run(graph)), "order")
    return after


def before_a_product(op):
    return lambda job: job.linear(job.apply(op, job.linear(job.x)))


def shown(job):
    h = job.b.emit_one(RESHAPE, job.apply(GELU, job.linear(job.x)), shape=(3, 4, WIDTH))
    h = job.b.emit_one(TRANSPOSE, h, perm=(1, 0, 2))
    return job.linear(job.b.emit_one(RESHAPE, h, shape=(ROWS, WIDTH)))


def deep(job):
    h = job.x
    for _ in range(3):
        h = job.apply(ADD, h, job.linear(job.apply(GELU, job.linear(h))))
    return h


def gated(job):
    gate, value = job.apply(SILU, job.linear(job.x)), job.linear(job.x)
    return job.linear(job.apply(MUL, gate, value))


def bent_twice(job):
    return job.linear(job.apply(SILU, job.apply(GELU, job.linear(job.x))))


def shared(job):
    """x / (1 + e^-x): of the quotient's operands and the power nothing but x is kept."""
    x = job.apply(ADD, job.linear(job.x), job.linear(job.x))
    e = job.apply(EXP, job.apply(NEG, x))
    return job.linear(job.apply(SUB, job.apply(DIV, x, job.apply(ADD, e, e)), e))


def norm_between_products(job):
    """Of a tensor that a later launch reads too, it is kept in place of what differs from it."""
    x = job.apply(ADD, job.linear(job.x), job.linear(job.x))
    return job.apply(ADD, x, job.linear(job.norm(x)))


CASES = {
    "of one that is not read": (shared, ["add", "matmul"]),
    "in memory anyway": (norm_between_products, ["add", "add"]),
    "gelu": (before_a_product(GELU), ["matmul", "matmul"]),  # the last one: the loss reads it
    "silu": (before_a_product(SILU), ["matmul", "matmul"]),
    "tanh reads what it made": (before_a_product(TANH), ["tanh", "matmul"]),
    "views": (shown, ["matmul", "reshape", "matmul"]),
    "deep": (deep, ["matmul", "add"] * 3),
    "gated": (gated, ["matmul", "matmul", "mul", "matmul"]),  # of two tensors: kept
    "bent twice": (bent_twice, ["matmul", "matmul"]),
    "norm": (lambda job: job.linear(job.norm(job.linear(job.x))), ["sub", "matmul"]),
    "norm of an input": (lambda job: job.linear(job.norm(job.x)), ["matmul"]),
    "read by its own gradient": (lambda job: job.apply(GELU, job.linear(job.x)), ["matmul"]),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_of_what_elements_are_made_of_one_tensor_is_kept(name, every, job, evaluate):
    make, expected = CASES[name]
    after = again(job.graph(make(job), every), job.feeds, evaluate)
    assert kept(after) == expected


def test_the_clone_is_made_in_the_launch_of_the_gradient(job):
    with job.b.at("mlp", SourceLocation("train.py", 41)):
        h = job.apply(GELU, job.linear(job.x))
    after = fuse.run(job.graph(job.linear(h)))
    made = [n for n in after.nodes if n.op.name == "fused" and "gelu" in n.attrs["members"]]
    assert [n.attrs["members"] for n in made] == [("gelu",), ("gelu", "gelu_grad")]
    assert [(n.phase, n.scope) for n in made] == [(Phase.FORWARD, "mlp"), (Phase.BACKWARD, "mlp")]
    (reader,) = [n for n in after.nodes if n.op is TRANSPOSE and n.inputs[0] in made[1].outputs]
    assert reader.phase is Phase.BACKWARD


def test_an_output_of_the_job_lives_anyway_and_is_not_made_again(job, evaluate):
    h = job.apply(GELU, job.linear(job.x))
    graph = job.graph(job.linear(h), hidden=h)
    assert again(graph, job.feeds, evaluate) is graph


def test_a_kernel_that_needs_the_readers_cannot_make_it_for_them(job, evaluate):
    # The product reads h and a gradient of h: it stands on every way to the gradient of gelu.
    h = job.apply(GELU, job.linear(job.x))
    graph = job.graph(job.apply(MATMUL, job.b.emit_one(TRANSPOSE, h, perm=(1, 0)), h))
    after = again(graph, job.feeds, evaluate)
    assert "gelu" in kept(after)


def test_a_graph_without_gradients_is_returned_as_it_is(job):
    job.b.outputs = [Output("y", job.apply(GELU, job.linear(job.x)))]
    graph = job.b.freeze()
    assert recompute_cheap(graph, on_host) is graph


@st.composite
def programs(draw):
    """A list of instructions (what, two earlier tensors); all tensors are [ROWS, WIDTH]."""
    what = st.sampled_from(("gelu", "tanh", "linear", "add", "mul", "shown", "norm"))
    earlier = st.integers(0, 99)
    return draw(st.lists(st.tuples(what, earlier, earlier), min_size=3, max_size=12))


def traced(job, program):
    tensors = [job.linear(job.x)]
    for what, i, j in program:
        a, b = tensors[-1 - i % min(3, len(tensors))], tensors[j % len(tensors)]
        if what in ("linear", "norm"):
            made = getattr(job, what)(a)
        elif what == "shown":
            turned = job.b.emit_one(RESHAPE, a, shape=(WIDTH, ROWS))
            made = job.b.emit_one(TRANSPOSE, turned, perm=(1, 0))
        else:
            op = {"gelu": GELU, "tanh": TANH, "add": ADD, "mul": MUL}[what]
            made = job.apply(op, *([a, b] if what in ("add", "mul") else [a]))
        tensors.append(made)
    total = tensors[0]
    for tensor in tensors[1:]:
        total = job.apply(ADD, total, tensor)
    return job.graph(total)


@settings(max_examples=tiers.examples(80), deadline=None)
@given(program=programs())
def test_any_graph_keeps_its_bits_and_not_more_tensors(program, evaluate_graphs):
    job = Job()
    graph = traced(job, program)
    with np.errstate(all="ignore"):
        after = again(graph, job.feeds, evaluate_graphs)
    assert len(kept(after)) <= len(kept(graph))
