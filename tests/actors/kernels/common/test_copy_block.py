"""Neighbours in memory as one copy: of numpy, in C and on a GPU, the same bytes and no others."""

import numpy as np
import pytest
from emulated_run import execute
from kernel_calls import bind_to

from actors.kernels.common.host_memory import SHAPE_KERNELS
from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import catalogue as cuda
from actors.kernels.cuda.calls import CopyBytes
from actors.kernels.cuda.kernel import DeviceView
from actors.kernels.native.movement import MOVEMENT_KERNELS
from compiler.contract.types import DType, TensorType, contiguous_strides, numpy_dtype

GUARD = 0x5A
ROWS = {
    "odd sizes": [("float32", (3, 5)), ("float32", (7,)), ("int64", ()), ("float16", (9, 3))],
    "one": [("float64", (2, 3))],
    "numbers": [("int64", ()), ("float32", ())],
    "nothing first": [("float32", (0, 3)), ("int64", (4,)), ("float32", (0,))],
    "nothing": [("float32", (0,)), ("float32", (2, 0))],
    "many bytes": [("float32", (1 << 17,)), ("bool", (77,)), ("float32", (300,))],
}


class Stacked:
    """Tensors at multiples of an alignment, among guards."""

    def __init__(self, rows, alignment):
        types = [TensorType(DType(dtype), shape) for dtype, shape in rows]
        offsets, end = [], 0
        for type_ in types:
            start = -(-end // alignment) * alignment
            offsets.append(start)
            end = start + type_.size_bytes
        self.size_bytes = end
        raw = np.full(end + 3 * 256, GUARD, np.uint8)
        self.begin = -raw.ctypes.data % 256 + 256
        self.raw, self.address = raw, raw.ctypes.data + self.begin
        strides = [contiguous_strides(t.shape, t.dtype.itemsize) for t in types]
        self.operands = tuple([Operand(t, 0, s) for t, s in zip(types, strides, strict=True)])
        self.arrays, self.views = [], []
        for type_, own, offset in zip(types, strides, offsets, strict=True):
            dtype = numpy_dtype(type_.dtype)
            self.arrays.append(np.ndarray(type_.shape, dtype, raw, self.begin + offset, own))
            self.views.append(DeviceView(self.address + offset, type_, own))


def on_host(kernel, source, target, attrs):
    bind_to(kernel, attrs, tuple(source.arrays), tuple(target.arrays), None)()


def on_gpu(kernel, source, target, attrs):
    """Copy on the device, and from there to pinned memory."""
    between = Stacked(source.rows, source.alignment)
    for start, end in ((source.views, between.views), (between.views, target.arrays)):
        calls = bind_to(kernel, attrs, tuple(start), tuple(end), None)
        assert [type(call) for call in calls] == [CopyBytes] * bool(source.size_bytes)
        execute(calls, 0, None)


PATHS = {
    "numpy": (SHAPE_KERNELS, on_host),
    "native": (MOVEMENT_KERNELS, on_host),
    "cuda": (cuda.kernels_by_name("h200").values(), on_gpu),
}


@pytest.mark.parametrize("alignment", [64, 256])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("path", PATHS)
def test_each_tensor_is_copied_and_nothing_beside_the_block(path, rows, alignment, request):
    if path == "native":
        request.getfixturevalue("native")
    kernels, run = PATHS[path]
    kernel = next(k for k in kernels if k.op == "copy_block")
    source, target = [Stacked(rows, alignment) for _ in range(2)]
    source.rows, source.alignment = rows, alignment
    rng = np.random.default_rng(3)
    for array in source.arrays:
        array[...] = rng.integers(0, 2, array.shape)
    attrs = {"size_bytes": source.size_bytes}
    assert kernel.plan(attrs, source.operands, target.operands).needs.workspace_bytes == 0
    run(kernel, source, target, attrs)
    for array, copy in zip(source.arrays, target.arrays, strict=True):
        np.testing.assert_array_equal(copy, array)
    outside = np.ones(target.raw.size, bool)
    outside[target.begin : target.begin + target.size_bytes] = False
    assert (target.raw[outside] == GUARD).all()


@pytest.mark.parametrize("path", PATHS)
def test_what_has_gaps_is_no_block(path, request):
    if path == "native":
        request.getfixturevalue("native")
    kernels, _ = PATHS[path]
    kernel = next(k for k in kernels if k.op == "copy_block")
    gapped = Operand(TensorType(DType.FLOAT32, (2, 3)), 0, (4, 8))
    dense = Operand(TensorType(DType.FLOAT32, (2, 3)), 0, (12, 4))
    assert kernel.plan({"size_bytes": 24}, (dense,), (dense,)) is not None
    assert kernel.plan({"size_bytes": 24}, (gapped,), (dense,)) is None
