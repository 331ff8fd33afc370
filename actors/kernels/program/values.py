"""What the texts of a program in C and in CUDA share: arguments, expressions, names and places.

An argument block is a vector of 64-bit words, and the constants here number them. An instruction is
an expression over names. `Values` gives the names and the places of elements in memory: v3 is value
3; of a FULL or ROW value in a loop over several rows, v3_1 is that of the second row. x3 is where
an input lies, y3 where output 3 does, k3 a row buffer, c3 column sums, u3 random bits, t3 a
reduction under way, m3 a stretch of the terms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from actors.kernels.program.numbers import Number
from actors.kernels.program.phases import LoopPhase, Schedule, op_of, operands_of
from compiler.contract.program import FusedProgram, Instruction, Kind
from compiler.contract.types import DType

# The argument block: a header, then four words per operand of the launch (inputs, then outputs),
# two per row buffer and two per column sum, and on the host one per number. Sizes, strides and
# addresses are here and not in the text, so that one function serves every shape.

ROWS = 0
COLUMNS = 1
CHUNK_ROWS = 2
NUM_CHUNKS = 3
"""Pieces of the rows; a chunk of a column sum has a partial of its own."""
MAX_WORKERS = 4
CHUNK_COLUMNS = 5
"""Columns of a piece. On the host, where rows are cut, those of the program: a walked row may be
several of its rows."""
NUM_COLUMN_CHUNKS = 6
"""Pieces of the columns; 0 where rows are cut."""
STATUS = 7
"""0, or 1 + the row of an index that `check_index` refused; written by the function."""
PARTIALS = 8
"""Address of the partial reductions of pieces of a row: 8 bytes per piece and reduction."""

SKIP = 9
"""Address of an int64, or 0: where it is not 0, the launch does nothing."""

FIRST_ROW, NUM_TEAMS, TEAM_THREADS = CHUNK_ROWS, NUM_CHUNKS, MAX_WORKERS
"""Of a CUDA device: teams take rows from the first on."""

NUM_PARTIALS = NUM_TEAMS
"""Where columns are added up on a CUDA device: the partial rows of each sum, which blocks leave; so
many blocks have a piece of the columns."""

_HEADER = 10

POINTER, STRIDE, EVERY, COUNT = 0, 1, 2, 3
"""Words of an operand. The stride is from row to row, in elements."""

_OPERAND = 4
_PAIR = 2


def operand(position: int, word: int = POINTER) -> int:
    """Return the place of a word of an operand; outputs come behind the inputs."""
    return _HEADER + _OPERAND * position + word


def operand_words(
    program: FusedProgram, addresses: Sequence[int], strides: Sequence[int], rows: int
) -> list[int]:
    """Return the words of all operands (inputs, then outputs) of a program of so many rows."""
    repeats = [(entry.every, entry.count or rows) for entry in program.inputs]
    repeats += [(1, rows)] * len(program.outputs)
    operands = zip(addresses, strides, repeats, strict=True)
    return [word for place, stride, repeat in operands for word in (place, stride, *repeat)]


def buffer(program: FusedProgram, index: int) -> int:
    """Return the place of a row buffer's address; its elements per thread follow."""
    return operand(len(program.inputs) + len(program.outputs)) + _PAIR * index


def column_sum(program: FusedProgram, num_buffers: int, index: int) -> int:
    """Return the place of a column sum's first partial; the elements per partial follow."""
    return buffer(program, num_buffers + index)


def repeated(program: FusedProgram, plan: Schedule, value: int) -> int:
    """Return the place of the address of an input of kind COLUMN as often as a walked row has it.

    The address is 0 where a walked row is one of the program. Words of C.
    """
    before = [x.kind for x in program.inputs[:value]].count(Kind.COLUMN)
    return column_sum(program, len(plan.buffers), len(plan.column_sums)) + before


def numbers_begin(program: FusedProgram, plan: Schedule) -> int:
    """Return the place of the first of the `numbers_of` a program, the last words of C."""
    return repeated(program, plan, len(program.inputs))


def stretches(program: FusedProgram, num_sums: int) -> int:
    """Return the place of the address of what teams add up in single precision, or 0."""
    return column_sum(program, 0, num_sums)


def way(program: FusedProgram, num_sums: int) -> int:
    """Return the place of the word that says which columns a thread has; the last of CUDA."""
    return stretches(program, num_sums) + 1


# Instructions as expressions of C. Floats are computed in their own type, bfloat16 and float16 in
# float. Signed integers wrap around, as numpy's do: arithmetic goes through the unsigned type.

_HALVES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "f16"}
_FLOATS = (DType.FLOAT32, DType.FLOAT64, *_HALVES)
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}

_MATH_H = "sqrt erfc log1p expm1 log2 log10 atan2 floor ceil"
_FUNCTIONS = {
    **{op: (f"{op}f", op) for op in _MATH_H.split()},
    **{op: (f"af_{op}f", op) for op in ("exp", "log", "tanh", "erf", "sin", "cos")},
    "round": ("rintf", "rint"),
    "abs": ("fabsf", "fabs"),
    "pow": ("af_powf", "af_pow"),
    "mod": ("af_mod_float", "af_mod_double"),
}
_FLOAT_FORMS = {
    "rsqrt": ("1.0f / sqrtf({0})", "1.0 / sqrt({0})"),
    "reciprocal": ("af_reciprocalf({0})", "1.0 / {0}"),
    "neg": ("-{0}", "-{0}"),
    "div": ("{0} / {1}", "{0} / {1}"),
    "sign": (
        "{0} != {0} ? {0} : (float)(({0} > 0) - ({0} < 0))",
        "{0} != {0} ? {0} : (double)(({0} > 0) - ({0} < 0))",
    ),
}
"""Ops of floats that are functions, and those with a form of their own: of float and of double."""


def is_float(dtype: DType) -> bool:
    """Return whether values are computed as float or double."""
    return dtype in _FLOATS


def type_of(dtype: DType) -> str:
    """Return the type in which values of a dtype are computed."""
    if dtype is DType.FLOAT64:
        return "double"
    if is_float(dtype):
        return "float"
    return "_Bool" if dtype is DType.BOOL else f"{dtype.value}_t"


def storage_of(dtype: DType) -> str:
    """Return the type of the elements in memory."""
    if dtype in _HALVES:
        return "uint16_t"
    return "uint8_t" if dtype is DType.BOOL else type_of(dtype)


def sum_type_of(dtype: DType) -> str:
    """Return the type in which elements of a dtype are added up at last."""
    return "double" if is_float(dtype) else "int64_t"


def partial_type_of(dtype: DType) -> str:
    """Return the type in which reductions of pieces of a row are joined."""
    # Compared as signed, the upper half of its range would be negative.
    return "uint64_t" if dtype is DType.UINT64 else sum_type_of(dtype)


def member_of(dtype: DType) -> str:
    """Return the member of an af_word that a sum or a partial reduction of a dtype is."""
    return "d" if is_float(dtype) else "i"


def load(dtype: DType, place: str) -> str:
    """Return the value of an element in memory."""
    if dtype in _HALVES:
        return f"af_from_{_HALVES[dtype]}({place})"
    return f"{place} != 0" if dtype is DType.BOOL else place


def store(dtype: DType, value: str) -> str:
    """Return what is put into memory for a value."""
    return f"af_to_{_HALVES[dtype]}({value})" if dtype in _HALVES else value


def conversions(dtype: DType, wide: str) -> dict[str, str]:
    """Return the definitions of a text for elements of a type: what FROM and TO mean for an x.

    FROM(x) is the number of type `wide` that an element is, TO(x) the element that a number is.
    """
    c_type, is_same = type_of(dtype), is_float(dtype) and type_of(dtype) == wide
    number = load(dtype, "x") if dtype in _HALVES else "(x)"
    element = "(x)" if is_same else f"({c_type})(x)"
    if dtype in _HALVES:
        element = store(dtype, "x" if is_same else element)
    return {"FROM(x)": number if is_same else f"({wide}){number}", "TO(x)": element}


def rounded(dtype: DType, value: str) -> str:
    """Return a value as it will be read back from memory."""
    return load(dtype, store(dtype, value)) if dtype in _HALVES else value


def literal(number: float, dtype: DType) -> str:
    """Return a constant of a dtype."""
    if dtype is DType.BOOL:
        return str(int(bool(number)))
    if not is_float(dtype):
        value = int(number)
        # C has no literal for it: -9223372036854775808 is the negation of one that is too large.
        if value == -(2**63):
            return "INT64_MIN"
        return f"(({type_of(dtype)}){value}{'ULL' if value >= 2**63 else 'LL'})"
    value_f = float(number)
    if math.isnan(value_f):
        return "NAN"
    if math.isinf(value_f):
        return "INFINITY" if value_f > 0 else "(-INFINITY)"
    # Hexadecimal is exact: no rounding between Python and the compiler.
    text = value_f.hex() if dtype.value == "float64" else f"(float){value_f.hex()}"
    return f"({text})"


def expression(
    instruction: Instruction,
    names: tuple[str, ...],
    dtypes: tuple[DType, ...],
    constants: tuple[float | None, ...],
) -> str | None:
    """Return the value of an elementwise instruction, `cast` and `constant`; None for other ops.

    `names`, `dtypes` and `constants` (the number, where an operand is one) are of the operands.
    """
    op, dtype = instruction.op, instruction.dtype
    if op == "constant":
        return literal(instruction.constants[0], dtype)
    if op == "cast":
        return f"{names[0]} != 0" if dtype is DType.BOOL else f"({type_of(dtype)}){names[0]}"
    if op == "select":
        return f"{names[0]} ? {names[1]} : {names[2]}"
    if op in _COMPARISONS:
        return f"{names[0]} {_COMPARISONS[op]} {names[1]}"
    if op in ("max", "min"):
        return _extreme(op, names, dtypes[0], constants)
    if op in _LOGIC and dtype is DType.BOOL:
        return f"{names[0]} {_LOGIC[op]} {names[1]}"
    if op == "not" and dtype is DType.BOOL:
        return f"!{names[0]}"
    if is_float(dtype):
        return _float(op, names, dtype)
    return _integer(op, names, dtype)


def _float(op: str, names: tuple[str, ...], dtype: DType) -> str | None:
    if op in _ARITHMETIC:
        return f"{names[0]} {_ARITHMETIC[op]} {names[1]}"
    is_double = dtype is DType.FLOAT64
    if op in _FUNCTIONS:
        return f"{_FUNCTIONS[op][is_double]}({', '.join(names)})"
    return _FLOAT_FORMS[op][is_double].format(*names) if op in _FLOAT_FORMS else None


def _integer(op: str, names: tuple[str, ...], dtype: DType) -> str | None:
    own = type_of(dtype)
    # Unsigned: overflow of signed integers is undefined in C, and short ones are promoted to int.
    wide = "uint64_t" if dtype.itemsize == 8 else "uint32_t"
    # A shift by the width or more, or by less than 0, is undefined in C; numpy gives 0 or the sign.
    is_less = f"(uint64_t){names[-1]} < {8 * dtype.itemsize}"
    if op in _ARITHMETIC and dtype is not DType.BOOL:
        return f"({own})(({wide}){names[0]} {_ARITHMETIC[op]} ({wide}){names[1]})"
    forms: dict[str, Callable[[], str]] = {
        "neg": lambda: f"({own})(0u - ({wide}){names[0]})",
        "abs": lambda: f"{names[0]} < 0 ? ({own})(0u - ({wide}){names[0]}) : {names[0]}",
        "sign": lambda: f"({own})(({names[0]} > 0) - ({names[0]} < 0))",
        "mod": lambda: f"({own})af_mod_{_sort(dtype)}({names[0]}, {names[1]})",
        "floordiv": lambda: f"({own})af_floordiv_{_sort(dtype)}({names[0]}, {names[1]})",
        "and": lambda: f"({own})({names[0]} & {names[1]})",
        "or": lambda: f"({own})({names[0]} | {names[1]})",
        "xor": lambda: f"({own})({names[0]} ^ {names[1]})",
        "not": lambda: f"({own})~{names[0]}",
        "shl": lambda: f"{is_less} ? ({own})(({wide}){names[0]} << {names[1]}) : 0",
        "shr": lambda: f"{is_less} ? ({own})({names[0]} >> {names[1]}) : ({own})-({names[0]} < 0)",
        "floor": lambda: names[0],
        "ceil": lambda: names[0],
        "round": lambda: names[0],
    }
    form = forms.get(op)
    return None if form is None or dtype is DType.BOOL else form()


def _sort(dtype: DType) -> str:
    return "uint" if dtype.value.startswith("uint") else "int"


def _extreme(
    op: str, names: tuple[str, ...], dtype: DType, constants: tuple[float | None, ...]
) -> str:
    """Return the larger or smaller of two; NaN where either is.

    `a > b ? a : b` gives b where either is NaN, which is what the processor's own instruction does:
    a constant, known to be none, goes first.
    """
    a, b = names
    sign = ">" if op == "max" else "<"
    if not is_float(dtype):
        return f"{a} {sign} {b} ? {a} : {b}"
    for first, second, number in ((a, b, constants[0]), (b, a, constants[1])):
        if number is not None and not math.isnan(number):
            return f"{first} {sign} {second} ? {first} : {second}"
    # `|`, not `||`: both sides are computed, and no branch stands in the way of vectors.
    return f"({a} {sign} {b}) | ({a} != {a}) ? {a} : {b}"


class Values:
    """The values of one program, as C."""

    def __init__(
        self,
        program: FusedProgram,
        plan: Schedule,
        place: str = "j",
        numbers: Sequence[Number] = (),
    ) -> None:
        """Number the row buffers and column sums of the schedule.

        `place` is where an element's random bits are in u. `numbers` are words of the block, from
        `numbers_begin` on; all others are text.
        """
        self.program = program
        self.plan = plan
        self._place = place
        self._buffers = {v: i for i, v in enumerate(plan.buffers)}
        self._sums = {v: i for i, v in enumerate(plan.column_sums)}
        self._numbers = {
            (number.value, number.index): f"a[{place}].{number.member}"
            for place, number in enumerate(numbers, numbers_begin(program, plan))
        }

    def dtype(self, value: int) -> DType:
        """Return the element type."""
        return self.program.dtype_of(value)

    def kind(self, value: int) -> Kind:
        """Return how a value lies in the space."""
        return self.program.kind_of(value)

    def type(self, value: int) -> str:
        """Return the type in which a value is computed."""
        return type_of(self.dtype(value))

    def storage(self, value: int) -> str:
        """Return the type of a value's elements in memory."""
        return storage_of(self.dtype(value))

    def is_float(self, value: int) -> bool:
        """Return whether a value is computed as float or double."""
        return is_float(self.dtype(value))

    def is_input(self, value: int) -> bool:
        """Return whether a value is an operand of the launch."""
        return value < len(self.program.inputs)

    def op(self, value: int) -> str:
        """Return the op of a value; "" for an input."""
        return op_of(self.program, value)

    def instruction(self, value: int) -> Instruction:
        """Return the instruction that makes a value."""
        return self.program.instructions[value - len(self.program.inputs)]

    def constant(self, value: int) -> float | None:
        """Return the number that a value is in the text, or None."""
        is_constant = self.op(value) == "constant" and (value, 0) not in self._numbers
        return self.instruction(value).constants[0] if is_constant else None

    def size(self, value: int, index: int = 0) -> str:
        """Return a whole number that an instruction has: a word of the block, or text."""
        return self._numbers.get((value, index)) or str(self.instruction(value).constants[index])

    def name(self, value: int, suffix: str = "") -> str:
        """Return the name of a value; a constant stands for itself."""
        number = self.constant(value)
        if number is not None:
            return literal(number, self.dtype(value))
        has_rows = self.kind(value) in (Kind.FULL, Kind.ROW)
        return f"v{value}{suffix if has_rows else ''}"

    def define(self, value: int, suffix: str = "") -> str:
        """Return what an instruction computes, rounded where it will be read back from memory.

        Raises ValueError where there is no C for it.
        """
        instruction = self.instruction(value)
        special = self._special(value, f"u{value}{suffix}", suffix)
        if special is not None:
            return special
        operands = instruction.operands
        text = expression(
            instruction,
            tuple([self.name(v, suffix) for v in operands]),
            tuple([self.dtype(v) for v in operands]),
            tuple([self.constant(v) for v in operands]),
        )
        if text is None:
            raise ValueError(f"there is no C for {instruction}")
        is_output = value in self.program.outputs
        return rounded(instruction.dtype, f"({text})") if is_output else text

    def constant_line(self, value: int, text: str, suffix: str = "") -> str:
        """Return the definition of a value as what `text` computes."""
        return f"const {self.type(value)} {self.name(value, suffix)} = {text};"

    def loaded_line(self, value: int, place: str, suffix: str = "") -> str:
        """Return the definition of a value that lies in memory at a place."""
        return self.constant_line(value, load(self.dtype(value), place), suffix)

    def total_type(self, value: int) -> str:
        """Return the type of t, a reduction of a row under way."""
        return sum_type_of(self.dtype(value)) if self.op(value) == "row_sum" else self.type(value)

    def start_line(self, value: int, suffix: str = "") -> str:
        """Return the definition of t, a reduction of a row of which nothing is known yet."""
        op, limits = self.op(value), self.dtype(value).value.upper()
        is_most = op == "row_max"
        if op == "row_sum":
            first = "0"
        elif self.is_float(value):
            first = "-INFINITY" if is_most else "INFINITY"
        elif is_most:
            first = "0" if limits.startswith("U") else f"{limits}_MIN"
        else:
            first = f"{limits}_MAX"
        return f"{self.total_type(value)} t{value}{suffix} = {first};"

    def random_key(self, value: int) -> tuple[str, str, str]:
        """Return the step, the seed and the key of random bits, of 64 bits each."""
        instruction = self.instruction(value)
        seed, step = [f"(uint64_t){self.name(v)}" for v in instruction.operands[:2]]
        word = self._numbers.get((value, 0))
        key = f"{int(instruction.constants[0]) % 2**64}ULL"
        return step, seed, f"(uint64_t){word}" if word else key

    def first_number(self, value: int) -> str:
        """Return the number of the first element of row r among those that random bits are for."""
        rows, places = f"r * a[{COLUMNS}].i", self.instruction(value).operands[2:]
        if not places:
            return rows
        name = self.name(places[0])
        return name if self.kind(places[0]) is Kind.ROW else f"({name} + {rows})"

    def _special(self, value: int, bits: str, suffix: str) -> str | None:
        """Return what no operand decides: places in the space, and words; None for other ops."""
        instruction = self.instruction(value)
        if instruction.op == "constant":
            return self._numbers.get((value, 0))
        if instruction.op == "column_index":
            return "(int32_t)j"
        if instruction.op == "row_index":
            wrap = f" % {self.size(value, 1)}" if instruction.constants[1] else ""
            return f"(int32_t)(r / {self.size(value)}{wrap})"
        if instruction.op == "check_index":
            return self.name(instruction.operands[0], suffix)
        if instruction.op == "philox":
            # The upper 24 bits of a word are kept where they are at least p * 2^24.
            least = math.ceil(float(instruction.constants[1]) * 2**24)
            number = f"({bits}[{self._place}] >> 8)"
            is_bits = instruction.dtype is DType.INT32
            return f"(int32_t){number}" if is_bits else f"{number} >= {least}u"
        return None

    def prelude(self, values: tuple[int, ...], suffix: str = "", row: str = "row") -> list[str]:
        """Return ROW and SCALAR operands of instructions, not of `values`, as local constants."""
        operands = {v for value in values for v in operands_of(self.program, value)} - {*values}
        places = {Kind.ROW: row, Kind.SCALAR: "s"}
        return [
            f"const {self.type(v)} {self.name(v, suffix)} = {places[self.kind(v)]}->v{v};"
            for v in sorted(operands)
            if self.kind(v) in places and self.constant(v) is None
        ]

    def reads(self, phase: LoopPhase, suffix: str = "") -> list[tuple[int, str]]:
        """Return the values that a phase has from operands, each with the name of its place."""
        rows = {v: suffix if self.kind(v) is Kind.FULL else "" for v in phase.loads}
        loads = [(v, f"x{v}{row}") for v, row in rows.items()]
        return loads + [(v, f"y{position}{suffix}") for v, position in phase.read_back]

    def pointers(
        self, phase: LoopPhase, row: str = "r", suffix: str = "", *, has_columns: bool = True
    ) -> list[str]:
        """Return the definitions of x and y: where the operands have what a phase walks in a row.

        Where COLUMN operands lie is left out without `has_columns`: it is the same for all rows.
        """
        full = [(v, self.kind(v) is Kind.FULL) for v in phase.loads]
        text = [
            self.pointer(v, suffix, row if is_full else "")
            for v, is_full in full
            if is_full or has_columns
        ]
        places = {*phase.stores, *[position for _, position in phase.read_back]}
        return text + [self.output_row(position, row, suffix) for position in sorted(places)]

    def element(self, value: int, index: str) -> str:
        """Return an element of an input."""
        return load(self.dtype(value), f"({self._operand(value)})[{index}]")

    def pointer(self, value: int, suffix: str = "", row: str = "") -> str:
        """Return the definition of x: where an input lies, or the row of it that belongs to one."""
        offset = f" + {self.own_row(value, row)}" if row else ""
        declaration = f"const {self.storage(value)} *x{value}{suffix}"
        return f"{declaration} = {self._operand(value)}{offset};"

    def repeated_pointer(self, value: int) -> str:
        """Return the definition of x: where a walked row has an input of kind COLUMN, on the host.

        It is `pointer`, or where the launch has put the columns one behind the other.
        """
        word = f"a[{repeated(self.program, self.plan, value)}].p"
        place = f"({word} ? (const {self.storage(value)} *){word} : {self._operand(value)})"
        return f"const {self.storage(value)} *x{value} = {place};"

    def repeat_lines(self, value: int) -> list[str]:
        """Return what fills the place of `repeated_pointer`, where there is one."""
        place, size = repeated(self.program, self.plan, value), self.dtype(value).itemsize
        columns = f"a[{CHUNK_COLUMNS}].i"
        to = f"(char *)a[{place}].p + {size} * j"
        return [
            f"for (int64_t j = 0; a[{place}].p && j < a[{COLUMNS}].i; j += {columns})",
            f"    memcpy({to}, {self._operand(value)}, (size_t)({size} * {columns}));",
        ]

    def _operand(self, value: int) -> str:
        return f"(const {self.storage(value)} *)a[{operand(value)}].p"

    def own_row(self, value: int, row: str = "r") -> str:
        """Return where the row of an input begins that belongs to a row of the space."""
        return f"{self.row_number(value, row)} * a[{operand(value, STRIDE)}].i"

    def row_number(self, value: int, row: str = "r") -> str:
        """Return which row of an input belongs to a row of the space."""
        entry = self.program.inputs[value]
        if entry.every != 1:
            row = f"({row} / a[{operand(value, EVERY)}].i)"
        if entry.count:
            row = f"({row} % a[{operand(value, COUNT)}].i)"
        return row

    def output_word(self, position: int, word: int = POINTER) -> str:
        """Return a word of an output, by its position."""
        return f"a[{operand(len(self.program.inputs) + position, word)}]"

    def output(self, position: int) -> str:
        """Return where an output begins, as a pointer to its elements."""
        return f"(({self.storage(self.program.outputs[position])} *){self.output_word(position)}.p)"

    def output_row(self, position: int, row: str = "r", suffix: str = "") -> str:
        """Return the definition of y: where a row of an output begins."""
        storage = self.storage(self.program.outputs[position])
        offset = f"{row} * {self.output_word(position, STRIDE)}.i"
        return f"{storage} *y{position}{suffix} = {self.output(position)} + {offset};"

    def buffer(self, value: int) -> str:
        """Return the row buffer of a value, of this worker."""
        place, c_type = buffer(self.program, self._buffers[value]), self.type(value)
        return f"({c_type} *)a[{place}].p + worker * a[{place + 1}].i"

    def partial(self, value: int, slot: str) -> str:
        """Return the definition of c, a column sum's partial row."""
        c_type = sum_type_of(self.dtype(value))
        return f"{c_type} *c{value} = {self.partial_place(value, slot)};"

    def partial_place(self, value: int, slot: str) -> str:
        """Return where a partial row of a column sum begins."""
        c_type, place = sum_type_of(self.dtype(value)), self._sum_word(value)
        return f"({c_type} *)a[{place}].p + {slot} * a[{place + 1}].i"

    def partial_step(self, value: int) -> str:
        """Return the elements from one partial row of a column sum to the next."""
        return f"a[{self._sum_word(value) + 1}].i"

    def _sum_word(self, value: int) -> int:
        return column_sum(self.program, len(self._buffers), self._sums[value])
