"""Order of elements and recurrences along the last axis, by numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.sums import WIDE
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import BytePass, Work
from actors.protocol import Arrays, Launch


@dataclass(frozen=True, slots=True)
class ArgsortKernel:
    """`argsort`(x) -> places in ascending order, equal ones as they came; attrs descending.

    numpy sorts into an array of its own: this launch allocates one.
    """

    name: str = "numpy.argsort"
    op: str = "argsort"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what numpy knows."""
        if has_bfloat16(inputs):
            return None
        size = float(outputs[0].type.size_bytes)
        return cost.needs(inputs, outputs, Work(2, passes=((BytePass.POWER, 8 * size),)))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one sort; of what is turned around where the largest come first."""
        (x,), (out,) = inputs, outputs
        if not flag(attrs, "descending"):
            return lambda: np.copyto(out, np.argsort(x, -1, kind="stable"))
        turned, last = x[..., ::-1], x.shape[-1] - 1

        def launch() -> None:
            np.subtract(last, np.argsort(turned, -1, kind="stable")[..., ::-1], out=out)

        return launch


@dataclass(frozen=True, slots=True)
class RecurrenceKernel:
    """`recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse."""

    name: str = "numpy.recurrence"
    op: str = "recurrence"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what numpy knows; scratch is a number for each row."""
        (out,) = outputs
        if has_bfloat16(inputs):
            return None
        work = Work(3.0 * out.shape[-1], passes=((BytePass.STRIDED, 3.0 * out.type.size_bytes),))
        size = scratch.size_bytes(_pieces(out.shape, out.dtype))
        return cost.needs(inputs, outputs, work, size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the steps, each of all rows."""
        (a, b), (out,) = inputs, outputs
        (total,) = scratch.carve(workspace, _pieces(out.shape, out.dtype))
        calls: list[Launch] = [partial(total.fill, 0)]
        order = range(out.shape[-1])
        for i in reversed(order) if flag(attrs, "reverse") else order:
            calls += [
                partial(np.multiply, total, a[..., i], out=total),
                partial(np.add, total, b[..., i], out=total),
                partial(np.copyto, out[..., i, None], total[..., None], casting="unsafe"),
            ]
        return in_sequence(calls)


def _pieces(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    return (Piece(shape[:-1], WIDE if dtype.kind == "f" else dtype),)


ALONG_KERNELS = (ArgsortKernel(), RecurrenceKernel())
