"""The names of devices, and what follows of a stream from where it is."""

import pytest
from error_texts import raises

from compiler.contract.placement import HOST, MAX_DEVICES, Device, DeviceKind, Memory, StreamRole
from compiler.contract.plan_tables import Stream
from compiler.contract.types import StreamId


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("host", HOST),
        ("sim", Device(DeviceKind.SIM)),
        ("sim:1", Device(DeviceKind.SIM, 1)),
        ("cuda:12", Device(DeviceKind.CUDA, 12)),
    ],
)
def test_a_text_names_a_device_and_a_device_its_text(text, device):
    assert Device.parse(text) == device
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize(
    "text", ["", "gpu", "sim:", "sim:-1", "sim:1:2", "sim: 1", "SIM", f"sim:{MAX_DEVICES}", "sim:²"]
)
def test_other_texts_are_refused_with_the_kinds_there_are(text):
    with raises(ValueError):
        Device.parse(text)


def test_the_host_works_on_its_own_memory_and_a_device_on_its():
    assert HOST.place.memory is Memory.HOST
    assert str(Device(DeviceKind.SIM, 1).place) == "device memory of sim:1"


@pytest.mark.parametrize(
    ("device", "role", "index", "has_thread"),
    [
        (HOST, StreamRole.COMPUTE, 0, False),
        (HOST, StreamRole.COMPUTE, 1, True),
        (HOST, StreamRole.PORT, 0, True),
        (HOST, StreamRole.H2D, 0, True),
        (Device(DeviceKind.SIM), StreamRole.COMPUTE, 1, False),
        (Device(DeviceKind.CUDA), StreamRole.D2H, 0, False),
    ],
)
def test_streams_of_the_host_are_threads_but_for_the_first_that_computes(
    device, role, index, has_thread
):
    assert Stream(StreamId(0), device, role, index, "s").has_thread is has_thread
