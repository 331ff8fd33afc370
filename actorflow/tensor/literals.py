"""What a user writes as a number, a size or a dtype: checked, with the user's line in the error.

Also the two names of an argument that torch and numpy call differently (`with_numpy_names`), and
the dtype that operands of several dtypes meet in (`promote`, `result_type`).
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType

_SINGLE_BYTES, _SAFE = 4, 1e38
"""Floats of so many bytes hold all numbers below this."""


def scalar(number: bool | int | float, dtype: DType) -> np.ndarray[Any, Any]:
    """Return a Python number in the dtype of its partner. Floats may round, nothing may wrap."""
    if isinstance(number, float) and not dtype.is_float:
        raise CompileError(
            f"{find_source()}: a float cannot be combined with {dtype} tensors; convert the"
            " tensor first with .to('float32')"
        )
    if type(number) is float and dtype.itemsize >= _SINGLE_BYTES and abs(number) < _SAFE:
        return np.asarray(number, dtype.value)
    if not dtype.is_float:
        if not _holds(dtype, number):
            raise _does_not_fit(number, dtype)
        return np.asarray(number, dtype.value)
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(float(number), dtype.value)
    except OverflowError:  # an int beyond every float
        raise _does_not_fit(number, dtype) from None
    if np.isinf(array) and not math.isinf(number):
        raise _does_not_fit(number, dtype)
    return array


def _range_of(dtype: DType) -> tuple[int, int] | tuple[float, float]:
    if dtype is DType.BOOL:
        return 0, 1
    if dtype.is_float:
        return float(np.finfo(dtype.value).min), float(np.finfo(dtype.value).max)
    return int(np.iinfo(dtype.value).min), int(np.iinfo(dtype.value).max)


def _does_not_fit(number: int | float, dtype: DType) -> CompileError:
    low, high = _range_of(dtype)
    wider = DType.FLOAT64 if dtype.is_float or not _holds(DType.INT64, number) else DType.INT64
    mend = "" if wider is dtype else f", or convert the tensor first with .to('{wider}')"
    return CompileError(
        f"{find_source()}: the number {number} cannot be combined with {dtype} tensors, which hold"
        f" {low} to {high}; use a number in that range{mend}"
    )


def _holds(dtype: DType, number: int | float) -> bool:
    low, high = _range_of(dtype)
    return low <= number <= high


def refuse_masked(array: object, what: str) -> None:
    """Raise CompileError for a masked array of numpy: a plan has no place for its mask."""
    if isinstance(array, np.ma.MaskedArray):
        raise CompileError(
            f"{find_source()}: {what} is a masked array of numpy, whose mask would be lost; give"
            " array.filled(number), and the mask, np.ma.getmaskarray(array), as a separate array"
        )


def dtype_named(name: DType | npt.DTypeLike, what: str) -> DType:
    """Return a dtype by its name. Raises CompileError, which begins with `what`, for others."""
    try:
        if name is None:  # which numpy takes for float64
            raise TypeError
        dtype = name if isinstance(name, DType) else DType(np.dtype(name).name)
    except (TypeError, ValueError):
        names = ", ".join(d.value for d in DType if d is not DType.BFLOAT16)
        if not isinstance(name, str) or name != DType.BFLOAT16.value:
            raise CompileError(
                f"{find_source()}: {what} {name} is not supported; use one of {names}"
            ) from None
        dtype = DType.BFLOAT16
    if dtype is DType.BFLOAT16:
        raise CompileError(
            f"{find_source()}: {what} bfloat16 is chosen for a whole job: write"
            " @af.job(precision='bf16'), or use float32 here"
        )
    return dtype


def checked_size(size: Any, what: str) -> int:
    """Return an integer of Python or numpy as an int. Raises CompileError for anything else."""
    if not isinstance(size, bool):
        with suppress(TypeError):
            return operator.index(size)
    raise CompileError(
        f"{find_source()}: {what} must be an integer, got {size!r} of type {type(size).__name__}"
    )


def checked_number(number: object, what: str) -> float:
    """Return a number of Python or numpy as a float. Raises CompileError for anything else."""
    if not isinstance(number, Real):
        raise CompileError(f"{find_source()}: {what} must be a number, got {type(number).__name__}")
    try:
        return float(number)
    except OverflowError:
        raise CompileError(f"{find_source()}: {what} is too large for a float") from None


P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_RANK = "        rank: number of spatial axes.\n"
"""What functions of ranks say of the argument that those of one rank have not."""

_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


class NumpyNamed(Protocol[P, R_co]):
    """A function of `dim` and `keepdim`, which numpy calls `axis` and `keepdims`."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, x: Any, *others: Any, axis: Any, **options: Any) -> R_co: ...
    @overload
    def __call__(self, x: Any, *others: Any, keepdims: bool, **options: Any) -> R_co: ...


def with_numpy_names(function: Callable[P, R]) -> NumpyNamed[P, R]:
    """Let a function of `dim` and `keepdim` be called with `axis` and `keepdims` as well."""
    place = [*inspect.signature(function).parameters].index("dim")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> R:
        for name, torchs in _OF_NUMPY.items():
            if name in kwargs:
                if torchs in kwargs or (torchs == "dim" and len(args) > place):
                    raise CompileError(
                        f"{find_source()}: {function.__name__} got {torchs} and {name}, which are"
                        " two names of one argument; give one of them"
                    )
                kwargs[torchs] = kwargs.pop(name)
        return function(*args, **kwargs)

    return called


def of_ranks(
    function: Callable[Concatenate[int, P], R], name: str
) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R]]:
    """Return a function of (rank, ...) for 1, 2 and 3 axes, called `<name>1d` and so on.

    What the function says of itself it says for all of them.
    """

    def of_rank(rank: int) -> Callable[P, R]:
        @functools.wraps(function)
        def ranked(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(rank, *args, **kwargs)

        ranked.__name__ = ranked.__qualname__ = f"{name}{rank}d"
        ranked.__doc__ = (function.__doc__ or "").replace(_RANK, "")
        ranked.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect
        return ranked

    full = inspect.signature(function)
    signature = full.replace(parameters=[*full.parameters.values()][1:])
    return of_rank(1), of_rank(2), of_rank(3)


# The dtype that operands meet in, by torch's rules. Operands of one dtype keep it. Of several:
#
# - Categories are ordered bool < integer < float. The widest of the highest category wins; float16
#   with bfloat16 is float32, and an unsigned integer with a signed one the next wider signed one.
# - A tensor without axes counts only where it is of a higher category than all that have axes; a
#   Python number only where it is of a higher one than all tensors, and is int64 or float32 then.
# - What is defined for floats alone (a quotient, exp, ...) makes integers and bools float32.

_NUMBERS = (bool, int, float)


def promote(dtypes: Iterable[DType]) -> DType:
    """Return the dtype that tensors of these dtypes meet in.

    Raises CompileError for uint64 with a signed integer: no integer dtype holds all of both.
    """
    distinct = list(dict.fromkeys(dtypes))
    highest = max([_category(dtype) for dtype in distinct])
    candidates = [dtype for dtype in distinct if _category(dtype) == highest]
    size = max([dtype.itemsize for dtype in candidates])
    widest = [dtype for dtype in candidates if dtype.itemsize == size]
    if highest == 2:
        return widest[0] if len(widest) == 1 else DType.FLOAT32
    unsigned = [dtype.itemsize for dtype in candidates if dtype.value.startswith("uint")]
    signed = [dtype.itemsize for dtype in candidates if not dtype.value.startswith("uint")]
    if not unsigned or not signed:
        return widest[0]
    bits = 8 * max(*signed, 2 * max(unsigned))
    if bits > 64:
        listed = " and ".join([str(dtype) for dtype in candidates])
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
    best: DType | None = None
    for level in levels:
        if level:
            dtype = promote(level)
            best = dtype if best is None or _category(dtype) > _category(best) else best
    return DType.FLOAT32 if best is None else best


def _of_number(number: float) -> DType:
    if isinstance(number, bool):
        return DType.BOOL
    return DType.INT64 if isinstance(number, int) else DType.FLOAT32


def _category(dtype: DType) -> int:
    return 2 if dtype.is_float else int(dtype is not DType.BOOL)
