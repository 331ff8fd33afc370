"""Sums, means and maxima over axes that no fused kernel reduces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag, integers
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.blocks import cut
from actors.kernels.interpret.sums import WIDE
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import BytePass, Work
from actors.protocol import Arrays, Launch

_LOOPS_PER_RESULT = 4
_RESULTS = 8192
"""Results that are under way in float64 at a time."""


@dataclass(frozen=True, slots=True)
class NumpyReduce:
    """`sum`, `mean` or `max`, where NaN wins; floats are added up in float64.

    numpy casts on the way, a buffer at a time, and walks the axes in the order of their strides:
    that is faster than columns by a product with ones, and loses nothing of a million float32.
    """

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every number, a mean only of floats, and no maximum over no element."""
        (x,), (out,) = inputs, outputs
        if has_bfloat16(inputs) or (self.op == "mean" and not x.type.dtype.is_float):
            return None
        if self.op == "max" and x.type.num_elements == 0 and out.type.num_elements > 0:
            return None
        size = scratch.size_bytes(self._pieces(out.type.num_elements, x.dtype))
        return cost.needs(inputs, outputs, _reduction(x, out), size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the results, block by block, and for a mean their division."""
        (x,), (out,) = inputs, outputs
        axes = integers(attrs, "axes")
        if not axes:
            return partial(np.copyto, out, x, casting="unsafe")
        if flag(attrs, "keepdims"):
            out = out[(*[0 if axis in axes else slice(None) for axis in range(x.ndim)], ...)]
        (totals,) = scratch.carve(workspace, self._pieces(out.size, x.dtype))
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        terms = np.array(math.prod(tuple([x.shape[axis] for axis in axes])), WIDE)
        function = np.maximum if self.op == "max" else np.add
        calls: list[Launch] = []
        for rows, result in cut((x.transpose(*kept, *axes), out), len(kept), _RESULTS):
            total = scratch.window(totals, result.shape) if totals.size else result
            reduced = tuple(range(result.ndim, rows.ndim))
            calls.append(partial(function.reduce, rows, reduced, total.dtype, total))
            if self.op == "mean":
                calls.append(partial(np.divide, total, terms, out=total))
            if totals.size:
                calls.append(partial(np.copyto, result, total, casting="unsafe"))
        return in_sequence(calls)

    def _pieces(self, results: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
        """Return scratch for sums of narrow floats; what is wide is added up in place."""
        is_widened = self.op != "max" and dtype.kind == "f" and dtype != WIDE
        return (Piece((min(results, _RESULTS) if is_widened else 0,), WIDE),)


def _reduction(x: Operand, out: Operand) -> Work:
    """Return the work of a reduction by numpy: every result starts a loop, a slow one."""
    loops = _LOOPS_PER_RESULT * out.type.num_elements
    return Work(loops=loops, passes=((BytePass.REDUCE, float(x.type.size_bytes)),))


REDUCE_KERNELS = tuple([NumpyReduce(op) for op in ("sum", "mean", "max")])
