"""A fused program as an op: `compiler.fusion.program` with tensors of the graph as operands.

The reference follows the program instruction by instruction in numpy: what it means, and what
kernels are measured against.
"""

from __future__ import annotations

from compiler.attrs import Attrs, AttrValue
from compiler.fusion.check import ProgramError, check_program
from compiler.fusion.interpreter import evaluate
from compiler.fusion.program import ROW_REDUCTIONS, FusedProgram, Kind
from compiler.fusion.spaces import Space
from compiler.ops.signature import Array, Types, expect_inputs
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference
from compiler.types import TensorType

FUSED = define("fused")
"""The operands of a program, in its order -> its outputs.

Attrs: program, rows, columns, shapes (of the outputs), members (names of the ops).
"""

HEAVY = (
    *("exp", "log", "tanh", "erf", "sin", "cos", "pow", "philox"),
    *("erfc", "expm1", "log1p", "log2", "log10", "atan2"),
)
"""Instructions counted as 8 operations per element, the others as one."""


def fused_attrs(
    program: FusedProgram,
    space: Space,
    shapes: tuple[tuple[int, ...], ...],
    members: tuple[str, ...],
) -> dict[str, AttrValue]:
    """Return the attributes of a fused node."""
    return {
        "program": program,
        "rows": space.rows,
        "columns": space.columns,
        "shapes": shapes,
        "members": members,
    }


def program_of(attrs: Attrs) -> FusedProgram:
    """Return what a fused node computes. Raises TypeError where there is something else."""
    return attrs.structure("program", FusedProgram)


def space_of(attrs: Attrs) -> Space:
    """Return the space of a fused node."""
    return Space(attrs.int_("rows"), attrs.int_("columns"))


def num_elements(kind: Kind, space: Space) -> int:
    """Return how many elements a value of a kind has."""
    rows = space.rows if kind in (Kind.FULL, Kind.ROW) else 1
    return rows * (space.columns if kind in (Kind.FULL, Kind.COLUMN) else 1)


@infer_type.of(FUSED)
def _fused_type(inputs: Types, attrs: Attrs) -> Types:
    return program_types(program_of(attrs), inputs, attrs)


def program_types(program: FusedProgram, inputs: Types, attrs: Attrs) -> Types:
    """Return the types of a program's outputs. Raises OpTypeError for operands it cannot take."""
    try:
        check_program(program)
    except ProgramError as error:
        raise OpTypeError(f"cannot be computed: {error}") from None
    space = space_of(attrs)
    if space.rows < 0 or space.columns < 0:
        raise OpTypeError(f"needs rows and columns, got {space.rows} and {space.columns}")
    expect_inputs(inputs, *[f"operand {i}" for i in range(len(program.inputs))])
    for index, (operand, type_) in enumerate(zip(program.inputs, inputs, strict=True)):
        own = Space(operand.count or space.rows, space.columns)
        expected = num_elements(operand.kind, own)
        if type_.dtype is not operand.dtype or type_.num_elements != expected:
            raise OpTypeError(
                f"needs operand {index} of {expected} elements of {operand.dtype}, got {type_}"
            )
    found: list[TensorType] = []
    for value, shape in zip(program.outputs, attrs.shapes("shapes"), strict=True):
        type_ = TensorType(program.dtype_of(value), shape)
        expected = num_elements(program.kind_of(value), space)
        if type_.num_elements != expected:
            raise OpTypeError(f"has an output of {expected} elements, declared as {type_}")
        found.append(type_)
    return tuple(found)


@reference.of(FUSED)
def _fused_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    results = evaluate(program_of(attrs), space_of(attrs), inputs)
    return tuple([r.reshape(s) for r, s in zip(results, attrs.shapes("shapes"), strict=True)])


@cost.of(FUSED)
def _fused_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    moved = sum([t.size_bytes for t in (*inputs, *outputs)])
    return Cost(program_flops(program_of(attrs), space_of(attrs)), float(moved))


def program_flops(program: FusedProgram, space: Space) -> float:
    """Return the operations of one execution of a program."""
    flops = 0.0
    for index, instruction in enumerate(program.instructions, len(program.inputs)):
        is_sum = instruction.op in ROW_REDUCTIONS or instruction.op == "column_sum"
        kind = Kind.FULL if is_sum else program.kind_of(index)
        flops += (8.0 if instruction.op in HEAVY else 1.0) * num_elements(kind, space)
    return flops
