"""The largest element of each window, and what follows from where it was.

Means of windows need no op: they are convolutions with a kernel of ones.
"""

from __future__ import annotations

import math

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.convolution import count_windows, windows_of
from compiler.ops.rule import Grads, array_of, gradient_of, streams
from compiler.ops.signature import Array, Types, expect_float, expect_inputs, expect_type
from compiler.registry import OpTypeError, define, infer_type, is_exact, reference
from compiler.rules import gradient
from compiler.sbp.signatures import SbpSignature, by_axes, linear_in, sbp_signatures
from compiler.types import DType, TensorType, ValueId

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


@array_of(MAX_POOL_GRAD)
def _max_pool_grad(attrs: Attrs, dy: Array, taps: Array) -> Array:
    dx = np.zeros((*dy.shape[:2], *attrs.ints("spatial")), dy.dtype)
    for tap in windows_of(attrs, attrs.ints("kernel")).taps(dx.shape[2:], dy.shape[2:]):
        dx[tap.places] += np.where(taps[tap.windows] == tap.number, dy[tap.windows], 0)
    return dx


@array_of(MAX_POOL_PICK)
def _pick(attrs: Attrs, x: Array, taps: Array) -> Array:
    y = np.zeros(taps.shape, x.dtype)
    for tap in windows_of(attrs, attrs.ints("kernel")).taps(x.shape[2:], taps.shape[2:]):
        at = tap.windows
        y[at] = np.where(taps[at] == tap.number, x[tap.places], y[at])
    return y


streams(MAX_POOL, MAX_POOL_GRAD, MAX_POOL_PICK, flops=1.0)


@gradient.of(MAX_POOL)
def _pool_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dy, _ = grads
    if dy is None:
        return (None,)
    spatial = b.type_of(node.inputs[0]).shape[2:]
    return (b.one(MAX_POOL_GRAD, dy, node.outputs[1], **node.attrs, spatial=spatial),)


@gradient_of(MAX_POOL_GRAD)
def _pool_grad_gradient(b: GraphBuilder, node: Node, dx: ValueId) -> Grads:
    own = {name: value for name, value in node.attrs.items() if name != "spatial"}
    return b.one(MAX_POOL_PICK, dx, node.inputs[1], **own), None


@gradient_of(MAX_POOL_PICK)
def _pick_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    spatial = b.type_of(node.inputs[0]).shape[2:]
    return b.one(MAX_POOL_GRAD, dy, node.inputs[1], **node.attrs, spatial=spatial), None


@sbp_signatures.of(MAX_POOL, MAX_POOL_GRAD, MAX_POOL_PICK)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Split images or channels; where the largest were is given, the rest is linear."""
    names = ["n", "c", *[""] * (inputs[0].rank - 2)]
    linear = [linear_in(0, 2)] * (len(inputs) == 2)
    return [*by_axes([names] * len(inputs), [names] * len(outputs)), *linear]
