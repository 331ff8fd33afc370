"""Differentiate programs: reverse mode over the instructions of a fused op.

Griewank & Walther, Evaluating Derivatives (2008), section 3.2, by the rules of
`compiler.fusion.derivatives`. What a value lacks of rows or columns was broadcast to what reads it,
so its adjoint is summed over them; what a sum over columns reads gets the sum's adjoint.

**What is read.** Of the operands and outputs of the forward node, only those that the derived
program uses become operands of the gradient's, so that the others may die. A value that is an
output per row or column is read, as it is small; one that is a whole output is computed again,
unless reading it needs no more whole tensors than not (e^x: the output in place of x).
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.define import FusedOp
from compiler.fusion.derivatives import RULES
from compiler.fusion.expressions import Expression
from compiler.fusion.forms import Form, Fused, Slot, output_of
from compiler.fusion.program import (
    COLUMN_REDUCTIONS,
    ROW_REDUCTIONS,
    FusedProgram,
    Instruction,
    Kind,
    ProgramInput,
    joined,
)
from compiler.fusion.stated import remembered
from compiler.registry import OpTypeError

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Derived:
    """A product's program. `operands` are positions among (gradients, operands, outputs)."""

    form: Form
    program: FusedProgram
    operands: tuple[int, ...]
    wanted: tuple[int, ...]


def float_slots(form: Form) -> Ints:
    """Return the positions of operands that can have a gradient."""
    return tuple([i for i, slot in enumerate(form.inputs) if slot.dtype.is_float])


@remembered(512)
def derive(found: Fused, form: Form, attrs: Attrs, given: Ints, wanted: Ints) -> Derived:
    """Return the product's program for the outputs `given` and the operands `wanted`.

    Operands to which nothing flows are left out of the result's `wanted`.
    """
    q = form.builder()
    pool = _pool(form, given)
    values = tuple([q.input(ProgramInput(slot.dtype, slot.kind)) for slot in pool])
    first, last = len(given), len(given) + len(form.inputs)
    forward = found.emit(q, attrs, form.extents, values[first:last])
    adjoints = _overridden(found, q, form, attrs, given, values, forward)
    if adjoints is None:
        seeds = [(forward[i], values[n]) for n, i in enumerate(given)]
        active = {values[first + i] for i in wanted}
        found_adjoints = _adjoints(q, form, values[first:last], seeds, active)
        adjoints = [found_adjoints.get(v) for v in values[first:last]]
    kinds = [_kind_of_gradient(slot.kind) for slot in form.inputs]
    reached = tuple([i for i in wanted if adjoints[i] is not None])
    outputs = tuple([output_of(q, adjoints[i], kinds[i]) for i in reached])
    slots = tuple(
        [Slot(f"d{form.inputs[i].name}", kinds[i], form.inputs[i].dtype) for i in reached]
    )
    whole = q.whole(outputs)
    saved = {v: values[last + i] for i, v in enumerate(forward) if v not in values}
    small = {v: n for v, n in saved.items() if q.kind_of(n) is not Kind.FULL}
    both = [_written(whole, form, s, reached) for s in (saved, small)]
    wide = [i >= first and slot.kind is Kind.FULL for i, slot in enumerate(pool)]
    program, operands = min(both, key=lambda made: sum([wide[i] for i in made[1]]))
    return Derived(
        Form(tuple([pool[i] for i in operands]), slots, form.extents), program, operands, reached
    )


def _pool(form: Form, given: Ints) -> list[Slot]:
    """Return what a product may read: gradients, operands, outputs."""
    outputs = [form.outputs[i] for i in given]
    grads = [Slot(f"d{slot.name}", slot.kind, slot.dtype) for slot in outputs]
    return [*grads, *form.inputs, *form.outputs]


def _kind_of_gradient(kind: Kind) -> Kind:
    """A number has a gradient per row, which is summed outside: no instruction sums all rows."""
    return Kind.ROW if kind is Kind.SCALAR else kind


def _written(
    whole: FusedProgram, form: Form, saved: dict[int, int], reached: Ints
) -> tuple[FusedProgram, Ints]:
    """Return a program that reads values where they are `saved`, and what it reads at all."""
    p = form.builder()
    own = [p.input(operand) for operand in whole.inputs]
    if not reached:
        return FusedProgram((), (), ()), ()
    for number, made in enumerate(whole.instructions, len(own)):
        operands = tuple([own[v] for v in made.operands])
        if number in saved:
            own.append(own[saved[number]])
        elif made.op == "check_index":  # the forward node has checked
            own.append(operands[0])
        else:
            own.append(p.repeat(made, operands))
    outputs = [output_of(p, Expression(p, own[v]), p.kind_of(own[v])) for v in whole.outputs]
    return p.finish(tuple(outputs))


def _overridden(
    found: Fused,
    q: ProgramBuilder,
    form: Form,
    attrs: Attrs,
    given: Ints,
    values: Ints,
    forward: Ints,
) -> list[Expression | None] | None:
    """Return the adjoints of operands by the definition's own formula, where it serves."""
    if not isinstance(found, FusedOp) or found.gradient is None:
        return None
    if any([f"d{form.outputs[i].name}" not in found.gradient.takes for i in given]):
        return None
    e = form.extents
    known = {
        slot.name: Expression(q, value, () if e is None else e.of(slot.kind))
        for slot, value in zip(_pool(form, given), values, strict=True)
    }
    wide = _wide_kinds(q, form, values[len(given) : len(given) + len(form.inputs)])
    for i in given:
        name = f"d{form.outputs[i].name}"
        known[name] = _once(known[name], wide[forward[i]])
    for slot in form.outputs:
        if f"d{slot.name}" not in known:  # nothing flows back to this output
            known[f"d{slot.name}"] = Expression(q, q.constant(0.0, slot.dtype))
    slots = [form.inputs[i] for i in float_slots(form)]
    made = found.gradient.results(known, found.settings(attrs), [slot.name for slot in slots])
    own = {s.name: _as_written(m, s, form) for s, m in zip(slots, made, strict=True)}
    return [own.get(slot.name) for slot in form.inputs]


def _as_written(adjoint: object, slot: Slot, form: Form) -> Expression | None:
    """Check an adjoint, and sum one that has more rows or columns than its operand."""
    if adjoint is None:
        return None
    if not isinstance(adjoint, Expression):
        raise OpTypeError(f"returns a {type(adjoint).__name__} for {slot.name}, no expression")
    if adjoint.dtype is not slot.dtype:
        raise OpTypeError(
            f"returns {adjoint.dtype} for {slot.name}, which is of {slot.dtype}; cast it with"
            f" .to({slot.name}.dtype)"
        )
    found, kind = adjoint.emitter.kind_of(adjoint.value), _kind_of_gradient(slot.kind)
    if form.extents is None or found is not Kind.FULL:
        return adjoint
    return _summed(adjoint, Kind.FULL, kind)


def _adjoints(
    q: ProgramBuilder, form: Form, operands: Ints, seeds: list[tuple[int, int]], active: set[int]
) -> dict[int, Expression]:
    """Walk the program backwards from its outputs; return the adjoints of what was reached."""
    wide = _wide_kinds(q, form, operands)
    flows = set(active)
    for number in range(q.num_values):
        made = q.made_by(number)
        if not isinstance(made, Instruction) or not made.dtype.is_float or made.op not in RULES:
            continue
        if any([v in flows for v in made.operands]):
            flows.add(number)
    adjoints: dict[int, Expression] = {}
    for value, seed in seeds:
        _add(adjoints, value, _once(Expression(q, seed), wide[value]))
    for number in range(len(wide) - 1, -1, -1):
        made, adjoint = q.made_by(number), adjoints.get(number)
        if adjoint is None or number not in flows or not isinstance(made, Instruction):
            continue
        read = [Expression(q, v) for v in made.operands]
        parts = RULES[made.op](adjoint, Expression(q, number), *read)
        for value, part in zip(made.operands, parts, strict=True):
            if part is not None and value in flows:
                reads = Kind.FULL if made.op in _REDUCTIONS else wide[number]
                _add(adjoints, value, _summed(part, reads, wide[value]))
    return {v: a for v, a in adjoints.items() if v in flows}


_REDUCTIONS = ROW_REDUCTIONS + COLUMN_REDUCTIONS


def _once(grad: Expression, wide: Kind) -> Expression:
    """Return the gradient of an output in one row alone, where rows will be summed and it has none.

    Of a scalar operand alone such outputs are computed: c[] = s * s.
    """
    p = grad.emitter
    if p.rows == 1 or wide not in (Kind.FULL, Kind.ROW):
        return grad
    if p.kind_of(grad.value) in (Kind.FULL, Kind.ROW):
        return grad
    return (grad.row_index() == 0).where(grad, 0.0)


def _add(adjoints: dict[int, Expression], value: int, part: Expression) -> None:
    earlier = adjoints.get(value)
    adjoints[value] = part if earlier is None else earlier + part


def _wide_kinds(q: ProgramBuilder, form: Form, operands: Ints) -> list[Kind]:
    """Return, per value, over which rows and columns it may differ, a number for each row.

    A scalar operand counts as one per row, and so does what is computed of it.
    """
    wide: list[Kind] = []
    own = {v: _kind_of_gradient(s.kind) for v, s in zip(operands, form.inputs, strict=True)}
    for number in range(q.num_values):
        made = q.made_by(number)
        if isinstance(made, Instruction) and made.operands and made.op not in _REDUCTIONS:
            kind = joined([wide[v] for v in made.operands])
            wide.append(Kind.FULL if made.op == "philox" else kind)
        else:
            wide.append(own.get(number, made.kind))
    return wide


def _summed(part: Expression, found: Kind, wanted: Kind) -> Expression:
    """Sum an adjoint over what a value of kind `found` has and one of kind `wanted` lacks.

    The adjoint itself may be a lesser value: what it lacks is counted instead of summed.
    """
    p = part.emitter
    has_columns = found in (Kind.FULL, Kind.COLUMN)
    has_rows = found in (Kind.FULL, Kind.ROW)
    if has_columns and wanted in (Kind.ROW, Kind.SCALAR):
        part = part.sum()
    if has_rows and wanted in (Kind.COLUMN, Kind.SCALAR) and p.rows != 1:
        if p.kind_of(part.value) in (Kind.COLUMN, Kind.SCALAR):
            part = part * p.rows
        else:
            part = Expression(p, p.reduce("column_sum", part.value))
    return part
