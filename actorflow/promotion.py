"""Which dtype operands of several meet in: torch's rules, in one place.

Operands of one dtype keep it. Of several:

- Categories are ordered bool < integer < float. The widest of the highest category wins; float16
  with bfloat16 is float32, and an unsigned integer with a signed one the next wider signed one.
- A tensor without axes counts only where it is of a higher category than all that have axes; a
  Python number only where it is of a higher one than all tensors, and is int64 or float32 then.
- What is defined for floats alone (a quotient, exp, ...) makes integers and bools float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.types import DType

_NUMBERS = (bool, int, float)


def promote(dtypes: Iterable[DType]) -> DType:
    """Return the dtype that tensors of these dtypes meet in.

    Raises CompileError for uint64 with a signed integer: no integer dtype holds all of both.
    """
    given = list(dict.fromkeys(dtypes))
    highest = max([_category(dtype) for dtype in given])
    own = [dtype for dtype in given if _category(dtype) == highest]
    size = max([dtype.itemsize for dtype in own])
    widest = [dtype for dtype in own if dtype.itemsize == size]
    if highest == 2:
        return widest[0] if len(widest) == 1 else DType.FLOAT32
    unsigned = [dtype.itemsize for dtype in own if dtype.value.startswith("uint")]
    signed = [dtype.itemsize for dtype in own if not dtype.value.startswith("uint")]
    if not unsigned or not signed:
        return widest[0]
    bits = 8 * max(*signed, 2 * max(unsigned))
    if bits > 64:
        listed = " and ".join([str(dtype) for dtype in own])
        raise CompileError(
            f"{find_source()}: no integer dtype holds all of {listed}; cast one of them with"
            " .to('int64') or .to('float64')"
        )
    return DType(f"int{bits}")


def result_type(operands: Sequence[Any]) -> DType:
    """Return the dtype that tensors and Python numbers meet in; there is at least one of them."""
    tensors = [o for o in operands if not isinstance(o, _NUMBERS)]
    numbers = [o for o in operands if isinstance(o, _NUMBERS)]
    levels = (
        [t.dtype for t in tensors if t.ndim],
        [t.dtype for t in tensors if not t.ndim],
        [_of_number(n) for n in numbers],
    )
    found: DType | None = None
    for level in levels:
        if level:
            own = promote(level)
            found = own if found is None or _category(own) > _category(found) else found
    return DType.FLOAT32 if found is None else found


def _of_number(number: float) -> DType:
    if isinstance(number, bool):
        return DType.BOOL
    return DType.INT64 if isinstance(number, int) else DType.FLOAT32


def _category(dtype: DType) -> int:
    return 2 if dtype.is_float else int(dtype is not DType.BOOL)
