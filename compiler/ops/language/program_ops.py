"""Ops whose attribute says what they compute: a fused program, a program of many updates, a region.

`evaluate` follows a program in numpy, one instruction at a time and in any float width: it is their
reference, what a program means, and what kernels are measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import InternalError
from compiler.contract.program import (
    ROW_REDUCTIONS,
    UFUNCS,
    FusedProgram,
    Instruction,
    Kind,
    ProgramError,
    ProgramInput,
    check_program,
    erf,
    erfc,
    is_by_elements,
)
from compiler.contract.region import TiledLoop, TileStep, TileStepKind, check_region
from compiler.contract.spaces import Space
from compiler.contract.types import DType, TensorType, numpy_dtype, rounded
from compiler.graph.registry import (
    Array,
    Cost,
    OpTypeError,
    Types,
    cost,
    define,
    expect_inputs,
    infer_type,
    input_output_aliases,
    reference,
)
from compiler.ops.primitives.reduce import check_indices, total
from compiler.ops.primitives.sources import dropout_mask, random_bits

# Arrays may be wider than the program says (float64 where it has float32): numbers and conversions
# follow the widths that came. bfloat16 is in float32 arrays, rounded where it is an output. FULL
# values are [rows, columns], ROW [rows, 1], COLUMN [1, columns], SCALAR [1, 1], so that numpy's
# broadcasting is the program's.

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **UFUNCS,
    # Of integers numpy 1.26 makes floats, and every numpy's rint does.
    **{
        name: lambda x, of=UFUNCS[name]: of(x) if x.dtype.kind == "f" else x
        for name in ("floor", "ceil", "round")
    },
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": erf,
    "erfc": erfc,
    "select": np.where,
    "row_sum": lambda x: total(x, 1, keepdims=True),
    "row_max": lambda x: x.max(axis=1, keepdims=True),
    "row_min": lambda x: x.min(axis=1, keepdims=True),
    "column_sum": lambda x: total(x, 0, keepdims=True),
}


def evaluate(program: FusedProgram, space: Space, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the outputs of a program, each with all its elements in row-major order, 2-d."""
    widths: dict[DType, np.dtype[Any]] = {}
    for operand, array in zip(program.inputs, inputs, strict=True):
        if operand.dtype.is_float:
            widths[operand.dtype] = array.dtype
    values = [
        _spread(operand, np.asarray(array), space)
        for operand, array in zip(program.inputs, inputs, strict=True)
    ]
    with np.errstate(all="ignore"):
        for number, instruction in enumerate(program.instructions, len(program.inputs)):
            operands = [values[v] for v in instruction.operands]
            value = _execute_instruction(instruction, operands, space, widths)
            is_stored = instruction.dtype is DType.BFLOAT16 and number in program.outputs
            values.append(rounded(value) if is_stored else value)
    return tuple([_filled(values[v], program.kind_of(v), space) for v in program.outputs])


def _execute_instruction(
    instruction: Instruction,
    operands: list[Array],
    space: Space,
    widths: dict[DType, np.dtype[Any]],
) -> Array:
    op, constants = instruction.op, instruction.constants
    dtype = widths.get(instruction.dtype) or _width(instruction.dtype)
    if op == "constant":
        return np.full((1, 1), constants[0], dtype)
    if op == "row_index":
        every, count = [int(number) for number in constants]
        rows = np.arange(space.rows, dtype=dtype)[:, None] // every
        return rows % count if count else rows
    if op == "check_index":
        extent = int(constants[0])
        check_indices(operands[0].reshape(-1), extent, "label")
        return operands[0]
    if op == "cast":
        return operands[0].astype(dtype)
    if op == "column_index":
        return np.arange(space.columns, dtype=dtype)[None, :]
    if op == "philox":
        return _random(operands, constants, space, instruction.dtype)
    if op not in _FUNCTIONS:
        raise InternalError(f"a fused program knows no instruction {op!r}")
    return np.asarray(_FUNCTIONS[op](*operands))


def _width(dtype: DType) -> np.dtype[Any]:
    """Return the type of arrays for a dtype of which no operand came: bfloat16 is in float32."""
    return np.dtype(np.float32) if dtype is DType.BFLOAT16 else numpy_dtype(dtype)


def _random(
    operands: list[Array], constants: tuple[int | float, ...], space: Space, dtype: DType
) -> Array:
    seed, step = [int(v.reshape(())) for v in operands[:2]]
    key, p = constants
    firsts = operands[2].reshape(-1) if len(operands) > 2 else np.zeros(1, np.int64)
    count = space.rows * space.columns // firsts.size
    share = (p,) if dtype is DType.BOOL else ()
    draw: Callable[..., Array] = dropout_mask if share else random_bits
    parts = [draw(seed, step, int(key), *share, count, int(first)) for first in firsts]
    return np.concatenate(parts).reshape(space.rows, space.columns)


def _spread(operand: ProgramInput, array: Array, space: Space) -> Array:
    """Return an operand as [rows or 1, columns or 1], with its repeated rows picked."""
    count = operand.count or space.rows
    if operand.kind in (Kind.SCALAR, Kind.COLUMN):
        return array.reshape(1, -1)
    matrix = array.reshape(count, space.columns if operand.kind is Kind.FULL else 1)
    if count == space.rows:
        return matrix
    return matrix[np.arange(space.rows) // operand.every % count]


def _filled(value: Array, kind: Kind, space: Space) -> Array:
    rows = space.rows if kind in (Kind.FULL, Kind.ROW) else 1
    columns = space.columns if kind in (Kind.FULL, Kind.COLUMN) else 1
    return np.broadcast_to(value, (rows, columns)).copy()


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
        own_space = Space(operand.count or space.rows, space.columns)
        expected = num_elements(operand.kind, own_space)
        if type_.dtype is not operand.dtype or type_.num_elements != expected:
            raise OpTypeError(
                f"needs operand {index} of {expected} elements of {operand.dtype}, got {type_}"
            )
    types: list[TensorType] = []
    for value, shape in zip(program.outputs, attrs.shapes("shapes"), strict=True):
        type_ = TensorType(program.dtype_of(value), shape)
        expected = num_elements(program.kind_of(value), space)
        if type_.num_elements != expected:
            raise OpTypeError(f"has an output of {expected} elements, declared as {type_}")
        types.append(type_)
    return tuple(types)


@reference.of(FUSED)
def _fused_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    results = evaluate(program_of(attrs), space_of(attrs), inputs)
    return tuple([r.reshape(s) for r, s in zip(results, attrs.shapes("shapes"), strict=True)])


@cost.of(FUSED)
def _fused_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    moved_bytes = sum([t.size_bytes for t in (*inputs, *outputs)])
    return Cost(program_flops(program_of(attrs), space_of(attrs)), float(moved_bytes))


def program_flops(program: FusedProgram, space: Space) -> float:
    """Return the operations of one execution of a program."""
    flops = 0.0
    for index, instruction in enumerate(program.instructions, len(program.inputs)):
        is_sum = instruction.op in ROW_REDUCTIONS or instruction.op == "column_sum"
        kind = Kind.FULL if is_sum else program.kind_of(index)
        flops += (8.0 if instruction.op in HEAVY else 1.0) * num_elements(kind, space)
    return flops


# Several updates of one kind as one op: one program for the elements of many variables.
#
#     adamw_update(w, dw, m, v, lr, step), adamw_update(b, db, mb, vb, lr, step)
#       ->  joined_updates(w, m, v, b, mb, vb, dw, db, lr, step)
#
# What is written over comes first, member by member, and so the outputs; then what else each member
# has of full size; then the numbers, which all share, and perhaps `skip` [] int64: where it is not
# 0, nothing changes. Only `compiler.fusion.merge_updates` emits it, for devices that take it.

JOINED_UPDATES = define("joined_updates")
"""See above. Attrs: program; over (the operand of the program under each output); count (of
members); members (what to call them); variables (the names of those that are updated)."""

MOST_WRITTEN = 512
"""Tensors that one joined update writes over, at most."""

input_output_aliases.register(JOINED_UPDATES, tuple([(k, k) for k in range(MOST_WRITTEN)]))


def member_operands(
    program: FusedProgram, over: tuple[int, ...], count: int
) -> tuple[tuple[int, ...], ...]:
    """Return, per member, which input of the op is each operand of the program."""
    full = [i for i in range(len(program.inputs)) if program.is_full(i) and i not in over]
    numbers = [i for i in range(len(program.inputs)) if not program.is_full(i)]
    members: list[tuple[int, ...]] = []
    for member in range(count):
        place = {i: member * len(over) + k for k, i in enumerate(over)}
        first = count * len(over)
        place |= {i: first + member * len(full) + k for k, i in enumerate(full)}
        first += count * len(full)
        place |= {i: first + k for k, i in enumerate(numbers)}
        members.append(tuple([place[i] for i in range(len(program.inputs))]))
    return tuple(members)


def joined_members(attrs: Attrs) -> tuple[tuple[int, ...], ...]:
    """Return the operands of each member of a node; see `member_operands`."""
    return member_operands(program_of(attrs), attrs.ints("over"), attrs.int_("count"))


def check_joined(program: FusedProgram, over: tuple[int, ...], count: int) -> None:
    """Check what a joined update computes. Raises ProgramError."""
    check_program(program)
    is_over = [0 <= i < len(program.inputs) and program.is_full(i) for i in over]
    if not is_by_elements(program) or len(over) != len(program.outputs) or not all(is_over):
        raise ProgramError("an update of elements writes each of its outputs over an operand")
    if len(set(over)) != len(over) or not 0 < count * len(over) <= MOST_WRITTEN:
        raise ProgramError(f"{count} updates of {len(over)} tensors each are not one")


@infer_type.of(JOINED_UPDATES)
def _joined_type(inputs: Types, attrs: Attrs) -> Types:
    program, over, count = program_of(attrs), attrs.ints("over"), attrs.int_("count")
    try:
        check_joined(program, over, count)
    except ProgramError as error:
        raise OpTypeError(f"cannot be computed: {error}") from None
    members = member_operands(program, over, count)
    num_inputs = 1 + max([place for member in members for place in member])
    if not num_inputs <= len(inputs) <= num_inputs + 1:
        raise OpTypeError(f"needs {num_inputs} inputs and perhaps one to skip, got {len(inputs)}")
    for member in members:
        size = inputs[member[over[0]]].num_elements
        for i, place in enumerate(member):
            expected = size if program.is_full(i) else 1
            type_ = inputs[place]
            if type_.dtype is not program.dtype_of(i) or type_.num_elements != expected:
                elements = f"{expected} elements of {program.dtype_of(i)}"
                raise OpTypeError(f"needs input {place} of {elements}, got {type_}")
    for i, new in zip(over, program.outputs, strict=True):
        if program.dtype_of(i) is not program.dtype_of(new):
            raise OpTypeError(f"writes {program.dtype_of(new)} over {program.dtype_of(i)}")
    return inputs[: count * len(over)]


@reference.of(JOINED_UPDATES)
def _joined_reference(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
    program, over, members = program_of(attrs), attrs.ints("over"), joined_members(attrs)
    is_skipped = any([skip != 0 for skip in arrays[1 + max(map(max, members)) :]])
    outputs: list[Array] = []
    for member in members:
        operands = tuple([np.asarray(arrays[place]) for place in member])
        if is_skipped:
            outputs += [operands[i].copy() for i in over]
            continue
        updated = evaluate(program, Space(1, operands[over[0]].size), operands)
        outputs += [new.reshape(operands[i].shape) for new, i in zip(updated, over, strict=True)]
    return tuple(outputs)


@cost.of(JOINED_UPDATES)
def _joined_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    moved_bytes = sum([t.size_bytes for t in (*inputs, *outputs)])
    stride = max(1, len(attrs.ints("over")))
    elements = sum([t.num_elements for t in outputs[::stride]])
    return Cost(program_flops(program_of(attrs), Space(1, elements)), float(moved_bytes))


# The reference of a region computes every wide value whole.

REGION = define("region")
"""The operands of a region -> its outputs. Attrs: region, members (names of the ops)."""


def region_attrs(region: TiledLoop, members: tuple[str, ...]) -> Attrs:
    """Return the attributes of a region."""
    return Attrs({"region": region, "members": members})


def region_of(attrs: Attrs) -> TiledLoop:
    """Return what a node computes. Raises TypeError where there is something else."""
    return attrs.structure("region", TiledLoop)


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
        values.update(zip(step.makes, _execute_step(region, step, operands), strict=True))
    outputs = [values[region.first_output + i] for i in range(len(region.outputs))]
    return tuple([x.reshape(t.shape) for x, t in zip(outputs, region.outputs, strict=True)])


def _execute_step(region: TiledLoop, step: TileStep, operands: list[Array]) -> tuple[Array, ...]:
    if step.kind is TileStepKind.PRODUCT:
        return (operands[0] @ operands[1],)
    if step.kind is TileStepKind.SUM_OF_PRODUCTS:
        return (operands[0].T @ operands[1],)
    if step.kind is TileStepKind.COLUMN_SUM:
        return (total(operands[0], 0),)
    return evaluate(_program(step), Space(region.rows, region.columns), tuple(operands))


@cost.of(REGION)
def _region_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    region = region_of(attrs)
    flops = 0.0
    for step in region.steps:
        if step.kind is TileStepKind.PROGRAM:
            flops += program_flops(_program(step), Space(region.rows, region.columns))
        elif step.kind is TileStepKind.COLUMN_SUM:
            flops += region.rows * region.columns
        else:
            flops += 2.0 * region.rows * math.prod(product_extents(region, step, inputs))
    return Cost(flops, float(sum([t.size_bytes for t in (*inputs, *outputs)])))


def product_extents(region: TiledLoop, step: TileStep, inputs: Types) -> tuple[int, int]:
    """Return the extents of a product that are not rows: k and n, or m and n."""
    columns = [region.columns if region.is_wide(v) else inputs[v].shape[1] for v in step.reads]
    return columns[0], columns[1]


def _program(step: TileStep) -> FusedProgram:
    if step.program is None:
        raise ValueError("a step of a region has no program")
    return step.program
