"""Ops on windows over any number of axes: convolution with its two adjoints, and max pooling.

The adjoints of a convolution are one another's gradients. Channels come first, as in torch:
x [N, C, *spatial], weight [O, C / groups, *kernel]. What is called a transposed convolution is
`conv_input_grad`, on its own. Means of windows need no op: they are convolutions with a kernel of
ones.
"""

from __future__ import annotations

import math

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.spaces import Windows
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import (
    Grads,
    SbpSignature,
    by_axes,
    gradient_of,
    linear_in,
    reference_of,
    sbp_signatures,
    streaming_cost,
)
from compiler.graph.graph import GraphBuilder, Node, gradient
from compiler.graph.registry import (
    Array,
    Cost,
    Op,
    OpTypeError,
    Types,
    cost,
    define,
    expect_equal_dtypes,
    expect_float,
    expect_inputs,
    expect_type,
    infer_type,
    is_exact,
    reference,
)
from compiler.ops.primitives.matmul import kept_precision

CONV = define("conv")
"""x [N, C, *spatial], weight [O, C / groups, *kernel] -> y [N, O, *positions]. Floats.

y[n, o, t] is the sum over c, k of weight[o, c, k] x[n, c, t * strides - low + k * dilation], zero
outside of x: a cross-correlation, as everywhere. Attrs: strides, low, high (what is put before and
behind each axis; negative: cut off), dilation: one per axis; groups, of which each has C / groups
channels and O / groups results; perhaps held: no step writes the weight; perhaps keeps_precision,
as of matmul.
"""

CONV_INPUT_GRAD = define("conv_input_grad")
"""dy [N, O, *positions], weight -> dx [N, C, *spatial]. Attrs of conv, and spatial."""

CONV_WEIGHT_GRAD = define("conv_weight_grad")
"""x, dy -> dweight [O, C / groups, *kernel]. Attrs of conv, and kernel."""


def windows_of(attrs: Attrs, kernel: tuple[int, ...]) -> Windows:
    """Return the windows that attributes describe."""
    return Windows(kernel, attrs.ints("strides"), attrs.ints("dilation"), attrs.ints("low"))


def count_windows(
    attrs: Attrs, spatial: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[int, ...]:
    """Return how many windows there are along each axis. Raises OpTypeError where none fits."""
    rank = len(spatial)
    names = ("strides", "dilation", "low", "high")
    settings = {name: attrs.ints(name) for name in names}
    for name, values in settings.items():
        if len(values) != rank:
            raise OpTypeError(f"needs {name} for each of the {rank} spatial axes, got {values}")
    if min((*settings["strides"], *settings["dilation"], *kernel), default=1) < 1:
        raise OpTypeError(
            "needs a kernel, strides and dilation of 1 or more, got a kernel of"
            f" {list(kernel)}, strides={settings['strides']}, dilation={settings['dilation']}"
        )
    counts = []
    for axis, (n, k, s, d, low, high) in enumerate(
        zip(spatial, kernel, *[settings[name] for name in names], strict=True)
    ):
        room, span = n + low + high, (k - 1) * d + 1
        if room < span:
            raise OpTypeError(
                f"has windows of {span} elements on spatial axis {axis}, which with its padding"
                f" has {room}; use a smaller kernel or dilation, or more padding"
            )
        counts.append((room - span) // s + 1)
    return tuple(counts)


@infer_type.of(CONV)
def _conv_type(inputs: Types, attrs: Attrs) -> Types:
    x, weight = expect_inputs(inputs, "x", "weight")
    return (_expect_conv(x, weight, attrs),)


@infer_type.of(CONV_INPUT_GRAD)
def _input_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, weight = expect_inputs(inputs, "dy", "weight")
    _expect_images(dy, "dy")
    _expect_images(weight, "weight")
    channels = weight.shape[1] * attrs.int_("groups")
    x = TensorType(dy.dtype, (dy.shape[0], channels, *attrs.ints("spatial")))
    expect_type(dy, "dy", _expect_conv(x, weight, attrs))
    return (x,)


@infer_type.of(CONV_WEIGHT_GRAD)
def _weight_grad_type(inputs: Types, attrs: Attrs) -> Types:
    x, dy = expect_inputs(inputs, "x", "dy")
    _expect_images(x, "x")
    _expect_images(dy, "dy")
    groups = max(attrs.int_("groups"), 1)
    shape = (dy.shape[1], x.shape[1] // groups, *attrs.ints("kernel"))
    weight = TensorType(x.dtype, shape)
    expect_type(dy, "dy", _expect_conv(x, weight, attrs))
    return (weight,)


def _expect_conv(x: TensorType, weight: TensorType, attrs: Attrs) -> TensorType:
    """Return the type of y. Raises OpTypeError for operands that do not fit."""
    expect_float((x, weight), "x", "weight")
    dtype, groups = expect_equal_dtypes((x, weight)), attrs.int_("groups")
    _expect_images(x, "x")
    if weight.rank != x.rank:
        raise OpTypeError(
            f"needs x [N, C, *spatial] and weight [O, C / groups, *kernel] of one rank, got"
            f" {list(x.shape)} and {list(weight.shape)}"
        )
    channels, results = x.shape[1], weight.shape[0]
    if groups < 1 or channels < 1 or results < 1 or channels % groups or results % groups:
        raise OpTypeError(
            f"needs channels and results that groups divide, got {channels} channels,"
            f" {results} results and groups={groups}"
        )
    if weight.shape[1] != channels // groups:
        raise OpTypeError(
            f"needs a weight of {channels // groups} channels for {channels} channels of x in"
            f" {groups} groups, got {list(weight.shape)}"
        )
    counts = count_windows(attrs, x.shape[2:], weight.shape[2:])
    return TensorType(dtype, (x.shape[0], results, *counts))


def _expect_images(type_: TensorType, name: str) -> None:
    if type_.rank < 3:
        raise OpTypeError(
            f"needs {name} with two axes before the spatial ones, got {list(type_.shape)}"
        )


@reference_of(CONV)
def _conv(attrs: Attrs, x: Array, weight: Array) -> Array:
    groups, kernel = attrs.int_("groups"), weight.shape[2:]
    counts = count_windows(attrs, x.shape[2:], kernel)
    by_group = _grouped(weight, 0, groups)
    y = np.zeros((x.shape[0], groups, weight.shape[0] // groups, *counts), x.dtype)
    for tap in windows_of(attrs, kernel).taps(x.shape[2:], counts):
        part = _grouped(x[tap.places], 1, groups)
        y[tap.windows] += np.einsum("ngc...,goc->ngo...", part, by_group[tap.own])
    return y.reshape(x.shape[0], weight.shape[0], *counts)


@reference_of(CONV_INPUT_GRAD)
def _input_grad(attrs: Attrs, dy: Array, weight: Array) -> Array:
    groups, spatial = attrs.int_("groups"), attrs.ints("spatial")
    dx = np.zeros((dy.shape[0], groups, weight.shape[1], *spatial), dy.dtype)
    rows, by_group = _grouped(dy, 1, groups), _grouped(weight, 0, groups)
    windows = windows_of(attrs, weight.shape[2:])
    for tap in windows.taps(spatial, dy.shape[2:]):
        part = rows[tap.windows]
        dx[tap.places] += np.einsum("ngo...,goc->ngc...", part, by_group[tap.own])
    return dx.reshape(dy.shape[0], groups * weight.shape[1], *spatial)


@reference_of(CONV_WEIGHT_GRAD)
def _weight_grad(attrs: Attrs, x: Array, dy: Array) -> Array:
    groups, kernel = attrs.int_("groups"), attrs.ints("kernel")
    rows = _grouped(dy, 1, groups)
    dw = np.zeros((groups, rows.shape[2], x.shape[1] // groups, *kernel), x.dtype)
    for tap in windows_of(attrs, kernel).taps(x.shape[2:], dy.shape[2:]):
        part, slopes = _grouped(x[tap.places], 1, groups), rows[tap.windows]
        flat = [a.reshape(*a.shape[:3], math.prod(a.shape[3:])) for a in (part, slopes)]
        dw[tap.own] = np.einsum("ngct,ngot->goc", *flat)
    return dw.reshape(dy.shape[1], x.shape[1] // groups, *kernel)


def _grouped(array: Array, axis: int, groups: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


@cost.of(CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Two operations for each element of y and each of the weight that it sees."""
    first, second = inputs
    y, weight = (first, second) if "spatial" in attrs else (second, outputs[0])
    if "spatial" not in attrs and "kernel" not in attrs:
        y, weight = outputs[0], second
    flops = 2.0 * y.num_elements * math.prod(weight.shape[1:])
    return Cost(flops, float(sum([t.size_bytes for t in (*inputs, *outputs)])))


@gradient_of(CONV)
def _conv_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    x, weight = node.inputs
    return _to_input(b, node, dy, weight, x), _to_weight(b, node, x, dy, weight)


@gradient_of(CONV_INPUT_GRAD)
def _input_grad_gradient(b: GraphBuilder, node: Node, dx: ValueId) -> Grads:
    dy, weight = node.inputs
    return _emit(b, CONV, node, dx, weight), _to_weight(b, node, dx, dy, weight)


@gradient_of(CONV_WEIGHT_GRAD)
def _weight_grad_gradient(b: GraphBuilder, node: Node, dweight: ValueId) -> Grads:
    x, dy = node.inputs
    return _to_input(b, node, dy, dweight, x), _emit(b, CONV, node, x, dweight)


def _to_input(b: GraphBuilder, node: Node, dy: ValueId, weight: ValueId, x: ValueId) -> ValueId:
    return _emit(b, CONV_INPUT_GRAD, node, dy, weight, spatial=b.type_of(x).shape[2:])


def _to_weight(b: GraphBuilder, node: Node, x: ValueId, dy: ValueId, weight: ValueId) -> ValueId:
    return _emit(b, CONV_WEIGHT_GRAD, node, x, dy, kernel=b.type_of(weight).shape[2:])


def _emit(
    b: GraphBuilder, op: Op, node: Node, first: ValueId, second: ValueId, **own: tuple[int, ...]
) -> ValueId:
    names = ("strides", "low", "high", "dilation", "groups")
    attrs = {name: node.attrs[name] for name in names} | kept_precision(node.attrs)
    return b.emit_one(op, first, second, **attrs, **own)


def _convolution_signatures(
    inputs: list[list[str]], output: list[str], types: Types, attrs: Attrs
) -> list[SbpSignature]:
    """Split images, or channels where they are of one group; the axes of space are whole."""
    axis_names = [[*labels, *[""] * (types[0].rank - 2)] for labels in (*inputs, output)]
    if attrs.int_("groups") != 1:
        axis_names = [[name if name == "n" else "" for name in labels] for labels in axis_names]
    signatures = by_axes(axis_names[:2], axis_names[2:], sums=True)
    return [*signatures, linear_in(0, 2), linear_in(1, 2)]


@sbp_signatures.of(CONV)
def _conv_signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    return _convolution_signatures([["n", "c"], ["o", "c"]], ["n", "o"], inputs, attrs)


@sbp_signatures.of(CONV_INPUT_GRAD)
def _input_grad_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    return _convolution_signatures([["n", "o"], ["o", "c"]], ["n", "c"], inputs, attrs)


@sbp_signatures.of(CONV_WEIGHT_GRAD)
def _weight_grad_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    return _convolution_signatures([["n", "c"], ["n", "o"]], ["o", "c"], inputs, attrs)


MAX_POOL = define("max_pool")
"""x [N, C, *spatial] -> y [N, C, *positions], tap (integers, likewise). Floats.

y is the largest element of x in a window, NaN where one is, and tap its place in the window in
row-major order, of equal ones the first, as in torch; -inf and the size of the window where that
has no element of x. Attrs: kernel, strides, low, high, dilation: one per spatial axis.
"""

MAX_POOL_GRAD = define("max_pool_grad")
"""dy, tap -> dx [N, C, *spatial], what windows have there. Attrs of max_pool, and spatial."""

MAX_POOL_PICK = define("max_pool_pick")
"""x, tap -> of each window of x [N, C, *spatial] that element, else 0. Attrs of max_pool."""

is_exact.register(MAX_POOL, True)
is_exact.register(MAX_POOL_PICK, True)


@infer_type.of(MAX_POOL)
def _pool_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    y = _expect_pool(x, attrs)
    return y, TensorType(_tap_dtype(attrs), y.shape)


@infer_type.of(MAX_POOL_GRAD)
def _pool_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, tap = expect_inputs(inputs, "dy", "tap")
    x = TensorType(dy.dtype, (*dy.shape[:2], *attrs.ints("spatial")))
    y = _expect_pool(x, attrs)
    expect_type(dy, "dy", y)
    expect_type(tap, "tap", TensorType(_tap_dtype(attrs), y.shape))
    return (x,)


@infer_type.of(MAX_POOL_PICK)
def _pick_type(inputs: Types, attrs: Attrs) -> Types:
    x, tap = expect_inputs(inputs, "x", "tap")
    y = _expect_pool(x, attrs)
    expect_type(tap, "tap", TensorType(_tap_dtype(attrs), y.shape))
    return (y,)


def _tap_dtype(attrs: Attrs) -> DType:
    """Return the type of taps: a byte where it holds all of them, and one for none."""
    return DType.UINT8 if math.prod(attrs.ints("kernel")) < 256 else DType.INT32


def _expect_pool(x: TensorType, attrs: Attrs) -> TensorType:
    expect_float((x,), "x")
    kernel = attrs.ints("kernel")
    if x.rank != len(kernel) + 2:
        raise OpTypeError(
            f"needs x [N, C, *spatial] of {len(kernel)} spatial axes, got {list(x.shape)}"
        )
    return TensorType(x.dtype, (*x.shape[:2], *count_windows(attrs, x.shape[2:], kernel)))


@reference.of(MAX_POOL)
def _max_pool(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    (x,) = inputs
    spatial, kernel = x.shape[2:], attrs.ints("kernel")
    counts, none = count_windows(attrs, spatial, kernel), math.prod(kernel)
    y = np.full((*x.shape[:2], *counts), -np.inf, x.dtype)
    taps = np.full(y.shape, none, _tap_dtype(attrs).value)
    for tap in windows_of(attrs, kernel).taps(spatial, counts):
        at, part = tap.windows, x[tap.places]
        better = (part > y[at]) | np.isnan(part) | (taps[at] == none)
        y[at], taps[at] = np.where(better, part, y[at]), np.where(better, tap.number, taps[at])
    return y, taps


@reference_of(MAX_POOL_GRAD)
def _max_pool_grad(attrs: Attrs, dy: Array, taps: Array) -> Array:
    dx = np.zeros((*dy.shape[:2], *attrs.ints("spatial")), dy.dtype)
    for tap in windows_of(attrs, attrs.ints("kernel")).taps(dx.shape[2:], dy.shape[2:]):
        dx[tap.places] += np.where(taps[tap.windows] == tap.number, dy[tap.windows], 0)
    return dx


@reference_of(MAX_POOL_PICK)
def _pick(attrs: Attrs, x: Array, taps: Array) -> Array:
    y = np.zeros(taps.shape, x.dtype)
    for tap in windows_of(attrs, attrs.ints("kernel")).taps(x.shape[2:], taps.shape[2:]):
        at = tap.windows
        y[at] = np.where(taps[at] == tap.number, x[tap.places], y[at])
    return y


streaming_cost(MAX_POOL, MAX_POOL_GRAD, MAX_POOL_PICK, flops=1.0)


@gradient.of(MAX_POOL)
def _pool_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dy, _ = grads
    if dy is None:
        return (None,)
    spatial = b.type_of(node.inputs[0]).shape[2:]
    return (b.emit_one(MAX_POOL_GRAD, dy, node.outputs[1], **node.attrs, spatial=spatial),)


@gradient_of(MAX_POOL_GRAD)
def _pool_grad_gradient(b: GraphBuilder, node: Node, dx: ValueId) -> Grads:
    attrs = {name: value for name, value in node.attrs.items() if name != "spatial"}
    return b.emit_one(MAX_POOL_PICK, dx, node.inputs[1], **attrs), None


@gradient_of(MAX_POOL_PICK)
def _pick_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    spatial = b.type_of(node.inputs[0]).shape[2:]
    return b.emit_one(MAX_POOL_GRAD, dy, node.inputs[1], **node.attrs, spatial=spatial), None


@sbp_signatures.of(MAX_POOL, MAX_POOL_GRAD, MAX_POOL_PICK)
def _pooling_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split images or channels; where the largest were is given, the rest is linear."""
    names = ["n", "c", *[""] * (inputs[0].rank - 2)]
    linear = [linear_in(0, 2)] * (len(inputs) == 2)
    return [*by_axes([names] * len(inputs), [names] * len(outputs)), *linear]
