"""How each op of a logical graph is written in ONNX: tables by op, and what needs several nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from actorflow.onnx.extents import Extent, Symbolic
from actorflow.onnx.forms import OperatorForm
from actorflow.onnx.graph_writer import GraphWriter, ports
from actorflow.onnx.program import DTYPES, OnnxError
from actorflow.onnx.reading import onnx_package
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import Node

ELEMENT_TYPES = {name: number for number, name in DTYPES.items()}


@dataclass
class NodeCall:
    """One node of a graph while it is written; `inputs` are names of values of ONNX."""

    graph: Symbolic
    place: int
    node: Node
    inputs: list[str]
    writer: GraphWriter
    opset: int
    body: Callable[[Symbolic, GraphWriter, list[str]], list[str]]
    """Writes a body: its graph, where to, names of its operands."""

    @property
    def attrs(self) -> Any:
        """The attributes of the node."""
        return self.node.attrs

    def type(self, place: int = 0) -> TensorType:
        """Type of an operand in the first trace."""
        return self.graph.graph.types[self.node.inputs[place]]

    @property
    def result(self) -> TensorType:
        """Type of the first result in the first trace."""
        return self.graph.graph.types[self.node.outputs[0]]

    def shape(self, place: int = 0) -> tuple[Extent, ...]:
        """Shape of an operand."""
        return self.graph.shape(self.node.inputs[place])

    @property
    def result_shape(self) -> tuple[Extent, ...]:
        """Shape of the first result."""
        return self.graph.shape(self.node.outputs[0])

    def ints(self, name: str) -> tuple[Extent, ...]:
        """Integers among the attributes."""
        return self.graph.ints(self.place, name)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Integers among the attributes that must not depend on free axes."""
        found = self.ints(name)
        if not all(isinstance(n, int) for n in found):
            self.refuse(f"{name} depends on the free axes")
        return tuple([n for n in found if isinstance(n, int)])

    def add(self, op_type: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        """Append a node of ONNX."""
        return self.writer.add(op_type, inputs, count, **attributes)

    def number(self, value: float, place: int = 0) -> str:
        """A scalar of the dtype of an operand."""
        return self.writer.number(value, self.type(place).dtype.value)

    def refuse(self, why: str) -> NoReturn:
        """Raise OnnxError with the user's line."""
        where = f" in {self.node.scope!r}" if self.node.scope else ""
        raise OnnxError(f"{self.node.source}: {self.node.op}{where}: {why}")


Emit = Callable[[NodeCall], Any]


def _simple(op_type: str) -> Emit:
    return lambda at: at.add(op_type, *at.inputs)


_OF_ONE_NAME = (
    "abs acos acosh add asin asinh atan atanh ceil cos cosh div equal erf exp floor greater less"
    " log mul neg pow reciprocal relu round sigmoid sign sin sinh sqrt sub tan tanh where"
)
_NAMES = {name: name.title() for name in _OF_ONE_NAME.split()} | {
    "greater_equal": "GreaterOrEqual",
    "hardswish": "HardSwish",
    "less_equal": "LessOrEqual",
    "matmul": "MatMul",
}


def _extreme(op_type: str, of_bools: str) -> Emit:
    return lambda at: at.add(of_bools if at.type().dtype is DType.BOOL else op_type, *at.inputs)


def _bitwise(name: str) -> Emit:
    def emit(at: NodeCall) -> str:
        if at.type().dtype is DType.BOOL:
            return str(at.add(name, *at.inputs))
        if at.opset < 18:
            at.refuse(f"needs opset 18 for integers (Bitwise{name}), the model is of {at.opset}")
        return str(at.add(f"Bitwise{name}", *at.inputs))

    return emit


def _gelu_exact(at: NodeCall) -> Any:
    if at.opset >= 20:
        return at.add("Gelu", *at.inputs)
    x = at.inputs[0]
    cdf = at.add("Erf", at.add("Mul", x, at.number(math.sqrt(0.5))))
    half = at.add("Mul", x, at.number(0.5))
    return at.add("Mul", half, at.add("Add", cdf, at.number(1.0)))


def _gelu(at: NodeCall) -> Any:
    if at.opset >= 20:
        return at.add("Gelu", *at.inputs, approximate="tanh")
    x = at.inputs[0]
    cube = at.add("Mul", x, at.add("Mul", x, x))
    inner = at.add("Add", x, at.add("Mul", cube, at.number(0.044715)))
    part = at.add("Tanh", at.add("Mul", inner, at.number(math.sqrt(2 / math.pi))))
    return at.add("Mul", at.add("Mul", x, at.number(0.5)), at.add("Add", part, at.number(1.0)))


def _elu(at: NodeCall) -> Any:
    inner, x = at.attrs.float_("input_scale"), at.inputs[0]
    scaled = x if inner == 1.0 else at.add("Mul", x, at.number(inner))
    below = at.add("Elu", scaled, alpha=at.attrs.float_("alpha"))
    y = below
    if inner != 1.0:
        y = at.add("Where", at.add("Greater", x, at.number(0.0)), x, below)
    scale = at.attrs.float_("scale")
    return y if scale == 1.0 else at.add("Mul", y, at.number(scale))


def _prelu(at: NodeCall) -> Any:
    x, weight = at.inputs
    return at.add("Where", at.add("Greater", x, at.number(0.0)), x, at.add("Mul", x, weight))


def _softplus(at: NodeCall) -> Any:
    beta, x = at.attrs.float_("beta"), at.inputs[0]
    z = x if beta == 1.0 else at.add("Mul", x, at.number(beta))
    soft = at.add("Softplus", z)
    soft = soft if beta == 1.0 else at.add("Div", soft, at.number(beta))
    return at.add("Where", at.add("Greater", z, at.number(at.attrs.float_("threshold"))), x, soft)


def _mish(at: NodeCall) -> Any:
    if at.opset >= 18:
        return at.add("Mish", *at.inputs)
    return at.add("Mul", at.inputs[0], at.add("Tanh", at.add("Softplus", *at.inputs)))


def _hardtanh(at: NodeCall) -> Any:
    bounds = [at.number(at.attrs.float_(name)) for name in ("low", "high")]
    return at.add("Clip", at.inputs[0], *bounds)


def _threshold(at: NodeCall) -> Any:
    x, value = at.inputs[0], at.number(at.attrs.float_("value"))
    is_low = at.add("LessOrEqual", x, at.number(at.attrs.float_("threshold")))
    return at.add("Where", is_low, value, x)


def _lerp(at: NodeCall) -> Any:
    start, end, weight = at.inputs
    return at.add("Add", start, at.add("Mul", weight, at.add("Sub", end, start)))


def _trunc(at: NodeCall) -> Any:
    x = at.inputs[0]
    is_low = at.add("Less", x, at.number(0.0))
    return at.add("Where", is_low, at.add("Ceil", x), at.add("Floor", x))


def _remainder(at: NodeCall) -> Any:
    a, b = at.inputs
    if not at.type().dtype.is_float:
        return at.add("Mod", a, b)
    rest = at.add("Mod", a, b, fmod=1)  # of the sign of a: moved to that of b
    zero = at.number(0.0)
    is_other = at.add("Less", at.add("Mul", rest, b), zero)
    return at.add("Where", is_other, at.add("Add", rest, b), rest)


def _floor_divide(at: NodeCall) -> Any:
    a, b = at.inputs
    quotient = at.add("Div", a, b)
    if at.type().dtype.is_float:
        return at.add("Floor", quotient)
    # ONNX divides integers toward zero.
    zero = at.number(0)
    is_exact = at.add("Equal", at.add("Mul", quotient, b), a)
    is_below = at.add("Xor", at.add("Less", a, zero), at.add("Less", b, zero))
    lower = at.add("And", at.add("Not", is_exact), is_below)
    return at.add("Where", lower, at.add("Sub", quotient, at.number(1)), quotient)


# Arranging.


def _broadcast_to(at: NodeCall) -> Any:
    shape = at.ints("shape")
    return (
        at.inputs[0]
        if shape == at.shape()
        else at.add("Expand", at.inputs[0], at.writer.vector(shape))
    )


def _slice(at: NodeCall) -> Any:
    starts, stops, steps = at.ints("starts"), at.ints("stops"), at.numbers("steps")
    extents = at.shape()
    axes = [
        axis
        for axis, extent in enumerate(extents)
        if (starts[axis], stops[axis], steps[axis]) != (0, extent, 1)
    ]
    if not axes:
        return at.inputs[0]
    vectors = [at.writer.vector([row[a] for a in axes]) for row in (starts, stops)]
    paces = [steps[a] for a in axes]
    last = [] if set(paces) == {1} else [at.writer.axes(*paces)]
    return at.add("Slice", at.inputs[0], *vectors, at.writer.axes(*axes), *last)


def _pad(at: NodeCall) -> Any:
    if {*at.numbers("steps")} - {1}:
        at.refuse("puts zeros between elements, which no operator of ONNX does")
    widths = [*at.ints("low"), *at.ints("high")]
    return at.add("Pad", at.inputs[0], at.writer.vector(widths), at.number(0))


_AXES_ARE_INPUTS = {"ReduceSum": 13}
"""The opset from which axes are an input; 18 for the others."""


def _reduced(at: NodeCall, op_type: str, x: str, axes: Sequence[int], keep: int = 1) -> str:
    if at.opset >= _AXES_ARE_INPUTS.get(op_type, 18):
        return str(at.add(op_type, x, at.writer.axes(*axes), keepdims=keep))
    return str(at.add(op_type, x, axes=list(axes), keepdims=keep))


def _reduce(op_type: str) -> Emit:
    def emit(at: NodeCall) -> str:
        axes, keep = at.numbers("axes"), int(at.attrs.bool_("keepdims"))
        return _reduced(at, op_type, at.inputs[0], axes, keep) if axes else at.inputs[0]

    return emit


def _argmax(at: NodeCall) -> Any:
    keep = int(at.attrs.bool_("keepdims"))
    return at.add("ArgMax", at.inputs[0], axis=at.attrs.int_("axis"), keepdims=keep)


def _argsort(at: NodeCall) -> Any:
    count = at.writer.extent(at.shape()[-1])
    largest = int(at.attrs.bool_("descending"))
    return at.add("TopK", at.inputs[0], count, count=2, axis=-1, largest=largest)[1]


def _recurrence(at: NodeCall) -> Any:
    producers = at.graph.graph.producers()
    factor = at.graph.graph.nodes[producers[at.node.inputs[0]]]
    while factor.op.name in ("broadcast_to", "reshape"):
        factor = at.graph.graph.nodes[producers[factor.inputs[0]]]
    data = factor.attrs["data"] if factor.op.name == "constant" else None
    dtype = at.type().dtype.value
    if not isinstance(data, bytes) or not (np.frombuffer(data, dtype) == 1).all():
        # The first factor meets 0, so that it may be anything.
        numbers = np.frombuffer(data, dtype) if isinstance(data, bytes) else np.zeros(2)
        if not (numbers.reshape(-1)[1:] == 1).all():
            at.refuse("a recurrence other than a cumulative sum is not written to ONNX")
    last = at.writer.number(len(at.shape(1)) - 1, "int64")
    return at.add("CumSum", at.inputs[1], last, reverse=int(at.attrs.bool_("reverse")))


def _flat_index(at: NodeCall) -> Any:
    flat, index = at.inputs
    extent = at.graph.int_(at.place, "extent")
    wide = at.writer.scalar(extent)
    is_low = at.add("Less", index, at.writer.number(0, "int64"))
    index = at.add("Where", is_low, at.add("Add", index, wide), index)
    return at.add("Add", at.add("Mul", flat, wide), index)


def _embedding_grad(at: NodeCall) -> Any:
    rows, ids = at.inputs
    zeros = at.add("Expand", at.number(0.0), at.writer.vector(at.result_shape))
    at_last = at.add("Unsqueeze", ids, at.writer.axes(-1))
    return at.add("ScatterND", zeros, at_last, rows, reduction="add")


# Layers.


def _conv(at: NodeCall) -> Any:
    pads = [*at.numbers("low"), *at.numbers("high")]
    return at.add(
        "Conv",
        *at.inputs,
        dilations=list(at.numbers("dilation")),
        group=at.attrs.int_("groups"),
        kernel_shape=list(at.type(1).shape[2:]),
        pads=pads,
        strides=list(at.numbers("strides")),
    )


def _conv_transpose(at: NodeCall) -> Any:
    kernel, strides, apart = at.type(1).shape[2:], at.numbers("strides"), at.numbers("dilation")
    low, high = at.numbers("low"), at.numbers("high")
    wide = at.result.shape[2:]
    more = [
        n - ((m - 1) * s + (k - 1) * d + 1 - a - b)
        for n, m, s, k, d, a, b in zip(
            wide, at.type().shape[2:], strides, kernel, apart, low, high, strict=True
        )
    ]
    if min(more) < 0 or not all(isinstance(n, int) for n in at.result_shape[2:]):
        at.refuse(f"a transposed convolution to {list(wide)} is not written to ONNX")
    return at.add(
        "ConvTranspose",
        *at.inputs,
        dilations=list(apart),
        group=at.attrs.int_("groups"),
        kernel_shape=list(kernel),
        output_padding=more,
        pads=[*low, *high],
        strides=list(strides),
    )


def _max_pool(at: NodeCall) -> Any:
    high, low, kernel = at.numbers("high"), at.numbers("low"), at.numbers("kernel")
    taps = at.node.outputs[1]
    if any(taps in node.inputs for node in at.graph.graph.nodes):
        at.refuse("where maxima lie is not written to ONNX")
    return at.add(
        "MaxPool",
        at.inputs[0],
        dilations=list(at.numbers("dilation")),
        kernel_shape=list(kernel),
        pads=[*low, *high],
        strides=list(at.numbers("strides")),
    )


def _layer_norm(at: NodeCall) -> Any:
    return at.add("LayerNormalization", *at.inputs, axis=-1, epsilon=at.attrs.float_("eps"))


def _scaled_by_root(at: NodeCall, x: str) -> Any:
    """Append x divided by the root of the mean of its squares along the last axis."""
    power = _reduced(at, "ReduceMean", at.add("Mul", x, x), [-1])
    root = at.add("Sqrt", at.add("Add", power, at.number(at.attrs.float_("eps"))))
    return at.add("Div", x, root)


def _rms_norm(at: NodeCall) -> Any:
    x, gain = at.inputs
    if at.opset >= 23:
        return at.add("RMSNormalization", x, gain, axis=-1, epsilon=at.attrs.float_("eps"))
    return at.add("Mul", _scaled_by_root(at, x), gain)


def _standardised(at: NodeCall) -> Any:
    x = at.inputs[0]
    return _scaled_by_root(at, at.add("Sub", x, _reduced(at, "ReduceMean", x, [-1])))


def _triangle(at: NodeCall, rows: Extent, columns: Extent) -> str:
    """Return bools [T, S]: which columns a row sees; the last row sees all."""
    w = at.writer
    if isinstance(rows, int) and isinstance(columns, int):
        return w.constant(np.tri(rows, columns, columns - rows, dtype=bool))
    zero, one = w.number(0, "int64"), w.number(1, "int64")
    high, wide = w.scalar(rows), w.scalar(columns)
    i = at.add("Unsqueeze", at.add("Range", zero, high, one), w.axes(1))
    j = at.add("Unsqueeze", at.add("Range", zero, wide, one), w.axes(0))
    last = at.add("Add", i, at.add("Sub", wide, high))
    return str(at.add("LessOrEqual", j, last))


def _softmax(at: NodeCall) -> Any:
    x, scale = at.inputs[0], at.attrs.float_("scale")
    x = x if scale == 1.0 else at.add("Mul", x, at.number(scale))
    if at.attrs.bool_("causal"):
        x = at.add("Where", _triangle(at, *at.shape()[-2:]), x, at.number(-math.inf))
    return at.add("Softmax", x, axis=-1)


def _attention(at: NodeCall) -> Any:
    q, k, v, *more = at.inputs
    if len(more) > 1:
        at.refuse("attention with dropout is not written to ONNX")
    turned = [*range(at.type().rank)]
    turned[-2], turned[-1] = turned[-1], turned[-2]
    scores = at.add("MatMul", q, at.add("Transpose", k, perm=turned))
    scores = at.add("Mul", scores, at.number(at.attrs.float_("scale")))
    low = at.number(-math.inf)
    if at.attrs.bool_("causal"):
        rows, columns = at.shape()[-2], at.shape(1)[-2]
        if at.type().shape[-2] > at.type(1).shape[-2]:
            at.refuse("causal attention with more queries than keys is not written to ONNX")
        scores = at.add("Where", _triangle(at, rows, columns), scores, low)
    if not more:
        return at.add("MatMul", at.add("Softmax", scores, axis=-1), v)
    scores = at.add("Add", scores, more[0])
    # A query that sees no key gets zeros, where a softmax of -inf alone is NaN.
    sees_none = at.add("Equal", _reduced(at, "ReduceMax", scores, [-1]), low)
    parts = at.add("Softmax", at.add("Where", sees_none, at.number(0.0), scores), axis=-1)
    return at.add("MatMul", at.add("Where", sees_none, at.number(0.0), parts), v)


# Bodies.


def _body(at: NodeCall, name: str, operands: list[str]) -> tuple[GraphWriter, list[str]]:
    """Return the writer of a body and the names of its results."""
    inner = GraphWriter(at.writer.names, at.writer)
    inner.scope, inner.source = at.writer.scope, at.writer.source
    return inner, at.body(at.graph.body(at.place, name), inner, operands)


def _graph_of(
    at: NodeCall, inner: Any, results: list[str], own: dict[str, TensorType], types: Any
) -> Any:
    """Return a body as a graph; its types are those of the first trace, free axes without one."""
    fresh = [inner.add("Identity", [r]) if r not in _made(inner) else r for r in results]
    seen: set[str] = set()
    for i, name in enumerate(fresh):  # no value may be a result twice
        if name in seen:
            fresh[i] = inner.add("Identity", [name])
        seen.add(fresh[i])
    inputs = ports({n: (t.dtype.value, [None] * t.rank) for n, t in own.items()})
    outputs = ports(
        {n: (t.dtype.value, [None] * t.rank) for n, t in zip(fresh, types, strict=True)}
    )
    return onnx_package().helper.make_graph(
        inner.nodes, at.writer.names.new("body"), inputs, outputs
    )


def _made(inner: Any) -> set[str]:
    return {name for node in inner.nodes for name in node.output}


def _scan(at: NodeCall) -> Any:
    carries, xs = at.attrs.int_("carries"), at.attrs.int_("xs")
    body = at.graph.body(at.place, "body")
    types = [body.graph.types[v] for v in at.attrs["body"].operands]
    own = [at.writer.names.new("carried" if i < carries else "entry") for i in range(carries + xs)]
    operands = [*own, *at.inputs[carries + xs :]]
    inner, results = _body(at, "body", operands)
    made = [body.graph.types[v] for v in at.attrs["body"].results]
    graph = _graph_of(at, inner, results, dict(zip(own, types, strict=False)), made)
    backwards = int(at.attrs.bool_("reverse"))
    return at.add(
        "Scan",
        *at.inputs[: carries + xs],
        count=len(at.node.outputs),
        body=graph,
        num_scan_inputs=xs,
        scan_input_directions=[backwards] * xs,
        scan_output_directions=[backwards] * (len(made) - carries),
    )


def _cond(at: NodeCall) -> Any:
    branches = []
    for name in ("then", "otherwise"):
        inner, results = _body(at, name, at.inputs)
        body = at.graph.body(at.place, name).graph
        types = [body.types[output.value] for output in body.outputs]
        branches.append(_graph_of(at, inner, results, {}, types))
    count = len(at.node.outputs)
    return at.add("If", at.inputs[0], count=count, then_branch=branches[0], else_branch=branches[1])


FORMS: dict[str, Callable[[NodeCall, OperatorForm], Any]] = {
    "BatchNormalization": lambda at, form: at.add(
        "BatchNormalization", *at.inputs, epsilon=form.epsilon
    ),
    "Conv": lambda at, form: _conv(at),
    "Gemm": lambda at, form: at.add("Gemm", *at.inputs, transB=1),
}

READ_AS_EXTENTS = (
    *("body", "otherwise", "then"),  # are compared by themselves
    *("axes", "extent", "high", "length", "low", "rows", "shape", "spatial", "starts", "stops"),
)
"""Attributes that may differ between traces: they are extents, or follow from those of operands."""

EMITTERS: dict[str, Emit] = {
    **{name: _simple(op_type) for name, op_type in _NAMES.items()},
    **dict.fromkeys(("copy_to", "stop_gradient", "to_sbp"), lambda at: at.inputs[0]),
    "argmax": _argmax,
    "argsort": _argsort,
    "attention": _attention,
    "bitwise_and": _bitwise("And"),
    "bitwise_not": _bitwise("Not"),
    "bitwise_or": _bitwise("Or"),
    "bitwise_xor": _bitwise("Xor"),
    "broadcast_to": _broadcast_to,
    "cast": lambda at: at.add("Cast", at.inputs[0], to=ELEMENT_TYPES[at.result.dtype.value]),
    "checked_index": lambda at: at.writer.reshape(at.inputs[0], at.result_shape),
    "concat": lambda at: at.add("Concat", *at.inputs, axis=at.attrs.int_("axis")),
    "cond": _cond,
    "conv": _conv,
    "conv_input_grad": _conv_transpose,
    "elu": _elu,
    "embedding": lambda at: at.add("Gather", *at.inputs, axis=0),
    "embedding_grad": _embedding_grad,
    "flat_index": _flat_index,
    "floor_divide": _floor_divide,
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "hardsigmoid": lambda at: at.add("HardSigmoid", *at.inputs, alpha=1 / 6, beta=0.5),
    "hardtanh": _hardtanh,
    "layer_norm": _layer_norm,
    "leaky_relu": lambda at: at.add(
        "LeakyRelu", *at.inputs, alpha=at.attrs.float_("negative_slope")
    ),
    "lerp": _lerp,
    "log_sigmoid": lambda at: at.add("Neg", at.add("Softplus", at.add("Neg", *at.inputs))),
    "log_softmax": lambda at: at.add("LogSoftmax", at.inputs[0], axis=-1),
    "max": _reduce("ReduceMax"),
    "max_pool": _max_pool,
    "maximum": _extreme("Max", "Or"),
    "mean": _reduce("ReduceMean"),
    "minimum": _extreme("Min", "And"),
    "mish": _mish,
    "not_equal": lambda at: at.add("Not", at.add("Equal", *at.inputs)),
    "pad": _pad,
    "prelu": _prelu,
    "recurrence": _recurrence,
    "remainder": _remainder,
    "reshape": lambda at: at.writer.reshape(at.inputs[0], at.ints("shape")),
    "rms_norm": _rms_norm,
    "rsqrt": lambda at: at.add("Reciprocal", at.add("Sqrt", *at.inputs)),
    "scan": _scan,
    "silu": lambda at: at.add("Mul", at.inputs[0], at.add("Sigmoid", at.inputs[0])),
    "slice": _slice,
    "softmax": _softmax,
    "softplus": _softplus,
    "square": lambda at: at.add("Mul", at.inputs[0], at.inputs[0]),
    "standardised": _standardised,
    "sum": _reduce("ReduceSum"),
    "threshold": _threshold,
    "transpose": lambda at: at.add("Transpose", at.inputs[0], perm=list(at.attrs.ints("perm"))),
    "trunc": _trunc,
}
"""By op; what stands in none of these is refused by name."""
