"""The functions of a program as text of C and of CUDA: what is done per launch, row and column.

The stages are bodies over `a` (the argument block), `s` (SCALAR values) and `row` (ROW values).
C and CUDA C++ share the syntax of all of them, so one text serves both, but for what a `Dialect`
says. The loop over the columns of a row is the target's own: lanes of a vector and threads of a
team have little in common (`native.loops`, `cuda.loops`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.kernels.program.phases import operands_of
from actors.kernels.program.values import SKIP, STRIDE, Values, rounded, store
from compiler.contract.program import FusedProgram, Kind


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between languages in the functions around the phases of a program.

    `function` is what a declaration begins with, and `seldom` one of what is done once per launch:
    gcc puts an inline function with powers in double into each of its callers. `check` returns what
    is done about an index, v3 say, that may be out of its range. Where `reporter` is not "",
    functions of a row have this _Bool as well: whether a thread reports such an index.
    """

    function: str
    seldom: str
    check: Callable[[Values, int], list[str]]
    reporter: str = ""


GET_SCALARS = ("NAME_scalars scalars, *s = &scalars;", "NAME_get_scalars(a, s);")
"""What a function does that needs SCALAR values of its own."""


def _indented(lines: list[str]) -> list[str]:
    # Directives of the compiler stay at the margin.
    return [line if line.startswith("#") else f"    {line}" for line in lines]


def block(head: str, body: list[str], otherwise: list[str] | None = None) -> list[str]:
    """Return a function, a loop or a branch: `head { body }`; a scope where there is no head."""
    *lines, last = head.split("\n")
    branch = [] if otherwise is None else ["} else {", *_indented(otherwise)]
    return [*lines, f"{last} {{" if last else "{", *_indented(body), *branch, "}"]


def about(program: FusedProgram) -> str:
    """Return what is said of a program to a person."""
    ops = ", ".join(dict.fromkeys([i.op for i in program.instructions if i.op != "constant"]))
    types = ", ".join(dict.fromkeys([i.dtype.value for i in program.inputs]))
    return f"program of {len(program.instructions)} instructions ({ops}) on {types}"


def skip_line(words: str = "a", place: int = SKIP, result: str = "") -> str:
    """Return what ends a launch that is to do nothing, as a word of its arguments says."""
    word = f"{words}[{place}].p"
    return f"if ({word} && *(const int64_t *){word}) return{result};"


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
    return ["typedef struct {", *_indented(members or ["char none;"]), f"}} NAME_{name};"]


def stage_functions(values: Values, dialect: Dialect) -> list[str]:
    """Return the functions of the launch, of a row before and behind each phase, and of its end."""
    text = scalars_function(values, dialect)
    for level in range(len(values.plan.rows)):
        text += _row_function(values, level, dialect)
    return text + _end_function(values, dialect)


def scalars_function(values: Values, dialect: Dialect) -> list[str]:
    """Return the function that computes SCALAR values."""
    text = []
    for v in scalar_values(values):
        value = values.element(v, "0") if values.is_input(v) else values.define(v)
        text += [values.constant_line(v, value), f"s->v{v} = v{v};"]
    head = f"{dialect.seldom} NAME_get_scalars(const af_word *a, NAME_scalars *s)"
    return block(head, [*text, "(void)a, (void)s;"])


def _row_function(values: Values, level: int, dialect: Dialect) -> list[str]:
    """Return the function that computes ROW values of a level, from reductions before it."""
    plan, text = values.plan, []
    for v in plan.phases[level - 1].reductions if level else ():
        # An output that later phases read has the bits that memory will have, however it is kept.
        stored = rounded(values.dtype(v), f"row->v{v}")
        if v in values.program.outputs and stored != f"row->v{v}":
            text.append(f"row->v{v} = {stored};")
    text += values.prelude(plan.rows[level])
    for v in plan.rows[level]:
        code = values.element(v, values.own_row(v)) if values.is_input(v) else values.define(v)
        if values.op(v) == "check_index":
            # No constant, because a check may put another index in its place.
            text += [f"{values.type(v)} v{v} = {code};", *dialect.check(values, v)]
        else:
            text.append(values.constant_line(v, code))
        text.append(f"row->v{v} = v{v};")
    parameters = "const af_word *a, const NAME_scalars *s, NAME_row *row, int64_t r"
    unused = "(void)a, (void)s, (void)row, (void)r"
    if dialect.reporter:
        parameters += f", _Bool {dialect.reporter}"
        unused += f", (void){dialect.reporter}"
    head = f"{dialect.function} NAME_row{level}({parameters})"
    return block(head, [*text, f"{unused};"])


def _end_function(values: Values, dialect: Dialect) -> list[str]:
    """Return the function that stores the ROW outputs of row r."""
    text = []
    for position, v in outputs_of(values, Kind.ROW):
        place = f"r * {values.output_word(position, STRIDE)}.i"
        value = store(values.dtype(v), f"row->v{v}")
        text.append(f"{values.output(position)}[{place}] = {value};")
    head = f"{dialect.function} NAME_end(const af_word *a, const NAME_row *row, int64_t r)"
    return block(head, [*text, "(void)a, (void)row, (void)r;"])


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
    before = values.prelude(plan.late) + [values.pointer(v) for v in inputs]
    body = [values.loaded_line(v, f"x{v}[j]") for v in inputs]
    for v in plan.column_sums:
        value = f"({values.type(v)}){total.format(v=v)}"
        value = rounded(values.dtype(v), value) if v in values.program.outputs else value
        body.append(values.constant_line(v, value))
    body += [values.constant_line(v, values.define(v)) for v in plan.late]
    for position, v in columns:
        before.append(f"{values.storage(v)} *y{position} = {values.output(position)};")
        body.append(f"y{position}[j] = {store(values.dtype(v), values.name(v))};")
    return before, body
