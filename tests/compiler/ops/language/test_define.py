"""Ops defined by programs: what follows of a definition, against numpy and central differences."""

import math

import numpy as np
import pytest
from error_texts import raises
from graph_oracles import fed, pull, slopes

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType
from compiler.fusion import fuse
from compiler.graph.graph import GraphBuilder, Output, SourceLocation
from compiler.graph.registry import cost, find_op, is_exact, reference
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import read_signature
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline.rewrites import check


def rms_norm(x, gamma, *, eps: float = 1e-6):
    return x * ((x * x).mean() + eps).rsqrt() * gamma


def standardised(x, *, eps: float = 1e-5):
    mean = x.mean()
    difference = x - mean
    scale = ((difference * difference).mean() + eps).rsqrt()
    return difference * scale, mean, scale


def huber(prediction, target, weight, *, delta: float = 1.0):
    error = abs(prediction - target)
    return weight * (error <= delta).where(0.5 * error**2, delta * (error - 0.5 * delta))


def log_sum(x):
    largest = x.max()
    return largest + (x - largest).exp().sum().log()


def many(x, y):
    z = x.tanh() * y.sin() + (x - y).cos() / (2 + x.erf()) - (-y).exp() ** 0.5
    return z.clip(-3, 3) + (x > y).where(x.minimum(0.5) % 2, 1 - y.sign() * abs(y)) + 2 / (3 + x**2)


ERF = np.vectorize(math.erf)


def numpy_many(x, y):
    z = np.tanh(x) * np.sin(y) + np.cos(x - y) / (2 + ERF(x)) - np.sqrt(np.exp(-y))
    chosen = np.where(x > y, np.minimum(x, 0.5) % 2, 1 - np.sign(y) * abs(y))
    return np.clip(z, -3, 3) + chosen + 2 / (3 + x**2)


def numpy_standardised(x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    scale = 1 / np.sqrt(variance + 1e-5)
    return (x - mean) * scale, mean[..., 0], scale[..., 0]


def numpy_huber(p, t, w):
    e = abs(p - t)
    return w * np.where(e <= 1, 0.5 * e * e, e - 0.5)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


LONG = "x[*, D], gamma[D] -> y[*, D]"
PROGRAMS = {
    "softsign": ("x -> y", lambda x: x / (1 + abs(x)), lambda x: x / (1 + abs(x))),
    "many": ("x, y -> z", many, numpy_many),
    "huber": ("prediction, target, weight -> loss", huber, numpy_huber),
    "rms_norm": (
        LONG,
        rms_norm,
        lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g,
    ),
    "standardised": (
        "x[*, D] -> y[*, D], mean[*], scale[*]",
        standardised,
        numpy_standardised,
    ),
    "log_sum": ("x[*, D] -> y[*]", log_sum, lambda x: np.log(np.exp(x).sum(-1))),
    "two axes": (
        "x[*, H, W], w[H, W] -> y[*]",
        lambda x, w: (x * w).min(),
        lambda x, w: (x * w).min((-2, -1)),
    ),
    "scaled": (
        "x[*, D], s[], r[*] -> y[*, D]",
        lambda x, s, r: (x * s).exp() * r + s * s,
        lambda x, s, r: np.exp(x * s) * r[..., None] + s * s,
    ),
    "without rows": (
        "x[*, D], g[D], s[] -> y[*, D], c[D], n[]",
        lambda x, g, s: (x * g * s, g * s, s * s),
        lambda x, g, s: (x * g * s, g * s, s * s),
    ),
    "of columns": (
        "g[D], r[*] -> y[*, D]",
        lambda g, r: g.exp() * r / g.sum(),
        lambda g, r: np.exp(g) * r[..., None] / g.sum(),
    ),
    "picked": (
        "x[*, D], label[*]: int -> y[*]",
        lambda x, label: (x.column_index() == label.to("int32")).where(x, 0.0).sum(),
        lambda x, label: np.take_along_axis(x, label[..., None], -1)[..., 0],
    ),
}
OPS = {
    name: fused_op(f"test.{name}", signature, program)
    for name, (signature, program, _) in PROGRAMS.items()
}
CASES = [
    ("softsign", (normal(2, 3),)),
    ("softsign", (normal(),)),
    ("many", (normal(2, 3), normal(3, seed=1))),
    ("huber", (3 * normal(2, 3), normal(3, seed=1), normal(2, 1, seed=2))),
    ("rms_norm", (normal(2, 3, 4), normal(4))),
    ("rms_norm", (normal(4), normal(4))),
    ("standardised", (normal(2, 3, 4),)),
    ("standardised", (normal(1, 5),)),
    ("log_sum", (normal(5, 4),)),
    ("two axes", (normal(5, 2, 3), normal(2, 3))),
    ("scaled", (normal(2, 4), np.array(0.3), normal(2))),
    ("of columns", (normal(3), 3 + normal(2, 2))),
    ("without rows", (normal(2, 3), normal(3), np.array(0.3))),
    ("without rows", (normal(1, 3), normal(3), np.array(0.3))),
    ("rms_norm", (normal(0, 4), normal(4))),
    ("picked", (normal(3, 4), np.array([2, 0, 3]))),
]
IDS = [f"{name} {'x'.join(map(str, arrays[0].shape))}" for name, arrays in CASES]


def feeds_of(arrays):
    return {str(i): a for i, a in enumerate(arrays)}


@pytest.mark.parametrize(("name", "arrays"), CASES, ids=IDS)
def test_a_definition_gives_what_numpy_gives_alone_and_as_a_kernel(name, arrays, evaluate):
    b = GraphBuilder()
    b.outputs = [Output(str(i), v) for i, v in enumerate(b.emit(OPS[name], fed(b, arrays)))]
    expected = PROGRAMS[name][2](*arrays)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for graph in (b.freeze(), check(fuse.run(b.freeze()), "fuse")):
        made, _ = evaluate(graph, feeds_of(arrays))
        for i, array in enumerate(expected):
            assert made[str(i)].shape == np.shape(array)
            np.testing.assert_allclose(made[str(i)], array, 1e-12, 1e-13)


def assert_gradients(build, arrays, evaluate, tolerance):
    """Compare the gradients of the sum of all outputs, weighted, with central differences."""
    b = GraphBuilder()
    inputs = fed(b, arrays)
    outputs = build(b, inputs)
    b.outputs = [Output(f"y{i}", v) for i, v in enumerate(outputs)]
    weights = [normal(*b.type_of(v).shape, seed=9 + i) for i, v in enumerate(outputs)]
    nodes = list(b.nodes)
    seeds = [
        b.emit_one(INPUT, name=f"w{i}", dtype="float64", shape=w.shape)
        for i, w in enumerate(weights)
    ]
    grads = pull(b, nodes, dict(zip(outputs, seeds, strict=True)))
    b.outputs += [Output(f"d{i}", grads[v]) for i, v in enumerate(inputs) if v in grads]
    feeds = feeds_of(arrays) | {f"w{i}": w for i, w in enumerate(weights)}
    made, _ = evaluate(b.freeze(), feeds)
    fused, _ = evaluate(check(fuse.run(b.freeze()), "fuse"), feeds)

    def objective(moved):
        got, _ = evaluate(b.freeze(), feeds | feeds_of(moved))
        return sum(float((got[f"y{i}"] * w).sum()) for i, w in enumerate(weights))

    for i, expected in slopes(objective, arrays):
        got = made.get(f"d{i}", np.zeros(expected.shape))
        np.testing.assert_allclose(got, expected, tolerance, tolerance)
        np.testing.assert_allclose(fused.get(f"d{i}", got), got, 1e-11, 1e-12)
    assert {f"d{i}" for i, a in enumerate(arrays) if a.dtype.kind != "f"}.isdisjoint(made)


@pytest.mark.parametrize(("name", "arrays"), CASES, ids=IDS)
def test_a_derived_gradient_agrees_with_central_differences(name, arrays, evaluate):
    assert_gradients(lambda b, v: b.emit(OPS[name], v), arrays, evaluate, 1e-6)


@pytest.mark.parametrize(("name", "arrays"), CASES, ids=IDS)
def test_a_derived_gradient_can_be_differentiated_again(name, arrays, evaluate):
    def squared_gradients(b, inputs):
        outputs = b.emit(OPS[name], inputs)
        seeds = {v: b.emit_one(find_op("tanh"), v) for v in outputs}
        grads = pull(b, list(b.nodes), seeds)
        return [b.emit_one(find_op("mul"), grads[v], grads[v]) for v in inputs if v in grads]

    assert_gradients(squared_gradients, arrays, evaluate, 1e-4)


def gradient_node(name, arrays, output=0):
    b = GraphBuilder()
    outputs = b.emit(OPS[name], fed(b, arrays))
    seed = b.emit_one(INPUT, name="dy", dtype="float64", shape=b.type_of(outputs[output]).shape)
    pull(b, list(b.nodes), {outputs[output]: seed})
    (node,) = [n for n in b.nodes if n.op.name.endswith("_grad")]
    return node, outputs, seed


def test_a_gradient_reads_small_outputs_and_no_more_whole_tensors_than_it_must():
    node, (_, mean, scale), seed = gradient_node("standardised", (normal(3, 4),))
    assert node.inputs == (seed, node.inputs[1], mean, scale)
    node, (y,), seed = gradient_node("softsign", (normal(3, 4),))
    assert y not in node.inputs
    exponential = fused_op("test.exponential", "x -> y", lambda x: (x * 2).exp() * 1.0)
    OPS["exponential"] = exponential
    node, (y,), seed = gradient_node("exponential", (normal(3, 4),))
    assert len(node.inputs) == 2


def test_a_gradient_of_ones_own_is_taken_where_it_serves_and_derived_elsewhere(evaluate):
    taken = []

    def own(dy, y):
        taken.append(True)
        return dy * y * (1 - y)

    op = fused_op("test.sigmoid", "x -> y", lambda x: 1 / (1 + (-x).exp()), gradient=own)
    assert_gradients(lambda b, v: b.emit(op, v), (normal(2, 3),), evaluate, 1e-6)
    assert taken

    def of_y(dy, scale, y):
        return scale * (dy - (dy).mean() - y * (dy * y).mean())

    signature = PROGRAMS["standardised"][0]
    op = fused_op("test.standard", signature, standardised, gradient=of_y)
    assert_gradients(lambda b, v: b.emit(op, v)[:1], (normal(3, 4),), evaluate, 1e-6)
    assert_gradients(lambda b, v: b.emit(op, v), (normal(3, 4),), evaluate, 1e-6)


def test_cost_and_exactness_follow_from_the_program():
    assert is_exact.get(fused_op("test.half", "x -> y", lambda x: x * 0.5)) is False
    assert is_exact.get(fused_op("test.twice", "x: number -> y", lambda x: x + x)) is True
    assert is_exact.get(OPS["softsign"]) is False
    type_ = TensorType(DType.FLOAT32, (4, 8))
    work = cost.get(OPS["softsign"])((type_,), (type_,), Attrs())
    assert (work.flops, work.bytes) == (3 * 32 + 1, 2 * 4 * 32)


def test_an_empty_tensor_has_an_empty_result():
    (y,) = reference.get(OPS["rms_norm"])(Attrs(), np.zeros((0, 4)), np.ones(4))
    assert y.shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "types", "attrs"),
    [
        ("rms_norm", ("float32 3 4",), {}),
        ("rms_norm", ("float32 3 4", "float32 5"), {}),
        ("rms_norm", ("float32", "float32 5"), {}),
        ("rms_norm", ("int64 3", "int64 3"), {}),
        ("rms_norm", ("float32 3", "float64 3"), {}),
        ("standardised", ("float32 3 0",), {}),
        ("picked", ("float32 3 4", "float32 3"), {}),
        ("softsign", ("float32 3",), {"eps": 1.0}),
        ("rms_norm", ("float32 3", "float32 3"), {"eps": "1"}),
    ],
)
def test_what_an_op_cannot_take_is_said_with_its_names(name, types, attrs):
    b = GraphBuilder()
    values = []
    for text in types:
        dtype, *shape = text.split()
        values.append(b.emit_one(INPUT, name="x", dtype=dtype, shape=tuple(map(int, shape))))
    with b.at("", SourceLocation("train.py", 7)), raises(CompileError):
        b.emit(OPS[name], values, attrs)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda x: x if x > 0 else -x, "choose with condition.where(a, b)"),
        (lambda x: x.where(x, 0.0), "chooses by a float32; compare it first"),
        (lambda x: (x > 0) + x, "computes add of bool and float32; cast one"),
        (lambda x: x + "1", "computes add of a str; it takes expressions"),
        (lambda x: (x, x), "returns 2 values for 1 outputs"),
        (lambda x: 3.0, "returns a float, no expression"),
        (lambda x: x.to("int64") * 0.5, "computes mul of int64 and 0.5"),
    ],
)
def test_what_no_program_can_say_is_refused(program, message):
    from compiler.graph.registry import OpTypeError

    with raises(OpTypeError):
        fused_op(f"test.{message}", "x -> y", program)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "x -> x",
        "x[*, D], y -> z[*, D]",
        "x[*, D], y[E] -> z[*, D]",
        "x[*] -> y[*]",
        "x: text -> y",
        "x! -> y",
    ],
)
def test_a_signature_that_is_none_says_why(text):
    with raises(ValueError):
        read_signature(text)
