"""Several updates of one kind as one op: one program for the elements of many variables.

    adamw_update(w, dw, m, v, lr, step), adamw_update(b, db, mb, vb, lr, step)
      ->  joined_updates(w, m, v, b, mb, vb, dw, db, lr, step)

What is written over comes first, member by member, and so the outputs; then what else each member
has of full size; then the numbers, which all share, and perhaps `skip` [] int64: where it is not 0,
nothing changes. Only `compiler.lowering.join_updates` emits it, for devices that take it.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.fusion.check import ProgramError, check_program
from compiler.fusion.interpreter import evaluate
from compiler.fusion.program import FusedProgram, is_by_elements
from compiler.fusion.spaces import Space
from compiler.ops.fused import program_flops, program_of
from compiler.ops.signature import Array, Types
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference, writes

JOINED_UPDATES = define("joined_updates")
"""See above. Attrs: program; over (the operand of the program under each output); count (of
members); members (what to call them); variables (the names of those that are updated)."""

MOST_WRITTEN = 512
"""Tensors that one joined update writes over, at most."""

writes.register(JOINED_UPDATES, tuple([(k, k) for k in range(MOST_WRITTEN)]))


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
    needed = 1 + max([place for member in members for place in member])
    if not needed <= len(inputs) <= needed + 1:
        raise OpTypeError(f"needs {needed} inputs and perhaps one to skip, got {len(inputs)}")
    for member in members:
        size = inputs[member[over[0]]].num_elements
        for i, place in enumerate(member):
            expected = size if program.is_full(i) else 1
            type_ = inputs[place]
            if type_.dtype is not program.dtype_of(i) or type_.num_elements != expected:
                wanted = f"{expected} elements of {program.dtype_of(i)}"
                raise OpTypeError(f"needs input {place} of {wanted}, got {type_}")
    for i, new in zip(over, program.outputs, strict=True):
        if program.dtype_of(i) is not program.dtype_of(new):
            raise OpTypeError(f"writes {program.dtype_of(new)} over {program.dtype_of(i)}")
    return inputs[: count * len(over)]


@reference.of(JOINED_UPDATES)
def _joined_reference(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
    program, over, members = program_of(attrs), attrs.ints("over"), joined_members(attrs)
    is_skipped = any([skip != 0 for skip in arrays[1 + max(map(max, members)) :]])
    made: list[Array] = []
    for member in members:
        own = tuple([np.asarray(arrays[place]) for place in member])
        if is_skipped:
            made += [own[i].copy() for i in over]
            continue
        news = evaluate(program, Space(1, own[over[0]].size), own)
        made += [new.reshape(own[i].shape) for new, i in zip(news, over, strict=True)]
    return tuple(made)


@cost.of(JOINED_UPDATES)
def _joined_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    moved = sum([t.size_bytes for t in (*inputs, *outputs)])
    every = max(1, len(attrs.ints("over")))
    elements = sum([t.num_elements for t in outputs[::every]])
    return Cost(program_flops(program_of(attrs), Space(1, elements)), float(moved))
