"""A program as the text of CUDA kernels for every shape, over the phases that C has too.

    NAME_rows       a team of threads per row, phase by phase; all teams together where rows are one
    NAME_columns<p> phase p of few long rows, a block for each piece of their columns
    NAME_last       what follows for these rows from their last reductions
    NAME_finish     COLUMN and SCALAR outputs: partial sums over rows are added up in their order

Of the first two ways a text has one: which of them a launch goes, its shape says (`programs`).

A reduction of a piece is left in scratch as 8 bytes. Every block of the next kernel puts those of
all pieces together, alike; so there is no kernel for that alone.
"""

from __future__ import annotations

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.expressions import is_float
from actors.kernels.codegen.expressions import sum_type_of as total_type_of
from actors.kernels.codegen.phases import Schedule
from actors.kernels.codegen.stages import outputs_of
from actors.kernels.codegen.values import indented
from actors.kernels.cuda.calls import KernelText
from actors.kernels.cuda.finish import FINISH_THREADS, finish_lines
from actors.kernels.cuda.loops import MAX_THREADS, STRETCH
from actors.kernels.cuda.stages import COLUMNS, StageWriter, has_dear_scalars
from compiler.fusion.program import FusedProgram, Kind
from compiler.types import DType

SHARED_SUMS = 8192
"""Sums over rows that a block has in shared memory: 32 KiB, so that several blocks share it."""

PIECE_THREADS = 256
"""Threads of a block that has a piece of the columns."""

_ROWS = f"a[{words.ROWS}].i"
_TEAM = f"a[{words.TEAM_THREADS}].i"
_PIECES = f"a[{words.NUM_COLUMN_CHUNKS}].i"


def emit(program: FusedProgram, plan: Schedule, *, is_cut: bool) -> KernelText:
    """Return the kernels of a program, for rows or for pieces of the columns of few rows.

    All that `check_program` lets pass has kernels. Raises ValueError for what it does not.
    """
    writer = _CudaEmitter(program, plan)
    text = "\n".join(writer.lines(is_cut=is_cut)) + "\n"
    ops = ", ".join(dict.fromkeys([i.op for i in program.instructions if i.op != "constant"]))
    types = ", ".join(dict.fromkeys([i.dtype.value for i in program.inputs]))
    about = f"program of {len(program.instructions)} instructions ({ops}) on {types}"
    has_exchanges = bool(writer.reductions) or bool(plan.column_sums) or writer.is_dear
    return KernelText.of("fused", text, tuple(writer.kernels), about, has_exchanges=has_exchanges)


class _CudaEmitter:
    """The text of one program, with NAME for its name."""

    def __init__(self, program: FusedProgram, plan: Schedule) -> None:
        self.program, self.plan = program, plan
        self.stages = StageWriter(program, plan)
        self.values, self.writer = self.stages.values, self.stages.writer
        self.reductions = self.stages.reductions
        self.is_dear = has_dear_scalars(self.values)
        self.kernels: list[str] = []

    def lines(self, *, is_cut: bool) -> list[str]:
        """Return the whole text."""
        phases = range(len(self.plan.phases))
        text = self.stages.lines()
        for index in phases:
            text += self.writer.lines(index)
        if is_cut:
            text += [line for index in phases for line in self._columns_kernel(index)]
            text += self._last_kernel() if outputs_of(self.values, Kind.ROW) else []
        elif self._has_rows():
            text += self._rows_kernel()
        if outputs_of(self.values, Kind.COLUMN) or outputs_of(self.values, Kind.SCALAR):
            text += self._kernel("finish", FINISH_THREADS, finish_lines(self.stages))
        return text

    def _has_rows(self) -> bool:
        """Whether anything is done for rows, or checked in them."""
        is_checked = any([i.op == "check_index" for i in self.program.instructions])
        is_idle = all([self.writer.is_empty(phase) for phase in self.plan.phases])
        return is_checked or not is_idle or bool(outputs_of(self.values, Kind.ROW))

    def _kernel(self, name: str, threads: int, body: list[str]) -> list[str]:
        own = f"NAME_{name}"
        self.kernels.append(own)
        return [
            f"typedef NAME_arguments {own}_arguments;",
            f"AF_KERNEL_UP_TO({threads}) {own}(AF_ARGUMENTS({own}) arguments) {{",
            *indented(body),
            "}",
        ]

    def _start(self, *, has_shared: bool = False) -> list[str]:
        """Return what a kernel over rows begins with."""
        shared = [f"AF_SHARED(float, shared, {SHARED_SUMS});"] if has_shared else []
        scalars = ["NAME_scalars scalars, *s = &scalars;", "NAME_get_scalars(a, s);"]
        if self.is_dear:
            shared.append("AF_SHARED(NAME_scalars, s, 1);")
            scalars = ["if (AF_THREAD == 0) NAME_get_scalars(a, s);", "AF_BARRIER();"]
        return [
            "AF_EXCHANGE(exchange);" if self.reductions else "void *exchange = 0;",
            *shared,
            "const af_word *a = arguments.w;",
            f"if (a[{words.SKIP}].p && *(const int64_t *)a[{words.SKIP}].p) return;",
            *scalars,
            "NAME_sums sums;",
        ]

    # A team per row.

    def _rows_kernel(self) -> list[str]:
        single = self.stages.single
        text = [
            f"const int64_t team = {_TEAM};",
            "const int64_t thread = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;",
            "const int64_t own = thread / team, lane = thread % team;",
            "/* Teams of one warp go from row to row together. */",
            "const int64_t shift = team < 32 ? own % (32 / team) : 0;",
            f"const int64_t teams = a[{words.NUM_TEAMS}].i, piece = own / teams;",
            "const int64_t slot = own - piece * teams;",
            f"const int64_t j0 = piece * a[{words.CHUNK_COLUMNS}].i;",
            f"const int64_t end = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, {COLUMNS});",
            *self.stages.places_in_block("own", "(AF_THREAD / team)"),
        ]
        sums = "a, &sums, j0, end, lane, team, slot"
        if self.plan.column_sums:
            text.append(f"NAME_clear({sums});")
        text += ["int32_t stretch = 0;"] if single else []
        text += [
            f"const int64_t r1 = {_ROWS};",
            f"for (int64_t r0 = a[{words.FIRST_ROW}].i + slot - shift; r0 < r1; r0 += teams) {{",
            "    const _Bool is_own = r0 + shift < r1;",
            "    const int64_t r = is_own ? r0 + shift : r1 - 1;",
            "    const int64_t j1 = is_own ? end : 0;",
            "    const _Bool is_first = is_own && lane == 0 && piece == 0;",
            "    NAME_row row[1];",
            "    NAME_row0(a, s, row, r, is_first);",
        ]
        for index in range(len(self.plan.phases)):
            text += [
                f"    NAME_phase{index}(a, s, row, r, j0, j1, lane, team, exchange, &sums);",
                f"    NAME_row{index + 1}(a, s, row, r, is_first);",
            ]
        text.append("    if (is_first) NAME_end(a, row, r);")
        if single:
            text.append(f"    if (++stretch == {STRETCH} || r0 + teams >= r1) {{")
            text += [f"        NAME_flush({sums});", "        stretch = 0;", "    }"]
        text.append("}")
        body = [*self._start(has_shared=bool(single)), *text, "(void)exchange, (void)sums;"]
        return self._kernel("rows", MAX_THREADS, body)

    # Pieces of the columns of few rows.

    def _columns_kernel(self, index: int) -> list[str]:
        phase = self.plan.phases[index]
        sums = "a, &sums, j0, j1, lane, team, 0"
        has_sums = bool(self.plan.column_sums) and index == 0
        text = [
            "const int64_t team = AF_NUM_THREADS, lane = AF_THREAD;",
            f"const int64_t j0 = AF_BLOCK * a[{words.CHUNK_COLUMNS}].i;",
            f"const int64_t j1 = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, {COLUMNS});",
            *(["const _Bool is_first = AF_BLOCK == 0 && lane == 0;"] if index == 0 else []),
            *self.stages.places_in_scratch("0"),
            *self.stages.places_of_totals(),
        ]
        text += [f"NAME_clear({sums});"] if has_sums else []
        text += [
            f"for (int64_t r = a[{words.FIRST_ROW}].i; r < {_ROWS}; r++) {{",
            "    NAME_row row[1];",
            *indented(self._row_until(index)),
            f"    NAME_phase{index}(a, s, row, r, j0, j1, lane, team, exchange, &sums);",
        ]
        stores = [self._partial(v) for v in phase.reductions]
        text += ["    if (lane == 0) {", *indented(stores, 2), "    }"] if stores else []
        text.append("}")
        is_last = index == len(self.plan.phases) - 1
        text += [f"NAME_flush({sums});"] if self.stages.single and is_last else []
        body = [*self._start(), *text, "(void)exchange, (void)sums;"]
        return self._kernel(f"columns{index}", PIECE_THREADS, body)

    def _last_kernel(self) -> list[str]:
        text = [
            "const int64_t team = AF_NUM_THREADS, lane = AF_THREAD;",
            f"for (int64_t r = a[{words.FIRST_ROW}].i; r < {_ROWS}; r++) {{",
            "    NAME_row row[1];",
            *indented(self._row_until(len(self.plan.phases))),
            "    if (lane == 0) NAME_end(a, row, r);",
            "}",
        ]
        body = [*self._start(), *text, "(void)exchange, (void)sums, (void)team;"]
        return self._kernel("last", PIECE_THREADS, body)

    def _row_until(self, index: int) -> list[str]:
        """Return the ROW values that phase `index` reads; only the first kernel reports indices."""
        text = [f"NAME_row0(a, s, row, r, {'is_first' if index == 0 else '0'});"]
        for before, phase in enumerate(self.plan.phases[:index]):
            text += [line for v in phase.reductions for line in self._combine(v)]
            text.append(f"NAME_row{before + 1}(a, s, row, r, 0);")
        return text

    def _partials(self, value: int) -> str:
        """Return where the partials of a reduction begin: row by row, reduction by reduction."""
        number, count = self.reductions.index(value), len(self.reductions)
        row = f"((r - a[{words.FIRST_ROW}].i) * {count} + {number})"
        return f"(af_word *)a[{words.PARTIALS}].p + {row} * {_PIECES}"

    def _partial(self, value: int) -> str:
        member = "d" if is_float(self.values.dtype(value)) else "i"
        return f"({self._partials(value)})[AF_BLOCK].{member} = row->v{value};"

    def _combine(self, value: int) -> list[str]:
        dtype, op = self.values.dtype(value), self.values.op(value)
        own = "uint64_t" if dtype is DType.UINT64 else total_type_of(dtype)
        sort = {"double": "f64", "int64_t": "i64", "uint64_t": "u64"}[own]
        sort = "i64" if op == "row_sum" and own == "uint64_t" else sort
        part = f"({own})p->{'d' if is_float(dtype) else 'i'}"
        join = {"row_sum": "AF_ADD", "row_max": "AF_LARGER", "row_min": "AF_SMALLER"}[op]
        # A thread without pieces has the last one again, which changes no extreme, and no sum.
        first = f"lane < {_PIECES} ? {part} : 0" if op == "row_sum" else part
        return [
            "{",
            f"    const af_word *p = {self._partials(value)};",
            f"    const af_word *end = p + {_PIECES};",
            f"    p += af_min(lane, {_PIECES} - 1);",
            f"    {own} t = {first};",
            f"    for (p += team; p < end; p += team) t = {join}(t, {part});",
            f"    row->v{value} = ({self.values.type(value)})"
            f"af_team_{op[len('row_') :]}_{sort}(t, team, exchange);",
            "}",
        ]
