"""Memory that the host can address: aligned blocks, and numpy arrays as the views on them.

The ops that only move elements are copies between such views (`SHAPE_KERNELS`). The kernels of
these ops in C and in CUDA take their addresses and strides from the same views.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, reduce

import numpy as np
from numpy.lib.stride_tricks import as_strided

from actors.kernels.common import cost
from actors.kernels.common.kernel import (
    Attrs,
    HostPlan,
    Kernel,
    KernelPlan,
    Operands,
    Work,
    Workspace,
    in_sequence,
    integer,
    integers,
    over_operands,
)
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.errors import InternalError
from compiler.contract.host_arrays import aligned_empty
from compiler.contract.placement import Memory
from compiler.contract.types import TensorType, numpy_dtype

_MAPPED_BYTES = 1 << 20
"""Blocks of so many bytes have pages of their own."""

_HUGE_BYTES = 4 << 20
"""Blocks of so many bytes ask for huge pages, as numpy does for its arrays."""


def allocate(size_bytes: int, alignment: int, memory: Memory) -> Array:
    """Return a block; see `DeviceStore.allocate`. Memory is ordinary whatever is asked for.

    Of a large block only what is touched takes memory, and the system has it back with the block.
    """
    if memory is Memory.SHARED:
        raise InternalError("shared memory of ranks is allocated by their communicator")
    try:
        if size_bytes < _MAPPED_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
            block: Array = np.empty(size_bytes + alignment, np.uint8)
        else:
            block = _mapped(size_bytes + alignment)
    # More than numpy can address, and more than the system gives.
    except (ValueError, OverflowError, OSError) as error:
        raise MemoryError(str(error)) from error
    # In Python a remainder is never negative: the bytes up to the next multiple.
    start = -block.ctypes.data % alignment
    return block[start : start + size_bytes]


def _mapped(size_bytes: int) -> Array:
    """Return pages fresh from the system; malloc may give those that another array has touched."""
    # Private: a forked child has a copy, as of any other array.
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def view_on(
    block: Array, offset_bytes: int, type_: TensorType, strides_bytes: tuple[int, ...]
) -> Array:
    """Return an array on a block; see `DeviceStore.view`."""
    dtype = numpy_dtype(type_.dtype)
    try:
        return np.ndarray(type_.shape, dtype, block, offset_bytes, strides_bytes)
    except TypeError as error:  # what numpy says of a buffer that is too small
        raise ValueError(str(error)) from error


def read(view: Array) -> Array:
    """Return a copy."""
    copy = aligned_empty(view.shape, view.dtype)
    np.copyto(copy, view)
    return copy


def write(view: Array, array: Array) -> None:
    """Fill a view from an array that broadcasts to it."""
    np.copyto(view, array)


BUFFER_ELEMENTS = 1024


def quiet_floating_point() -> None:
    """Make this thread's numpy calls silent on overflow and the like, with small buffers.

    To be called by every thread that runs launches, once, before the first. Overflow to infinity
    and NaN are ordinary values inside a kernel (an exponential is tried before its maximum is
    known), so a warning would be noise, and under `-W error` an exception in the middle of a
    step. numpy keeps this state per thread and context; an `errstate` block per launch would cost
    about a microsecond.

    numpy copies broadcast and strided operands through transient buffers of its own. With 8,192
    elements (its default) they reach 100 KiB per call; with 1,024 they stay in the first-level
    cache and measured equally fast or faster. Elementwise results do not depend on it.
    """
    np.seterr(all="ignore")
    np.setbufsize(BUFFER_ELEMENTS)


# Ops that move elements. The compiler turns most of them into views; a kernel runs only where bytes
# must move.

Copy = tuple[Array, Array]
"""A target and a source of one shape; a source that cannot be written is a constant."""

CopiesOf = Callable[[Arrays, Arrays, Attrs], list[list[Copy]]]
"""The phases of an op on its inputs and outputs; the copies of a phase may be made in any order."""


def _plan_copies(
    op: str, copies: CopiesOf, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan copies between views of inputs and outputs.

    It takes every call, but for a reshape between two tensors that are both not dense.
    """
    if not can_copy(op, inputs, outputs):
        return None
    phases = copies(meta_views(inputs), meta_views(outputs), attrs)
    each = [_work(target, source) for copies in phases for target, source in copies]
    work = reduce(Work.then, each, Work(0.0))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        phases = copies(inputs, outputs, attrs)
        return in_sequence([partial(np.copyto, *copy) for copies in phases for copy in copies])

    needs = cost.needs(inputs, outputs, work, in_place=written_over(op))
    return KernelPlan(needs, bind)


def can_copy(op: str, inputs: Operands, outputs: Operands) -> bool:
    """Whether an op is copies of views, operands lying so.

    A reshape only sees dense ones anew, and a block is made of such.
    """
    if op == "copy_block":
        return all([x.is_dense for x in (*inputs, *outputs)])
    return op != "reshape" or inputs[0].is_dense or outputs[0].is_dense


def written_over(op: str) -> tuple[tuple[int, int], ...]:
    """Return the pairs (output, input) of an op where the input is never read."""
    return ((0, 0),) if op == "carry" else ()


def meta_views(operands: Operands) -> Arrays:
    """Return arrays that lie as operands do, in bytes that nobody may touch."""
    return tuple([as_strided(np.empty((), x.dtype), x.shape, x.strides_bytes) for x in operands])


def _work(target: Array, source: Array) -> Work:
    sizes = (source.itemsize, target.itemsize)
    return over_operands(target.shape, (source.strides, target.strides), sizes)


def _copied(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    return [[(outputs[0], inputs[0])]]


def _carried(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """The new value, wherever the old one lay."""
    return [[(outputs[0], inputs[1])]]


def _copied_as_one(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """Neighbours in memory, and the bytes between them, as one copy of bytes."""
    size = integer(attrs, "size_bytes")
    target, source = [_bytes_from(operands[0], size) for operands in (outputs, inputs)]
    return [[(target, source)]]


def _bytes_from(first: Array, size_bytes: int) -> Array:
    """Return so many bytes of the memory that an array lies in, from where it begins."""
    return as_strided(first.reshape(-1)[:1].view(np.uint8), (size_bytes,), (1,))


def _reshaped(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """One copy through whichever side can be seen in the other's shape."""
    (x,), (out,) = inputs, outputs
    # One side is dense (`can_copy`): seen in the other's shape it stays a view and is not copied.
    dense = out.flags.c_contiguous
    return [[(out.reshape(x.shape), x) if dense else (out, x.reshape(out.shape))]]


def _padded(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """Zeros, then the input at `low`, every `steps` elements. The adjoint of slice."""
    (x,), (out,) = inputs, outputs
    steps = integers(attrs, "steps")
    places = [
        slice(low, low + (n - 1) * step + 1, step) if n else slice(0, 0)
        for low, n, step in zip(integers(attrs, "low"), x.shape, steps, strict=True)
    ]
    # With the dots: of a tensor without axes out[()] would be a number, and no view.
    inside = [(out[(*places, Ellipsis)], x)]
    if x.shape == out.shape:
        return [inside]
    return [[(out, np.broadcast_to(np.zeros((), out.dtype), out.shape))], inside]


def _joined(inputs: Arrays, outputs: Arrays, attrs: Attrs) -> list[list[Copy]]:
    """The inputs one after the other along an axis."""
    (out,), axis, stop = outputs, integer(attrs, "axis"), 0
    copies: list[Copy] = []
    for part in inputs:
        start, stop = stop, stop + part.shape[axis]
        copies.append((out[(*[slice(None)] * axis, slice(start, stop))], part))
    return [copies]


COPIES: Mapping[str, CopiesOf] = {
    "copy": _copied,
    "carry": _carried,
    "copy_block": _copied_as_one,
    "reshape": _reshaped,
    "pad": _padded,
    "concat": _joined,
}
"""What each op that only moves elements copies."""

SHAPE_KERNELS = tuple(
    [Kernel(f"numpy.{op}", op, partial(_plan_copies, op, copies)) for op, copies in COPIES.items()]
)


def address(array: Array | None) -> int:
    """Return where an array's first element is; 0 for None and for an array without elements."""
    if array is None or not array.size:
        return 0
    pointer: int = array.__array_interface__["data"][0]
    return pointer
