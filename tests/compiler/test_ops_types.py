"""Inferred types are what the references return, for every op, on random shapes and dtypes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.program import Kind, ProgramInput
from compiler.fusion.spaces import Space
from compiler.ops import standard
from compiler.ops.fused import fused_attrs
from compiler.registry import Op, cost, find_op, infer_type, is_comm, is_source, reference
from compiler.types import DType, TensorType

FLOATS = ("float32", "float64")
NUMBERS = (*FLOATS, "int32", "int64", "uint8")
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
filled = st.lists(st.integers(1, 3), max_size=4).map(tuple)

IS_TYPED_BY_TYPE = int(np.__version__.partition(".")[0]) >= 2


def array(dtype, shape):
    values = np.random.default_rng(math.prod(shape)).uniform(0.5, 3.0, shape)
    return values > 1.5 if dtype == "bool" else values.astype(dtype)


def scalar_int(value):
    return np.array(value, np.int64)


@st.composite
def unary(draw, dtypes=FLOATS, count=1):
    dtype, shape = draw(st.sampled_from(dtypes)), draw(shapes)
    return [array(dtype, shape)] * count, {}


@st.composite
def pair(draw, dtypes=FLOATS):
    dtype = draw(st.sampled_from(dtypes))
    drawn = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=3))
    return [array(dtype, shape) for shape in drawn.input_shapes], {}


@st.composite
def where(draw):
    drawn = draw(hnp.mutually_broadcastable_shapes(num_shapes=3, min_side=0, max_side=3))
    dtype = draw(st.sampled_from((*NUMBERS, "bool")))
    return [
        array(d, s) for d, s in zip(("bool", dtype, dtype), drawn.input_shapes, strict=True)
    ], {}


@st.composite
def cast(draw):
    dtypes = st.sampled_from((*NUMBERS, "bool", "float16"))
    return [array(draw(dtypes), draw(shapes))], {"dtype": draw(dtypes)}


@st.composite
def reduction(draw, dtypes=FLOATS, shapes=filled):
    shape = draw(shapes)
    axes = draw(st.sets(st.integers(0, len(shape) - 1))) if shape else ()
    attrs = {"axes": tuple(sorted(axes)), "keepdims": draw(st.booleans())}
    return [array(draw(st.sampled_from(dtypes)), shape)], attrs


@st.composite
def argmax(draw):
    shape = draw(filled.filter(len))
    attrs = {"axis": draw(st.integers(0, len(shape) - 1)), "keepdims": draw(st.booleans())}
    return [array(draw(st.sampled_from(NUMBERS)), shape)], attrs


@st.composite
def reshape(draw):
    shape = draw(shapes)
    return [array("float32", shape)], {"shape": tuple(draw(st.permutations((*shape, 1))))}


@st.composite
def transpose(draw):
    shape = draw(shapes)
    return [array("int32", shape)], {"perm": tuple(draw(st.permutations(range(len(shape)))))}


@st.composite
def broadcast_to(draw):
    drawn = draw(hnp.mutually_broadcastable_shapes(num_shapes=1, base_shape=(2, 1, 3)))
    return [array("float64", drawn.input_shapes[0])], {"shape": drawn.result_shape}


@st.composite
def slice_(draw):
    shape = draw(shapes)
    starts = tuple(draw(st.integers(0, n)) for n in shape)
    stops = tuple(draw(st.integers(i, n)) for i, n in zip(starts, shape, strict=True))
    steps = tuple(draw(st.integers(1, 3)) for _ in shape)
    return [array("float32", shape)], {"starts": starts, "stops": stops, "steps": steps}


@st.composite
def pad(draw):
    shape = draw(shapes)
    low, high = (tuple(draw(st.integers(0, 2)) for _ in shape) for _ in range(2))
    steps = tuple(draw(st.integers(1, 3)) for _ in shape)
    return [array("float32", shape)], {"low": low, "high": high, "steps": steps}


@st.composite
def concat(draw):
    shape = draw(shapes.filter(len))
    axis = draw(st.integers(0, len(shape) - 1))
    extents = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    parts = [array("int64", (*shape[:axis], n, *shape[axis + 1 :])) for n in extents]
    return parts, {"axis": axis}


@st.composite
def split(draw):
    shape, sections = draw(shapes.filter(len)), draw(st.integers(1, 3))
    shape = (shape[0] * sections, *shape[1:])
    return [array("int32", shape)], {"axis": 0, "sections": sections}


@st.composite
def matmul(draw):
    drawn = draw(
        hnp.mutually_broadcastable_shapes(signature="(m,k),(k,n)->(m,n)", min_side=0, max_side=3)
    )
    dtype = draw(st.sampled_from(FLOATS))
    return [array(dtype, shape) for shape in drawn.input_shapes], {}


@st.composite
def softmax(draw):
    batch, rows, more = draw(shapes), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    x = array(draw(st.sampled_from(FLOATS)), (*batch, rows, rows + more))
    return [x], {"scale": 0.5, "causal": draw(st.booleans())}


@st.composite
def softmax_grad(draw):
    inputs, _ = draw(unary(count=2).filter(lambda call: call[0][0].ndim > 0))
    return inputs, {"scale": 0.5}


@st.composite
def attention(draw):
    dtype, batch = draw(st.sampled_from(FLOATS)), draw(shapes)
    rows, more = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    columns, width, out = max(rows + more, 1), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    ends = ((rows, width), (columns, width), (columns, out))
    inputs = [array(dtype, (*batch, *end)) for end in ends]
    return inputs, {"scale": 0.5, "causal": draw(st.booleans())}


@st.composite
def attention_grad(draw):
    (q, k, v), attrs = draw(attention())
    y = array(q.dtype, (*q.shape[:-1], v.shape[-1]))
    return [y, q, k, v, y, array(q.dtype, q.shape[:-1])], attrs


@st.composite
def packed_attention(draw):
    dtype, sizes = draw(st.sampled_from(FLOATS)), st.integers(0, 3)
    batch, rows, heads, width = draw(sizes), draw(sizes) + 1, draw(sizes), draw(sizes)
    return [array(dtype, (batch, rows, 3, heads, width))], {"scale": 0.5, "causal": True}


@st.composite
def packed_attention_grad(draw):
    (qkv,), attrs = draw(packed_attention())
    batch, rows, _, heads, width = qkv.shape
    y = array(qkv.dtype, (batch, rows, heads, width))
    return [y, qkv, y, array(qkv.dtype, (batch, heads, rows))], attrs


@st.composite
def layer_norm(draw):
    dtype, shape = draw(st.sampled_from(FLOATS)), (*draw(shapes), draw(st.integers(1, 4)))
    last = array(dtype, shape[-1:])
    return [array(dtype, shape), last, last], {"eps": 1e-5}


@st.composite
def layer_norm_grad(draw):
    (x, gamma, _), _ = draw(layer_norm())
    rows = array(x.dtype, x.shape[:-1])
    return [x, x, gamma, rows, rows], {}


@st.composite
def cross_entropy(draw):
    dtype, rows = draw(st.sampled_from(FLOATS)), draw(st.integers(1, 4))
    labels = array(draw(st.sampled_from(("int32", "int64", "uint8"))), (rows,))
    return [array(dtype, (rows, 5)), labels], {}


@st.composite
def cross_entropy_grad(draw):
    (logits, labels), _ = draw(cross_entropy())
    return [array(logits.dtype, ()), logits, labels, array(logits.dtype, labels.shape)], {}


@st.composite
def group(draw):
    """A bias and the sums of its rows and columns, of a tensor of two or three axes."""
    dtype, columns = DType(draw(st.sampled_from(FLOATS))), draw(st.integers(1, 4))
    shape = (*draw(st.sampled_from(((3,), (2, 2), (1, 3)))), columns)
    p = ProgramBuilder(math.prod(shape[:-1]), columns)
    x, bias = (p.input(ProgramInput(dtype, kind)) for kind in (Kind.FULL, Kind.COLUMN))
    y = p.op("add", x, bias)
    program, _ = p.finish((y, p.reduce("row_sum", y), p.reduce("column_sum", x)))
    shapes = (shape, shape[:-1], (columns,))
    attrs = fused_attrs(program, Space(p.rows, columns), shapes, ("add", "sum", "sum"))
    return [array(dtype.value, shape), array(dtype.value, (columns,))], attrs


@st.composite
def fused_product(draw):
    (x, bias), attrs = draw(group())
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    return [array(x.dtype, (rows, 2)), array(x.dtype, (2, columns)), bias], attrs


@st.composite
def linear_cross_entropy(draw, before=0, after=0, has_gradients=False):
    dtype, rows, width = draw(st.sampled_from(FLOATS)), draw(st.integers(1, 4)), 2
    labels = array(draw(st.sampled_from(("int32", "int64", "uint8"))), (rows,))
    bias = [array(dtype, (5,))] if draw(st.booleans()) else []
    arrays = [array(dtype, (rows, width)), array(dtype, (5, width)), *bias, labels]
    arrays = [array(dtype, ())] * before + arrays + [array(dtype, (rows,))] * after
    attrs = {"chunk_rows": draw(st.integers(1, 5))}
    if has_gradients:
        possible = ("dx", "dweight", *["dbias"] * len(bias))
        wanted = draw(st.sets(st.sampled_from(possible), min_size=1))
        attrs |= {name: name in wanted for name in ("dx", "dweight", "dbias")}
    return arrays, attrs


@st.composite
def embedding(draw):
    ids = array(draw(st.sampled_from(("int32", "int64", "uint64"))), draw(shapes))
    return [array(draw(st.sampled_from(FLOATS)), (4, draw(st.integers(0, 3)))), ids], {}


@st.composite
def embedding_grad(draw):
    (weight, ids), _ = draw(embedding())
    return [array(weight.dtype, ids.shape + weight.shape[1:]), ids], {"rows": 4}


@st.composite
def embedding_sgd_update(draw):
    (weight, ids), _ = draw(embedding())
    return [weight, weight[ids.astype(np.int64)], ids, array(weight.dtype, ())], {}


@st.composite
def embedding_concat(draw):
    (weight, ids), _ = draw(embedding())
    x = array(weight.dtype, (*ids.shape, draw(st.integers(0, 3))))
    return [weight, ids, x, weight, ids], {"picked": (1, 0, 1)}


@st.composite
def dropout(draw):
    (x,), _ = draw(unary())
    return [x, scalar_int(3), scalar_int(draw(st.integers(0, 9)))], {"p": 0.25, "key": 7}


@st.composite
def constant(draw):
    x = array(draw(st.sampled_from((*NUMBERS, "bool"))), draw(shapes))
    return [], {"dtype": str(x.dtype), "shape": x.shape, "data": x.tobytes()}


@st.composite
def update(draw, tensors, with_step, **attrs):
    (x,), _ = draw(unary())
    step = [scalar_int(draw(st.integers(0, 9)))] if with_step else []
    return [x] * tensors + [array(x.dtype, ())] + step, attrs


@st.composite
def accumulate(draw):
    (x,), _ = draw(unary())
    return [x, x + x, scalar_int(draw(st.integers(0, 9)))], {"every": draw(st.integers(1, 4))}


SIGNED = unary((*FLOATS, "int32"))
CALLS = {
    "constant": constant(),
    **dict.fromkeys(("neg", "abs", "square", "relu"), SIGNED),
    **dict.fromkeys(("exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos"), unary()),
    **dict.fromkeys(("tanh", "sigmoid", "gelu", "silu"), unary()),
    **dict.fromkeys(
        (f"{n}_grad" for n in ("tanh", "sigmoid", "relu", "gelu", "silu")), unary(count=2)
    ),
    **dict.fromkeys(("gelu_grad_output", "silu_grad_output"), unary(count=2)),
    "cast": cast(),
    **dict.fromkeys(("add", "sub", "mul"), pair(NUMBERS)),
    **dict.fromkeys(("div", "pow"), pair()),
    **dict.fromkeys(("maximum", "minimum"), pair((*NUMBERS, "bool"))),
    **dict.fromkeys(("equal", "not_equal", "less", "less_equal"), pair((*NUMBERS, "bool"))),
    **dict.fromkeys(("greater", "greater_equal"), pair((*NUMBERS, "bool"))),
    "where": where(),
    "sum": reduction(NUMBERS, shapes),
    "mean": reduction(),
    "max": reduction(NUMBERS),
    "argmax": argmax(),
    "reshape": reshape(),
    "transpose": transpose(),
    "broadcast_to": broadcast_to(),
    "slice": slice_(),
    "pad": pad(),
    "concat": concat(),
    **dict.fromkeys(("stop_gradient", "copy", "copy_in", "copy_out"), unary((*NUMBERS, "bool"))),
    "copy_back": unary((*NUMBERS, "bool"), count=2),
    "split": split(),
    "matmul": matmul(),
    "softmax": softmax(),
    "softmax_grad": softmax_grad(),
    "attention": attention(),
    "attention_grad": attention_grad(),
    "packed_attention": packed_attention(),
    "packed_attention_grad": packed_attention_grad(),
    "layer_norm": layer_norm(),
    "layer_norm_grad": layer_norm_grad(),
    "cross_entropy": cross_entropy(),
    "cross_entropy_grad": cross_entropy_grad(),
    "cross_entropy_rows": cross_entropy(),
    "fused": group(),
    "fused_product": fused_product(),
    "linear_cross_entropy": linear_cross_entropy(),
    "linear_cross_entropy_grad": linear_cross_entropy(1, 1, has_gradients=True),
    "linear_cross_entropy_train": linear_cross_entropy(1, 0, has_gradients=True),
    "embedding": embedding(),
    "embedding_grad": embedding_grad(),
    "embedding_concat": embedding_concat(),
    "embedding_sgd_update": embedding_sgd_update(),
    "dropout": dropout(),
    "non_finite": unary() | unary().map(lambda call: ([*call[0], scalar_int(1)], {})),
    "increment": st.lists(st.integers(0, 9), min_size=1, max_size=2).map(
        lambda counts: ([scalar_int(count) for count in counts], {})
    ),
    "accumulate": accumulate(),
    "sgd_update": update(2, False, weight_decay=0.1),
    "momentum_update": update(3, False, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw_update": update(4, True, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1),
}


def types_of(arrays):
    return tuple(TensorType(DType(str(a.dtype)), tuple(a.shape)) for a in arrays)


@pytest.mark.parametrize("name", sorted(CALLS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_reference_returns_arrays_of_the_inferred_types(name, data):
    arrays, attrs = data.draw(CALLS[name])
    op, attrs = find_op(name), Attrs(attrs)
    inferred = infer_type.get(op)(types_of(arrays), attrs)
    before = [a.copy() for a in arrays]
    results = reference.get(op)(attrs, *arrays)
    made = types_of([np.asarray(r) for r in results])
    assert [t.shape for t in made] == [t.shape for t in inferred]
    # Before numpy 2 a scalar beside a Python number became float64; who reads it knows the type.
    if IS_TYPED_BY_TYPE or all([a.ndim for a in arrays]):
        assert made == inferred
    for array_, saved in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array_, saved)
    for result in results:
        assert not any(np.shares_memory(result, a) for a in arrays)
    work = cost.get(op)(types_of(arrays), inferred, attrs)
    assert work.flops >= 0
    assert work.bytes >= 0


def shipped_ops():
    """Return the ops of the standard families; other tests may have defined more."""
    families = [getattr(standard, name) for name in standard.__all__]
    found = {op for family in families for op in vars(family).values() if isinstance(op, Op)}
    return sorted(found, key=str)


def test_every_op_infers_types_and_every_op_but_sources_and_collectives_has_a_reference():
    for op in shipped_ops():
        assert infer_type.has(op), op
        assert reference.has(op) or is_source.get(op) or is_comm.get(op), op


def test_every_op_with_a_reference_is_sampled_above():
    assert {op.name for op in shipped_ops() if reference.has(op)} == set(CALLS)
