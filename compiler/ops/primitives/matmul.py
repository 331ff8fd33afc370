"""Matrix products. Operands may be strided views: transposes and split heads cost no copy."""

from __future__ import annotations

import math

import numpy as np

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.types import HALVES, DType, TensorType, ValueId
from compiler.graph.columns import (
    Grads,
    SbpSignature,
    by_axes,
    gradient_of,
    last_labels,
    linear_in,
    reference_of,
    sbp_signatures,
)
from compiler.graph.graph import GraphBuilder, Node
from compiler.graph.registry import (
    Cost,
    OpTypeError,
    Types,
    broadcast_shape,
    cost,
    define,
    expect_equal_dtypes,
    expect_float,
    expect_inputs,
    infer_type,
)
from compiler.ops.primitives.reduce import sum_to
from compiler.ops.primitives.shape import is_swapped, reshape_to, swap_last_axes

MATMUL = define("matmul")
"""a [..., M, K], b [..., K, N] -> [..., M, N]. Floats; leading axes broadcast as in np.matmul.

Attrs: out_dtype, optional: "float32" lets a product of 16-bit floats keep the sums, which are
float32 in any case, as they are; keeps_precision, see there.
"""

KEEPS_PRECISION = "keeps_precision"
"""An optional attr of products and convolutions, true where a user called neither: a mean of
windows, say. Mixed precision leaves their operands, and those of their gradients, as they are."""


@infer_type.of(MATMUL)
def _matmul_type(inputs: Types, attrs: Attrs) -> Types:
    a, b = expect_inputs(inputs, "a", "b")
    expect_float(inputs, "a", "b")
    dtype = _result_dtype(expect_equal_dtypes(inputs), attrs)
    for name, type_ in (("a", a), ("b", b)):
        if type_.rank < 2:
            raise OpTypeError(
                f"needs matrices, but {name} has rank {type_.rank};"
                " reshape a vector of n elements to [1, n] or [n, 1]"
            )
    if a.shape[-1] != b.shape[-2]:
        raise OpTypeError(
            f"needs equal inner extents: {a.shape[-1]} against {b.shape[-2]}{_hint(a, b)}"
        )
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    return (TensorType(dtype, (*batch, a.shape[-2], b.shape[-1])),)


def _result_dtype(dtype: DType, attrs: Attrs) -> DType:
    if "out_dtype" not in attrs:
        return dtype
    name = attrs.str_("out_dtype")
    dtypes = [dtype, DType.FLOAT32] if dtype in HALVES else [dtype]
    for candidate in dtypes:
        if candidate.value == name:
            return candidate
    raise OpTypeError(
        f"makes {' or '.join(map(str, dtypes))} of {dtype} operands, got out_dtype {name!r}"
    )


def _hint(a: TensorType, b: TensorType) -> str:
    if a.shape[-1] == b.shape[-1]:
        return "; did you mean to transpose the second operand?"
    if a.shape[-2] == b.shape[-2]:
        return "; did you mean to transpose the first operand?"
    return ""


reference_of(MATMUL)(lambda attrs, a, b: np.matmul(a, b))


@cost.of(MATMUL)
def _matmul_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    moved_bytes = sum(t.size_bytes for t in (*inputs, *outputs))
    return Cost(2.0 * math.prod(outputs[0].shape) * inputs[0].shape[-1], float(moved_bytes))


@gradient_of(MATMUL)
def _matmul_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    x, w = node.inputs
    attrs = kept_precision(node.attrs)
    dx = _product_like(b, x, dy, swap_last_axes(b, w), attrs)
    if b.type_of(w).rank == 2 and b.type_of(x).rank > 2:
        # One product over all rows instead of one per batch element and a sum over them.
        x, dy = _as_matrix(b, x), _as_matrix(b, dy)
    return dx, _product_like(b, w, swap_last_axes(b, x), dy, attrs)


def kept_precision(attrs: Attrs) -> dict[str, AttrValue]:
    """Return what the attrs of a product's gradients have of its own."""
    return {KEEPS_PRECISION: True} if attrs.get(KEEPS_PRECISION) else {}


def _as_matrix(b: GraphBuilder, value: ValueId) -> ValueId:
    *batch, last = b.type_of(value).shape
    return reshape_to(b, value, (math.prod(batch), last))


def _product_like(
    b: GraphBuilder, like: ValueId, left: ValueId, right: ValueId, attrs: dict[str, AttrValue]
) -> ValueId:
    """Emit `left @ right`, the gradient of operand `like`, summed where that was stretched.

    The gradient of a transposed operand is computed transposed: the transpose in the operand's own
    gradient undoes it, and a weight gets a dense gradient in its own order.
    """
    shape = b.type_of(like).shape
    if not is_swapped(b, like):
        return sum_to(b, b.emit_one(MATMUL, left, right, **attrs), shape)
    product = b.emit_one(MATMUL, swap_last_axes(b, right), swap_last_axes(b, left), **attrs)
    swapped = (*shape[:-2], shape[-1], shape[-2])
    return swap_last_axes(b, sum_to(b, product, swapped))


@sbp_signatures.of(MATMUL)
def _matmul_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split leading axes, rows or columns; split inner axes give shares of the sum."""
    leading = outputs[0].shape[:-2]
    names = [str(axis) for axis in range(len(leading))]
    a, b = [last_labels(names, x.shape[:-2], leading) for x in inputs]
    signatures = by_axes([[*a, "m", "k"], [*b, "k", "n"]], [[*names, "m", "n"]], sums=True)
    return [*signatures, linear_in(0, 2), linear_in(1, 2)]
