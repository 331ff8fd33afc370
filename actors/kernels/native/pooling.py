"""The largest elements of windows, and the gradient, in C (`pooling.c`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost
from actors.kernels.interpret.pooling import POOLING_OPS, windows_of
from actors.kernels.interpret.shape import shown
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.launch import Word, address, native_launch
from actors.kernels.work import NATIVE_CALLS, BytePass, CWork, Work
from actors.protocol import Arrays, Launch
from compiler.types import DType

_MOST_AXES, _MOST_LANES = 3, 64


@dataclass(frozen=True, slots=True)
class NativePooling:
    """One of `POOLING_OPS`, on dense tensors, whose channels may all lie last."""

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
        if not all([x.is_dense for x in operands]) and not _are_last(shown(operands)):
            return None
        windows = min([x.type.num_elements for x in operands])
        size = float(math.prod(kernel) * windows * inputs[0].dtype.itemsize)
        sort = (BytePass.PLAIN, size)
        in_c = partial(CWork, (sort,), pieces=chunks.num_chunks(size))
        return cost.needs(inputs, outputs, Work(NATIVE_CALLS, passes=(sort,), in_c=in_c))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        if self.op == "max_pool":
            (x,), (y, taps) = inputs, outputs
        elif self.op == "max_pool_pick":
            (x, taps), (y,) = inputs, outputs
        else:
            (y, taps), (x,) = inputs, outputs
        ways, planes, lanes = windows_of(attrs), math.prod(x.shape[:2]), 1
        if _are_last((x, y, taps)):
            lanes = x.shape[1]
            planes = len(x) * -(-lanes // _MOST_LANES)
        work = math.prod(ways.kernel) * y.nbytes + x.nbytes
        words: list[Word] = [
            *(address(x), address(y), address(taps), planes),
            *(chunks.units_per_chunk(max(planes, 1), work), runtime.num_threads()),
            *(POOLING_OPS.index(self.op), int(x.itemsize == 8) + 2 * int(taps.itemsize == 4)),
            lanes,
            *(*_three(x.shape[2:], 1), *_three(y.shape[2:], 1), *_three(ways.kernel, 1)),
            *(*_three(ways.strides, 1), *_three(ways.dilation, 1), *_three(ways.low, 0)),
        ]
        where = runtime.address_in("pooling.c", "af_pool")
        return native_launch(where, words, (inputs, outputs))


def _are_last(arrays: Arrays) -> bool:
    """Whether channels, several of them, lie innermost in dense tensors."""
    last = [np.moveaxis(array, 1, -1) for array in arrays]
    return arrays[0].shape[1] > 1 and all([a.flags.c_contiguous and a.size for a in last])


def _three(numbers: tuple[int, ...], other: int) -> tuple[int, ...]:
    """Return a number for each of three axes, of which the first may be none of a tensor."""
    return (*[other] * (_MOST_AXES - len(numbers)), *numbers)


NATIVE_POOLING_KERNELS = tuple([NativePooling(op) for op in POOLING_OPS])
