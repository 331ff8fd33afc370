"""Cutting a tensor into equal dense parts: one strided copy per part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost
from actors.kernels.attributes import integer
from actors.kernels.interpret.shape import over_parts
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, in_sequence
from actors.protocol import Array, Launch


@dataclass(frozen=True, slots=True)
class SplitKernel:
    """`split`: the parts of the input along an axis, each into its own output."""

    name: str = "numpy.split"
    op: str = "split"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every call."""
        return cost.needs(inputs, outputs, over_parts(inputs[0].shape, outputs, attrs))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the copies, one after another."""
        axis = integer(attrs, "axis")
        before: tuple[slice, ...] = (slice(None),) * axis
        copies: list[Launch] = []
        start = 0
        for out in outputs:
            stop = start + out.shape[axis]
            copies.append(partial(np.copyto, out, inputs[0][(*before, slice(start, stop))]))
            start = stop
        return in_sequence(copies)


SPLIT_KERNELS = (SplitKernel(),)
