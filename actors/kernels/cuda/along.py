"""Order of elements and recurrences along the last axis, on a GPU (`along.cuh`).

A merge sort without meetings: log2(columns / 32) calls, in which each element looks for its place.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.kernels.attributes import flag
from actors.kernels.axes import MAX_OUTER, walk
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.indices import places_words
from actors.kernels.cuda.views import DeviceView, PlacedView, carve, on_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands
from actors.kernels.scratch import Piece, size_bytes
from compiler.types import DType

_BLOCK, _SHORT_RUN, _WARP = 256, 32, 32
_TYPES = {
    DType.FLOAT32: ("float", "double", "(double)(x)", "(float)(x)"),
    DType.FLOAT64: ("double", "double", "(x)", "(x)"),
    DType.BFLOAT16: ("uint16_t", "double", "(double)af_from_bf16(x)", "af_to_bf16((float)(x))"),
    DType.FLOAT16: ("uint16_t", "double", "(double)af_from_f16(x)", "af_to_f16((float)(x))"),
    DType.INT64: ("int64_t", "uint64_t", "(uint64_t)(x)", "(int64_t)(x)"),
}
"""By element: its type, what is computed in, what makes that of one, and one of that."""


def _are_walked(x: Operand) -> bool:
    axes = walk(x.shape[:-1], (x.strides_bytes[:-1],), in_order=True)
    return x.type.dtype in _TYPES and len(axes) <= MAX_OUTER


def _rows(x: DeviceView) -> list[int]:
    return [x.address, x.strides_bytes[-1], *places_words(x.shape[:-1], x.strides_bytes[:-1])]


@functools.cache
def _text(dtype: DType) -> KernelText:
    own, wide, made, back = _TYPES[dtype]
    key = "NAME_of_float" if dtype.is_float else "NAME_of_int"
    head = f"#define NAME_T {own}\n#define NAME_WIDE {wide}\n#define NAME_KEY(x) {key}(x)\n"
    head += f"#define NAME_FROM(x) {made}\n#define NAME_TO(x) {back}\n"
    text = head + (Path(__file__).parent / "along.cuh").read_text(encoding="utf-8")
    names = ("NAME_keys", "NAME_merge", "NAME_recur")
    return KernelText.of("along", text, names, f"order and recurrences of {dtype}")


@dataclass(frozen=True, slots=True)
class CudaArgsort:
    """`argsort`(x) -> places in ascending order, equal ones as they came; attrs descending."""

    gpu: Gpu
    name: str = "cuda.argsort"
    op: str = "argsort"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take a dense output; scratch is keys and places, twice."""
        (x,), (out,) = inputs, outputs
        if not (_are_walked(x) and out.is_dense and x.shape[-1] < 1 << 31):
            return None
        num, merges = x.type.num_elements, len(_widths(x.shape[-1]))
        moved = self.gpu.call_ns + self.gpu.bytes_ns(24.0 * num)
        return KernelNeeds(size_bytes(_pieces(num)), duration_ns=(1 + merges) * moved)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return a call for the keys and one for each merge."""
        (x,), (out,) = on_device(inputs), on_device(outputs)
        num, columns = x.type.num_elements, x.shape[-1]
        if not num:
            return ()
        keys, other, places, others = carve(workspace, _pieces(num))
        text, blocks, widths = _text(x.dtype), -(-num // _BLOCK), _widths(columns)
        rest, rows = (num, columns), _rows(x)
        is_descending = int(flag(attrs, "descending"))
        words = (*rows, keys, other, places, others, 0, *rest, 0, is_descending)
        calls = [RunKernel(text, text.kernels[0], blocks, _BLOCK, words)]
        for width in widths:
            target = out.address if width == widths[-1] else 0
            words = (*rows, keys, other, places, others, target, *rest, width, 0)
            calls.append(RunKernel(text, text.kernels[1], blocks, _BLOCK, words))
            keys, other, places, others = other, keys, others, places
        return tuple(calls)


def _widths(columns: int) -> list[int]:
    """Return the runs that are merged: 0 for those that are made first."""
    widths, width = [0], _SHORT_RUN
    while width < columns:
        widths.append(width)
        width *= 2
    return widths


def _pieces(num: int) -> tuple[Piece, ...]:
    keys, places = Piece((num,), np.dtype(np.uint64)), Piece((num,), np.dtype(np.uint32))
    return (keys, keys, places, places)


@dataclass(frozen=True, slots=True)
class CudaRecurrence:
    """`recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse."""

    gpu: Gpu
    name: str = "cuda.recurrence"
    op: str = "recurrence"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take a dense output; no scratch."""
        (out,) = outputs
        if not (all(map(_are_walked, inputs)) and out.is_dense):
            return None
        moved = 5.0 * out.type.size_bytes
        return KernelNeeds(duration_ns=self.gpu.call_ns + self.gpu.bytes_ns(moved))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return one call, with a block for each row."""
        (a, b), (out,) = on_device(inputs), on_device(outputs)
        if not out.type.num_elements:
            return ()
        columns, text = out.shape[-1], _text(out.dtype)
        threads = min(_BLOCK, -(-columns // (4 * _WARP)) * _WARP)
        words = (*_rows(a), *_rows(b), out.address, columns, int(flag(attrs, "reverse")))
        rows = math.prod(out.shape[:-1])
        return (RunKernel(text, text.kernels[2], rows, threads, words),)
