"""The host is a device whose streams are threads and whose events are done."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from error_texts import raises

from actors.device.host import HostDevice
from actors.kernels.common import host_memory
from actors.loop.bound import PlanMemory, Views
from actors.testing.simulated import LateSchedule, SimulatedDevice
from compiler.contract.errors import InternalError, OutOfMemory
from compiler.contract.placement import HOST, Device, DeviceKind, Memory
from compiler.contract.plan_tables import Arena
from compiler.contract.types import DType, TensorType

SIM = Device(DeviceKind.SIM)


def test_an_event_of_the_host_holds_nobody():
    host = HostDevice({})
    stream, event = host.make_stream("compute"), host.make_event()
    stream.record(event)
    stream.wait(event)
    event.synchronize()
    host.synchronize()
    assert event.is_done


def test_a_stream_of_the_host_waits_for_events_of_other_devices():
    late = SimulatedDevice(LateSchedule(Random(0), eagerness=0.0))
    stream, event, ran = late.make_stream("s"), late.make_event(), []
    late.bind_chain(stream, (lambda: ran.append(1),))[0]()
    stream.record(event)
    assert ran == []
    HostDevice({}).make_stream("compute").wait(event)
    assert ran == [1]


def test_launches_that_are_not_native_stay_as_they_are():
    chain = (lambda: None, lambda: None)
    for joins in (True, False):
        host = HostDevice({}, joins=joins)
        assert host.bind_chain(host.make_stream("compute"), chain) == chain


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_blocks_are_aligned_and_views_lie_where_they_should(alignment):
    block = host_memory.allocate(1000, alignment, Memory.HOST)
    assert block.ctypes.data % alignment == 0
    type_ = TensorType(DType.FLOAT32, (2, 3))
    view = host_memory.view_on(block, 512, type_, (4, 8))
    assert view.ctypes.data == block.ctypes.data + 512
    host_memory.write(view, np.arange(6, dtype=np.float32).reshape(2, 3))
    copy = host_memory.read(view)
    view[:] = 0
    assert copy.tolist() == [[0, 1, 2], [3, 4, 5]]
    with raises(ValueError):
        host_memory.view_on(block, 990, type_, (12, 4))


def test_memory_that_ranks_share_is_not_the_hosts_to_give():
    with raises(InternalError):
        host_memory.allocate(8, 64, Memory.SHARED)


class Locking(SimulatedDevice):
    """Notes what memory it is asked for."""

    def allocate(self, size_bytes, alignment, memory):
        self.asked = [*getattr(self, "asked", []), memory]
        return super().allocate(size_bytes, alignment, memory)


def test_pinned_memory_is_made_by_the_device_that_copies_from_it(plan_maker):
    plan = plan_maker().plan()
    rows = [(HOST, Memory.HOST), (HOST, Memory.PINNED), (SIM, Memory.DEVICE)]
    arenas = tuple([Arena(device, memory, 128, 64) for device, memory in rows])
    plan = replace(plan, arenas=arenas)
    late = Locking(LateSchedule(Random(0)))
    Views(plan, {HOST: HostDevice({}), SIM: late}, None, PlanMemory())
    assert late.asked == [Memory.PINNED, Memory.DEVICE]
    plan = replace(plan, arenas=arenas[:2])
    Views(plan, {HOST: HostDevice({})}, None, PlanMemory())


def test_a_device_that_is_too_small_is_named(plan_maker):
    plan = plan_maker().plan()
    plan = replace(plan, arenas=(Arena(SIM, Memory.DEVICE, 1 << 60, 64),))
    with raises(OutOfMemory):
        Views(plan, {SIM: SimulatedDevice(LateSchedule(Random(0)))}, None, PlanMemory())
