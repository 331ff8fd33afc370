"""How tests call one native kernel: among guard bytes, with garbage in the scratch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from actors.kernels.kernel import Operand
from actors.kernels.native import chunks
from compiler.types import DType, TensorType

GUARD = 0x5A
MARGIN = 128


def operand(array):
    return Operand(TensorType(DType(array.dtype.name), array.shape), 0, array.strides)


def garbage(size_bytes):
    """Scratch of 0xFF, aligned to 64 bytes, with guard bytes behind it."""
    raw = np.full(size_bytes + 64 + MARGIN, GUARD, np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + size_bytes] = 0xFF
    return raw[start : start + size_bytes], raw[start + size_bytes :]


def guarded(array):
    """Return a copy with the same strides among guard bytes, and a check that those still stand.

    Bytes between the elements are guards as well.
    """
    spans = [(n - 1) * abs(s) for n, s in zip(array.shape, array.strides, strict=True) if n]
    size = (sum(spans) + array.itemsize) if array.size else 0
    raw = np.full(size + 2 * MARGIN, GUARD, np.uint8)
    copy = np.ndarray(array.shape, array.dtype, raw, MARGIN, array.strides)
    used = np.zeros(raw.size, bool)
    for byte in range(array.itemsize):
        flags = np.ndarray(array.shape, bool, used, MARGIN + byte, array.strides)
        flags[...] = True
    copy[...] = array

    def check():
        assert (raw[~used] == GUARD).all(), "bytes outside of the output were written"

    return copy, check


def call(kernel, attrs, inputs, outputs, launches=2):
    """Run a kernel into outputs laid out like the given ones; returns copies of them.

    Checks that the inputs, and all bytes around outputs and scratch, are left alone.
    """
    needs = kernel.query(attrs, tuple(map(operand, inputs)), tuple(map(operand, outputs)))
    assert needs is not None, f"{kernel.name} does not take the call"
    before = [x.copy() for x in inputs]
    made = [guarded(out) for out in outputs]
    arrays = tuple(array for array, _ in made)
    workspace, behind = garbage(needs.workspace_bytes) if needs.workspace_bytes else (None, None)
    launch = kernel.bind(attrs, tuple(inputs), arrays, workspace)
    for _ in range(launches):
        if workspace is not None:
            workspace[:] = 0xFF
        launch()
    for _, check in made:
        check()
    assert behind is None or (behind == GUARD).all(), "bytes behind the scratch were written"
    for x, old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, old)
    return arrays


def in_place(kernel, attrs, inputs, pairs, launches=1):
    """Run a kernel whose outputs lie over inputs: pairs of (output, input); returns the outputs."""
    arrays = [x.copy() for x in inputs]
    outputs = tuple(arrays[index] for _, index in pairs)
    needs = kernel.query(attrs, tuple(map(operand, arrays)), tuple(map(operand, outputs)))
    assert needs.in_place == tuple(pairs)
    workspace = garbage(needs.workspace_bytes)[0] if needs.workspace_bytes else None
    launch = kernel.bind(attrs, tuple(arrays), outputs, workspace)
    for _ in range(launches):
        launch()
    return outputs


@pytest.fixture(scope="session")
def native_call():
    """The functions above, for tests (importlib mode has no sibling imports)."""
    return SimpleNamespace(operand=operand, call=call, in_place=in_place)


@pytest.fixture(params=[64, None], ids=["tiny-chunks", "usual-chunks"])
def chunk_bytes(request, monkeypatch):
    """Runs a test with chunks of 64 bytes as well, so that small tensors have many."""
    if request.param is not None:
        for name in ("CHUNK_BYTES", "RUN_BYTES", "CACHED_BYTES"):
            monkeypatch.setattr(chunks, name, request.param)
        monkeypatch.setattr(chunks, "SPLIT_ELEMENTS", 8)


@pytest.fixture
def with_threads(native, native_toolchain):
    """Return a function that makes a call with that many threads."""

    def run(num_threads, function):
        native.turn_on(native_toolchain, num_threads)
        assert native.num_threads() == num_threads
        return function()

    return run
