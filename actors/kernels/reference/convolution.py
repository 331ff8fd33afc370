"""Convolution and its gradients through BLAS, chunk by chunk, and pooling, tap by tap.

The steps and windows are those of `actors.kernels.common.convolution_steps`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.convolution_steps import (
    OPS,
    POOLING_OPS,
    Copy,
    Fill,
    Multiply,
    ScratchLayout,
    Step,
    steps_of,
    windows_of,
)
from actors.kernels.common.host_memory import meta_views
from actors.kernels.common.kernel import (
    CALLS_PER_PRODUCT,
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    MatrixProduct,
    Operands,
    Piece,
    Work,
    Workspace,
    in_sequence,
    integers,
    item_weight,
)
from actors.kernels.reference.bfloat16 import has_halves
from actors.machine.protocol import Array, Arrays, Launch

CHUNK_BYTES = 4 << 20
"""Columns that are in the caches when they are multiplied."""


def _plan_convolution(
    op: str, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan `conv`, `conv_input_grad` or `conv_weight_grad`.

    It takes float32 and float64; scratch is a chunk of columns, and what is padded.
    """
    if has_halves((*inputs, *outputs)) or not outputs[0].type.dtype.is_float:
        return None
    room, steps = asked(op, attrs, meta_views(inputs), meta_views(outputs))
    names, pieces = tuple(room.pieces), tuple(room.pieces.values())

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        arrays = dict(zip(names, kernel.carve(workspace, pieces), strict=True))
        room = ScratchLayout(outputs[0].dtype, CHUNK_BYTES, arrays)
        steps = steps_of(op, attrs, inputs, outputs, room)
        return in_sequence([call for step, _ in steps for call in _calls(step, room)])

    needs = cost.needs(inputs, outputs, work_of(steps), kernel.size_bytes(pieces))
    return KernelPlan(needs, bind)


def asked(
    op: str, attrs: Attrs, inputs: Arrays, outputs: Arrays
) -> tuple[ScratchLayout, list[tuple[Step, int]]]:
    """Return what a call needs, and its steps on nothing."""
    room = ScratchLayout(outputs[0].dtype, CHUNK_BYTES, None)
    steps = list(steps_of(op, attrs, inputs, outputs, room))
    for step, _ in steps:
        # numpy's product cannot add to its output: it goes to scratch first.
        if isinstance(step, Multiply) and step.adds:
            room.at("part", *step.out.shape)
    return room, steps


def _calls(step: Step, room: ScratchLayout) -> list[Launch]:
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


CONVOLUTION_KERNELS = tuple(
    [Kernel(f"numpy.{op}", op, partial(_plan_convolution, op)) for op in OPS]
)


def _plan_pooling(op: str, attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan one of `POOLING_OPS`: a few calls of numpy for each tap, an element of the window.

    It takes float32 and float64; scratch is two flags per window.
    """
    if has_halves((*inputs, *outputs)):
        return None
    taps = (*inputs, *outputs)[-1 if op == "max_pool" else 1]
    size = math.prod(integers(attrs, "kernel")) * float(taps.type.num_elements)
    work = Work(6.0, passes=((BytePass.MASKED, size * inputs[0].dtype.itemsize),))
    pieces = (Piece(taps.shape, np.dtype(np.bool_)),) * 2
    ways = windows_of(attrs)
    needs = cost.needs(inputs, outputs, work, kernel.size_bytes(pieces))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        none = math.prod(ways.kernel)
        if op == "max_pool":
            (x,), (y, taps) = inputs, outputs
            fills: list[Launch] = [partial(y.fill, -np.inf), partial(taps.fill, none)]
        else:
            taps = inputs[1]
            x, y = (outputs[0], inputs[0]) if op == "max_pool_grad" else (*inputs[:1], *outputs)
            fills = [partial(outputs[0].fill, 0)]
        if not taps.size:
            return in_sequence(fills)
        flags = kernel.carve(workspace, pieces)
        calls: list[Launch] = []
        for tap in ways.taps(x.shape[2:], taps.shape[2:]):
            tap_number = np.array(tap.number, taps.dtype)
            windows = [a[tap.windows] for a in (y, taps, *flags)]
            calls += _tap_calls(op, x[tap.places], tap_number, np.array(none, taps.dtype), *windows)
        return in_sequence((*fills, *calls))

    return KernelPlan(needs, bind)


def _tap_calls(
    op: str, x: Array, own: Array, none: Array, y: Array, taps: Array, is_own: Array, other: Array
) -> Iterator[Launch]:
    """Yield the calls of one tap, on the windows that have it."""
    if op != "max_pool":
        yield partial(np.equal, taps, own, out=is_own)
        if op == "max_pool_grad":
            yield partial(np.add, x, y, out=x, where=is_own)
        else:
            yield partial(np.copyto, y, x, where=is_own)
        return
    yield partial(np.greater, x, y, out=is_own)
    for same in (partial(np.not_equal, x, x), partial(np.equal, taps, none)):  # NaN, the first
        yield partial(same, out=other)
        yield partial(np.logical_or, is_own, other, out=is_own)
    yield partial(np.copyto, y, x, where=is_own)
    yield partial(np.copyto, taps, own, where=is_own)


POOLING_KERNELS = tuple(
    [Kernel(f"numpy.{op}", op, partial(_plan_pooling, op)) for op in POOLING_OPS]
)
