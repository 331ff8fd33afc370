"""Functions on tensors. Names, arguments and semantics are torch's, else numpy's or jax.lax's.

Each file says in its `__all__` what it hands on; `actorflow` hands on all of these names. Functions
that torch's tensors have as methods are methods of tensors, too. What users call checks its
arguments against its annotations (`validate_arguments`); the functions of the files call one
another without.

elementwise.py    arithmetic and analysis of each element, comparisons, logic, rounding, bounds
shape.py          cut, joined and moved axes: split, concat, permute, view, squeeze, stack
indexing.py       elements by tensors of integers: taken, put and added
reduce.py         over axes: sums, extremes, cumulative sums
order.py          sorted, the largest, quantiles, places among sorted numbers
arranging.py      repeated, turned, diagonals, windows; numbers that the job knows; padding
products.py       matmul, einsum and products of vectors, down to matrix products
activation.py     nonlinearities and softmax
normalisation.py  over the last axes, over groups, over batch and places
dense.py          linear, bilinear, embedding, embedding_bag
convolution.py    convolutions and transposes over 1 to 3 axes; windows as columns
pooling.py        maxima and means of windows; images made larger or smaller
random.py         dropout and random numbers, each a function of seed, step, op and element
debug.py          print, check, breakpoint: what a run does with tensors, as `af.debug`
control.py        scan, map, cond, while_loop: functions that run functions
loss.py           losses of regression, of classes and of probabilities
sequence.py       attention, rotary positions, connectionist temporal classification
sampling.py       images at places that the job computes: grid_sample, affine_grid
linalg.py         decompositions of matrices, as af.linalg; numpy's LAPACK
fft.py            Fourier transforms of pairs of real and imaginary parts, as af.fft

May import actorflow.tensor, compiler.contract, compiler.graph and compiler.ops.{families, language,
primitives}. Begin reading at elementwise.py: most functions check what they take and apply one op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from actorflow.functional import (
    activation,
    arranging,
    control,
    convolution,
    dense,
    elementwise,
    fft,
    indexing,
    linalg,
    loss,
    normalisation,
    order,
    pooling,
    products,
    random,
    reduce,
    sampling,
    sequence,
    shape,
)
from actorflow.functional.activation import *
from actorflow.functional.arranging import *
from actorflow.functional.control import *
from actorflow.functional.convolution import *
from actorflow.functional.dense import *
from actorflow.functional.elementwise import *
from actorflow.functional.indexing import *
from actorflow.functional.loss import *
from actorflow.functional.normalisation import *
from actorflow.functional.order import *
from actorflow.functional.pooling import *
from actorflow.functional.products import *
from actorflow.functional.random import *
from actorflow.functional.reduce import *
from actorflow.functional.sampling import *
from actorflow.functional.sequence import *
from actorflow.functional.shape import *
from actorflow.tensor.arguments import validate_arguments
from actorflow.tensor.habits import accept_habits
from actorflow.tensor.tensor import METHODS, Tensor, as_tensor, checked_axis

_FILES = (
    activation,
    arranging,
    control,
    convolution,
    dense,
    elementwise,
    indexing,
    loss,
    normalisation,
    order,
    pooling,
    products,
    random,
    reduce,
    sampling,
    sequence,
    shape,
)
if not TYPE_CHECKING:  # which reads no list that is put together, and would hide the functions
    __all__ = [name for file in _FILES for name in file.__all__]
for _name in (
    name for file in _FILES for name in file.__all__
):  # so that functions of the files call one another unchecked
    globals()[_name] = accept_habits(validate_arguments(globals()[_name]))
for _module in (fft, linalg):  # name spaces, af.fft.rfft: their names would hide others
    for _name in _module.__all__:
        setattr(_module, _name, accept_habits(validate_arguments(getattr(_module, _name))))


# The table METHODS of `Tensor` is filled here, as `tensor` may not import functions. A function is
# a method where torch's tensors have it.

_NO_METHODS = ("bucketize", "searchsorted")
_NAMES = (
    *(name for name in elementwise.__all__ if name != "where"),
    *("log_softmax", "relu", "sigmoid", "softmax", "tanh"),
    *(name for name in (*reduce.__all__, *order.__all__) if name not in _NO_METHODS),
    *(name for name in products.__all__ if name not in ("einsum", "tensordot")),
    *("chunk", "flatten", "split", "unflatten"),
    *("expand", "expand_as", "movedim", "moveaxis", "narrow", "reshape_as", "select", "squeeze"),
    *("swapdims", "unbind", "unsqueeze", "view", "view_as"),
    *("diag", "diagonal", "flip", "fliplr", "flipud", "repeat", "repeat_interleave", "roll"),
    *("rot90", "tile", "tril", "triu"),
    *("bernoulli", "multinomial"),
    *("gather", "index_add", "index_copy", "index_fill", "index_put", "index_select"),
    *("masked_fill", "put", "scatter", "scatter_add", "scatter_reduce", "take", "take_along_dim"),
)


def _cast(dtype: str, x: Tensor) -> Tensor:
    return x.to(dtype)


_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int": "int32",
    "long": "int64",
    "short": "int16",
    "bool": "bool",
}

_PLAIN: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "contiguous": lambda x: x,
    "clone": lambda x: x,
    "dim": lambda x: x.ndim,
    "numel": lambda x: x.type.num_elements,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[checked_axis(x, dim)],
    "new_full": lambda x, size, fill_value: arranging.full(size, fill_value, dtype=x.dtype),
    "new_ones": lambda x, *size: arranging.ones(*size, dtype=x.dtype),
    "new_zeros": lambda x, *size: arranging.zeros(*size, dtype=x.dtype),
    "type_as": lambda x, other: x.to(as_tensor(other).dtype),
}
"""Methods that torch's tensors have, and that are no functions here: tensors never change."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": indexing.subscript,
    "__rmatmul__": lambda x, other: products.matmul(other, x),
    "__rpow__": lambda x, other: elementwise.pow(other, x),
}

_OTHERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(linalg, name) for name in ("cholesky", "det", "matrix_power", "slogdet")},
    "inverse": linalg.inv,
    "trace": arranging.trace,  # not af.trace, which is a package
    "unfold": arranging.unfold,  # not af.unfold, which makes columns of images, as torch's
}

METHODS.update({name: globals()[name] for name in _NAMES})
METHODS.update(_OPERATORS | _OTHERS | _PLAIN)
METHODS.update({name: partial(_cast, dtype) for name, dtype in _DTYPES.items()})
