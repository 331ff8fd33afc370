"""Convolution and its gradients through BLAS, chunk by chunk; see `actors.kernels.convolution`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.convolution import OPS, Copy, Fill, Multiply, Room, Step, steps_of
from actors.kernels.interpret.bfloat16 import has_halves
from actors.kernels.interpret.shape import shown
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace, in_sequence
from actors.kernels.work import CALLS_PER_PRODUCT, BytePass, MatrixProduct, Work, item_weight
from actors.protocol import Arrays, Launch

CHUNK_BYTES = 4 << 20
"""Columns that are in the caches when they are multiplied."""


@dataclass(frozen=True, slots=True)
class ConvolutionKernel:
    """`conv`, `conv_input_grad` or `conv_weight_grad`."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64; scratch is a chunk of columns, and what is padded."""
        if has_halves((*inputs, *outputs)) or not outputs[0].type.dtype.is_float:
            return None
        room, steps = asked(self.op, attrs, shown(inputs), shown(outputs))
        size = scratch.size_bytes(tuple(room.pieces.values()))
        return cost.needs(inputs, outputs, work_of(steps), size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the steps."""
        pieces = asked(self.op, attrs, inputs, outputs)[0].pieces
        arrays = scratch.carve(workspace, tuple(pieces.values()))
        room = Room(outputs[0].dtype, CHUNK_BYTES, dict(zip(pieces, arrays, strict=True)))
        steps = steps_of(self.op, attrs, inputs, outputs, room)
        return in_sequence([call for step, _ in steps for call in _calls(step, room)])


def asked(
    op: str, attrs: Attrs, inputs: Arrays, outputs: Arrays
) -> tuple[Room, list[tuple[Step, int]]]:
    """Return what a call needs, and its steps on nothing."""
    room = Room(outputs[0].dtype, CHUNK_BYTES, None)
    steps = list(steps_of(op, attrs, inputs, outputs, room))
    for step, _ in steps:
        if isinstance(step, Multiply) and step.adds:
            room.at("part", *step.out.shape)
    return room, steps


def _calls(step: Step, room: Room) -> list[Launch]:
    if isinstance(step, Fill):
        return [partial(step.target.fill, 0)]
    if isinstance(step, Copy):
        return [partial(np.copyto, step.target, step.source)]
    if not step.adds:
        return [partial(np.matmul, step.a, step.b, out=step.out)]
    part = room.at("part", *step.out.shape)
    return [
        partial(np.matmul, step.a, step.b, out=part),
        partial(np.add, step.out, part, out=step.out),
    ]


def work_of(steps: list[tuple[Step, int]]) -> Work:
    """Return the work of steps, each so many times."""
    calls, loops, weight = 0.0, 0.0, 1.0
    passes: Counter[BytePass] = Counter()
    products: Counter[tuple[int, int, int]] = Counter()
    for step, times in steps:
        calls += times
        if isinstance(step, Fill):
            passes[BytePass.SIMPLE] += times * step.target.nbytes
        elif isinstance(step, Copy):
            passes[BytePass.STRIDED] += times * step.target.nbytes
            loops += times * (step.target.size // max(1, step.target.shape[-1]))
        else:
            calls += times * (CALLS_PER_PRODUCT - 1)
            (m, k), n = step.a.shape[-2:], step.b.shape[-1]
            products[m, n, k] += times * step.out[..., 0, 0].size
            weight = item_weight(step.out.itemsize)
    return Work(
        calls,
        loops,
        tuple([(sort, float(size)) for sort, size in passes.items()]),
        tuple([MatrixProduct(weight * count, *form) for form, count in products.items()]),
    )


CONVOLUTION_KERNELS = tuple([ConvolutionKernel(op) for op in OPS])
