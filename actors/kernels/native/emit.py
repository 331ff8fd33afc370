"""A program as the text of C functions for every shape.

    int32_t NAME(void *arguments)                          the launch
    void NAME_rows(void *arguments, row0, row1, worker)    some of its rows, for a caller of our own
    void NAME_finish(void *arguments)                      what follows behind all rows

Both ways to run come from the same phases (`native.loops`). Where there are many rows, a chunk is
some rows, and walks them phase by phase while they lie in the first-level cache. Where there are
few and they are long, a chunk is some columns, every phase is a parallel call, and the pieces'
reductions are put together in order in between.

A caller of NAME_rows gives all rows of a chunk, in order and one call at a time, with pieces that
begin at multiples of `num_rows_at_once` in the chunk: then the bits are those of the launch. It
calls NAME_finish at the end.

Loops carry `omp simd`: an output may lie over an input only element by element, so no iteration
depends on another.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from actors.kernels.common.kernel import Attrs, fused_program
from actors.kernels.library.runtime import CFunction, unique_name
from actors.kernels.native.loops import REDUCTIONS, num_rows_at_once, phase_lines
from actors.kernels.program import values as words
from actors.kernels.program.phases import LoopPhase, Schedule, schedule
from actors.kernels.program.spaces import _made
from actors.kernels.program.values import (
    Values,
    column_lines,
    expression,
    indented,
    row_lines,
    row_stores,
    scalar_lines,
    scalar_stores,
    structs,
    sum_type_of,
)
from compiler.contract.program import OTHERS, FusedProgram, Instruction, Kind
from compiler.contract.types import DType

_FINISH_COLUMNS = 4096

_MOST_RANDOM = 6
"""Every philox has 8 KiB of bits on the stack of its phase."""


def is_taken(program: FusedProgram) -> bool:
    """Return whether there is C for every instruction of a program."""
    num_random = [i.op for i in program.instructions].count("philox")
    return num_random <= _MOST_RANDOM and all([_has_form(program, i) for i in program.instructions])


def emit(program: FusedProgram, plan: Schedule | None = None) -> CFunction:
    """Return the function of a program, walked as planned.

    Raises ValueError where `is_taken` is false.
    """
    text = "\n".join(_CEmitter(program, plan or schedule(program)).lines())
    name = unique_name("fused", text)
    ops = ", ".join(dict.fromkeys([i.op for i in program.instructions if i.op != "constant"]))
    types = ", ".join(dict.fromkeys([i.dtype.value for i in program.inputs]))
    about = f"program of {len(program.instructions)} instructions ({ops}) on {types}"
    return CFunction(name, text.replace("NAME", name), about)


def _has_form(program: FusedProgram, instruction: Instruction) -> bool:
    op, dtypes = instruction.op, tuple([program.dtype_of(v) for v in instruction.operands])
    if op in REDUCTIONS:
        return instruction.dtype is not DType.BOOL
    if op == "column_sum" or (op in OTHERS and op not in ("constant", "cast")):
        return True
    names, constants = ("x",) * len(dtypes), (None,) * len(dtypes)
    return expression(instruction, names, dtypes, constants) is not None


class _CEmitter:
    """The text of one program, with NAME for its name."""

    def __init__(self, program: FusedProgram, plan: Schedule) -> None:
        self.program = program
        self.plan = plan
        self.values = Values(program, self.plan)
        self.num_rows = num_rows_at_once(program)
        self.has_columns = any([program.kind_of(v) is Kind.COLUMN for v in program.outputs])

    def lines(self) -> list[str]:
        """Return the whole text."""
        text = [*structs(self.values), *self._scalars()]
        for level in range(len(self.plan.rows)):
            text += self._row_stage(level)
        for index, phase in enumerate(self.plan.phases):
            text += phase_lines(self.values, f"phase{index}", phase, 1)
            if self.num_rows > 1:
                text += phase_lines(self.values, f"phases{index}", phase, self.num_rows)
        text += [*self._row_end(), *self._walk_rows(), *self._walk_columns()]
        if self.has_columns:
            text += self._finish_chunk()
        return text + self._finish() + self._launch()

    # Once per launch and once per row.

    def _scalars(self) -> list[str]:
        return [
            "static void NAME_get_scalars(const af_word *a, NAME_scalars *s) {",
            *indented(scalar_lines(self.values)),
            "    (void)a, (void)s;",
            "}",
        ]

    def _row_stage(self, level: int) -> list[str]:
        """Return the function that computes ROW values of a level, from reductions before it."""
        return [
            f"static inline void NAME_row{level}(const af_word *a, const NAME_scalars *s,",
            "        NAME_row *row, int64_t r) {",
            *indented(row_lines(self.values, level, self._check)),
            "    (void)a, (void)s, (void)row, (void)r;",
            "}",
        ]

    def _check(self, value: int) -> list[str]:
        extent = int(self.values.instruction(value).constants[0])
        # Chunks run on several threads: any row with a bad index may stay, but no torn number.
        status = f"&((af_word *)a)[{words.STATUS}].i"
        return [
            f"if ((uint64_t)(int64_t)v{value} >= {extent}ULL)",
            f"    __atomic_store_n({status}, r + 1, __ATOMIC_RELAXED);",
        ]

    def _row_end(self) -> list[str]:
        return [
            "static inline void NAME_end(const af_word *a, const NAME_row *row, int64_t r) {",
            *indented(row_stores(self.values)),
            "    (void)a, (void)row, (void)r;",
            "}",
        ]

    # The two ways to run.

    def _zero_sums(self, slot: str, begin: str, end: str) -> list[str]:
        text = []
        for v in self.plan.column_sums:
            size = f"(size_t)({end} - {begin}) * sizeof *c{v}"
            # All bits 0 are 0 of integers and doubles alike.
            text += [self.values.partial(v, slot), f"memset(c{v} + {begin}, 0, {size});"]
        return text

    def _walk_rows(self) -> list[str]:
        columns = f"a[{words.COLUMNS}].i"
        several = []
        # The rows that are left over at the end of a chunk take the function for a single one.
        if self.num_rows > 1:
            several = [
                f"for (; r + {self.num_rows} <= row1; r += {self.num_rows}) {{",
                *indented(self._some_rows(self.num_rows, columns)),
                "}",
            ]
        text = [
            "const af_word *a = arguments;",
            f"const int64_t slot = row0 / a[{words.CHUNK_ROWS}].i;",
            f"if (row0 % a[{words.CHUNK_ROWS}].i == 0) {{",
            *indented(self._zero_sums("slot", "0", columns)),
            "}",
            "NAME_scalars scalars, *s = &scalars;",
            "NAME_get_scalars(a, s);",
            "int64_t r = row0;",
            *several,
            "for (; r < row1; r++) {",
            *indented(self._some_rows(1, columns)),
            "}",
        ]
        return [
            "AF_EXPORT void NAME_rows(void *arguments, int64_t row0, int64_t row1,",
            "        int32_t worker) {",
            *indented(text),
            "}",
            "static void NAME_chunk(void *arguments, int64_t chunk, int32_t worker) {",
            "    const af_word *a = arguments;",
            f"    const int64_t row0 = chunk * a[{words.CHUNK_ROWS}].i;",
            f"    const int64_t row1 = af_min(row0 + a[{words.CHUNK_ROWS}].i, a[{words.ROWS}].i);",
            "    NAME_rows(arguments, row0, row1, worker);",
            "}",
        ]

    def _some_rows(self, num_rows: int, columns: str) -> list[str]:
        name = "phase" if num_rows == 1 else "phases"
        text = [f"NAME_row row[{num_rows}];"]
        text += [f"NAME_row0(a, s, row + {k}, r + {k});" for k in range(num_rows)]
        for index in range(len(self.plan.phases)):
            text.append(f"NAME_{name}{index}(a, s, row, r, 0, {columns}, worker, slot);")
            text += [f"NAME_row{index + 1}(a, s, row + {k}, r + {k});" for k in range(num_rows)]
        return text + [f"NAME_end(a, row + {k}, r + {k});" for k in range(num_rows)]

    def _walk_columns(self) -> list[str]:
        text = [
            "NAME_scalars scalars, *s = &scalars;",
            "NAME_get_scalars(a, s);",
            *self._zero_sums("0", "0", f"a[{words.COLUMNS}].i"),
            f"for (int64_t r = 0; r < a[{words.ROWS}].i; r++) {{",
            "    NAME_row row[1];",
            "    NAME_frame frame = {a, s, row, r};",
            "    NAME_row0(a, s, row, r);",
        ]
        count, most = f"a[{words.NUM_COLUMN_CHUNKS}].i", f"(int32_t)a[{words.MAX_WORKERS}].i"
        for index, phase in enumerate(self.plan.phases):
            text.append(f"    af_parallel(NAME_piece{index}, &frame, {count}, {most});")
            text += [line for v in phase.reductions for line in self._combine(phase, v)]
            text.append(f"    NAME_row{index + 1}(a, s, row, r);")
        return [
            *("typedef struct {", "    const af_word *a;", "    const NAME_scalars *s;"),
            *("    const NAME_row *row;", "    int64_t r;", "} NAME_frame;"),
            *[line for index, phase in enumerate(self.plan.phases) for line in self._piece(index)],
            "static void NAME_columns(af_word *a) {",
            *indented([*text, "    NAME_end(a, row, r);", "}"]),
            "}",
        ]

    def _piece(self, index: int) -> list[str]:
        reductions = self.plan.phases[index].reductions
        text = []
        for place, v in enumerate(reductions):
            # Partial sums are doubles or 64-bit integers, whatever the value's type.
            member = "d" if self.values.is_float(v) else "i"
            where = f"((af_word *)a[{words.PARTIALS}].p)[chunk * {len(reductions)} + {place}]"
            text.append(f"    {where}.{member} = row->v{v};")
        end = f"a[{words.COLUMNS}].i"
        return [
            f"static void NAME_piece{index}(void *arguments, int64_t chunk, int32_t worker) {{",
            "    const NAME_frame *frame = arguments;",
            "    const af_word *a = frame->a;",
            "    NAME_row values = *frame->row, *row = &values;",
            f"    const int64_t j0 = chunk * a[{words.CHUNK_COLUMNS}].i;",
            f"    const int64_t j1 = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, {end});",
            f"    NAME_phase{index}(a, frame->s, row, frame->r, j0, j1, 0, 0);",
            *text,
            "    (void)worker;",
            "}",
        ]

    def _combine(self, phase: LoopPhase, value: int) -> list[str]:
        """Return the reduction of a row from those of its pieces, in their order."""
        c_type, member = ("double", "d") if self.values.is_float(value) else ("int64_t", "i")
        # Compared as signed, the upper half of its range would be negative.
        if self.values.dtype(value) is DType.UINT64:
            c_type = "uint64_t"
        place = f"i * {len(phase.reductions)} + {phase.reductions.index(value)}"
        part = f"((const af_word *)a[{words.PARTIALS}].p)[{place}].{member}"
        op = self.values.op(value)
        sign = ">" if op == "row_max" else "<"
        # p != p is true of NaN alone: it wins, as it does in numpy.
        join = "t += p" if op == "row_sum" else f"t = p != p || p {sign} t ? p : t"
        return [
            "    {",
            f"        {c_type} t = 0;",
            f"        for (int64_t i = 0; i < a[{words.NUM_COLUMN_CHUNKS}].i; i++) {{",
            f"            const {c_type} p = {part};",
            f"            if (i == 0) t = p; else {join};",
            "        }",
            f"        row->v{value} = ({self.values.type(value)})t;",
            "    }",
        ]

    # Behind all rows.

    def _finish_chunk(self) -> list[str]:
        """Return the function that adds up the partials of some columns, and what follows."""
        text = [
            "const af_word *a = arguments;",
            f"const int64_t j0 = chunk * {_FINISH_COLUMNS};",
            f"const int64_t j1 = af_min(j0 + {_FINISH_COLUMNS}, a[{words.COLUMNS}].i);",
            f"const int64_t is_cut = a[{words.NUM_COLUMN_CHUNKS}].i;",
            f"const int64_t num_slots = is_cut ? 1 : a[{words.NUM_CHUNKS}].i;",
            "NAME_scalars scalars, *s = &scalars;",
            "NAME_get_scalars(a, s);",
            "if (num_slots == 0) {",
            *indented(self._zero_sums("0", "j0", "j1")),
            "}",
        ]
        for v in self.plan.column_sums:
            c_type = sum_type_of(self.values.dtype(v))
            text += [
                self.values.partial(v, "0"),
                "for (int64_t i = 1; i < num_slots; i++) {",
                f"    const {c_type} *from = c{v} + i * {self.values.partial_step(v)};",
                "#pragma omp simd",
                f"    for (int64_t j = j0; j < j1; j++) c{v}[j] += from[j];",
                "}",
            ]
        return [
            "static void NAME_finish_chunk(void *arguments, int64_t chunk, int32_t worker) {",
            *indented([*text, *self._finish_loop()]),
            "    (void)worker, (void)s, (void)num_slots;",
            "}",
        ]

    def _finish_loop(self) -> list[str]:
        before, body = column_lines(self.values, "c{v}[j]")
        loop = ["for (int64_t j = j0; j < j1; j++) {", *indented(body), "}"]
        return [*before, "#pragma omp simd", *loop]

    def _finish(self) -> list[str]:
        text = []
        if self.has_columns:
            size = f"(a[{words.COLUMNS}].i + {_FINISH_COLUMNS - 1}) / {_FINISH_COLUMNS}"
            most = f"(int32_t)a[{words.MAX_WORKERS}].i"
            text.append(f"    af_parallel(NAME_finish_chunk, a, {size}, {most});")
        scalars = scalar_stores(self.values)
        if scalars:
            text += ["    NAME_scalars scalars, *s = &scalars;", "    NAME_get_scalars(a, s);"]
            text += indented(scalars)
        return [
            "AF_EXPORT void NAME_finish(void *arguments) {",
            "    af_word *a = arguments;",
            *text,
            "    (void)a;",
            "}",
        ]

    def _launch(self) -> list[str]:
        rows, most = f"a[{words.NUM_CHUNKS}].i", f"(int32_t)a[{words.MAX_WORKERS}].i"
        return [
            "AF_EXPORT int32_t NAME(void *arguments) {",
            "    af_word *a = arguments;",
            f"    a[{words.STATUS}].i = 0;",
            f"    if (a[{words.SKIP}].p && *(const int64_t *)a[{words.SKIP}].p) return 0;",
            f"    if (a[{words.NUM_COLUMN_CHUNKS}].i)",
            "        NAME_columns(a);",
            "    else",
            f"        af_parallel(NAME_chunk, a, {rows}, {most});",
            "    NAME_finish(a);",
            f"    return a[{words.STATUS}].i != 0;",
            "}",
        ]


def function_of(attrs: Attrs) -> CFunction | None:
    """Return the function of a launch; None where there is no C for its program."""
    function = _function(fused_program(attrs, "program"))
    members = attrs.get("members")
    if function is None or not isinstance(members, tuple):
        return function
    names = ", ".join(dict.fromkeys([str(name) for name in members]))
    return replace(function, about=f"{names}: {function.about}")


@functools.lru_cache(maxsize=4096)
def _function(program: FusedProgram) -> CFunction | None:
    scheduled = _made(program)
    return emit(program, scheduled.schedule) if is_taken(program) else None
