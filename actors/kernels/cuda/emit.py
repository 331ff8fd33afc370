"""A program as the text of CUDA kernels for every shape, over the phases that C has too.

    NAME_rows       a team of threads per row, phase by phase; all teams together where rows are one
    NAME_columns<p> phase p of few long rows, a block for each piece of their columns
    NAME_last       what follows for these rows from their last reductions
    NAME_finish     COLUMN and SCALAR outputs: partial sums over rows are added up in their order

Of the first two ways a text has one: which of them a launch goes, its shape says (`cuda.programs`).

A reduction of a piece is left in scratch as 8 bytes. Every block of the next kernel puts those of
all pieces together, alike; so there is no kernel for that alone.
"""

from __future__ import annotations

from enum import Enum

from actors.kernels.cuda.calls import KernelText
from actors.kernels.cuda.loops import (
    MAX_THREADS,
    STRETCH,
    PhaseWriter,
    is_random,
    sum_dtype,
    summing_threads,
)
from actors.kernels.cuda.strips import StripWriter
from actors.kernels.program import values as words
from actors.kernels.program.phases import Schedule, op_of
from actors.kernels.program.stages import (
    GET_SCALARS,
    Dialect,
    about,
    block,
    column_lines,
    outputs_of,
    scalar_stores,
    skip_line,
    stage_functions,
    struct,
    structs,
)
from actors.kernels.program.values import Values, member_of, partial_type_of, sum_type_of
from compiler.contract.program import FusedProgram, Kind
from compiler.contract.types import DType

# Where rows are reduced a team has its sums over rows in single precision for a stretch of rows, in
# shared memory or in scratch; in between a block adds those of its teams to its partial row of
# doubles. Where they are not, threads have them in registers (`strips`).

COLUMNS = f"a[{words.COLUMNS}].i"

_ALL_TEAMS = "a, &all, j0, end, end, num_teams, AF_BLOCK"
_SUMS = (
    "const af_word *a, NAME_sums *sums, int64_t j0, int64_t j1, int64_t width, int32_t num_teams,"
    " int64_t slot"
)


def _check_lines(values: Values, value: int) -> list[str]:
    """Return what is done about a bad index: it is reported once, and 0 for all that follows.

    Its place is that of its row in the operand, as the host says it.
    """
    instruction = values.instruction(value)
    operand = instruction.operands[0]
    place = values.row_number(operand) if values.is_input(operand) else "r"
    status = f"a[{words.STATUS}].p"
    return block(
        f"if ((uint64_t)(int64_t)v{value} >= {int(instruction.constants[0])}ULL)",
        [f"if (is_first) af_report({status}, {place}, (int64_t)v{value});", f"v{value} = 0;"],
    )


DIALECT = Dialect("AF_FUNCTION void", "AF_FUNCTION void", _check_lines, "is_first")


def has_dear_scalars(program: FusedProgram, plan: Schedule) -> bool:
    """Return whether SCALAR values are computed in double, a few hundred instructions for a power.

    Processors for graphics do 2 of those at a time, for 128 of others: one thread of a block
    computes them for all.
    """
    computed = [v for v in plan.scalars if op_of(program, v) not in ("constant", "cast")]
    return any([program.dtype_of(v) is DType.FLOAT64 for v in computed])


def _size_of(values: Values, value: int) -> int:
    return sum_dtype(values.dtype(value)).itemsize


# COLUMN outputs come from the partial rows of blocks, behind all rows. Some threads add up those of
# one column, each some of them in order, and then what they have, in order: so the result is the
# same however many blocks this kernel has.

FINISH_THREADS = 256
_MOST_ADDERS, _SLOTS_EACH = 32, 4


def finish_adders(num_partials: int) -> int:
    """Return how many threads add up the partial rows of one column: a power of two.

    Each has a few, which are on their way together.
    """
    adders = 1
    while adders < _MOST_ADDERS and adders * _SLOTS_EACH < num_partials:
        adders *= 2
    return adders


PIECE_THREADS = 256
"""Threads of a block that has a piece of the columns."""

_FEW_TENSORS = 2

_ROWS = f"a[{words.ROWS}].i"
_TEAM = f"a[{words.TEAM_THREADS}].i"
_PIECES = f"a[{words.NUM_COLUMN_CHUNKS}].i"
_EACH_ROW = f"for (int64_t r = a[{words.FIRST_ROW}].i; r < {_ROWS}; r++)"
_BLOCK_IS_TEAM = "const int64_t team = AF_NUM_THREADS, lane = AF_THREAD;"


class SumPlace(Enum):
    """Where threads have sums over rows: in registers, in shared memory, or in scratch."""

    NONE = "none"
    REGISTERS = "registers"
    SHARED = "shared"
    SCRATCH = "scratch"


def emit(program: FusedProgram, plan: Schedule, sums: SumPlace, *, is_cut: bool) -> KernelText:
    """Return the kernels of a program, for rows or for pieces of the columns of few rows.

    All that `check_program` lets pass has kernels. Raises ValueError for what it does not.
    """
    writer = _CudaEmitter(program, plan, sums)
    text = "\n".join(writer.lines(is_cut=is_cut)) + "\n"
    has_exchanges = bool(writer.reductions or plan.column_sums or writer.is_dear)
    kernels = tuple(writer.kernels)
    return KernelText.of("fused", text, kernels, about(program), has_exchanges=has_exchanges)


class _CudaEmitter:
    """The text of one program, with NAME for its name."""

    def __init__(self, program: FusedProgram, plan: Schedule, sums: SumPlace) -> None:
        self.program, self.plan, self.sums = program, plan, sums
        self.writer = PhaseWriter(program, plan)
        self.values = self.writer.values
        self.reductions = [v for phase in plan.phases for v in phase.reductions]
        self.is_dear = has_dear_scalars(program, plan)
        self.kernels: list[str] = []

    def lines(self, *, is_cut: bool) -> list[str]:
        """Return the whole text."""
        phases = range(len(self.plan.phases))
        num_words = words.way(self.program, len(self.plan.column_sums)) + 1
        sums = [f"{self.writer.sum_type(v)} *c{v};" for v in self.plan.column_sums]
        text = [
            *struct("arguments", [f"af_word w[{num_words}];"]),
            *structs(self.values),
            *struct("sums", sums),
            *stage_functions(self.values, DIALECT),
            *self._sum_functions(),
        ]
        if self.sums is SumPlace.REGISTERS:
            strips = StripWriter(self.writer, self.plan)
            body = [*strips.shared(), *self._start(), *strips.lines(), "(void)exchange, (void)s;"]
            return [*text, *self._kernel("rows", MAX_THREADS, body), *self._finish_kernel()]
        text += [line for index in phases for line in self.writer.lines(index)]
        if is_cut:
            text += [line for index in phases for line in self._columns_kernel(index)]
            text += self._last_kernel() if outputs_of(self.values, Kind.ROW) else []
        elif self._has_rows():
            text += self._rows_kernel()
        return [*text, *self._finish_kernel()]

    def _has_rows(self) -> bool:
        """Whether anything is done for rows, or checked in them."""
        is_checked = any([i.op == "check_index" for i in self.program.instructions])
        is_idle = all([self.writer.is_empty(phase) for phase in self.plan.phases])
        return is_checked or not is_idle or bool(outputs_of(self.values, Kind.ROW))

    def _kernel(self, name: str, threads: int, body: list[str], bound: str = "UP_TO") -> list[str]:
        kernel = f"NAME_{name}"
        self.kernels.append(kernel)
        head = f"AF_KERNEL_{bound}({threads}) {kernel}(AF_ARGUMENTS({kernel}) arguments)"
        return [f"typedef NAME_arguments {kernel}_arguments;", *block(head, body)]

    def _start(self) -> list[str]:
        """Return what a kernel over rows begins with."""
        shared, scalars = [], [*GET_SCALARS]
        # One thread computes the scalars for its block; the barrier shows them to all.
        if self.is_dear:
            shared.append("AF_SHARED(NAME_scalars, s, 1);")
            scalars = ["if (AF_THREAD == 0) NAME_get_scalars(a, s);", "AF_BARRIER();"]
        return [
            "AF_EXCHANGE(exchange);" if self.reductions else "void *exchange = 0;",
            *shared,
            "const af_word *a = arguments.w;",
            skip_line(),
            *scalars,
        ]

    # Sums over rows that teams leave in memory.

    def _sum_functions(self) -> list[str]:
        """Return the functions that begin the sums of a block and that end a stretch of them.

        A thread does so for some columns of all teams: between two barriers, where others add.
        """
        if not self.plan.column_sums:
            return []
        values, text = self.values, []
        for name in ("clear", "flush"):
            body, is_clear = [], name == "clear"
            for v in self.plan.column_sums:
                c_type = sum_type_of(values.dtype(v))
                teams = [*([] if is_clear else [f"t{v} += *c{v};"]), f"*c{v} = 0;"]
                body += [
                    f"{c_type} *d{v} = {values.partial_place(v, 'slot')} + j;",
                    f"{self.writer.sum_type(v)} *c{v} = sums->c{v} + j;",
                    f"{c_type} t{v} = {'0' if is_clear else f'*d{v}'};",
                    *block(f"for (int32_t i = 0; i < num_teams; i++, c{v} += width)", teams),
                    f"*d{v} = t{v};",
                ]
            before = [] if is_clear else ["AF_BARRIER();"]
            loop = block("for (int64_t j = j0 + AF_THREAD; j < j1; j += AF_NUM_THREADS)", body)
            head = f"AF_FUNCTION void NAME_{name}({_SUMS})"
            text += block(head, [*before, *loop, "AF_BARRIER();"])
        return text

    def _team_bytes(self) -> int:
        """Return the bytes of a team's sums for each column."""
        return sum([_size_of(self.values, v) for v in self.plan.column_sums])

    def _sum_places(self, first: str, width: str, begin: str, num_teams: str) -> list[str]:
        """Return where each sum of the first team has its column `begin`, less that many columns.

        The sums of all teams lie together, `width` columns a team; the widest types come first.
        """
        text, before = [], 0
        for v in sorted(self.plan.column_sums, key=lambda v: -_size_of(self.values, v)):
            place = f"{first} + {before} * ({num_teams}) * {width}"
            text.append(f"sums.c{v} = ({self.writer.sum_type(v)} *)({place}) - {begin};")
            before += _size_of(self.values, v)
        return text

    def _stretches(self) -> str:
        """Return where sums begin that are not in shared memory."""
        return f"(char *)a[{words.stretches(self.program, len(self.plan.column_sums))}].p"

    # A team per row.

    def _rows_kernel(self) -> list[str]:
        has_sums = bool(self.plan.column_sums)
        row = [
            "const _Bool is_own = r0 + shift < r1;",
            # Teams of a warp exchange values, and those of a block meet where a stretch ends: one
            # without a row goes along on the last row with no columns, and stores nothing.
            "const int64_t r = is_own ? r0 + shift : r1 - 1;",
            "const int64_t j1 = is_own ? end : 0;",
            "const _Bool is_first = is_own && lane == 0 && piece == 0;",
            "NAME_row row[1];",
            "NAME_row0(a, s, row, r, is_first);",
        ]
        for index in range(len(self.plan.phases)):
            row += [
                f"NAME_phase{index}(a, s, row, r, j0, j1, lane, team, exchange, &sums);",
                f"NAME_row{index + 1}(a, s, row, r, is_first);",
            ]
        row.append("if (is_first) NAME_end(a, row, r);")
        if has_sums:
            flush = [f"NAME_flush({_ALL_TEAMS});", "stretch = 0;"]
            row += block(f"if (++stretch == {STRETCH} || r0 + teams >= r1)", flush)
        first = f"a[{words.FIRST_ROW}].i + slot - shift"
        text = [
            f"const int32_t team = (int32_t){_TEAM};",
            "const int64_t thread = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;",
            "const int64_t own = (int32_t)thread / team;",
            "const int32_t lane = (int32_t)thread % team;",
            *(self._teams_of_blocks() if has_sums else self._teams()),
            *(["int32_t stretch = 0;"] if has_sums else []),
            f"const int64_t r1 = {_ROWS};",
            *block(f"for (int64_t r0 = {first}; r0 < r1; r0 += teams)", row),
        ]
        shared = []
        if self.sums is SumPlace.SHARED:
            teams = f"AF_NUM_THREADS / (int32_t)arguments.w[{words.TEAM_THREADS}].i"
            count = f"{teams} * {self._team_bytes()} * arguments.w[{words.COLUMNS}].i"
            shared = [f"AF_SHARED_OF_LAUNCH(char, shared, {count});"]
        body = [*shared, *self._start(), *text, "(void)exchange, (void)sums;"]
        if has_sums:
            is_shared = self.sums is SumPlace.SHARED
            threads = summing_threads(self.program) if is_shared else MAX_THREADS
            return self._kernel("rows", threads, body)
        bound = "TWO_UP_TO" if self.reductions and self._is_small() else "UP_TO"
        return self._kernel("rows", MAX_THREADS, body, bound)

    def _is_small(self) -> bool:
        """Return whether half of the registers will do.

        Random bits, doubles, three tensors and repeated rows need more. A second block then reads
        memory while the first one waits for its threads, or computes.
        """
        dtypes = {x.dtype for x in self.program.inputs}
        dtypes |= {i.dtype for i in self.program.instructions}
        full = [entry for entry in self.program.inputs if entry.kind is Kind.FULL]
        are_few = len(full) <= _FEW_TENSORS and all([x.every == 1 and not x.count for x in full])
        return are_few and DType.FLOAT64 not in dtypes and not is_random(self.program)

    @staticmethod
    def _teams() -> list[str]:
        """Return which rows and which columns a team has."""
        return [
            "/* Teams of one warp go from row to row together. */",
            "const int64_t shift = team < 32 ? own % (32 / team) : 0;",
            f"const int64_t teams = a[{words.NUM_TEAMS}].i;",
            "const int64_t piece = (int32_t)own / (int32_t)teams, slot = own - piece * teams;",
            f"const int64_t j0 = piece * a[{words.CHUNK_COLUMNS}].i;",
            f"const int64_t end = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, {COLUMNS});",
            "NAME_sums sums;",
        ]

    def _teams_of_blocks(self) -> list[str]:
        """Return the same where teams of a block go from row to row together, to add up columns."""
        place, size = "shared", self._team_bytes()
        text = [
            "const int32_t num_teams = AF_NUM_THREADS / team;",
            "const int64_t shift = AF_THREAD / team, slot = own;",
            f"const int64_t teams = a[{words.NUM_PARTIALS}].i * num_teams;",
            f"const int64_t piece = 0, j0 = 0, end = {COLUMNS};",
        ]
        if self.sums is SumPlace.SCRATCH:
            place = f"{self._stretches()} + AF_BLOCK * num_teams * {size} * end"
        first = self._sum_places(place, "end", "j0", "num_teams")
        own = [f"sums.c{v} += shift * end;" for v in self.plan.column_sums]
        return [
            *text,
            "NAME_sums sums, all;",
            *first,
            "all = sums;",
            f"NAME_clear({_ALL_TEAMS});",
            *own,
        ]

    # Pieces of the columns of few rows.

    def _columns_kernel(self, index: int) -> list[str]:
        # Each block has its columns of the one partial row.
        sums = "a, &sums, j0, j1, 0, 1, 0"
        has_sums = bool(self.plan.column_sums)
        is_first, is_last = index == 0, index == len(self.plan.phases) - 1
        stores = [self._partial(v) for v in self.plan.phases[index].reductions]
        row = [
            *self._row_until(index),
            f"NAME_phase{index}(a, s, row, r, j0, j1, lane, team, exchange, &sums);",
            *(block("if (lane == 0)", stores) if stores else []),
        ]
        text = [
            _BLOCK_IS_TEAM,
            f"const int64_t j0 = AF_BLOCK * a[{words.CHUNK_COLUMNS}].i;",
            f"const int64_t j1 = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, {COLUMNS});",
            *(["const _Bool is_first = AF_BLOCK == 0 && lane == 0;"] if is_first else []),
            "NAME_sums sums;",
            *self._sum_places(self._stretches(), COLUMNS, "0", "1"),
            *([f"NAME_clear({sums});"] if has_sums and is_first else []),
            *block(_EACH_ROW, row),
            *([f"NAME_flush({sums});"] if has_sums and is_last else []),
        ]
        body = [*self._start(), *text, "(void)exchange, (void)sums;"]
        return self._kernel(f"columns{index}", PIECE_THREADS, body)

    def _last_kernel(self) -> list[str]:
        row = [*self._row_until(len(self.plan.phases)), "if (lane == 0) NAME_end(a, row, r);"]
        text = [_BLOCK_IS_TEAM, *block(_EACH_ROW, row), "(void)exchange, (void)team;"]
        return self._kernel("last", PIECE_THREADS, [*self._start(), *text])

    def _row_until(self, index: int) -> list[str]:
        """Return the ROW values that phase `index` reads; only the first kernel reports indices."""
        text = ["NAME_row row[1];"]
        text.append(f"NAME_row0(a, s, row, r, {'is_first' if index == 0 else '0'});")
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
        member = member_of(self.values.dtype(value))
        return f"({self._partials(value)})[AF_BLOCK].{member} = row->v{value};"

    def _combine(self, value: int) -> list[str]:
        dtype, op = self.values.dtype(value), self.values.op(value)
        c_type = partial_type_of(dtype)
        part = f"({c_type})p->{member_of(dtype)}"
        join = {"row_sum": "AF_ADD", "row_max": "AF_LARGER", "row_min": "AF_SMALLER"}[op]
        # A thread without pieces has the last one again, which changes no extreme, and no sum.
        first = f"lane < {_PIECES} ? {part} : 0" if op == "row_sum" else part
        text = [
            f"const af_word *p = {self._partials(value)};",
            f"const af_word *end = p + {_PIECES};",
            f"p += af_min(lane, {_PIECES} - 1);",
            f"{c_type} t = {first};",
            f"for (p += team; p < end; p += team) t = {join}(t, {part});",
            f"row->v{value} = {self.writer.joined(value, 't', c_type)};",
        ]
        return block("", text)

    # Behind all rows.

    def _finish_kernel(self) -> list[str]:
        """Return the kernel of COLUMN outputs, each column by itself, and of SCALAR outputs."""
        columns, scalars = outputs_of(self.values, Kind.COLUMN), scalar_stores(self.values)
        if not (columns or scalars):
            return []
        before, body = column_lines(self.values, "t{v}")
        text, shared = [], []
        if columns and self.plan.column_sums:
            shared = [f"AF_SHARED(af_word, parts, {FINISH_THREADS});"]
            text = [*before, *self._added_columns(body)]
        elif columns:
            loop = f"for (int64_t j = thread; j < {COLUMNS}; j += AF_NUM_BLOCKS * AF_NUM_THREADS)"
            text = [*before, *block(loop, body)]
        body = [
            *shared,
            "const af_word *a = arguments.w;",
            skip_line(),
            "const int64_t thread = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;",
            *GET_SCALARS,
            *text,
            *(block("if (thread == 0)", scalars) if scalars else []),
            "(void)s, (void)thread;",
        ]
        return self._kernel("finish", FINISH_THREADS, body)

    def _added_columns(self, body: list[str]) -> list[str]:
        """Return the loop over columns: some threads add up the slots of one, in a fixed order."""
        text, added, joined = [], [], []
        for v in self.plan.column_sums:
            c_type, step = sum_type_of(self.values.dtype(v)), self.values.partial_step(v)
            member = member_of(self.values.dtype(v))
            text += [
                f"const {c_type} *c{v} = {self.values.partial_place(v, 'group')} + from;",
                f"{c_type} t{v} = 0;",
            ]
            added.append(f"t{v} += *c{v}, c{v} += groups * {step};")
            joined += [
                # Before `parts` is written again: others may still add up the sum before this one.
                "AF_BARRIER();",
                f"parts[AF_THREAD].{member} = t{v};",
                "AF_BARRIER();",
                f"t{v} = 0;",
                "for (int32_t i = 0; i < groups; i++)",
                f"    t{v} += parts[i * columns + AF_THREAD % columns].{member};",
            ]
        loop = f"for (int64_t j0 = AF_BLOCK * columns; j0 < {COLUMNS};"
        return [
            f"const int32_t num_slots = (int32_t)a[{words.NUM_PARTIALS}].i;",
            "int32_t groups = 1;",
            f"while (groups < {_MOST_ADDERS} && groups * {_SLOTS_EACH} < num_slots) groups *= 2;",
            "const int32_t columns = AF_NUM_THREADS / groups, group = AF_THREAD / columns;",
            *block(
                f"{loop}\n     j0 += AF_NUM_BLOCKS * columns)",
                [
                    "const int64_t j = j0 + AF_THREAD % columns;",
                    f"const int64_t from = af_min(j, {COLUMNS} - 1);",
                    *text,
                    # All sums in one loop, so that many partial rows are on their way at once.
                    "AF_FOUR_TIMES",
                    *block("for (int32_t i = group; i < num_slots; i += groups)", added),
                    *joined,
                    *block(f"if (group == 0 && j < {COLUMNS})", body),
                ],
            ),
        ]
