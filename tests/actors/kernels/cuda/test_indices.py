"""A bad index on a device is what the host raises, with the launch and the firing it was in."""

from random import Random

import numpy as np
import pytest
from error_texts import raises

from actors.device.cuda.device import CudaDevice
from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.cuda.kernel import gpu_named, status_of
from actors.machine.protocol import DeviceFault
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule
from compiler.contract.placement import Memory
from compiler.contract.types import DType, TensorType, contiguous_strides

TABLE, IDS, ROWS = (
    TensorType(DType.FLOAT32, (5, 4)),
    TensorType(DType.INT32, (2, 3)),
    TensorType(DType.FLOAT32, (2, 3, 4)),
)


@pytest.fixture(params=[False, True], ids=["whole", "stepwise"])
def device(request, native_toolchain):
    """An emulated device with the kernels of the catalogue."""
    cuda = EmulatedCuda(LateSchedule(Random(1), eagerness=0.0))
    driver = EmulatedDriver(cuda, native_toolchain, gpu_named("h200"))
    return CudaDevice(driver, kernels_by_name("h200"), is_stepwise=request.param)


def placed(device, type_):
    block = device.allocate(type_.size_bytes, 256, Memory.DEVICE)
    strides = contiguous_strides(type_.shape, type_.dtype.itemsize)
    return block, device.view(block, 0, type_, strides)


@pytest.mark.parametrize("num_launches", [1, 4])
def test_a_bad_id_in_a_chain_is_told_by_the_wait_after_it(num_launches, device):
    blocks, (table, ids, rows) = zip(*[placed(device, t) for t in (TABLE, IDS, ROWS)], strict=True)
    assert blocks
    device.write(table, np.arange(20, dtype=np.float32).reshape(5, 4))
    device.write(ids, np.array([[0, 4, 1], [1, 2, 3]], np.int32))
    stream, event = device.make_stream("compute"), device.make_event()
    given = ("cuda.embedding", {}, (table, ids), (rows,), None, (TABLE, IDS, ROWS))
    launches = tuple([device.bind(*given) for _ in range(num_launches)])
    (chain,) = device.bind_chain(stream, launches)

    def fire():
        chain()
        stream.record(event)
        event.synchronize()

    fire()
    np.testing.assert_array_equal(device.read(rows)[0, 1], [16, 17, 18, 19])
    device.write(ids, np.array([[0, 4, 1], [7, 5, -3]], np.int32))
    with raises(DeviceFault) as caught:
        fire()
    assert isinstance(caught.value.__cause__, IndexError)
    assert (caught.value.stream, caught.value.launch) == (stream, num_launches)
    device.write(ids, np.zeros((2, 3), np.int32))
    with raises(DeviceFault):
        fire()  # what the memory holds is nobody's any more


@pytest.mark.parametrize(
    ("shape", "place", "value", "label", "text"),
    [
        ((4,), 3, 9, DType.INT32, "label 9 at position 3 is outside 0..4"),
        ((2, 3), 4, -1, DType.INT8, "label -1 at position (1, 1) is outside 0..4"),
        ((), 0, -1, DType.UINT64, f"label {2**64 - 1} at position () is outside 0..4"),
    ],
)
def test_place_and_value_of_a_report_become_the_words_of_the_host(shape, place, value, label, text):
    status = status_of(7, "label", TensorType(label, shape), 5)
    assert status.word == 7
    assert str(status.explain(place, value)) == text
