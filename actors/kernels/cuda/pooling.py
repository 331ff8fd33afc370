"""The largest elements of windows, and the gradient: a thread for each result (`pooling.cuh`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.views import DeviceView, PlacedView, on_device
from actors.kernels.interpret.pooling import POOLING_OPS, windows_of
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from compiler.types import DType

_BLOCK = 256
_MOST_AXES = 3

_ROWS = {
    DType.FLOAT32: ("float", "float", "(x)", "(x)"),
    DType.FLOAT64: ("double", "double", "(x)", "(x)"),
    DType.BFLOAT16: ("uint16_t", "float", "af_from_bf16(x)", "af_to_bf16(x)"),
    DType.FLOAT16: ("uint16_t", "float", "af_from_f16(x)", "af_to_f16(x)"),
}
"""By type of x: the type of an element, of a number, a number of an element, and back."""


@dataclass(frozen=True, slots=True)
class CudaPooling:
    """One of `POOLING_OPS`."""

    gpu: Gpu
    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"cuda.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take up to three axes of space, in any layout."""
        dtype = inputs[0].type.dtype
        if dtype not in _ROWS or len(windows_of(attrs).kernel) > _MOST_AXES:
            return None
        moved = sum([x.type.size_bytes for x in (*inputs, *outputs)])
        return KernelNeeds(duration_ns=self.gpu.call_ns + self.gpu.bytes_ns(moved))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return one call."""
        given, made = on_device(inputs), on_device(outputs)
        if not made[0].type.num_elements:
            return ()
        if self.op == "max_pool":
            (x,), (y, taps) = given, made
        elif self.op == "max_pool_pick":
            (x, taps), (y,) = given, made
        else:
            (y, taps), (x,) = given, made
        ways, num = windows_of(attrs), made[0].type.num_elements
        words = (
            *(x.address, y.address, taps.address, num, math.prod(ways.kernel)),
            *(x.shape[1], *_three(x.shape[2:], 1), *_three(y.shape[2:], 1)),
            *(*_three(ways.kernel, 1), *_three(ways.strides, 1)),
            *(*_three(ways.dilation, 1), *_three(ways.low, 0)),
            *[
                s
                for v in (x, y, taps)
                for s in (*v.strides_bytes[:2], *_three(v.strides_bytes[2:], 0))
            ],
        )
        text = _text(x.dtype, taps.dtype)
        kernel = text.kernels[POOLING_OPS.index(self.op)]
        return (RunKernel(text, kernel, -(-num // _BLOCK), _BLOCK, words),)


def _three(numbers: tuple[int, ...], other: int) -> tuple[int, ...]:
    """Return a number for each of three axes, of which the first may be none of a tensor."""
    return (*[other] * (_MOST_AXES - len(numbers)), *numbers)


@functools.cache
def _text(dtype: DType, taps: DType) -> KernelText:
    row, real, number, element = _ROWS[dtype]
    tap = "uint8_t" if taps is DType.UINT8 else "int32_t"
    head = f"#define NAME_ROW {row}\n#define NAME_REAL {real}\n#define NAME_TAP {tap}\n"
    head += f"#define NAME_FROM(x) {number}\n#define NAME_TO(x) {element}\n"
    text = head + Path(__file__).with_name("pooling.cuh").read_text(encoding="utf-8")
    names = ("NAME_max", "NAME_grad", "NAME_pick")
    about = f"the largest elements of windows of {dtype}"
    return KernelText.of("pooling", text, names, about, has_exchanges=False)


def pooling_kernels(gpu: Gpu) -> tuple[CudaPooling, ...]:
    """Return the kernels of this file for a GPU."""
    return tuple([CudaPooling(gpu, op) for op in POOLING_OPS])
