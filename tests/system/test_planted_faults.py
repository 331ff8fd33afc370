"""Faults that a device could have, planted one at a time in the code as it is: each is found.

Every test runs a check that there is anyway, without the fault and with it.
"""

from random import Random

import numpy as np
import pytest
from emulated_run import emulated_run, execute

from actors.device.cuda.device import CudaDevice
from actors.device.emulated import kernels
from actors.device.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.device.schedule import LateSchedule
from actors.kernels.cuda import embedding, row_sums, sort
from actors.kernels.cuda.calls import CopyBytes, KernelText
from actors.kernels.cuda.gpu import gpu_named
from compiler.errors import DeviceError, InternalError
from compiler.placement import Memory
from compiler.types import DType, TensorType

GPU = gpu_named("h200")


def changed_text(text, old, new, nth=0):
    """Return a kernel text in which one of the places of `old` says `new`."""
    parts = text.text.split(old)
    assert len(parts) > nth + 1, f"{old!r} is not in the text {nth + 1} times"
    source = old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])
    own = text.kernels[0].rpartition("_")[0]
    names = tuple([name.replace(own, "NAME") for name in text.kernels])
    return KernelText.of(
        "mutant", source.replace(own, "NAME"), names, "", has_exchanges=text.has_exchanges
    )


# -- kernels -------------------------------------------------------------------------------------


@pytest.fixture
def sorts(native_toolchain):
    """Return whether keys are sorted as numpy sorts them, in an order of blocks and threads."""

    def run(seed):
        keys = np.random.default_rng(seed).integers(0, 700, 1000).astype(sort.KEY)
        held = [np.full(max(p.size_bytes, 4), 0xFF, np.uint8) for p in sort.sort_pieces(keys.size)]
        memory = [piece.view(sort.KEY) for piece in held]
        memory[0][: keys.size] = keys
        addresses = tuple([piece.ctypes.data for piece in memory])
        calls, _, places = sort.sort_calls(addresses, keys.size, 700)
        kernels.load([call.text for call in calls], native_toolchain)
        execute(calls, seed, np.zeros(6, np.int64))
        found = memory[addresses.index(places)][: keys.size]
        return np.array_equal(found, np.argsort(keys, kind="stable"))

    return run


@pytest.mark.parametrize("nth", [0, 1, 4], ids=["before digits", "after digits", "at the end"])
def test_a_barrier_left_out_is_found_in_every_order_of_threads(nth, sorts, monkeypatch):
    assert all(sorts(seed) for seed in range(20))
    text = sort._text()
    before = text.text.partition("_tile(")[0].count("AF_BARRIER();")
    mutant = changed_text(text, "AF_BARRIER();", ";", before + nth)
    monkeypatch.setattr(sort, "_text", lambda: mutant)
    assert not any(sorts(seed) for seed in range(20))


@pytest.fixture
def gathers(native_toolchain):
    """Return whether rows of a bad id are zeros and the id is told, as the host tells it."""

    def run():
        table, ids = np.ones((5, 4), np.float32), np.array([0, 5, 4], np.int32)
        found = emulated_run(
            native_toolchain,
            embedding.CudaEmbedding(GPU),
            {},
            (table, ids),
            (TensorType(DType.FLOAT32, (3, 4)),),
        )
        is_told = str(found.error) == "id 5 at position 1 is outside 0..4"
        return is_told and found.outputs[0][:, 0].tolist() == [1, 0, 1]

    return run


def test_an_unguarded_index_is_found(gathers, monkeypatch):
    assert gathers()
    guard = "(uint64_t)id < (uint64_t)a->num_rows"
    mutant = changed_text(row_sums.text_of_ids(), guard, "1")
    monkeypatch.setattr(embedding, "text_of_ids", lambda: mutant)
    assert not gathers()


# -- devices -------------------------------------------------------------------------------------


class Copies:
    """A kernel that copies its input to its output, as bytes."""

    def bind(self, attrs, inputs, outputs, workspace):
        (x,), (y,) = inputs, outputs
        source = x.address if hasattr(x, "address") else x.ctypes.data
        return (CopyBytes(y.address, source, y.type.size_bytes),)


@pytest.fixture
def copies(native_toolchain):
    """Return a function that feeds a device from pinned memory by a chain of copies."""

    def run():
        cuda = EmulatedCuda(LateSchedule(Random(3)))
        driver = EmulatedDriver(cuda, native_toolchain, GPU)
        device = CudaDevice(driver, {"copy": Copies()})
        type_ = TensorType(DType.FLOAT32, (16,))
        pinned = device.allocate(64, 256, Memory.PINNED)
        block = device.allocate(64, 256, Memory.DEVICE)
        source = device.view(pinned, 0, type_, (4,))
        target = device.view(block, 0, type_, (4,))
        source[...] = np.arange(16)
        stream = device.make_stream("h2d")
        launch = device.bind("copy", {}, (source,), (target,), None)
        for chain in device.bind_chain(stream, (launch,) * 3):
            chain()
        device.synchronize()
        np.testing.assert_array_equal(device.read(target), np.arange(16))

    return run


def test_an_allocation_during_capture_is_found(copies, monkeypatch):
    copies()
    launch = EmulatedDriver.copy_later

    def allocating(driver, *args):
        driver.allocate(256)
        return launch(driver, *args)

    monkeypatch.setattr(EmulatedDriver, "copy_later", allocating)
    with pytest.raises(InternalError, match="cannot be captured on cuda:0: allocate gave 900"):
        copies()


def test_a_copy_from_pageable_memory_is_found(copies, monkeypatch):
    copies()
    monkeypatch.setattr(
        "actors.device.cuda.device.pinned_bytes", lambda kept, size: np.empty(size, np.uint8)
    )
    with pytest.raises(DeviceError, match="are neither of a device nor pinned"):
        copies()
