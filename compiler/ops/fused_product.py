"""A matrix product and the program that alone reads it, in one launch: it stays in cache."""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.fusion.interpreter import evaluate
from compiler.fusion.spaces import Space
from compiler.ops.fused import program_flops, program_of, program_types, space_of
from compiler.ops.matmul import MATMUL
from compiler.ops.signature import Array, Types
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference

FUSED_PRODUCT = define("fused_product")
"""a [M, K], b [K, N], and a program's operands but its first -> its outputs.

Operand 0 of the program is the product, FULL in a space of M rows and N columns. Attrs: those of
`matmul` and those of `fused`.
"""


@infer_type.of(FUSED_PRODUCT)
def _fused_product_type(inputs: Types, attrs: Attrs) -> Types:
    if len(inputs) < 2:
        raise OpTypeError(f"expects a, b and the operands of a program, got {len(inputs)} inputs")
    (product,) = infer_type.get(MATMUL)(inputs[:2], attrs)
    space = space_of(attrs)
    if product.shape != (space.rows, space.columns):
        raise OpTypeError(
            f"needs a product of {space.rows} rows and {space.columns} columns, got {product}"
        )
    return program_types(program_of(attrs), (product, *inputs[2:]), attrs)


@reference.of(FUSED_PRODUCT)
def _fused_product_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    (product,) = reference.get(MATMUL)(attrs, *inputs[:2])
    results = evaluate(program_of(attrs), space_of(attrs), (product, *inputs[2:]))
    return tuple([r.reshape(s) for r, s in zip(results, attrs.shapes("shapes"), strict=True)])


@cost.of(FUSED_PRODUCT)
def _fused_product_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    space: Space = space_of(attrs)
    (product,) = infer_type.get(MATMUL)(inputs[:2], attrs)
    flops = cost.get(MATMUL)(inputs[:2], (product,), attrs).flops
    flops += program_flops(program_of(attrs), space)
    return Cost(flops, float(sum([t.size_bytes for t in (*inputs, *outputs)])))
