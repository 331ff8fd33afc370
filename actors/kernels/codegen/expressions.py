"""Instructions of a program as expressions of C, over operands that are names.

Floats are computed in their own type, bfloat16 and float16 in float. Signed integers wrap around,
as numpy's do: arithmetic goes through the unsigned type.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from compiler.fusion.program import Instruction
from compiler.types import DType

_HALVES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "f16"}
_FLOATS = (DType.FLOAT32, DType.FLOAT64, *_HALVES)
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}

_FLOAT_UNARY = {
    "sqrt": ("sqrtf({0})", "sqrt({0})"),
    "rsqrt": ("1.0f / sqrtf({0})", "1.0 / sqrt({0})"),
    "reciprocal": ("1.0f / {0}", "1.0 / {0}"),
    "exp": ("af_expf({0})", "exp({0})"),
    "log": ("af_logf({0})", "log({0})"),
    "tanh": ("af_tanhf({0})", "tanh({0})"),
    "erf": ("af_erff({0})", "erf({0})"),
    "erfc": ("erfcf({0})", "erfc({0})"),
    "log1p": ("log1pf({0})", "log1p({0})"),
    "expm1": ("expm1f({0})", "expm1({0})"),
    "log2": ("log2f({0})", "log2({0})"),
    "log10": ("log10f({0})", "log10({0})"),
    "atan2": ("atan2f({0}, {1})", "atan2({0}, {1})"),
    "sin": ("sinf({0})", "sin({0})"),
    "cos": ("cosf({0})", "cos({0})"),
    "floor": ("floorf({0})", "floor({0})"),
    "ceil": ("ceilf({0})", "ceil({0})"),
    "round": ("rintf({0})", "rint({0})"),
    "abs": ("fabsf({0})", "fabs({0})"),
    "neg": ("-{0}", "-{0}"),
    "div": ("{0} / {1}", "{0} / {1}"),
    "pow": ("powf({0}, {1})", "pow({0}, {1})"),
    "mod": ("af_mod_float({0}, {1})", "af_mod_double({0}, {1})"),
    "sign": (
        "{0} != {0} ? {0} : (float)(({0} > 0) - ({0} < 0))",
        "{0} != {0} ? {0} : (double)(({0} > 0) - ({0} < 0))",
    ),
}
"""Ops that floats have a form of their own for: of float and of double."""


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


def load(dtype: DType, place: str) -> str:
    """Return the value of an element in memory."""
    if dtype in _HALVES:
        return f"af_from_{_HALVES[dtype]}({place})"
    return f"{place} != 0" if dtype is DType.BOOL else place


def store(dtype: DType, value: str) -> str:
    """Return what is put into memory for a value."""
    return f"af_to_{_HALVES[dtype]}({value})" if dtype in _HALVES else value


def rounded(dtype: DType, value: str) -> str:
    """Return a value as it will be read back from memory."""
    return load(dtype, store(dtype, value)) if dtype in _HALVES else value


def literal(number: float, dtype: DType) -> str:
    """Return a constant of a dtype."""
    if dtype is DType.BOOL:
        return str(int(bool(number)))
    if not is_float(dtype):
        value = int(number)
        if value == -(2**63):
            return "INT64_MIN"
        return f"(({type_of(dtype)}){value}{'ULL' if value >= 2**63 else 'LL'})"
    value_f = float(number)
    if math.isnan(value_f):
        return "NAN"
    if math.isinf(value_f):
        return "INFINITY" if value_f > 0 else "(-INFINITY)"
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
    forms = _FLOAT_UNARY.get(op)
    return None if forms is None else forms[dtype.value == "float64"].format(*names)


def _integer(op: str, names: tuple[str, ...], dtype: DType) -> str | None:
    own = type_of(dtype)
    wide = "uint64_t" if dtype.itemsize == 8 else "uint32_t"
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
    return f"({a} {sign} {b}) | ({a} != {a}) ? {a} : {b}"
