"""What the kernels of a program share: its structs, what is done per launch and row, and its sums.

A team has its sums over rows in single precision for a stretch of rows, in shared memory or in
scratch, and adds them to its partial row of doubles in between.
"""

from __future__ import annotations

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.expressions import rounded, store
from actors.kernels.codegen.expressions import sum_type_of as total_type_of
from actors.kernels.codegen.phases import Schedule
from actors.kernels.codegen.values import indented
from actors.kernels.cuda.loops import PhaseWriter, is_single
from compiler.fusion.program import FusedProgram, Kind

COLUMNS = f"a[{words.COLUMNS}].i"

_STAGE = "const af_word *a, const NAME_scalars *s, NAME_row *row, int64_t r, _Bool is_first"
_SUMS = "const af_word *a, NAME_sums *sums, int64_t j0, int64_t j1, int64_t lane, int64_t team"


class StageWriter:
    """The text of what surrounds the phases of one program, with NAME for its name."""

    def __init__(self, program: FusedProgram, plan: Schedule) -> None:
        self.program, self.plan = program, plan
        self.writer = PhaseWriter(program, plan)
        self.values = self.writer.values
        self.reductions = [v for phase in plan.phases for v in phase.reductions]
        self.single = [v for v in plan.column_sums if is_single(self.values.dtype(v))]

    def lines(self) -> list[str]:
        """Return the structs and the functions."""
        text = ["typedef struct {", f"    af_word w[{self._num_words()}];", "} NAME_arguments;"]
        text += [*self._structs(), *self._scalars()]
        for level in range(len(self.plan.rows)):
            text += self._row_stage(level)
        return [*text, *self._row_end(), *self._sum_functions()]

    def outputs(self, kind: Kind) -> list[tuple[int, int]]:
        """Return (position, value) of the outputs of a kind."""
        outputs = enumerate(self.program.outputs)
        return [(position, v) for position, v in outputs if self.program.kind_of(v) is kind]

    def _num_words(self) -> int:
        return words.stretches(self.program, len(self.plan.column_sums)) + 1

    def _structs(self) -> list[str]:
        values = self.values
        rows = sorted([*[v for stage in self.plan.rows for v in stage], *self.reductions])
        scalars = [f"{values.type(v)} v{v};" for v in self._scalar_values()]
        members = [f"{values.type(v)} v{v};" for v in rows]
        sums = [f"{self.writer.sum_type(v)} *c{v};" for v in self.plan.column_sums]
        text = []
        for name, own in (("scalars", scalars), ("row", members), ("sums", sums)):
            text += ["typedef struct {", *indented(own or ["char none;"]), f"}} NAME_{name};"]
        return text

    def _scalar_values(self) -> list[int]:
        entries = enumerate(self.program.inputs)
        inputs = [v for v, entry in entries if entry.kind is Kind.SCALAR]
        return [v for v in (*inputs, *self.plan.scalars) if self.values.constant(v) is None]

    def _scalars(self) -> list[str]:
        values = self.values
        text = ["AF_FUNCTION void NAME_get_scalars(const af_word *a, NAME_scalars *s) {"]
        for v in self._scalar_values():
            value = values.element(v, "0") if values.is_input(v) else values.define(v)
            text += [f"    const {values.type(v)} v{v} = {value};", f"    s->v{v} = v{v};"]
        return [*text, "    (void)a, (void)s;", "}"]

    def _row_stage(self, level: int) -> list[str]:
        """Return the function that computes ROW values of a level, from reductions before it."""
        values = self.values
        text = []
        for v in self.plan.phases[level - 1].reductions if level else ():
            kept = rounded(values.dtype(v), f"row->v{v}")
            if v in self.program.outputs and kept != f"row->v{v}":
                text.append(f"row->v{v} = {kept};")
        text += values.prelude(self.plan.rows[level])
        for v in self.plan.rows[level]:
            own = values.element(v, values.own_row(v)) if values.is_input(v) else values.define(v)
            is_checked = values.op(v) == "check_index"
            text.append(f"{'' if is_checked else 'const '}{values.type(v)} v{v} = {own};")
            text += [*(self._check(v) if is_checked else ()), f"row->v{v} = v{v};"]
        return [
            f"AF_FUNCTION void NAME_row{level}({_STAGE}) {{",
            *indented(text),
            "    (void)a, (void)s, (void)row, (void)r, (void)is_first;",
            "}",
        ]

    def _check(self, value: int) -> list[str]:
        """Return what is done about a bad index: it is reported once, and 0 for all that follows.

        Its place is that of its row in the operand, as the host says it.
        """
        instruction = self.values.instruction(value)
        operand = instruction.operands[0]
        place = self.values.row_number(operand) if self.values.is_input(operand) else "r"
        return [
            f"if ((uint64_t)(int64_t)v{value} >= {int(instruction.constants[0])}ULL) {{",
            f"    if (is_first) af_report(a[{words.STATUS}].p, {place}, (int64_t)v{value});",
            f"    v{value} = 0;",
            "}",
        ]

    def _row_end(self) -> list[str]:
        text = []
        for position, v in self.outputs(Kind.ROW):
            place = f"r * {self.values.output_word(position, words.STRIDE)}.i"
            value = store(self.values.dtype(v), f"row->v{v}")
            text.append(f"    {self.values.output(position)}[{place}] = {value};")
        return [
            "AF_FUNCTION void NAME_end(const af_word *a, const NAME_row *row, int64_t r) {",
            *text,
            "    (void)a, (void)row, (void)r;",
            "}",
        ]

    def _sum_functions(self) -> list[str]:
        """Return the functions that begin the sums of a team and that end a stretch of them."""
        if not self.plan.column_sums:
            return []
        values, single = self.values, self.single
        totals = {
            v: f"{total_type_of(values.dtype(v))} *d{v} = {values.partial_place(v, 'slot')};"
            for v in self.plan.column_sums
        }
        own = [f"sums->c{v} = d{v};" for v in self.plan.column_sums if v not in single]
        zero = [f"d{v}[j] = 0;" for v in self.plan.column_sums]
        zero += [f"sums->c{v}[j] = 0;" for v in single]
        add = [f"d{v}[j] += sums->c{v}[j], sums->c{v}[j] = 0;" for v in single]
        text = [
            f"AF_FUNCTION void NAME_clear({_SUMS}, int64_t slot) {{",
            *indented([*totals.values(), *own, *self.writer.columns(zero)]),
            "}",
        ]
        if not single:
            return text
        return [
            *text,
            f"AF_FUNCTION void NAME_flush({_SUMS}, int64_t slot) {{",
            *indented([*[totals[v] for v in single], *self.writer.columns(add)]),
            "}",
        ]

    def places_in_scratch(self, team: str) -> list[str]:
        """Return where a team has its sums in single precision."""
        if not self.single:
            return []
        return self._places(f"(float *){self._stretches()}", team, COLUMNS, "0")

    def places_in_block(self, team: str, team_in_block: str) -> list[str]:
        """Return where a team has them that may be in shared memory."""
        if not self.single:
            return []
        return [
            f"const _Bool is_shared = !{self._stretches()};",
            f"float *stretches = is_shared ? shared : (float *){self._stretches()};",
            *self._places(
                "stretches",
                f"(is_shared ? {team_in_block} : {team})",
                f"a[{words.CHUNK_COLUMNS}].i",
                "j0",
            ),
        ]

    def places_of_totals(self) -> list[str]:
        """Return where sums are that go into the partial row of the one team itself."""
        others = [v for v in self.plan.column_sums if v not in self.single]
        return [f"sums.c{v} = {self.values.partial_place(v, '0')};" for v in others]

    def _stretches(self) -> str:
        return f"a[{words.stretches(self.program, len(self.plan.column_sums))}].p"

    def _places(self, first: str, team: str, columns: str, begin: str) -> list[str]:
        """Return where each sum has its column `begin`, and so where column 0 would be."""
        return [
            f"float *single = {first} + {team} * {len(self.single)} * {columns} - {begin};",
            *[f"sums.c{v} = single + {i} * {columns};" for i, v in enumerate(self.single)],
        ]
