"""A region as an op: products and programs over rows that are worked on some at a time.

The reference computes every wide value whole: what a region means, and what kernels are measured
against.
"""

from __future__ import annotations

import math

from compiler.attrs import Attrs
from compiler.fusion.check import ProgramError
from compiler.fusion.interpreter import evaluate
from compiler.fusion.program import FusedProgram
from compiler.fusion.region import Region, Step, StepKind, check_region
from compiler.fusion.spaces import Space
from compiler.ops.fused import program_flops
from compiler.ops.reduce import total
from compiler.ops.signature import Array, Types
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference

REGION = define("region")
"""The operands of a region -> its outputs. Attrs: region, members (names of the ops)."""


def region_attrs(region: Region, members: tuple[str, ...]) -> Attrs:
    """Return the attributes of a region."""
    return Attrs({"region": region, "members": members})


def region_of(attrs: Attrs) -> Region:
    """Return what a node computes. Raises TypeError where there is something else."""
    return attrs.structure("region", Region)


@infer_type.of(REGION)
def _region_type(inputs: Types, attrs: Attrs) -> Types:
    region = region_of(attrs)
    try:
        check_region(region, inputs)
    except ProgramError as error:
        raise OpTypeError(f"cannot be computed: {error}") from None
    return region.outputs


@reference.of(REGION)
def _region_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    region = region_of(attrs)
    values: dict[int, Array] = dict(enumerate(inputs))
    for step in region.steps:
        operands = [values[v] for v in step.reads]
        values.update(zip(step.makes, _execute(region, step, operands), strict=True))
    made = [values[region.first_output + i] for i in range(len(region.outputs))]
    return tuple([x.reshape(t.shape) for x, t in zip(made, region.outputs, strict=True)])


def _execute(region: Region, step: Step, operands: list[Array]) -> tuple[Array, ...]:
    if step.kind is StepKind.PRODUCT:
        return (operands[0] @ operands[1],)
    if step.kind is StepKind.SUM_OF_PRODUCTS:
        return (operands[0].T @ operands[1],)
    if step.kind is StepKind.COLUMN_SUM:
        return (total(operands[0], 0),)
    return evaluate(_program(step), Space(region.rows, region.columns), tuple(operands))


@cost.of(REGION)
def _region_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    region = region_of(attrs)
    flops = 0.0
    for step in region.steps:
        if step.kind is StepKind.PROGRAM:
            flops += program_flops(_program(step), Space(region.rows, region.columns))
        elif step.kind is StepKind.COLUMN_SUM:
            flops += region.rows * region.columns
        else:
            flops += 2.0 * region.rows * math.prod(product_extents(region, step, inputs))
    return Cost(flops, float(sum([t.size_bytes for t in (*inputs, *outputs)])))


def product_extents(region: Region, step: Step, inputs: Types) -> tuple[int, int]:
    """Return the extents of a product that are not rows: k and n, or m and n."""
    columns = [region.columns if region.is_wide(v) else inputs[v].shape[1] for v in step.reads]
    return columns[0], columns[1]


def _program(step: Step) -> FusedProgram:
    if step.program is None:
        raise ValueError("a step of a region has no program")
    return step.program
