"""Fused attention as cuDNN takes it: tensors [batch, heads, rows, width] with strides, and a mask.

This is the record of a call. Whoever executes it makes the library's graph of it; what that says
can be read back and compared with this.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.types import DType

FORWARD = ("q", "k", "v", "y", "lse")
BACKWARD = ("q", "k", "v", "y", "dy", "lse", "dq", "dk", "dv")
RESULTS = {FORWARD: 2, BACKWARD: 3}
"""How many of the tensors, from the end, are written."""

Extents = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class SdpaTensor:
    """A tensor [batch, heads, rows, width]; strides are in elements, the last of them is 1."""

    name: str
    dtype: DType
    shape: Extents
    strides: Extents

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to behind the last."""
        pairs = zip(self.shape, self.strides, strict=True)
        return (sum([(n - 1) * s for n, s in pairs]) + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SdpaCall:
    """Attention, whose tensors are named as `FORWARD` has them, or its gradient (`BACKWARD`).

    y = softmax(scale q kT) v; lse [batch, heads, rows, 1], in float32, is the natural logarithm of
    the sum of exponentials of a row of scores. Causal: a query sees as many keys fewer than all as
    there are queries after it, so that the last of them sees every key.
    """

    tensors: tuple[SdpaTensor, ...]
    scale: float
    causal: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, which say what is computed."""
        return tuple([tensor.name for tensor in self.tensors])

    @property
    def is_backward(self) -> bool:
        """Whether it is the gradient."""
        return self.names == BACKWARD

    @property
    def num_results(self) -> int:
        """How many tensors are written: the last ones."""
        return RESULTS[self.names]

    @property
    def about(self) -> str:
        """What is said of it to a person."""
        q, k, v = self.tensors[:3]
        what = "the gradient of attention" if self.is_backward else "attention"
        mask = ", causal" if self.causal else ""
        return f"{what} of {q.dtype.value} {list(q.shape)} by {k.shape[2]} keys, {v.shape[3]}{mask}"
