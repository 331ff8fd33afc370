"""Kernels made of two others: the first makes a tensor, which the second reads.

It is made where the second leaves an output over it, if there is one; else in scratch.

"numpy.embedding_sgd_update": the gradient of the whole table, then plain descent. numpy cannot add
equal ids up without a table or fresh arrays; what the op saves in traffic it saves in C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actors.kernels import scratch
from actors.kernels.interpret.embedding import EmbeddingGradKernel
from actors.kernels.interpret.update import SGD
from actors.kernels.kernel import (
    Attrs,
    Kernel,
    KernelNeeds,
    Operand,
    Operands,
    Workspace,
    in_sequence,
    operands_of,
)
from actors.kernels.scratch import Piece
from actors.kernels.work import Work
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError
from compiler.types import TensorType, contiguous_strides, numpy_dtype

_MADE = -1
"""The place of what the first step makes, among the operands of the second."""


@dataclass(frozen=True, slots=True)
class SubKernel:
    """A kernel with its attributes, and the places of the inputs that it reads."""

    kernel: Kernel
    attrs: Attrs
    reads: tuple[int, ...]

    def query(self, inputs: Operands, made: Operand, outputs: Operands) -> KernelNeeds | None:
        """Return what the kernel needs."""
        operands = (*inputs, made)
        return self.kernel.query(self.attrs, tuple([operands[i] for i in self.reads]), outputs)

    def bind(self, inputs: Arrays, made: Array, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the kernel's launch."""
        arrays = tuple([(*inputs, made)[i] for i in self.reads])
        return self.kernel.bind(self.attrs, arrays, outputs, workspace)


@dataclass(frozen=True, slots=True)
class TwoStepKernel:
    """`op` by the steps, and with the type between them, that `split` returns for a call."""

    op: str
    split: Callable[[Attrs, Operands], tuple[SubKernel, SubKernel, TensorType]]

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what both kernels take."""
        _, second, made = self.split(attrs, inputs)
        found = self._needs(attrs, inputs, outputs)
        if found is None:
            return None
        place = _output_over_made(second, found[1])
        pairs = [(out, second.reads[i]) for out, i in found[1].in_place if out != place]
        return KernelNeeds(
            scratch.size_bytes(_pieces(made, place, found)),
            tuple([(out, read) for out, read in pairs if read != _MADE]),
            found[0].duration_ns + found[1].duration_ns,
            (found[0].work or Work()).then(found[1].work or Work()),
        )

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the two launches in order."""
        operands = operands_of(inputs)
        first, second, made = self.split(attrs, operands)
        found = self._needs(attrs, operands, operands_of(outputs))
        if found is None:
            raise InternalError(f"{self.name} is bound to arrays that it does not take")
        place = _output_over_made(second, found[1])
        between, *own = scratch.carve(workspace, _pieces(made, place, found))
        if place is not None:
            between = outputs[place].reshape(made.shape)
        return in_sequence(
            (
                first.bind(inputs, between, (between,), own[0]),
                second.bind(inputs, between, outputs, own[1]),
            )
        )

    def _needs(
        self, attrs: Attrs, inputs: Operands, outputs: Operands
    ) -> tuple[KernelNeeds, KernelNeeds] | None:
        first, second, made = self.split(attrs, inputs)
        between = Operand(made, 0, contiguous_strides(made.shape, made.dtype.itemsize))
        one, other = (
            first.query(inputs, between, (between,)),
            second.query(inputs, between, outputs),
        )
        return None if one is None or other is None else (one, other)


def _output_over_made(second: SubKernel, needs: KernelNeeds) -> int | None:
    """Return an output that may lie over what the first step makes, or None."""
    return next((out for out, i in needs.in_place if second.reads[i] == _MADE), None)


def _pieces(
    made: TensorType, place: int | None, found: tuple[KernelNeeds, KernelNeeds]
) -> tuple[Piece, ...]:
    """Return what the first step makes, unless it has a place, and the scratch of the kernels."""
    sizes = [Piece((needs.workspace_bytes,), np.dtype(np.uint8)) for needs in found]
    shape = made.shape if place is None else (0,)
    return (Piece(shape, numpy_dtype(made.dtype)), *sizes)


def _embedding_sgd_update(
    attrs: Attrs, inputs: Operands
) -> tuple[SubKernel, SubKernel, TensorType]:
    """Parameter, dy, ids and rate."""
    table = inputs[0].type
    gradient = SubKernel(EmbeddingGradKernel(), {"rows": table.shape[0]}, (1, 2))
    return gradient, SubKernel(SGD, {"weight_decay": 0.0}, (0, _MADE, 3)), table


EMBEDDING_SGD_UPDATE = TwoStepKernel("embedding_sgd_update", _embedding_sgd_update)
