"""One phase of a program as a loop of a team of threads over the columns of a row.

A thread takes several columns at a time, a batch: all are loaded before the first is computed, so
that enough bytes are on their way, and stored after that. Which thread has a column is the same for
all rows and phases of a launch; so an output may lie over an input, what was stored may be read
back, and sums over rows need no barrier. A word of the launch, its way, says which it is:

    WIDE    lane l has columns B*l .. B*l + B-1, then those B*team further; a batch is moved at once
    RUNS    the same columns, each loaded and stored by itself
    NARROW  columns l, l + team, ... l + (B-1)*team, one by one: neighbours read neighbours

The terms of a sum over a row are added up by thread and then by team, so bits depend on who has a
column. Therefore what a program that reduces rows goes is WIDE or RUNS by its shape alone (whole
batches in every row, `cuda.programs`), with the same columns and the same instructions; only how
these come and go follows from addresses. Others may go NARROW instead: no sum of theirs crosses
columns. Random bits are for eight columns that share a counter, and never NARROW.

Places within a batch are offsets of 32 bits from its first column: wider ones cost more than most
programs compute.

A sum in single precision is of at most `STRETCH` terms, which is exact to 15 roundings, less than
1e-6 of a sum of one sign; stretches are added up in double.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from actors.kernels.program import values as words
from actors.kernels.program.phases import LoopPhase, Schedule, operands_of, weight
from actors.kernels.program.stages import block
from actors.kernels.program.values import Values, is_float, storage_of, store
from compiler.contract.program import ROW_REDUCTIONS, FusedProgram, Kind
from compiler.contract.types import DType

# A run is the columns of one thread, in words of 32 bits. Wide accesses move 16 bytes at once (8 or
# 4, where a run has no more), narrow ones an element each; either way the same words are in
# registers after that, and the same instructions compute on them. So a launch may choose by its
# addresses, and no bit depends on it.

WIDEST = 16
"""Bytes that a thread moves at once, at most."""

_WORD = 4
_UNSIGNED = {1: "uint8_t", 2: "uint16_t"}


def access_bytes(itemsize: int, batch: int) -> int:
    """Return the bytes of a wide access to a run, which its address must be a multiple of.

    That of one element where a run has but one, or less than a word.
    """
    run = batch * itemsize
    return min(WIDEST, run) if batch > 1 and run >= _WORD else itemsize


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """The elements of one operand: `words` is their array in registers, `place` their pointer.

    `storage` is the type of an element in memory.
    """

    words: str
    place: str
    dtype: DType
    storage: str

    def element(self) -> str:
        """Return element k, as it is in memory."""
        size, words = self.dtype.itemsize, self.words
        if size < _WORD:
            # Short elements share a word: element k is shifted down from its place.
            each = _WORD // size
            return f"({self.storage})({words}[k / {each}] >> k % {each} * {8 * size})"
        bits = f"{words}[k]" if size == _WORD else f"af_long_of({words} + 2 * k)"
        if self.dtype in (DType.FLOAT32, DType.FLOAT64):
            return f"af_{self.storage}_of_bits({bits})"
        return f"({self.storage}){bits}"

    def put(self, value: str) -> str:
        """Return how element k, which nobody has put before where it is short, becomes a value."""
        size, words = self.dtype.itemsize, self.words
        if size < _WORD:
            per_word = _WORD // size
            element = f"(uint32_t)({_UNSIGNED[size]})({value})"
            # Or, not assignment: the word begins at 0 and its other elements must stay.
            return f"{words}[k / {per_word}] |= {element} << k % {per_word} * {8 * size};"
        is_float = self.dtype in (DType.FLOAT32, DType.FLOAT64)
        bits = f"af_bits_of_{self.storage}({value})" if is_float else f"({value})"
        if size == _WORD:
            return f"{words}[k] = {'' if is_float else '(uint32_t)'}{bits};"
        return f"af_put_long({words} + 2 * k, {'' if is_float else '(uint64_t)'}{bits});"


class RunWriter:
    """How the runs of a batch of columns are moved, all of them before the first is used.

    The text around says `here`, how many columns there are from the first on, and `step` from one
    to the next. `is_wide`: `batch` neighbours, and every run of them lies evenly.
    """

    def __init__(self, batch: int) -> None:
        """Move `batch` columns at a time."""
        self.batch = batch

    def arrays(self, runs: list[ColumnRun], rows: int = 0) -> list[str]:
        """Return the words of runs, all 0; of so many rows each where that is not 0."""
        extents = f"[{rows}]" if rows else ""
        zero = "{{0}}" if rows else "{0}"
        return [f"uint32_t {run.words}{extents}[{self._num_words(run)}] = {zero};" for run in runs]

    def get(self, runs: list[ColumnRun], *, is_wide: bool) -> list[str]:
        """Return what loads runs; where there are no columns they stay 0."""
        return self._moved(
            [f"af_get({run.words}, {run.place}, {self._size(run)});" for run in runs],
            [run.put(f"{run.place}[k * step]") for run in runs],
            runs if is_wide else [],
        )

    def store(self, runs: list[ColumnRun], *, is_wide: bool) -> list[str]:
        """Return what stores runs."""
        return self._moved(
            [f"af_put({run.place}, {run.words}, {self._size(run)});" for run in runs],
            [f"{run.place}[k * step] = {run.element()};" for run in runs],
            runs if is_wide else [],
        )

    def either(self, body: Callable[[bool], list[str]]) -> list[str]:
        """Return what is done with a batch whose runs are moved at once, or else one by one.

        Each has its own text: what only the other needs costs it no instruction.
        `left` columns are left from the first on, and `way` is the launch's.
        """
        narrow = [
            "const int32_t here = left;",
            f"int32_t step = way == {NARROW} ? (int32_t)team : 1;",
            "AF_FORGET(step); /* or each place would have a pointer of its own from now on */",
            *body(False),
            "(void)step, (void)here;",
        ]
        if self.batch == 1:
            return block("", narrow)
        return self.wide_or(f"left >= {self.batch}", body(True), narrow)

    def wide_or(self, is_whole: str, wide: list[str], narrow: list[str]) -> list[str]:
        """Return what is done where a batch is moved at once, or else what is done instead."""
        here = f"const int32_t here = {self.batch}, step = 1;"
        wide = [here, *wide, "(void)step, (void)here;"]
        return block(f"if (way == {WIDE} && {is_whole})", wide, narrow)

    def _moved(self, wide: list[str], narrow: list[str], evenly: list[ColumnRun]) -> list[str]:
        """Return wide accesses of what lies evenly and has any, and narrow ones of the rest."""
        can = [access_bytes(run.dtype.itemsize, self.batch) > run.dtype.itemsize for run in evenly]
        can += [False] * (len(narrow) - len(can))
        rest = [line for line, is_at_once in zip(narrow, can, strict=True) if not is_at_once]
        return [*itertools.compress(wide, can), *self._each(rest)]

    def _each(self, lines: list[str]) -> list[str]:
        if not lines:
            return []
        return self.each_column(block("if (k * step < here)", lines))

    def each_column(self, lines: list[str]) -> list[str]:
        """Return the loop over the columns of a batch."""
        return ["AF_UNROLL", *block(f"for (int32_t k = 0; k < {self.batch}; k++)", lines)]

    def _size(self, run: ColumnRun) -> int:
        return self.batch * run.dtype.itemsize

    def _num_words(self, run: ColumnRun) -> int:
        return max(1, self._size(run) // _WORD)


MAX_THREADS = 512
"""Threads of a block, at most: each has 128 registers then."""

STRETCH = 16

RANDOM_COLUMNS = 8
"""Columns of a batch where there are random bits: one counter's."""

NARROW, RUNS, WIDE = 0, 1, 2
"""Which columns a thread has, and how it moves them."""

_PHASE_PARAMETERS = (
    "const af_word *a, const NAME_scalars *s, NAME_row *row, int64_t r, int64_t j0,\n"
    "        int64_t j1, int32_t lane, int32_t team, void *exchange, NAME_sums *sums"
)
_PHASE_UNUSED = (
    "(void)a, (void)s, (void)row, (void)r, (void)team, (void)exchange, (void)sums;"
    " (void)lane, (void)j0, (void)j1;"
)

_BATCH_BYTES = 16
_MOST_BATCH = 8
_MOST_SUMS, _MOST_SHARED_SUMS = 8, 12
"""Of sums over rows that a thread has in registers: where they stay there (`strips`) each is a
double and a float, and where they are in shared memory, those of a batch are there for a while."""

_MOST_TENSORS = 4

_MOST_COLUMNS = 64
"""Of numbers of columns that a thread has in registers for all of its rows."""

MOST_WEIGHT = 320
"""Of what is computed for a batch, in additions: GELU of bfloat16 has 16 bytes just so."""


def is_random(program: FusedProgram) -> bool:
    """Return whether a program has random bits."""
    return any([i.op == "philox" for i in program.instructions])


def batch_of(program: FusedProgram) -> int:
    """Return how many columns a thread takes at a time, from what it loads for each."""
    if is_random(program):
        return RANDOM_COLUMNS
    full = [entry.dtype.itemsize for entry in program.inputs if entry.kind is Kind.FULL]
    num_sums = len([i for i in program.instructions if i.op == "column_sum"])
    reduces = any([i.op in ROW_REDUCTIONS for i in program.instructions])
    num_columns = len([entry for entry in program.inputs if entry.kind is Kind.COLUMN])
    most_sums, batch = _MOST_SHARED_SUMS if reduces else _MOST_SUMS, _MOST_BATCH
    while batch > 1 and (
        batch * sum(full, 0) > _BATCH_BYTES * max(1, len(full))
        or batch * weight(program) > MOST_WEIGHT
        or batch * num_sums > most_sums
        or batch * num_columns > _MOST_COLUMNS
    ):
        # Halved until loads are 16 bytes per operand and registers hold what is computed.
        batch //= 2
    return batch


def is_paired(program: FusedProgram) -> bool:
    """Return whether a thread loads two batches before it computes the first."""
    return batch_of(program) > 1 and not is_random(program)


def summing_threads(program: FusedProgram) -> int:
    """Return the threads of a multiprocessor that reduce rows and add up columns in shared memory.

    They wait for a row, for each other and for the sums: half as many again do so beside, where 80
    registers will do. Random bits and doubles need more. So do sums in scratch, whose addresses are
    twice as wide (20 registers more); they are of rows that take a block of `MAX_THREADS` each, and
    half as many again are no second block.
    """
    dtypes = {x.dtype for x in program.inputs} | {i.dtype for i in program.instructions}
    num_full = len([entry for entry in program.inputs if entry.kind is Kind.FULL])
    is_large = DType.FLOAT64 in dtypes or is_random(program) or num_full > _MOST_TENSORS
    return MAX_THREADS if is_large else 3 * MAX_THREADS // 2


def sum_dtype(dtype: DType) -> DType:
    """Return the type in which a team adds up the values of a column, of a type, for a stretch."""
    if is_single(dtype):
        return DType.FLOAT32
    return DType.FLOAT64 if is_float(dtype) else DType.INT64


def is_single(dtype: DType) -> bool:
    """Return whether values are added up in single precision, stretch by stretch."""
    return is_float(dtype) and dtype is not DType.FLOAT64


Placed = list[tuple[ColumnRun, str]]
"""Runs, each with the row that it is of."""


@dataclass(frozen=True, slots=True)
class _PhaseRuns:
    """What a phase moves: what it loads, the sums that it adds to, and what it stores."""

    loads: Placed
    sums: Placed
    stores: Placed

    @property
    def moved(self) -> list[ColumnRun]:
        return [run for run, _ in (*self.loads, *self.sums, *self.stores)]


def _numbered(placed: Placed) -> Placed:
    """Return runs whose words are those of batch i."""
    return [(replace(run, words=f"{run.words}[i]"), row) for run, row in placed]


class PhaseWriter:
    """The text of the phases of one program, with NAME for its name."""

    def __init__(self, program: FusedProgram, plan: Schedule) -> None:
        self.program, self.plan = program, plan
        self.values = Values(program, plan, "k")
        self.batch = batch_of(program)
        self.runs = RunWriter(self.batch)
        self._at_once = 2 if is_paired(program) else 1

    def is_empty(self, phase: LoopPhase) -> bool:
        """Return whether a phase does nothing."""
        return not (phase.stores or phase.reductions or phase.column_sums)

    def lines(self, index: int) -> list[str]:
        """Return the function NAME_phase`index` on columns j0 .. j1 of row r."""
        phase = self.plan.phases[index]
        loop = [] if self.is_empty(phase) else self._loop(phase, index)
        text = [*self._before(phase), *loop, *self._after(phase)]
        head = f"AF_FUNCTION void NAME_phase{index}({_PHASE_PARAMETERS})"
        return block(head, [*text, _PHASE_UNUSED])

    def first_columns(self) -> list[str]:
        """Return where a thread begins, and how far its columns and its batches lie apart."""
        return [
            f"const int64_t way = a[{words.way(self.program, len(self.plan.column_sums))}].i;",
            f"const int64_t first = j0 + (way == {NARROW} ? 1 : {self.batch}) * lane;",
            f"const int32_t apart = {self.batch} * (int32_t)team;",
        ]

    def _loop(self, phase: LoopPhase, index: int) -> list[str]:
        """Return the loop over batches, two of a thread at a time where both are moved at once.

        Every second phase goes back: caches still have the end.
        """
        is_back = index % 2 == 1
        flush = self._flush(phase, "at - each < first" if is_back else "at + each >= j1")
        text = [*self.first_columns(), f"const int32_t each = {self._at_once} * apart;"]
        loop = "for (int64_t at = first; at < j1; at += each)"
        if is_back:  # a team with a second phase is a power of two
            text.append("const int64_t last = first + ((j1 - 1 - first) & -each);")
            loop = "for (int64_t at = last; at >= first; at -= each)"
        text += ["int32_t stretch = 0;"] if flush else []
        one = [
            "const int32_t left = (int32_t)af_min(j1 - b, apart);",
            *self.runs.either(lambda is_wide: self._batch(phase, is_wide=is_wide)),
        ]
        body = ["const int64_t b = at;", *one]
        if self._at_once > 1:
            apart = block("for (int64_t b = at; b < af_min(at + each, j1); b += apart)", one)
            is_whole = f"at + apart + {self.batch} <= j1"
            body = self.runs.wide_or(is_whole, self._pair(phase), ["AF_ROLLED", *apart])
        return [*text, "AF_ROLLED", *block(loop, [*body, *flush])]

    def _batch(self, phase: LoopPhase, *, is_wide: bool) -> list[str]:
        """Return what is done with the columns b + k * step, if k * step < here."""
        runs = self._runs(phase)
        return [
            *self.runs.arrays(runs.moved),
            *self._loads(runs, is_wide=is_wide),
            *block("", self._computes(phase, runs, is_wide=is_wide)),
        ]

    def _pair(self, phase: LoopPhase) -> list[str]:
        """Return what is done with the columns from `at` on, and those that are `apart` from them.

        Both are loaded before the first is computed: so twice as many bytes are on their way.
        """
        runs = self._runs(phase)
        of_one = _PhaseRuns(_numbered(runs.loads), _numbered(runs.sums), _numbered(runs.stores))
        steps = (
            self._loads(of_one, is_wide=True),
            self._computes(phase, of_one, is_wide=True),
        )
        text = self.runs.arrays(runs.moved, rows=2)
        for step in steps:
            both = ["const int64_t b = at + i * apart;", *step]
            text += ["AF_UNROLL", *block("for (int32_t i = 0; i < 2; i++)", both)]
        return text

    def _runs(self, phase: LoopPhase) -> _PhaseRuns:
        sums = [self._sum(v) for v in phase.column_sums]
        return _PhaseRuns(self.loaded(phase), sums, self.stored(phase))

    def _loads(self, runs: _PhaseRuns, *, is_wide: bool) -> list[str]:
        """Return what loads the columns from b on."""
        loads = [run for run, _ in (*runs.loads, *runs.sums)]
        return [
            *self.places(runs.loads, "const "),
            *self.places(runs.sums),
            *self.runs.get(loads, is_wide=is_wide),
        ]

    def _computes(self, phase: LoopPhase, runs: _PhaseRuns, *, is_wide: bool) -> list[str]:
        """Return what computes and stores the columns from b on."""
        loads, sums, stores = [
            [run for run, _ in placed] for placed in (runs.loads, runs.sums, runs.stores)
        ]
        added = [
            run.put(f"{run.element()} + {self.term(v)}")
            for v, run in zip(phase.column_sums, sums, strict=True)
        ]
        ends = [line for v in phase.reductions for line in self._reduce(v)]
        added = [*(block("if (k * step < here)", ends) if ends else []), *added]
        return [
            *self.random_bits(phase),
            *self.each_computed(phase, loads, added, stores),
            *self.places([*runs.sums, *runs.stores]),
            *self.runs.store([*sums, *stores], is_wide=is_wide),
        ]

    def places(self, placed: Placed, const: str = "") -> list[str]:
        """Return the pointers to column b of runs in their rows."""
        return [f"{const}{run.storage} *{run.place} = {row} + b;" for run, row in placed]

    def each_computed(
        self, phase: LoopPhase, loads: list[ColumnRun], added: list[str], stores: list[ColumnRun]
    ) -> list[str]:
        """Return the loop over a batch: what was loaded, computed, added up, and will be stored."""
        column = [
            "const int64_t j = b + k * step;",
            *self._computed(phase, loads),
            *added,
            *self._put_outputs(phase, stores),
            "(void)j;",
        ]
        return self.runs.each_column(column)

    def loaded(self, phase: LoopPhase) -> Placed:
        """Return the runs that a phase loads, each with the row that it is of."""
        return [(self._run(v, f"l{v}", f"f{v}"), row) for v, row in self.values.reads(phase)]

    def stored(self, phase: LoopPhase) -> Placed:
        """Return the runs that a phase stores, each with the row that it is of."""
        outputs = self.program.outputs
        return [
            (self._run(outputs[position], f"o{position}", f"z{position}"), f"y{position}")
            for position in phase.stores
        ]

    def _run(self, value: int, array: str, place: str) -> ColumnRun:
        return ColumnRun(array, place, self.values.dtype(value), self.values.storage(value))

    def _sum(self, value: int) -> tuple[ColumnRun, str]:
        """Return the run of a team's sums over rows, and where they are."""
        dtype = sum_dtype(self.values.dtype(value))
        return ColumnRun(f"q{value}", f"g{value}", dtype, storage_of(dtype)), f"c{value}"

    def random_bits(self, phase: LoopPhase) -> list[str]:
        """Return the random bits of a batch."""
        values, text = self.values, []
        for v in [v for v in phase.body if values.op(v) == "philox"]:
            step, seed, key = values.random_key(v)
            text += [
                f"uint32_t u{v}[{RANDOM_COLUMNS}];",
                f"af_random8(u{v}, {values.first_number(v)} + b, {step},",
                f"    {seed}, {key});",
            ]
        return text

    def _computed(self, phase: LoopPhase, loads: list[ColumnRun]) -> list[str]:
        """Return the values of a phase at element k, from what was loaded."""
        values, reads = self.values, self.values.reads(phase)
        return [
            *[
                values.loaded_line(v, run.element())
                for (v, _), run in zip(reads, loads, strict=True)
            ],
            *[values.constant_line(v, values.define(v)) for v in phase.body],
        ]

    def _put_outputs(self, phase: LoopPhase, stores: list[ColumnRun]) -> list[str]:
        """Return how element k of outputs gets into the words that are stored."""
        outputs = self.program.outputs
        return [
            run.put(self._in_memory(outputs[position]))
            for position, run in zip(phase.stores, stores, strict=True)
        ]

    def term(self, value: int) -> str:
        """Return the name of what a reduction adds up."""
        return self.values.name(operands_of(self.program, value)[0])

    def _in_memory(self, value: int) -> str:
        """Return what is put into memory for a value; what was rounded has but 16 bits to take."""
        values, dtype = self.values, self.values.dtype(value)
        if dtype is DType.BFLOAT16 and values.constant(value) is None:
            # Exact: the value was rounded to bfloat16 when it was computed, so the low half is 0.
            return f"(uint16_t)(af_bits_of_float({values.name(value)}) >> 16)"
        return store(dtype, values.name(value))

    def _before(self, phase: LoopPhase) -> list[str]:
        values, text = self.values, []
        for v in phase.reductions:
            single = [f"float p{v} = 0;"] if self._is_by_stretches(v) else []
            text += [values.start_line(v), *single]
        return [
            *values.prelude((*phase.body, *phase.reductions, *phase.column_sums)),
            *values.pointers(phase),
            *[f"{self.sum_type(v)} *c{v} = sums->c{v};" for v in phase.column_sums],
            *text,
        ]

    def sum_type(self, value: int) -> str:
        """Return the type in which a team adds up a column sum."""
        return storage_of(sum_dtype(self.values.dtype(value)))

    def _is_by_stretches(self, value: int) -> bool:
        return self.values.op(value) == "row_sum" and is_single(self.values.dtype(value))

    def _reduce(self, value: int) -> list[str]:
        x, op = self.term(value), self.values.op(value)
        if op == "row_sum":
            return [f"{'p' if self._is_by_stretches(value) else 't'}{value} += {x};"]
        join = "AF_LARGER" if op == "row_max" else "AF_SMALLER"
        single = "_F32" if is_single(self.values.dtype(value)) else ""
        return [f"t{value} = {join}{single}({x}, t{value});"]

    def _flush(self, phase: LoopPhase, is_end: str) -> list[str]:
        """Return the end of a stretch."""
        sums = [v for v in phase.reductions if self._is_by_stretches(v)]
        if not sums:
            return []
        ends = [f"t{v} += p{v}, p{v} = 0;" for v in sums]
        # Batches that go together have so many terms of a thread; some times as many are a stretch.
        many = max(1, STRETCH // (self._at_once * self.batch))
        return block(f"if (++stretch == {many} || {is_end})", [*ends, "stretch = 0;"])

    def _after(self, phase: LoopPhase) -> list[str]:
        total = self.values.total_type
        return [f"row->v{v} = {self.joined(v, f't{v}', total(v))};" for v in phase.reductions]

    def joined(self, value: int, name: str, c_type: str) -> str:
        """Return the reduction of the numbers of a type that a team has, as the value's type."""
        op = self.values.op(value)[len("row_") :]
        sort = {"double": "f64", "float": "f32", "uint64_t": "u64"}.get(c_type, "i64")
        # Sums of integers wrap around alike.
        sort = "i64" if (op, sort) == ("sum", "u64") else sort
        return f"({self.values.type(value)})af_team_{op}_{sort}({name}, team, exchange)"
