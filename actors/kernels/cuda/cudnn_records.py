"""Calls of cuDNN as data: tensors with strides, and what is computed of them.

A record says what is wanted. Whoever executes it makes the library's graph of it; what that says
can be read back and compared with this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compiler.types import DType

FORWARD = ("q", "k", "v", "y", "lse")
BACKWARD = ("q", "k", "v", "y", "dy", "lse", "dq", "dk", "dv")
CONV = ("x", "weight", "y")
CONV_INPUT_GRAD = ("dy", "weight", "dx")
CONV_WEIGHT_GRAD = ("x", "dy", "dweight")
RESULTS = {FORWARD: 2, BACKWARD: 3, CONV: 1, CONV_INPUT_GRAD: 1, CONV_WEIGHT_GRAD: 1}
"""How many of the tensors, from the end, are written."""

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CudnnTensor:
    """A tensor; strides are in elements. The name says what it is in a call."""

    name: str
    dtype: DType
    shape: Extents
    strides: Extents

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to behind the last."""
        pairs = zip(self.shape, self.strides, strict=True)
        return (sum([(n - 1) * s for n, s in pairs]) + 1) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class CudnnRecord:
    """What calls have in common: their tensors, first those that are read."""

    __slots__ = ()

    tensors: tuple[CudnnTensor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, which say what is computed."""
        return tuple([tensor.name for tensor in self.tensors])

    @property
    def num_results(self) -> int:
        """How many tensors are written: the last ones."""
        return RESULTS[self.names]


@dataclass(frozen=True, slots=True)
class SdpaCall(CudnnRecord):
    """Attention, whose tensors are named as `FORWARD` has them, or its gradient (`BACKWARD`).

    Tensors are [batch, heads, rows, width], with a last stride of 1.
    y = softmax(scale q kT) v; lse [batch, heads, rows, 1], in float32, is the natural logarithm of
    the sum of exponentials of a row of scores. Causal: a query sees as many keys fewer than all as
    there are queries after it, so that the last of them sees every key.
    """

    tensors: tuple[CudnnTensor, ...]
    scale: float
    causal: bool

    @property
    def is_backward(self) -> bool:
        """Whether it is the gradient."""
        return self.names == BACKWARD

    @property
    def about(self) -> str:
        """What is said of it to a person."""
        q, k, v = self.tensors[:3]
        what = "the gradient of attention" if self.is_backward else "attention"
        mask = ", causal" if self.causal else ""
        return f"{what} of {q.dtype.value} {list(q.shape)} by {k.shape[2]} keys, {v.shape[3]}{mask}"


@dataclass(frozen=True, slots=True)
class ConvCall(CudnnRecord):
    """A convolution (`CONV`), or its gradient by x or the weight, added up in float32.

    Tensors are [N, C, *spatial], [O, C / groups, *kernel] and [N, O, *positions]; it is the
    cross-correlation with `padding` zeros before and behind each spatial axis.
    """

    tensors: tuple[CudnnTensor, ...]
    padding: Extents
    strides: Extents
    dilation: Extents

    @property
    def roles(self) -> tuple[CudnnTensor, CudnnTensor, CudnnTensor]:
        """The image, the weight and the result of the convolution, or what has their places."""
        first, second, third = self.tensors
        if self.names == CONV_INPUT_GRAD:
            return third, second, first
        return (first, third, second) if self.names == CONV_WEIGHT_GRAD else (first, second, third)

    @property
    def groups(self) -> int:
        """How many groups of channels there are."""
        image, weight, _ = self.roles
        return image.shape[1] // weight.shape[1]

    @property
    def about(self) -> str:
        """What is said of it to a person."""
        image, weight, _ = self.roles
        what = "a convolution" if self.names == CONV else f"{self.names[-1]} of a convolution"
        return (
            f"{what} of {image.dtype.value} {list(image.shape)} by {list(weight.shape)}, strides"
            f" {list(self.strides)}"
        )


CudnnCall = SdpaCall | ConvCall
