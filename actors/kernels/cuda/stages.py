"""What the kernels of a program share: its structs, what is done per launch and row, and its sums.

A team has its sums over rows in single precision for a stretch of rows, in shared memory or in
scratch, and adds them to its partial row of doubles in between.
"""

from __future__ import annotations

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.expressions import is_float, storage_of
from actors.kernels.codegen.expressions import sum_type_of as total_type_of
from actors.kernels.codegen.phases import Schedule
from actors.kernels.codegen.stages import row_lines, row_stores, scalar_lines, struct, structs
from actors.kernels.codegen.values import Values, indented
from actors.kernels.cuda.loops import PhaseWriter, is_single, sum_dtype
from actors.kernels.cuda.runs import ColumnRun
from compiler.fusion.program import FusedProgram
from compiler.types import DType

COLUMNS = f"a[{words.COLUMNS}].i"

_STAGE = "const af_word *a, const NAME_scalars *s, NAME_row *row, int64_t r, _Bool is_first"
_SUMS = "const af_word *a, NAME_sums *sums, int64_t j0, int64_t j1, int64_t lane, int64_t team"


def has_dear_scalars(values: Values) -> bool:
    """Return whether SCALAR values are computed in double, a few hundred instructions for a power.

    Processors for graphics do 2 of those at a time, for 128 of others: one thread of a block
    computes them for all.
    """
    made = [v for v in values.plan.scalars if values.op(v) not in ("constant", "cast")]
    return any([values.dtype(v) is DType.FLOAT64 for v in made])


def scalars_function(values: Values) -> list[str]:
    """Return the function that computes SCALAR values."""
    return [
        "AF_FUNCTION void NAME_get_scalars(const af_word *a, NAME_scalars *s) {",
        *indented(scalar_lines(values)),
        "    (void)a, (void)s;",
        "}",
    ]


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
        sums = [f"{self.writer.sum_type(v)} *c{v};" for v in self.plan.column_sums]
        text += [*structs(self.values), *struct("sums", sums), *scalars_function(self.values)]
        for level in range(len(self.plan.rows)):
            text += self._row_stage(level)
        return [*text, *self._row_end(), *self._sum_functions()]

    def _num_words(self) -> int:
        return words.way(self.program, len(self.plan.column_sums)) + 1

    def _row_stage(self, level: int) -> list[str]:
        """Return the function that computes ROW values of a level, from reductions before it."""
        return [
            f"AF_FUNCTION void NAME_row{level}({_STAGE}) {{",
            *indented(row_lines(self.values, level, self._check, index="")),
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
        return [
            "AF_FUNCTION void NAME_end(const af_word *a, const NAME_row *row, int64_t r) {",
            *indented(row_stores(self.values)),
            "    (void)a, (void)row, (void)r;",
            "}",
        ]

    def _sum_functions(self) -> list[str]:
        """Return the functions that begin the sums of a team and that end a stretch of them."""
        if not self.plan.column_sums:
            return []
        values, single = self.values, self.single
        places = {
            v: f"{total_type_of(values.dtype(v))} *d{v} = {values.partial_place(v, 'slot')};"
            for v in self.plan.column_sums
        }
        own = [f"sums->c{v} = d{v};" for v in self.plan.column_sums if v not in single]
        totals = [self._total(v) for v in self.plan.column_sums]
        clear = self._moved([], [*totals, *map(self._stretch, single)], [])
        text = [
            f"AF_FUNCTION void NAME_clear({_SUMS}, int64_t slot) {{",
            *indented([*places.values(), *own, *clear]),
            "}",
        ]
        if not single:
            return text
        totals, stretches = [[make(v) for v in single] for make in (self._total, self._stretch)]
        both = zip(totals, stretches, strict=True)
        add = [d.put(f"{d.element()} + {c.element()}") for (d, _), (c, _) in both]
        add += [c.put("0.0f") for c, _ in stretches]
        flush = self._moved([*totals, *stretches], [*totals, *stretches], add)
        return [
            *text,
            f"AF_FUNCTION void NAME_flush({_SUMS}, int64_t slot) {{",
            *indented([*[places[v] for v in single], *flush]),
            "}",
        ]

    def _total(self, value: int) -> tuple[ColumnRun, str]:
        """Return the run of a team's partial row, and where it is."""
        dtype = DType.FLOAT64 if is_float(self.values.dtype(value)) else DType.INT64
        return ColumnRun(f"t{value}", f"h{value}", dtype, storage_of(dtype)), f"d{value}"

    def _stretch(self, value: int) -> tuple[ColumnRun, str]:
        dtype = sum_dtype(self.values.dtype(value))
        return ColumnRun(f"q{value}", f"g{value}", dtype, storage_of(dtype)), f"sums->c{value}"

    def _moved(
        self,
        loads: list[tuple[ColumnRun, str]],
        stores: list[tuple[ColumnRun, str]],
        body: list[str],
    ) -> list[str]:
        """Return the loop that loads runs, does something about each element and stores runs."""
        runs = self.writer.runs
        loop = [
            "AF_UNROLL",
            f"for (int32_t k = 0; k < {self.writer.batch}; k++) {{",
            *indented(body),
            "}",
        ]
        return self.writer.every_batch(
            [
                *[f"{run.storage} *{run.place} = {place} + b;" for run, place in stores],
                *runs.arrays([run for run, _ in stores]),
                *runs.get([run for run, _ in loads]),
                *(loop if body else []),
                *runs.store([run for run, _ in stores]),
            ]
        )

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
