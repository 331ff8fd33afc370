"""What a program's text does once per launch, per row and per column, for every target.

The lines are bodies of functions over `a` (the argument block), `s` (SCALAR values) and `row` (ROW
values); who writes a function says how it is called.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.expressions import load, rounded, store
from actors.kernels.codegen.phases import operands_of
from actors.kernels.codegen.values import Values, indented
from compiler.fusion.program import Kind


def outputs_of(values: Values, kind: Kind) -> list[tuple[int, int]]:
    """Return (position, value) of the outputs of a kind."""
    outputs = enumerate(values.program.outputs)
    return [(position, v) for position, v in outputs if values.kind(v) is kind]


def scalar_values(values: Values) -> list[int]:
    """Return the SCALAR values that are no constants."""
    entries = enumerate(values.program.inputs)
    inputs = [v for v, entry in entries if entry.kind is Kind.SCALAR]
    return [v for v in (*inputs, *values.plan.scalars) if values.constant(v) is None]


def structs(values: Values) -> list[str]:
    """Return the structs NAME_scalars and NAME_row."""
    rows = [v for stage in values.plan.rows for v in stage]
    rows += [v for phase in values.plan.phases for v in phase.reductions]
    return [
        *struct("scalars", [f"{values.type(v)} v{v};" for v in scalar_values(values)]),
        *struct("row", [f"{values.type(v)} v{v};" for v in sorted(rows)]),
    ]


def struct(name: str, members: list[str]) -> list[str]:
    """Return the struct NAME_`name`; no struct of C is empty."""
    return ["typedef struct {", *indented(members or ["char none;"]), f"}} NAME_{name};"]


def scalar_lines(values: Values) -> list[str]:
    """Return what computes SCALAR values."""
    text = []
    for v in scalar_values(values):
        value = values.element(v, "0") if values.is_input(v) else values.define(v)
        text += [f"const {values.type(v)} v{v} = {value};", f"s->v{v} = v{v};"]
    return text


def row_lines(
    values: Values, level: int, check: Callable[[int], list[str]], index: str = "const "
) -> list[str]:
    """Return what computes ROW values of a level, from reductions before it.

    `check` returns what is done about an index; `index` is "" where that may change it.
    """
    plan, text = values.plan, []
    for v in plan.phases[level - 1].reductions if level else ():
        kept = rounded(values.dtype(v), f"row->v{v}")
        if v in values.program.outputs and kept != f"row->v{v}":
            text.append(f"row->v{v} = {kept};")
    text += values.prelude(plan.rows[level])
    for v in plan.rows[level]:
        own = values.element(v, values.own_row(v)) if values.is_input(v) else values.define(v)
        is_index = values.op(v) == "check_index"
        text.append(f"{index if is_index else 'const '}{values.type(v)} v{v} = {own};")
        text += [*(check(v) if is_index else ()), f"row->v{v} = v{v};"]
    return text


def row_stores(values: Values) -> list[str]:
    """Return what stores the ROW outputs of row r."""
    text = []
    for position, v in outputs_of(values, Kind.ROW):
        place = f"r * {values.output_word(position, words.STRIDE)}.i"
        value = store(values.dtype(v), f"row->v{v}")
        text.append(f"{values.output(position)}[{place}] = {value};")
    return text


def scalar_stores(values: Values) -> list[str]:
    """Return what stores the SCALAR outputs."""
    text = []
    for position, v in outputs_of(values, Kind.SCALAR):
        is_plain = values.constant(v) is None
        value = store(values.dtype(v), f"s->v{v}" if is_plain else values.name(v))
        text.append(f"{values.output(position)}[0] = {value};")
    return text


def column_lines(values: Values, total: str) -> tuple[list[str], list[str]]:
    """Return what COLUMN outputs need before a loop over columns, and its body for column j.

    `total` is the sum over rows of a value: "c{v}[j]", say.
    """
    plan, columns = values.plan, outputs_of(values, Kind.COLUMN)
    used = {v for value in plan.late for v in operands_of(values.program, value)}
    used |= {v for _, v in columns}
    inputs = [v for v in sorted(used) if values.is_input(v) and values.kind(v) is Kind.COLUMN]
    before = values.prelude(plan.late)
    body = []
    for v in inputs:
        before.append(values.pointer(v))
        body.append(f"const {values.type(v)} v{v} = {load(values.dtype(v), f'x{v}[j]')};")
    for v in plan.column_sums:
        value = f"({values.type(v)}){total.format(v=v)}"
        value = rounded(values.dtype(v), value) if v in values.program.outputs else value
        body.append(f"const {values.type(v)} v{v} = {value};")
    body += [f"const {values.type(v)} v{v} = {values.define(v)};" for v in plan.late]
    for position, v in columns:
        before.append(f"{values.storage(v)} *y{position} = {values.output(position)};")
        body.append(f"y{position}[j] = {store(values.dtype(v), values.name(v))};")
    return before, body
