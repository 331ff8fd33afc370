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
from actors.kernels.codegen.expressions import expression, is_float, load, rounded, store
from actors.kernels.codegen.expressions import sum_type_of as total_type_of
from actors.kernels.codegen.phases import Schedule, operands_of
from actors.kernels.codegen.values import Values, indented
from actors.kernels.cuda.calls import KernelText
from actors.kernels.cuda.loops import MAX_THREADS, STRETCH, PhaseWriter, is_single
from compiler.fusion.program import OTHERS, ROW_REDUCTIONS, FusedProgram, Instruction, Kind
from compiler.types import DType

SHARED_SUMS = 8192
"""Sums over rows that a block has in shared memory: 32 KiB, so that several blocks share it."""

FINISH_COLUMNS = 32
FINISH_THREADS = 256
"""Threads that add up partial sums: so many columns, of each several threads."""

_ROWS, _COLUMNS = f"a[{words.ROWS}].i", f"a[{words.COLUMNS}].i"
_TEAM = f"a[{words.TEAM_THREADS}].i"
_PIECES = f"a[{words.NUM_COLUMN_CHUNKS}].i"
_STAGE = "const af_word *a, const NAME_scalars *s, NAME_row *row, int64_t r, _Bool is_first"
_SUMS = "const af_word *a, NAME_sums *sums, int64_t j0, int64_t j1, int64_t lane, int64_t team"


def refused(program: FusedProgram) -> str:
    """Return the instruction that there is no C for, in words; "" where there is none."""
    for instruction in program.instructions:
        if not _has_form(program, instruction):
            types = ", ".join([str(program.dtype_of(v)) for v in instruction.operands])
            return f"{instruction.op}({types}) -> {instruction.dtype}"
    return ""


def _has_form(program: FusedProgram, instruction: Instruction) -> bool:
    op, dtypes = instruction.op, tuple([program.dtype_of(v) for v in instruction.operands])
    if op in (*ROW_REDUCTIONS, "column_sum") or (op in OTHERS and op not in ("constant", "cast")):
        return True
    names, constants = ("x",) * len(dtypes), (None,) * len(dtypes)
    return expression(instruction, names, dtypes, constants) is not None


def emit(program: FusedProgram, plan: Schedule, *, is_cut: bool) -> KernelText:
    """Return the kernels of a program, for rows or for pieces of the columns of few rows.

    Raises ValueError where `refused` names an instruction.
    """
    writer = _CudaEmitter(program, plan)
    text = "\n".join(writer.lines(is_cut=is_cut)) + "\n"
    ops = ", ".join(dict.fromkeys([i.op for i in program.instructions if i.op != "constant"]))
    types = ", ".join(dict.fromkeys([i.dtype.value for i in program.inputs]))
    about = f"program of {len(program.instructions)} instructions ({ops}) on {types}"
    has_exchanges = writer.has_reductions or bool(plan.column_sums)
    return KernelText.of("fused", text, tuple(writer.kernels), about, has_exchanges=has_exchanges)


class _CudaEmitter:
    """The text of one program, with NAME for its name."""

    def __init__(self, program: FusedProgram, plan: Schedule) -> None:
        self.program, self.plan = program, plan
        self.writer = PhaseWriter(program, plan)
        self.values: Values = self.writer.values
        self.reductions = [v for phase in plan.phases for v in phase.reductions]
        self.has_reductions = bool(self.reductions)
        self.kernels: list[str] = []

    def lines(self, *, is_cut: bool) -> list[str]:
        """Return the whole text."""
        text = ["typedef struct {", f"    af_word w[{self._num_words()}];", "} NAME_arguments;"]
        text += [*self._structs(), *self._scalars()]
        for level in range(len(self.plan.rows)):
            text += self._row_stage(level)
        for index in range(len(self.plan.phases)):
            text += self.writer.lines(index)
        text += [*self._row_end(), *self._sum_functions()]
        phases = range(len(self.plan.phases))
        if is_cut:
            text += [line for index in phases for line in self._columns_kernel(index)]
            text += self._last_kernel() if self._outputs(Kind.ROW) else []
        elif self._has_rows():
            text += self._rows_kernel()
        if self._outputs(Kind.COLUMN) or self._outputs(Kind.SCALAR):
            text += self._finish_kernel()
        return text

    def _num_words(self) -> int:
        return words.stretches(self.program, len(self.plan.column_sums)) + 1

    def _outputs(self, kind: Kind) -> list[tuple[int, int]]:
        """Return (position, value) of the outputs of a kind."""
        outputs = enumerate(self.program.outputs)
        return [(position, v) for position, v in outputs if self.program.kind_of(v) is kind]

    def _has_rows(self) -> bool:
        """Whether anything is done for rows, or checked in them."""
        is_checked = any([i.op == "check_index" for i in self.program.instructions])
        is_idle = all([self.writer.is_empty(phase) for phase in self.plan.phases])
        return is_checked or not is_idle or bool(self._outputs(Kind.ROW))

    # What is there once per launch, per row and per team.

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
        place, operand = "r", instruction.operands[0]
        if self.values.is_input(operand):
            stride = f" * a[{words.operand(operand, words.STRIDE)}].i"
            place = self.values.own_row(operand).removesuffix(stride)
        return [
            f"if ((uint64_t)(int64_t)v{value} >= {int(instruction.constants[0])}ULL) {{",
            f"    if (is_first) af_report(a[{words.STATUS}].p, {place}, (int64_t)v{value});",
            f"    v{value} = 0;",
            "}",
        ]

    def _row_end(self) -> list[str]:
        text = []
        for position, v in self._outputs(Kind.ROW):
            place = f"r * {self.values.output_word(position, words.STRIDE)}.i"
            value = store(self.values.dtype(v), f"row->v{v}")
            text.append(f"    {self.values.output(position)}[{place}] = {value};")
        return [
            "AF_FUNCTION void NAME_end(const af_word *a, const NAME_row *row, int64_t r) {",
            *text,
            "    (void)a, (void)row, (void)r;",
            "}",
        ]

    # Sums over rows.

    def _single_sums(self) -> list[int]:
        return [v for v in self.plan.column_sums if is_single(self.values.dtype(v))]

    def _sum_functions(self) -> list[str]:
        """Return the functions that begin the sums of a team and that end a stretch of them."""
        if not self.plan.column_sums:
            return []
        single, totals = self._single_sums(), "slot"
        clear, flush = [], []
        for v in self.plan.column_sums:
            own = f"{self.values.partial(v, totals)}".replace(f"*c{v} ", f"*d{v} ")
            clear += [own, f"{'' if v in single else f'sums->c{v} = d{v};'}"]
            flush.append(own)
        zero = [f"d{v}[j] = 0;" for v in self.plan.column_sums]
        zero += [f"sums->c{v}[j] = 0;" for v in single]
        add = [f"d{v}[j] += sums->c{v}[j], sums->c{v}[j] = 0;" for v in single]
        clear = [line for line in clear if line]
        text = [
            f"AF_FUNCTION void NAME_clear({_SUMS}, int64_t slot) {{",
            *indented([*clear, *self.writer.columns(zero)]),
            "}",
        ]
        if not single:
            return text
        return [
            *text,
            f"AF_FUNCTION void NAME_flush({_SUMS}, int64_t slot) {{",
            *indented([*[line for line in flush if any([f"*d{v} " in line for v in single])]]),
            *indented(self.writer.columns(add)),
            "}",
        ]

    def _sum_places(self, team: str, shared: str) -> list[str]:
        """Return where a team's sums in single precision are: number `team` of them."""
        single = self._single_sums()
        if not single:
            return []
        word = f"a[{words.stretches(self.program, len(self.plan.column_sums))}].p"
        first = f"float *single = (float *){word} + {team} * {len(single)} * {_COLUMNS};"
        if shared:
            first = (
                f"float *single = {word} ? (float *){word} + {team} * {len(single)} * {_COLUMNS}"
                f" : shared + {shared} * {len(single)} * {_COLUMNS};"
            )
        return [
            first,
            *[f"sums.c{v} = single + {i} * {_COLUMNS};" for i, v in enumerate(single)],
        ]

    # A team per row.

    def _start_kernel(self, name: str, *, has_shared: bool = False) -> list[str]:
        self.kernels.append(f"NAME_{name}")
        text = [*_head(name, MAX_THREADS)]
        text += ["    AF_EXCHANGE(exchange);"] if self.has_reductions else []
        text += [f"    AF_SHARED(float, shared, {SHARED_SUMS});"] if has_shared else []
        text += [] if self.has_reductions else ["    void *exchange = 0;"]
        return [
            *text,
            "    const af_word *a = arguments.w;",
            f"    if (a[{words.SKIP}].p && *(const int64_t *)a[{words.SKIP}].p) return;",
            "    NAME_scalars scalars, *s = &scalars;",
            "    NAME_get_scalars(a, s);",
            "    NAME_sums sums;",
        ]

    def _rows_kernel(self) -> list[str]:
        single = self._single_sums()
        text = [
            f"const int64_t team = {_TEAM};",
            "const int64_t thread = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;",
            "const int64_t own = thread / team, lane = thread % team;",
            "/* Teams of one warp go from row to row together. */",
            "const int64_t shift = team < 32 ? own % (32 / team) : 0;",
            *self._sum_places("own", "(AF_THREAD / team)"),
        ]
        sums = f"a, &sums, 0, {_COLUMNS}, lane, team, own"
        if self.plan.column_sums:
            text.append(f"NAME_clear({sums});")
        text += ["int32_t stretch = 0;"] if single else []
        text += [
            f"for (int64_t r0 = a[{words.FIRST_ROW}].i + own - shift; r0 < {_ROWS};",
            f"     r0 += a[{words.NUM_TEAMS}].i) {{",
            f"    const _Bool is_own = r0 + shift < {_ROWS};",
            f"    const int64_t r = is_own ? r0 + shift : {_ROWS} - 1;",
            f"    const int64_t j1 = is_own ? {_COLUMNS} : 0;",
            "    const _Bool is_first = is_own && lane == 0;",
            "    NAME_row row[1];",
            "    NAME_row0(a, s, row, r, is_first);",
        ]
        for index in range(len(self.plan.phases)):
            text += [
                f"    NAME_phase{index}(a, s, row, r, 0, j1, lane, team, exchange, &sums);",
                f"    NAME_row{index + 1}(a, s, row, r, is_first);",
            ]
        text.append("    if (is_first) NAME_end(a, row, r);")
        if single:
            text.append(f"    if (++stretch == {STRETCH}) {{")
            text += [f"        NAME_flush({sums});", "        stretch = 0;", "    }"]
        text += ["}", *([f"NAME_flush({sums});"] if single else [])]
        start = self._start_kernel("rows", has_shared=bool(single))
        return [*start, *indented(text), "    (void)exchange, (void)sums;", "}"]

    # Pieces of the columns of few rows.

    def _columns_kernel(self, index: int) -> list[str]:
        phase = self.plan.phases[index]
        sums = "a, &sums, j0, j1, lane, team, 0"
        has_sums = bool(self.plan.column_sums) and index == 0
        text = [
            "const int64_t team = AF_NUM_THREADS, lane = AF_THREAD;",
            f"const int64_t j0 = AF_BLOCK * a[{words.CHUNK_COLUMNS}].i;",
            f"const int64_t j1 = af_min(j0 + a[{words.CHUNK_COLUMNS}].i, {_COLUMNS});",
            "const _Bool is_first = AF_BLOCK == 0 && lane == 0;",
            *self._sum_places("0", ""),
        ]
        if self.plan.column_sums:
            text += self._total_places()
        text += [f"NAME_clear({sums});"] if has_sums else []
        text += [
            f"for (int64_t r = a[{words.FIRST_ROW}].i; r < {_ROWS}; r++) {{",
            "    NAME_row row[1];",
            *indented(self._row_until(index)),
            f"    NAME_phase{index}(a, s, row, r, j0, j1, lane, team, exchange, &sums);",
        ]
        stores = [self._partial(v, "AF_BLOCK", f"row->v{v}") for v in phase.reductions]
        text += ["    if (lane == 0) {", *indented(stores, 2), "    }"] if stores else []
        text.append("}")
        is_last = index == len(self.plan.phases) - 1
        text += [f"NAME_flush({sums});"] if self._single_sums() and is_last else []
        start = self._start_kernel(f"columns{index}")
        return [*start, *indented(text), "    (void)exchange, (void)sums, (void)is_first;", "}"]

    def _total_places(self) -> list[str]:
        """Return sums that go into the total itself; those in single precision have their own."""
        text = []
        for v in self.plan.column_sums:
            if v not in self._single_sums():
                place = self.values.partial(v, "0").split(" = ", 1)[1]
                text.append(f"sums.c{v} = {place}")
        return text

    def _last_kernel(self) -> list[str]:
        text = [
            "const int64_t team = AF_NUM_THREADS, lane = AF_THREAD;",
            "const _Bool is_first = 0;",
            f"for (int64_t r = a[{words.FIRST_ROW}].i; r < {_ROWS}; r++) {{",
            "    NAME_row row[1];",
            *indented(self._row_until(len(self.plan.phases))),
            "    if (lane == 0) NAME_end(a, row, r);",
            "}",
        ]
        start = self._start_kernel("last")
        return [*start, *indented(text), "    (void)exchange, (void)sums, (void)team;", "}"]

    def _row_until(self, index: int) -> list[str]:
        """Return the ROW values that phase `index` reads; only the first kernel reports indices."""
        text = [f"NAME_row0(a, s, row, r, {'is_first' if index == 0 else '0'});"]
        for before, phase in enumerate(self.plan.phases[:index]):
            text += [line for v in phase.reductions for line in self._combine(v)]
            text.append(f"NAME_row{before + 1}(a, s, row, r, 0);")
        return text

    def _place(self, value: int, piece: str) -> str:
        """Return the partial reduction of a piece: row by row, reduction by reduction."""
        number, count = self.reductions.index(value), len(self.reductions)
        row = f"((r - a[{words.FIRST_ROW}].i) * {count} + {number})"
        member = "d" if is_float(self.values.dtype(value)) else "i"
        return f"((af_word *)a[{words.PARTIALS}].p)[{row} * {_PIECES} + {piece}].{member}"

    def _partial(self, value: int, piece: str, own: str) -> str:
        return f"{self._place(value, piece)} = {own};"

    def _combine(self, value: int) -> list[str]:
        dtype, op = self.values.dtype(value), self.values.op(value)
        own = "uint64_t" if dtype is DType.UINT64 else total_type_of(dtype)
        sort = {"double": "f64", "int64_t": "i64", "uint64_t": "u64"}[own]
        sort = "i64" if op == "row_sum" and own == "uint64_t" else sort
        part = f"({own}){self._place(value, 'af_min(i, last)')}"
        join = {"row_sum": "AF_ADD", "row_max": "AF_LARGER", "row_min": "AF_SMALLER"}[op]
        # A thread without pieces has the last one again, which changes no extreme, and no sum.
        first = f"lane <= last ? {part} : 0" if op == "row_sum" else part
        return [
            "{",
            f"    const int64_t last = {_PIECES} - 1;",
            "    int64_t i = lane;",
            f"    {own} t = {first};",
            "    for (i += team; i <= last; i += team) {",
            f"        const {own} p = {part};",
            f"        t = {join}(t, p);",
            "    }",
            f"    row->v{value} = ({self.values.type(value)})"
            f"af_team_{op[len('row_') :]}_{sort}(t, team, exchange);",
            "}",
        ]

    # After all rows.

    def _finish_kernel(self) -> list[str]:
        values, columns = self.values, self._outputs(Kind.COLUMN)
        before, body = self._late()
        text = []
        if columns and self.plan.column_sums:
            text = [*before, *self._added_columns(body)]
        elif columns:
            loop = f"for (int64_t j = thread; j < {_COLUMNS}; j += AF_NUM_BLOCKS * AF_NUM_THREADS)"
            text = [*before, f"{loop} {{", *indented(body), "}"]
        scalars = []
        for position, v in self._outputs(Kind.SCALAR):
            is_plain = values.constant(v) is None
            value = store(values.dtype(v), f"s->v{v}" if is_plain else values.name(v))
            scalars.append(f"    {values.output(position)}[0] = {value};")
        if scalars:
            text += ["if (thread == 0) {", *scalars, "}"]
        self.kernels.append("NAME_finish")
        shared = (
            [f"    AF_SHARED(af_word, parts, {FINISH_THREADS});"]
            if columns and self.plan.column_sums
            else []
        )
        return [
            *_head("finish", FINISH_THREADS),
            *shared,
            "    const af_word *a = arguments.w;",
            f"    if (a[{words.SKIP}].p && *(const int64_t *)a[{words.SKIP}].p) return;",
            "    const int64_t thread = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;",
            "    NAME_scalars scalars, *s = &scalars;",
            "    NAME_get_scalars(a, s);",
            *indented(text),
            "    (void)s, (void)thread;",
            "}",
        ]

    def _added_columns(self, body: list[str]) -> list[str]:
        """Return the loop over columns: eight threads add up the slots of one, in a fixed order."""
        text = []
        for v in self.plan.column_sums:
            own = total_type_of(self.values.dtype(v))
            member = "d" if own == "double" else "i"
            text += [
                self.values.partial(v, "0"),
                f"{own} t{v} = 0;",
                f"for (int64_t i = group; i < a[{words.NUM_TEAMS}].i; i += groups)",
                f"    t{v} += c{v}[i * {self.values.partial_step(v)} + from];",
                "AF_BARRIER();",
                f"parts[AF_THREAD].{member} = t{v};",
                "AF_BARRIER();",
                f"t{v} = 0;",
                "for (int32_t i = 0; i < groups; i++)",
                f"    t{v} += parts[i * {FINISH_COLUMNS} + AF_THREAD % {FINISH_COLUMNS}].{member};",
            ]
        return [
            f"const int32_t groups = AF_NUM_THREADS / {FINISH_COLUMNS};",
            f"const int32_t group = AF_THREAD / {FINISH_COLUMNS};",
            f"for (int64_t j0 = AF_BLOCK * {FINISH_COLUMNS}; j0 < {_COLUMNS};",
            f"     j0 += AF_NUM_BLOCKS * {FINISH_COLUMNS}) {{",
            f"    const int64_t j = j0 + AF_THREAD % {FINISH_COLUMNS};",
            f"    const int64_t from = af_min(j, {_COLUMNS} - 1);",
            *indented(text),
            f"    if (group == 0 && j < {_COLUMNS}) {{",
            *indented(body, 2),
            "    }",
            "}",
        ]

    def _late(self) -> tuple[list[str], list[str]]:
        """Return what COLUMN outputs need before the loop, and the body for column j."""
        values, plan, columns = self.values, self.plan, self._outputs(Kind.COLUMN)
        used = {v for value in plan.late for v in operands_of(self.program, value)}
        used |= {v for _, v in columns}
        inputs = [v for v in sorted(used) if values.is_input(v) and values.kind(v) is Kind.COLUMN]
        before = values.prelude(plan.late)
        body = []
        for v in inputs:
            before.append(values.pointer(v))
            body.append(f"const {values.type(v)} v{v} = {load(values.dtype(v), f'x{v}[j]')};")
        for v in plan.column_sums:
            value = f"({values.type(v)})t{v}"
            value = rounded(values.dtype(v), value) if v in self.program.outputs else value
            body.append(f"const {values.type(v)} v{v} = {value};")
        body += [f"const {values.type(v)} v{v} = {values.define(v)};" for v in plan.late]
        for position, v in columns:
            before.append(f"{values.storage(v)} *y{position} = {values.output(position)};")
            body.append(f"y{position}[j] = {store(values.dtype(v), values.name(v))};")
        return before, body


def _head(name: str, threads: int) -> list[str]:
    own = f"NAME_{name}"
    return [
        f"typedef NAME_arguments {own}_arguments;",
        f"AF_KERNEL_UP_TO({threads}) {own}(AF_ARGUMENTS({own}) arguments) {{",
    ]
