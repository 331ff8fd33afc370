"""The type in which composed functions compute: float32 for floats of 16 bits (op-math).

An op computes 16-bit floats in float32 and rounds its results. A function of several ops would
round what lies between them as well: a sum of squares overflows float16 from 65,520 on, though its
root fits. So every function that sums, averages, squares or raises on its way computes in float32
from its operands to its results, whatever axes it goes over, and so do its gradients. The casts are
fused with what stands beside them. It is torch's rule, too (its `opmath_t`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from actorflow.tensor.literals import result_type
from actorflow.tensor.tensor import Tensor
from compiler.contract.types import HALVES, DType

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def in_float32(function: Callable[P, R]) -> Callable[P, R]:
    """Let a composed function compute tensors of 16-bit floats in float32, and round its results.

    Results have the dtype in which the float tensors among the arguments meet. What is no tensor of
    16-bit floats is handed on as it is.
    """

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        xs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dtype.is_float]
        if not any([x.dtype in HALVES for x in xs]):
            return function(*args, **kwargs)
        wide = {name: widened(x) for name, x in kwargs.items()}
        results = function(*[widened(x) for x in args], **wide)
        return rounded(results, result_type(xs))

    return computed


def widened(x: T) -> T:
    """Return a tensor or an array of 16-bit floats in float32, anything else as it is."""
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype == np.float16:
        return cast("T", x.astype(np.float32))
    return cast("T", x.to(DType.FLOAT32)) if isinstance(x, Tensor) and x.dtype in HALVES else x


def rounded(made: T, dtype: DType) -> T:
    """Return what a function made, tensors of float32 in a dtype of 16 bits where that is asked."""
    if isinstance(made, tuple):
        each = [rounded(x, dtype) for x in made]
        return cast("T", made._make(each) if hasattr(made, "_make") else tuple(each))
    if isinstance(made, Tensor) and made.dtype is DType.FLOAT32 and dtype in HALVES:
        return cast("T", made.to(dtype))
    return made
