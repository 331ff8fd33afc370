"""Blocks go with their object, windows have any strides, and a fork is refused."""

import gc

import numpy as np
import pytest
from error_texts import raises

from actors.device.cuda.memory import capturing
from actors.machine.protocol import FullDevice
from compiler.contract.errors import InternalError
from compiler.contract.placement import Memory
from compiler.contract.types import DType, TensorType

FLOATS = TensorType(DType.FLOAT32, (3, 4))


def test_what_is_written_is_read_again(make_device):
    device = make_device()
    block = device.allocate(1024, 256, Memory.DEVICE)
    view = device.view(block, 64, FLOATS, (16, 4))
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    device.write(view, values)
    assert np.array_equal(device.read(view), values)
    device.write(view, np.float32(2.5))
    assert np.array_equal(device.read(view), np.full((3, 4), 2.5, np.float32))


@pytest.mark.parametrize("strides", [(32, 4), (4, 12), (32, 8), (64, 0), (-16, 4)])
def test_a_window_with_strides_is_read_and_its_gaps_stay(make_device, strides):
    device = make_device()
    block = device.allocate(256, 256, Memory.DEVICE)
    whole = device.view(block, 0, TensorType(DType.UINT8, (256,)), (1,))
    before = np.arange(256, dtype=np.uint8)
    device.write(whole, before)
    view = device.view(block, 64, FLOATS, strides)
    expected = before.copy()
    oracle = np.ndarray((3, 4), np.float32, expected, 64, strides)
    assert np.array_equal(device.read(view).view(np.uint32), oracle.copy().view(np.uint32))
    values = np.full((3, 4), 7.0, np.float32)
    device.write(view, values)
    oracle[...] = values
    assert np.array_equal(device.read(whole), expected)


def test_a_window_without_elements_is_not_copied(make_device, driver):
    device = make_device()
    block = device.allocate(0, 256, Memory.DEVICE)
    view = device.view(block, 0, TensorType(DType.FLOAT32, (0, 4)), (16, 4))
    device.write(view, np.zeros((0, 4), np.float32))
    assert device.read(view).shape == (0, 4)
    assert "copy" not in driver.names()


@pytest.mark.parametrize(("offset", "strides"), [(17, (16, 4)), (0, (64, 4)), (0, (-16, 4))])
def test_a_window_that_leaves_its_block_is_refused(make_device, offset, strides):
    device = make_device()
    block = device.allocate(64, 256, Memory.DEVICE)
    with raises(ValueError):
        device.view(block, offset, FLOATS, strides)


def test_pinned_memory_is_an_array_that_keeps_it(make_device, driver):
    device = make_device()
    block = device.allocate(64, 256, Memory.PINNED)
    view = device.view(block, 0, FLOATS, (16, 4))
    assert view.ctypes.data % 256 == 0
    device.write(view, np.float32(3))
    del block, device
    gc.collect()
    assert float(view[2, 3]) == 3.0
    kept = driver.counts()["free_pinned"]
    del view
    gc.collect()
    assert driver.counts()["free_pinned"] == kept + 1


def test_a_block_that_is_dropped_is_given_back(make_device, driver):
    device = make_device()
    block = device.allocate(64, 256, Memory.DEVICE)
    assert block.address in driver.memory
    del block
    gc.collect()
    assert driver.counts()["free"] == 1


def test_the_driver_is_closed_when_nobody_has_it_and_all_memory_is_free(make_device, driver):
    device = make_device()
    stream, block = device.make_stream("compute"), device.allocate(64, 256, Memory.DEVICE)
    del device
    gc.collect()
    assert "close" not in driver.names()
    del stream
    gc.collect()
    assert "close" not in driver.names()
    del block
    gc.collect()
    assert driver.names()[-1] == "close"
    assert driver.memory == {}


def test_memory_dropped_during_a_capture_is_freed_after_it(make_device, driver):
    blocks = [make_device().allocate(64, 256, Memory.DEVICE)]
    with capturing():
        blocks.clear()
        gc.collect()
        assert "free" not in driver.names()
    assert driver.counts()["free"] == 1


def test_a_device_says_what_is_free_before_it_is_asked_for_more(make_device, driver):
    with pytest.raises(FullDevice) as caught:
        make_device().allocate(1 << 31, 256, Memory.DEVICE)
    assert caught.value.free_bytes == 1 << 30
    assert "allocate" not in driver.names()
    driver.failing["allocate"] = 2
    with pytest.raises(MemoryError):
        make_device().allocate(64, 256, Memory.DEVICE)


def test_what_only_the_collector_has_makes_room(make_device, driver, monkeypatch):
    device = make_device()
    monkeypatch.setattr(driver, "free", lambda address: setattr(driver, "_free_bytes", 1 << 30))
    over = [device.allocate(1 << 20, 256, Memory.DEVICE)]
    over.append(over)
    driver._free_bytes = 0
    del over
    assert device.allocate(1 << 20, 256, Memory.DEVICE).size_bytes == 1 << 20


def test_other_memory_is_not_a_devices(make_device):
    with raises(InternalError):
        make_device().allocate(64, 256, Memory.HOST)


def test_a_forked_child_is_refused_and_frees_nothing_of_its_parent(make_device, driver, child_says):
    device = make_device()
    block = device.allocate(1024, 256, Memory.DEVICE)
    view = device.view(block, 0, FLOATS, (16, 4))
    text = child_says(lambda: device.read(view))
    assert text.startswith("DeviceError: a CUDA device is open in process ")
    assert text.endswith(
        "was forked, and CUDA does not support fork. Start the process with multiprocessing's"
        " 'spawn'"
    )
    for use in (device.synchronize, lambda: device.allocate(8, 8, Memory.DEVICE)):
        assert child_says(use).startswith("DeviceError: a CUDA device is open in process ")
    blocks = [block]
    del block

    def drop():
        blocks.clear()
        gc.collect()
        return driver.counts()["free"]

    assert child_says(drop) == "0"
    assert drop() == 1


@pytest.mark.parametrize("was_on", [True, False])
def test_nothing_is_collected_within_a_capture(was_on):
    """A graph of a library that is dropped there gives back memory, and breaks the capture."""
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with capturing():
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
