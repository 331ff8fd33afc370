"""How tests call a kernel of CUDA devices: as a device would, on the host, in several orders."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np

from actors.device.cuda.memory import argument_block
from actors.kernels.common.kernel import Operand, require_plan
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    CopyBytes,
    FillBytes,
    RunCudnn,
    RunKernel,
    RunProduct,
)
from actors.kernels.cuda.kernel import DeviceView
from actors.testing.emulated import kernels, library_calls
from compiler.contract.types import (
    DType,
    TensorType,
    contiguous_strides,
    from_bits,
    numpy_dtype,
    to_bits,
)

GUARD = 0x5A
MARGIN = 512
ALIGNMENT = 256
SEEDS = (0, 1)


@dataclass(frozen=True)
class Emulated:
    """What a launch left. `status` are the words of its cell, `error` what they mean, or None."""

    outputs: tuple[np.ndarray, ...]
    status: tuple[int, ...]
    error: Exception | None
    calls: tuple
    needs: object


def stored(x, dtype):
    """Return numbers in a type, by its name; those of bfloat16 as their bits."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = np.empty_like(x, np.uint16)
    bits[...] = to_bits(x.astype(np.float32))
    return bits


def loaded(x):
    """Return what `stored` stored in float64."""
    return (from_bits(x) if x.dtype == np.uint16 else x).astype(np.float64)


class Place:
    """Bytes at a multiple of 256 plus an offset, among guards; all 0xFF at first."""

    def __init__(self, type_, strides_bytes=None, offset_bytes=0):
        itemsize = type_.dtype.itemsize
        strides = contiguous_strides(type_.shape, itemsize)
        self.strides = strides if strides_bytes is None else tuple(strides_bytes)
        extents = [(n - 1) * s for n, s in zip(type_.shape, self.strides, strict=True) if n]
        size = 0 if 0 in type_.shape else sum(extents) + itemsize
        self.raw = np.full(size + 2 * MARGIN + ALIGNMENT, GUARD, np.uint8)
        start = -self.raw.ctypes.data % ALIGNMENT + MARGIN // ALIGNMENT * ALIGNMENT + offset_bytes
        self.array = np.ndarray(
            type_.shape, numpy_dtype(type_.dtype), self.raw, start, self.strides
        )
        self.used = np.zeros(self.raw.size, bool)
        for byte in range(itemsize if size else 0):
            np.ndarray(type_.shape, bool, self.used, start + byte, self.strides)[...] = True
        self.raw[self.used] = 0xFF
        self.view = DeviceView(self.raw.ctypes.data + start, type_, self.strides)

    def check(self):
        where = np.flatnonzero((self.raw != GUARD) & ~self.used)
        assert not where.size, f"{where.size} bytes were written beside a tensor of {self.view}"


def type_of(array, dtype=None):
    """Return the type of an array; bits of 16 without a sign are bfloat16 unless it is said."""
    if dtype is None:
        dtype = DType.BFLOAT16 if array.dtype == np.uint16 else DType(array.dtype.name)
    return TensorType(dtype, array.shape)


def execute(calls, seed, cell):
    """Do the calls in order, as they would be done on a stream."""
    for call in calls:
        match call:
            case CopyBytes(target, source, size):
                ctypes.memmove(target, source, size)
            case FillBytes(target, value, size):
                ctypes.memset(target, value, size)
            case RunKernel():
                words = list(call.words)
                if call.status is not None:
                    words[call.status.word] = cell.ctypes.data
                block = argument_block(words)
                built = kernels.built(call.name)
                assert len(words) >= built.num_words, "fewer words than the kernel reads"
                address = ctypes.addressof(block)
                grid = call.num_blocks, call.num_threads
                kernels.run(built, grid, call.shared_bytes, address, seed)
            case RunProduct():
                library_calls.run_product(call.product, call.a, call.b, call.c, call.d)
                if call.workspace:
                    ctypes.memset(call.workspace, 0xFF, call.workspace_bytes)
            case RunCudnn():
                library_calls.run_cudnn_call(call.record, call.addresses)
                ctypes.memset(call.workspace, 0xFF, call.workspace_bytes)


def single(calls, way):
    """Return calls with one way in place of several."""
    return tuple(
        itertools.chain(
            *[
                call.alternatives[way] if isinstance(call, AlternativeCalls) else (call,)
                for call in calls
            ]
        )
    )


def emulated_run(
    toolchain,
    kernel,
    attrs,
    inputs,
    results,
    *,
    dtypes=None,
    output_strides=None,
    offset_bytes=0,
    in_place=(),
    seeds=SEEDS,
    way=0,
):
    """Query, bind and execute a kernel once for each seed; return what the last left.

    Args:
        toolchain: The fixture `native_toolchain`.
        inputs: Arrays; their strides are kept. uint16 is bfloat16 unless `dtypes` says else.
        results: Types of the outputs; `output_strides` in bytes, None for dense ones.
        offset_bytes: How far all operands lie behind a multiple of 256.
        in_place: Pairs (output, input) that share bytes.
        way: The number of the way that is taken where there are several.

    Checks that every seed gives the same bits, that inputs without a pair and all bytes around
    outputs and scratch are left alone.
    """
    dtypes = dtypes or [None] * len(inputs)
    output_strides = output_strides or [None] * len(results)
    last_bits = None
    for seed in seeds:
        ins = []
        for array, dtype in zip(inputs, dtypes, strict=True):
            place = Place(type_of(array, dtype), array.strides, offset_bytes)
            place.array[...] = array
            ins.append(place)
        outs = [
            Place(type_, strides, offset_bytes)
            for type_, strides in zip(results, output_strides, strict=True)
        ]
        for output, index in in_place:
            outs[output] = ins[index]
        operands = [
            tuple([Operand(p.view.type, 0, p.view.strides_bytes) for p in places])
            for places in (ins, outs)
        ]
        plan = require_plan(kernel, attrs, *operands)
        needs = plan.needs
        assert {*in_place} <= {*needs.in_place}
        scratch = Place(TensorType(DType.UINT8, (needs.workspace_bytes,)))
        calls = plan.bind(
            tuple([p.view for p in ins]),
            tuple([p.view for p in outs]),
            scratch.view if needs.workspace_bytes else None,
        )
        calls = single(calls, way)
        kernels.load([c.text for c in calls if isinstance(c, RunKernel)], toolchain)
        cell, elsewhere = np.zeros(7, np.int64), np.zeros(2, np.int64)
        cell[4:6] = elsewhere.ctypes.data, elsewhere.ctypes.data + 8
        execute(calls, seed, cell)
        for place in (*ins, *outs, scratch):
            place.check()
        shared = {index for _, index in in_place}
        for index, (place, array) in enumerate(zip(ins, inputs, strict=True)):
            if index not in shared:
                np.testing.assert_array_equal(place.array, array)
        bits = [p.array.tobytes() for p in outs]
        assert last_bits is None or last_bits == bits, (
            "another order of threads and blocks, other bits"
        )
        last_bits = bits
    error = None
    if cell[1]:
        (status,) = {c.status for c in calls if isinstance(c, RunKernel) and c.status is not None}
        error = status.explain(int(cell[2]), int(cell[3]))
    outputs = tuple([p.array.copy() for p in outs])
    return Emulated(outputs, tuple([int(word) for word in cell]), error, calls, needs)
