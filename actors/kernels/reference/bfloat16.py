"""16-bit floats in numpy: casts of bfloat16, and kernels that compute in float32 instead.

numpy holds bfloat16 as the uint16 of its bits. Up is a shift. Down rounds to the nearest, ties to
even, in integers: half of what falls away is added to the bits, less one where the result would
else be odd; the carry runs up into the exponent, past the largest number to infinity, as it should.
A NaN keeps its sign and gets its quiet bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from actors.kernels.common import cost
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    HostKernel,
    HostPlan,
    Kernel,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    Work,
    Workspace,
    carve,
    in_sequence,
    over_blocks,
    size_bytes,
    window,
)
from actors.kernels.common.strides import block_elements, cut
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.types import HALVES, DType, TensorType, contiguous_strides, numpy_dtype

_BITS = np.dtype(np.uint32)

BLOCK = block_elements(_BITS.itemsize)
"""Elements that are cast at a time."""

_ONE, _SIXTEEN, _QUIET, _ALMOST_HALF = (np.array(n, _BITS) for n in (1, 16, 0x40, 0x7FFF))


def has_bfloat16(operands: Operands) -> bool:
    """Return whether an operand is bfloat16, which arithmetic on its uint16 would get wrong."""
    return any([operand.type.dtype is DType.BFLOAT16 for operand in operands])


def has_halves(operands: Operands) -> bool:
    """Return whether an operand is of 16-bit floats, in which numpy is slow or at a loss."""
    return any([operand.type.dtype in HALVES for operand in operands])


def widening(bits: Array, out: Array) -> list[Launch]:
    """Return the launches that cast bfloat16 to float32."""
    calls: list[Launch] = []
    for low, wide in cut((bits, out.view(_BITS)), out.ndim, BLOCK):
        calls.append(partial(np.copyto, wide, low))
        calls.append(partial(np.left_shift, wide, _SIXTEEN, out=wide))
    return calls


def widening_work(elements: int) -> Work:
    """Return what `widening` does."""
    return over_blocks(elements, _BITS.itemsize, {BytePass.SIMPLE: 2})


def narrowing(x: Array, out: Array, flats: Arrays) -> list[Launch]:
    """Return the launches that cast float32 to bfloat16; `flats` as in `narrowing_pieces`."""
    flat, flat_mask = flats
    calls: list[Launch] = []
    for block, low in cut((x, out), out.ndim, BLOCK):
        t, bits = window(flat, low.shape), block.view(_BITS)
        mask = window(flat_mask, low.shape)
        calls += [
            # Round to nearest, ties to even: add 0x7FFF and the last bit that stays, then cut off.
            partial(np.right_shift, bits, _SIXTEEN, out=t),
            partial(np.bitwise_and, t, _ONE, out=t),
            partial(np.add, t, _ALMOST_HALF, out=t),
            partial(np.add, t, bits, out=t),
            partial(np.right_shift, t, _SIXTEEN, out=t),
            partial(np.copyto, low, t, casting="unsafe"),
            partial(np.not_equal, block, block, out=mask),
            partial(_keep_nan, bits, t, mask, low),
        ]
    return calls


def _keep_nan(bits: Array, t: Array, mask: Array, low: Array) -> None:
    """Mend the elements that are NaN, if there are any: the carry may have made them numbers."""
    if mask.any():
        np.right_shift(bits, _SIXTEEN, out=t)
        # A bit of the fraction, else a NaN whose fraction was in the lower half would become
        # infinite.
        np.bitwise_or(t, _QUIET, out=t)
        np.copyto(low, t, casting="unsafe", where=mask)


def narrowing_pieces(elements: int) -> tuple[Piece, ...]:
    """Return the scratch of `narrowing`: a block of bits and one of booleans."""
    shape = (min(elements, BLOCK),)
    return Piece(shape, _BITS), Piece(shape, np.dtype(np.bool_))


def narrowing_work(elements: int) -> Work:
    """Return what `narrowing` does where nothing is NaN."""
    return over_blocks(elements, _BITS.itemsize, {BytePass.SIMPLE: 6, BytePass.PLAIN: 2})


# Kernels by way of float32 run where no kernel reads 16-bit floats itself. Operands of bfloat16 and
# float16 are cast into scratch, a kernel of the op computes there, and results are rounded where
# they are wanted so. Each number is rounded once, as by a kernel that computes in float32 inside;
# only the scratch, four bytes an element, tells the two apart.

_FLOAT32, _BFLOAT16 = numpy_dtype(DType.FLOAT32), numpy_dtype(DType.BFLOAT16)
_HALVES = tuple([numpy_dtype(half) for half in HALVES])


def _plan_widened(
    inner: HostKernel, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan a call of a kernel on float32 copies of its 16-bit operands.

    It takes calls with 16-bit operands that the kernel takes in float32.
    """
    operands = (*inputs, *outputs)
    if not has_halves(operands) or any([x.type.dtype is DType.UINT16 for x in operands]):
        return None  # to numpy bfloat16 is one with it
    wide = tuple([_widened(x) for x in operands])
    count = len(inputs)
    plan = inner.plan(attrs, wide[:count], wide[count:])
    if plan is None:
        return None
    casts, pieces, needs = _casts(inputs, outputs), _pieces(inputs, outputs), plan.needs
    needs = KernelNeeds(
        size_bytes(pieces) + needs.workspace_bytes,
        duration_ns=needs.duration_ns + cost.duration_ns(operands, casts, cost.REFERENCE),
        work=None if needs.work is None else needs.work.then(casts),
    )
    return KernelPlan(needs, partial(_bind_widened, plan, pieces))


def _bind_widened(
    plan: HostPlan, pieces: tuple[Piece, ...], inputs: Arrays, outputs: Arrays, workspace: Workspace
) -> Launch:
    """Return the casts up, the launch of the plan in float32, and the casts down."""
    copies = iter(carve(workspace, pieces))
    calls: list[Launch] = []
    wide_inputs: list[Array] = []
    for x in inputs:
        if _is_low(x):
            copy = next(copies)
            # With the dots: x[()] would be a number, and no view on one.
            index: tuple[Any, ...] = (*[slice(n) for n in copy.shape], ...)
            calls += _casts_up(x[index], copy)
            wide_inputs.append(np.broadcast_to(copy, x.shape))
        else:
            wide_inputs.append(x)
    wide_outputs = [next(copies) if _is_low(x) else x for x in outputs]
    size, scratch = size_bytes(pieces), None
    if workspace is not None and workspace.size > size:
        scratch = workspace[size:]
    calls.append(plan.bind(tuple(wide_inputs), tuple(wide_outputs), scratch))
    rounding = tuple(copies)
    for wide, out in zip(wide_outputs, outputs, strict=True):
        if _is_low(out):
            calls += _casts_down(wide, out, rounding)
    return in_sequence(calls)


def upcast(kernels: Iterable[HostKernel]) -> Iterator[HostKernel]:
    """Yield the upcast form of every kernel."""
    for kernel in kernels:
        yield Kernel(f"{kernel.name}.upcast", kernel.op, partial(_plan_widened, kernel))


def _is_low(array: Array) -> bool:
    return array.dtype in _HALVES


def _casts_up(low: Array, wide: Array) -> list[Launch]:
    """Return the launches that make float32 of an array; numpy knows float16 itself."""
    return widening(low, wide) if low.dtype == _BFLOAT16 else [partial(np.copyto, wide, low)]


def _casts_down(wide: Array, low: Array, rounding: Arrays) -> list[Launch]:
    """Return the launches that round an array of float32; from 65,520 on float16 is infinite."""
    if low.dtype == _BFLOAT16:
        return narrowing(wide, low, rounding)
    return [partial(np.copyto, low, wide, casting="same_kind")]


def _widened(x: Operand) -> Operand:
    """Return a 16-bit operand as its float32 copy lies, another as it is."""
    if x.type.dtype not in HALVES:
        return replace(x, offset_bytes=0)
    own_shape = _own_shape(x.shape, x.strides_bytes)
    dense = contiguous_strides(own_shape, _FLOAT32.itemsize)
    strides = [step if n == m else 0 for step, n, m in zip(dense, own_shape, x.shape, strict=True)]
    return Operand(TensorType(DType.FLOAT32, x.shape), 0, tuple(strides))


def _own_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return extents without repetitions; numpy gives empty arrays strides of 0 all over."""
    if 0 in shape:
        return shape
    return tuple([n if stride else 1 for n, stride in zip(shape, strides, strict=True)])


def _pieces(inputs: Operands, outputs: Operands) -> tuple[Piece, ...]:
    """Return a float32 copy of each 16-bit operand, and what rounding the outputs needs."""
    low = [x for x in (*inputs, *outputs) if has_halves((x,))]
    copies = [Piece(_own_shape(x.shape, x.strides_bytes), _FLOAT32) for x in low]
    rounded = [x.type.num_elements for x in outputs if has_halves((x,))]
    return (*copies, *(narrowing_pieces(max(rounded)) if rounded else ()))


def _casts(inputs: Operands, outputs: Operands) -> Work:
    work = Work(calls=0.0)
    for x in inputs:
        if has_halves((x,)):
            work = work.then(widening_work(x.type.num_elements))
    for x in outputs:
        if has_halves((x,)):
            work = work.then(narrowing_work(x.type.num_elements))
    return work
