"""A program that adds up columns and reduces no rows, as a kernel over strips of columns.

A thread has one batch of columns in all rows that its team takes, and so their sums in registers:
nothing is exchanged before the end, and several rows are on their way at once. Teams of a block
then add up what they have in their order, and a block leaves one partial row.

A sum in single precision is of at most `STRETCH` terms; stretches are added up in double.
"""

from __future__ import annotations

from dataclasses import replace

from actors.kernels.cuda.loops import (
    MOST_WEIGHT,
    NARROW,
    STRETCH,
    ColumnRun,
    PhaseWriter,
    is_single,
)
from actors.kernels.program import values as words
from actors.kernels.program.phases import Schedule, weight
from actors.kernels.program.stages import block
from actors.kernels.program.values import member_of, sum_type_of
from compiler.contract.program import FusedProgram, Kind

STRIP_THREADS = 256
"""Threads of a block: each has some hundred registers then."""

_ROW_BYTES = 64
"""Bytes that a thread loads at once, if few rows have them: with 16 memory would be half idle."""

_MOST_ROWS, _MANY_COLUMNS = 4, 4


def rows_at_once(program: FusedProgram, batch: int) -> int:
    """Return how many rows a thread loads before it computes the first: a power of two."""
    full = [entry.dtype.itemsize for entry in program.inputs if entry.kind is Kind.FULL]
    most = min(
        _ROW_BYTES // max(1, batch * sum(full, 0)), MOST_WEIGHT // max(1, batch * weight(program))
    )
    # What is the same in all rows stays in registers, too.
    columns = [entry for entry in program.inputs if entry.kind is Kind.COLUMN]
    most = min(most, _MOST_ROWS if len(columns) < _MANY_COLUMNS else _MOST_ROWS // 2)
    rows = 1
    while 2 * rows <= most:
        rows *= 2
    return rows


class StripWriter:
    """The text of the kernel over strips of one program, with NAME for its name."""

    def __init__(self, writer: PhaseWriter, plan: Schedule) -> None:
        """Write the one phase that there is where no row is reduced."""
        self.writer, self.plan, self.values, self.runs = writer, plan, writer.values, writer.runs
        (self.phase,) = plan.phases
        self.batch, self.rows = writer.batch, rows_at_once(writer.program, writer.batch)
        loads = [*zip(self.phase.loads, writer.loaded(self.phase), strict=True)]
        is_column = [self.values.kind(v) is Kind.COLUMN for v in self.phase.loads]
        self.of_all = [x for x, is_one in zip(loads, is_column, strict=True) if is_one]
        self.of_rows = [x for x, is_one in zip(loads, is_column, strict=True) if not is_one]
        self.single = [v for v in plan.column_sums if is_single(self.values.dtype(v))]

    def shared(self) -> list[str]:
        """Return the shared memory of the kernel, which stands before anything is computed."""
        return [f"AF_SHARED(af_word, parts, {STRIP_THREADS * self.batch});"]

    def lines(self) -> list[str]:
        """Return the body of the kernel, behind the scalars."""
        return [
            f"const int32_t team = (int32_t)a[{words.TEAM_THREADS}].i;",
            "const int32_t own = AF_THREAD / team, lane = AF_THREAD % team;",
            "const int32_t teams_in_block = AF_NUM_THREADS / team;",
            f"const int32_t blocks = (int32_t)a[{words.NUM_PARTIALS}].i;",
            "const int32_t piece = (int32_t)AF_BLOCK / blocks;",
            "const int64_t slot = AF_BLOCK - piece * blocks;",
            "const int64_t teams = (int64_t)blocks * teams_in_block;",
            f"const int64_t j0 = piece * a[{words.CHUNK_COLUMNS}].i;",
            f"const int64_t j1 = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, a[{words.COLUMNS}].i);",
            "const _Bool is_first_lane = lane == 0 && piece == 0;",
            *self.writer.first_columns(),
            "const int64_t b = first;",
            "const int32_t left = (int32_t)af_max(af_min(j1 - b, apart), 0);",
            f"const int64_t r1 = a[{words.ROWS}].i;",
            *[f"{self._total(v)} t{v}[{self.batch}] = {{0}};" for v in self.plan.column_sums],
            *[f"float p{v}[{self.batch}] = {{0}};" for v in self.single],
            *[self.values.pointer(v) for v, _ in self.of_all],
            *self.runs.either(lambda is_wide: self._all_rows(is_wide=is_wide)),
            *self._joined(),
        ]

    def _total(self, value: int) -> str:
        return sum_type_of(self.values.dtype(value))

    def _all_rows(self, *, is_wide: bool) -> list[str]:
        """Return the loop over the rows of a team."""
        of_all = [placed for _, placed in self.of_all]
        runs = [run for run, _ in of_all]
        flush, count = [], []
        if self.single:
            ends = [f"t{v}[k] += p{v}[k], p{v}[k] = 0;" for v in self.single]
            flush = self.runs.each_column(ends)
            # So many rows at a time divide a stretch.
            is_end = f"if ((stretch += {self.rows}) == {STRETCH})"
            count = block(is_end, [*flush, "stretch = 0;"])
        begin = f"a[{words.FIRST_ROW}].i + slot * teams_in_block + own"
        return [
            *self.writer.places(of_all, "const "),
            *self.runs.arrays(runs),
            *self.runs.get(runs, is_wide=is_wide),
            *(["int32_t stretch = 0;"] if self.single else []),
            "AF_ROLLED",
            *block(
                f"for (int64_t r0 = {begin}; r0 < r1; r0 += {self.rows} * teams)",
                [*self._some_rows(is_wide=is_wide), *count],
            ),
            *flush,
        ]

    def _some_rows(self, *, is_wide: bool) -> list[str]:
        """Return what is done with rows r0, r0 + teams, ...: all loads precede the first store."""
        placed = [x for _, x in self.of_rows]
        of_row = [replace(run, words=f"{run.words}[i]") for run, _ in placed]
        row = [
            "const _Bool is_own = r0 + i * teams < r1;",
            "const int64_t r = is_own ? r0 + i * teams : r1 - 1;",
            "const _Bool is_first = is_own && is_first_lane;",
            "NAME_row *row = rows + i;",
        ]
        loads = [
            "NAME_row0(a, s, row, r, is_first);",
            *[self.values.pointer(v, row="r") for v, _ in self.of_rows],
            *self.writer.places(placed, "const "),
            *self.runs.get(of_row, is_wide=is_wide),
        ]
        computes = [
            *self._computed(of_row, is_wide=is_wide),
            "NAME_row1(a, s, row, r, is_first);",
            "if (is_first) NAME_end(a, row, r);",
            "(void)is_own;",
        ]
        text = [
            f"NAME_row rows[{self.rows}];",
            *self.runs.arrays([run for run, _ in placed], self.rows),
        ]
        for step in (loads, computes):
            loop = block(f"for (int32_t i = 0; i < {self.rows}; i++)", [*row, *step])
            text += ["AF_UNROLL", *loop]
        return text

    def _computed(self, of_row: list[ColumnRun], *, is_wide: bool) -> list[str]:
        """Return what is computed of row r, added up and stored."""
        phase, writer, values = self.phase, self.writer, self.values
        places = {v: run for v, (run, _) in self.of_all}
        places |= {v: run for (v, _), run in zip(self.of_rows, of_row, strict=True)}
        stores = writer.stored(phase)
        runs, added = [run for run, _ in stores], []
        for v in phase.column_sums:
            # Of a row that is not there nothing is added.
            term = writer.term(v) if self.rows == 1 else f"is_own ? {writer.term(v)} : 0"
            added.append(f"{'p' if v in self.single else 't'}{v}[k] += {term};")
        store = [values.output_row(position) for position in phase.stores]
        store += [*writer.places(stores), *self.runs.store(runs, is_wide=is_wide)]
        return [
            *values.prelude((*phase.body, *phase.column_sums)),
            *writer.random_bits(phase),
            *self.runs.arrays(runs),
            *writer.each_computed(phase, [places[v] for v in phase.loads], added, runs),
            *(block("if (is_own)", store) if runs else []),
        ]

    def _joined(self) -> list[str]:
        """Return how teams add up what they have: of each column, one team after the other."""
        size = f"team * {self.batch}"
        text = []
        for v in self.plan.column_sums:
            c_type, member = self._total(v), member_of(self.values.dtype(v))
            column = [
                f"const int32_t of = q / {self.batch}, k = q % {self.batch};",
                f"const int64_t j = j0 + (way == {NARROW} ? of + k * team : q);",
                f"{c_type} t = 0;",
                "for (int32_t i = 0; i < teams_in_block; i++)",
                f"    t += parts[i * {size} + q].{member};",
                f"if (j < j1) ({self.values.partial_place(v, 'slot')})[j] = t;",
            ]
            text += [
                "AF_BARRIER();",
                "AF_UNROLL",
                f"for (int32_t k = 0; k < {self.batch}; k++)",
                f"    parts[AF_THREAD * {self.batch} + k].{member} = t{v}[k];",
                "AF_BARRIER();",
                *block(f"for (int32_t q = AF_THREAD; q < {size}; q += AF_NUM_THREADS)", column),
            ]
        return text
