"""The largest elements of windows, and the gradient, in C (`pooling.c`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from actors.kernels import cost
from actors.kernels.interpret.pooling import POOLING_OPS, windows_of
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.launch import Word, address, native_launch
from actors.kernels.work import NATIVE_CALLS, BytePass, CWork, Work
from actors.protocol import Array, Arrays, Launch
from compiler.types import DType
from compiler.windows import Windows

_MOST_AXES = 3
_MOST_LANES = 128
_WIDE = 64
"""So many channels side by side are lanes enough; fewer are taken of several windows."""

_PASSES = 3
"""A byte takes as long here as in so many passes over dense tensors, about."""


@dataclass(frozen=True, slots=True)
class NativePooling:
    """One of `POOLING_OPS`, on tensors that lie anyhow."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"c.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64 of up to three axes of space."""
        operands, kernel = (*inputs, *outputs), windows_of(attrs).kernel
        is_known = inputs[0].type.dtype in (DType.FLOAT32, DType.FLOAT64)
        if not (runtime.is_on() and is_known and len(kernel) <= _MOST_AXES):
            return None
        if not all([_is_within_reach(x) for x in operands]):
            return None
        windows = min([x.type.num_elements for x in operands])
        size = float(math.prod(kernel) * windows * inputs[0].dtype.itemsize)
        sort = (BytePass.PLAIN, size)
        in_c = partial(CWork, (sort,), pieces=chunks.num_chunks(_PASSES * size))
        return cost.needs(inputs, outputs, Work(NATIVE_CALLS, passes=(sort,), in_c=in_c))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        if self.op == "max_pool":
            (x,), (y, taps) = inputs, outputs
        elif self.op == "max_pool_pick":
            (x, taps), (y,) = inputs, outputs
        else:
            (y, taps), (x,) = inputs, outputs
        ways, kind = windows_of(attrs), _OPS[self.op]
        if self.op == "max_pool_grad" and _are_tiles(ways, x.shape[2:], y.shape[2:]):
            kind = _SPREAD
        is_last, group, at_once = _block(x, y.shape[-1])
        units = len(x) * -(-x.shape[1] // group)
        work = _PASSES * (math.prod(ways.kernel) * y.nbytes + x.nbytes)
        words: list[Word] = [
            *(address(x), address(y), address(taps), units),
            *(chunks.units_per_chunk(max(units, 1), work), runtime.num_threads()),
            *(kind, int(x.itemsize == 8) + 2 * int(taps.itemsize == 4)),
            *(x.shape[1], group, at_once, int(is_last)),
            *(step for a in (x, y, taps) for step in _steps(a)),
            *(*_three(x.shape[2:], 1), *_three(y.shape[2:], 1), *_three(ways.kernel, 1)),
            *(*_three(ways.strides, 1), *_three(ways.dilation, 1), *_three(ways.low, 0)),
        ]
        where = runtime.address_in("pooling.c", "af_pool")
        return native_launch(where, words, (inputs, outputs))


_OPS = {"max_pool": 0, "max_pool_grad": 1, "max_pool_pick": 2}
_SPREAD = 3


def _is_within_reach(operand: Operand) -> bool:
    """Whether elements are whole steps apart, that 32 bits hold."""
    size = operand.dtype.itemsize
    far = sum([(n - 1) * abs(s) for n, s in zip(operand.shape, operand.strides_bytes, strict=True)])
    return far < size << 31 and not any([step % size for step in operand.strides_bytes])


def _are_tiles(ways: Windows, spatial: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    """Whether each element of x is in one window, so that nothing is added up."""
    tiled = tuple([k * n for k, n in zip(ways.kernel, counts, strict=True)])
    is_apart = ways.strides == ways.kernel and {*ways.dilation} == {1}
    return tiled == spatial and is_apart and not any(ways.low)


def _block(x: Array, windows: int) -> tuple[bool, int, int]:
    """Return whether channels lie innermost, and the channels and windows of a block of lanes.

    Only what fills the innermost is less than there is, so that the last block is a beginning.
    """
    channels = max(x.shape[1], 1)
    is_last = channels > 1 and abs(x.strides[1]) < abs(x.strides[-1])
    if is_last and channels >= _WIDE:
        return is_last, min(channels, _MOST_LANES), 1
    if is_last:
        return is_last, channels, max(1, min(windows, _MOST_LANES // channels))
    at_once = max(1, min(windows, _MOST_LANES))
    return is_last, min(channels, _MOST_LANES // at_once), at_once


def _steps(array: Array) -> tuple[int, ...]:
    image, channel, *spatial = [step // array.itemsize for step in array.strides]
    return (image, channel, *_three(tuple(spatial), 0))


def _three(numbers: tuple[int, ...], other: int) -> tuple[int, ...]:
    """Return a number for each of three axes, of which the first may be none of a tensor."""
    return (*[other] * (_MOST_AXES - len(numbers)), *numbers)


NATIVE_POOLING_KERNELS = tuple([NativePooling(op) for op in POOLING_OPS])
