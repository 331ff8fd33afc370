"""What a user writes as a number or a dtype: checked, and named with his line where it is wrong."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.types import DType


def scalar(number: bool | int | float, dtype: DType) -> np.ndarray[Any, Any]:
    """Return a Python number in the dtype of its partner. Floats may round, nothing may wrap."""
    if isinstance(number, float) and not dtype.is_float:
        raise CompileError(
            f"{find_source()}: a float cannot be combined with {dtype} tensors; convert the"
            " tensor first with .to('float32')"
        )
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


def dtype_named(name: DType | npt.DTypeLike, what: str) -> DType:
    """Return a dtype by its name. Raises CompileError, which begins with `what`, for others."""
    try:
        if name is None:  # which numpy takes for float64
            raise TypeError
        dtype = name if isinstance(name, DType) else DType(np.dtype(name).name)
    except (TypeError, ValueError):
        known = ", ".join(d.value for d in DType if d is not DType.BFLOAT16)
        if not isinstance(name, str) or name != DType.BFLOAT16.value:
            raise CompileError(
                f"{find_source()}: {what} {name} is not supported; use one of {known}"
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
