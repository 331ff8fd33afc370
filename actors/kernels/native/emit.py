"""A program as the text of C functions for every shape.

    int32_t NAME(void *arguments)                          the launch
    void NAME_rows(void *arguments, row0, row1, worker)    some of its rows, for a caller of our own
    void NAME_finish(void *arguments)                      what follows behind all rows

Both ways to run come from the same phases (`native.loops`). Where there are many rows, a chunk is
some rows, and walks them phase by phase while they lie in the first-level cache. Where there are
few and they are long, a chunk is some columns, every phase is a parallel call, and the pieces'
reductions are put together in order in between. Where rows are narrow, a row that is walked is
several of the program's (`native.fused`), which the text learns from words of the block.

A caller of NAME_rows gives all rows of a chunk, in order and one call at a time, with pieces that
begin at multiples of `num_rows_at_once` in the chunk: then the bits are those of the launch. It
calls NAME_finish at the end.

Loops carry `omp simd`: an output may lie over an input only element by element, so no iteration
depends on another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from actors.kernels.common.kernel import Attrs, fused_program
from actors.kernels.library.runtime import CFunction, unique_name
from actors.kernels.native.loops import REDUCTIONS, num_rows_at_once, phase_lines
from actors.kernels.program import values as words
from actors.kernels.program.numbers import Number, numbers_of
from actors.kernels.program.phases import LoopPhase, Schedule, schedule
from actors.kernels.program.spaces import scheduled
from actors.kernels.program.stages import (
    GET_SCALARS,
    Dialect,
    about,
    block,
    column_lines,
    scalar_stores,
    skip_line,
    stage_functions,
    struct,
    structs,
)
from actors.kernels.program.values import (
    Values,
    expression,
    member_of,
    partial_type_of,
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


def emit(
    program: FusedProgram,
    plan: Schedule | None = None,
    numbers: Sequence[Number] | None = None,
) -> CFunction:
    """Return the function of a program, walked as planned, with these `numbers` as words.

    None are all of `numbers_of`: the block has a place for each, whether the text reads it or not.

    Raises ValueError where `is_taken` is false.
    """
    numbers = numbers_of(program) if numbers is None else numbers
    text = "\n".join(_CEmitter(program, plan or schedule(program), numbers).lines())
    name = unique_name("fused", text)
    return CFunction(name, text.replace("NAME", name), about(program))


def _has_form(program: FusedProgram, instruction: Instruction) -> bool:
    op, dtypes = instruction.op, tuple([program.dtype_of(v) for v in instruction.operands])
    if op in REDUCTIONS:
        return instruction.dtype is not DType.BOOL
    if op == "column_sum" or (op in OTHERS and op not in ("constant", "cast")):
        return True
    names, constants = ("x",) * len(dtypes), (None,) * len(dtypes)
    return expression(instruction, names, dtypes, constants) is not None


def _check_lines(values: Values, value: int) -> list[str]:
    # Chunks run on several threads: any row with a bad index may stay, but no torn number.
    status = f"&((af_word *)a)[{words.STATUS}].i"
    return [
        f"if ((uint64_t)(int64_t)v{value} >= (uint64_t){values.size(value)})",
        f"    __atomic_store_n({status}, r + 1, __ATOMIC_RELAXED);",
    ]


_DIALECT = Dialect("static inline void", "static void", _check_lines)


class _CEmitter:
    """The text of one program, with NAME for its name."""

    def __init__(self, program: FusedProgram, plan: Schedule, numbers: Sequence[Number]) -> None:
        self.program = program
        self.plan = plan
        self.values = Values(program, plan, numbers=numbers)
        self.num_rows = num_rows_at_once(program)
        self.has_columns = any([program.kind_of(v) is Kind.COLUMN for v in program.outputs])

    def lines(self) -> list[str]:
        """Return the whole text."""
        text = [*structs(self.values), *stage_functions(self.values, _DIALECT)]
        for index, phase in enumerate(self.plan.phases):
            text += phase_lines(self.values, f"phase{index}", phase, 1)
            if self.num_rows > 1:
                text += phase_lines(self.values, f"phases{index}", phase, self.num_rows)
        text += [*self._walk_rows(), *self._walk_columns()]
        if self.has_columns:
            text += self._finish_chunk()
        return text + self._finish() + self._launch()

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
        # The rows that are left over at the end of a chunk take the function for a single one.
        several = f"for (; r + {self.num_rows} <= row1; r += {self.num_rows})"
        text = [
            "const af_word *a = arguments;",
            f"const int64_t slot = row0 / a[{words.CHUNK_ROWS}].i;",
            *block(
                f"if (row0 % a[{words.CHUNK_ROWS}].i == 0)", self._zero_sums("slot", "0", columns)
            ),
            *GET_SCALARS,
            "int64_t r = row0;",
            *(block(several, self._some_rows(self.num_rows)) if self.num_rows > 1 else []),
            *block("for (; r < row1; r++)", self._some_rows(1)),
        ]
        chunk = [
            "const af_word *a = arguments;",
            f"const int64_t row0 = chunk * a[{words.CHUNK_ROWS}].i;",
            f"const int64_t row1 = af_min(row0 + a[{words.CHUNK_ROWS}].i, a[{words.ROWS}].i);",
            "NAME_rows(arguments, row0, row1, worker);",
        ]
        rows = "AF_EXPORT void NAME_rows(void *arguments, int64_t row0, int64_t row1,"
        return [
            *block(f"{rows}\n        int32_t worker)", text),
            *block(_chunk_head("chunk"), chunk),
        ]

    def _some_rows(self, num_rows: int) -> list[str]:
        columns = f"a[{words.COLUMNS}].i"
        name = "phase" if num_rows == 1 else "phases"
        text = [f"NAME_row row[{num_rows}];"]
        text += [f"NAME_row0(a, s, row + {k}, r + {k});" for k in range(num_rows)]
        for index in range(len(self.plan.phases)):
            text.append(f"NAME_{name}{index}(a, s, row, r, 0, {columns}, worker, slot);")
            text += [f"NAME_row{index + 1}(a, s, row + {k}, r + {k});" for k in range(num_rows)]
        return text + [f"NAME_end(a, row + {k}, r + {k});" for k in range(num_rows)]

    def _walk_columns(self) -> list[str]:
        row = [
            "NAME_row row[1];",
            "NAME_frame frame = {a, s, row, r};",
            "NAME_row0(a, s, row, r);",
        ]
        count, most = f"a[{words.NUM_COLUMN_CHUNKS}].i", f"(int32_t)a[{words.MAX_WORKERS}].i"
        for index, phase in enumerate(self.plan.phases):
            row.append(f"af_parallel(NAME_piece{index}, &frame, {count}, {most});")
            row += [line for v in phase.reductions for line in self._combine(phase, v)]
            row.append(f"NAME_row{index + 1}(a, s, row, r);")
        walk = [
            *GET_SCALARS,
            *self._zero_sums("0", "0", f"a[{words.COLUMNS}].i"),
            *block(
                f"for (int64_t r = 0; r < a[{words.ROWS}].i; r++)", [*row, "NAME_end(a, row, r);"]
            ),
        ]
        members = ["const af_word *a;", "const NAME_scalars *s;", "const NAME_row *row;"]
        return [
            *struct("frame", [*members, "int64_t r;"]),
            *[line for index in range(len(self.plan.phases)) for line in self._piece(index)],
            *block("static void NAME_columns(af_word *a)", walk),
        ]

    def _piece(self, index: int) -> list[str]:
        reductions = self.plan.phases[index].reductions
        text = []
        for place, v in enumerate(reductions):
            # Partial sums are doubles or 64-bit integers, whatever the value's type.
            where = f"((af_word *)a[{words.PARTIALS}].p)[chunk * {len(reductions)} + {place}]"
            text.append(f"{where}.{member_of(self.values.dtype(v))} = row->v{v};")
        end = f"a[{words.COLUMNS}].i"
        text = [
            "const NAME_frame *frame = arguments;",
            "const af_word *a = frame->a;",
            "NAME_row values = *frame->row, *row = &values;",
            f"const int64_t j0 = chunk * a[{words.CHUNK_COLUMNS}].i;",
            f"const int64_t j1 = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, {end});",
            f"NAME_phase{index}(a, frame->s, row, frame->r, j0, j1, 0, 0);",
            *text,
            "(void)worker;",
        ]
        return block(_chunk_head(f"piece{index}"), text)

    def _combine(self, phase: LoopPhase, value: int) -> list[str]:
        """Return the reduction of a row from those of its pieces, in their order."""
        dtype, op = self.values.dtype(value), self.values.op(value)
        c_type = partial_type_of(dtype)
        place = f"i * {len(phase.reductions)} + {phase.reductions.index(value)}"
        part = f"((const af_word *)a[{words.PARTIALS}].p)[{place}].{member_of(dtype)}"
        sign = ">" if op == "row_max" else "<"
        # p != p is true of NaN alone: it wins, as it does in numpy.
        join = "t += p" if op == "row_sum" else f"t = p != p || p {sign} t ? p : t"
        pieces = [f"const {c_type} p = {part};", f"if (i == 0) t = p; else {join};"]
        return block(
            "",
            [
                f"{c_type} t = 0;",
                *block(f"for (int64_t i = 0; i < a[{words.NUM_COLUMN_CHUNKS}].i; i++)", pieces),
                f"row->v{value} = ({self.values.type(value)})t;",
            ],
        )

    # Behind all rows.

    def _finish_chunk(self) -> list[str]:
        """Return the function that adds up the partials of some columns, and what follows."""
        text = [
            "const af_word *a = arguments;",
            f"const int64_t j0 = chunk * {_FINISH_COLUMNS};",
            f"const int64_t j1 = af_min(j0 + {_FINISH_COLUMNS}, a[{words.COLUMNS}].i);",
            f"const int64_t is_cut = a[{words.NUM_COLUMN_CHUNKS}].i;",
            f"const int64_t num_slots = is_cut ? 1 : a[{words.NUM_CHUNKS}].i;",
            *GET_SCALARS,
            *block("if (num_slots == 0)", self._zero_sums("0", "j0", "j1")),
        ]
        for v in self.plan.column_sums:
            c_type = sum_type_of(self.values.dtype(v))
            slot = [
                f"const {c_type} *from = c{v} + i * {self.values.partial_step(v)};",
                "#pragma omp simd",
                f"for (int64_t j = j0; j < j1; j++) c{v}[j] += from[j];",
            ]
            text.append(self.values.partial(v, "0"))
            text += block("for (int64_t i = 1; i < num_slots; i++)", slot)
        before, body = column_lines(self.values, "c{v}[j]")
        text += [*before, "#pragma omp simd", *block("for (int64_t j = j0; j < j1; j++)", body)]
        unused = "(void)worker, (void)s, (void)num_slots;"
        return block(_chunk_head("finish_chunk"), [*text, unused])

    def _finish(self) -> list[str]:
        text = ["af_word *a = arguments;"]
        if self.has_columns:
            size = f"(a[{words.COLUMNS}].i + {_FINISH_COLUMNS - 1}) / {_FINISH_COLUMNS}"
            most = f"(int32_t)a[{words.MAX_WORKERS}].i"
            text.append(f"af_parallel(NAME_finish_chunk, a, {size}, {most});")
        scalars = scalar_stores(self.values)
        text += [*GET_SCALARS, *scalars] if scalars else []
        return block("AF_EXPORT void NAME_finish(void *arguments)", [*text, "(void)a;"])

    def _launch(self) -> list[str]:
        loads = {v for phase in self.plan.phases for v in phase.loads}
        repeated = [v for v in sorted(loads) if self.values.kind(v) is Kind.COLUMN]
        rows, most = f"a[{words.NUM_CHUNKS}].i", f"(int32_t)a[{words.MAX_WORKERS}].i"
        text = [
            "af_word *a = arguments;",
            f"a[{words.STATUS}].i = 0;",
            skip_line(result=" 0"),
            *[line for v in repeated for line in self.values.repeat_lines(v)],
            f"if (a[{words.NUM_COLUMN_CHUNKS}].i)",
            "    NAME_columns(a);",
            "else",
            f"    af_parallel(NAME_chunk, a, {rows}, {most});",
            "NAME_finish(a);",
            f"return a[{words.STATUS}].i != 0;",
        ]
        return block("AF_EXPORT int32_t NAME(void *arguments)", text)


def _chunk_head(name: str) -> str:
    """Return the head of a function that the pool of threads calls."""
    return f"static void NAME_{name}(void *arguments, int64_t chunk, int32_t worker)"


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
    plan = scheduled(program).schedule  # first: it refuses what is no program
    return emit(program, plan) if is_taken(program) else None
