"""Of several ways to do the same a device tries all on scratch, and never on the plan's memory."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from actors.device.cuda.driver import SCRATCH_BYTE
from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.kernels.cuda.calls import AlternativeCalls
from actors.kernels.cuda.kernel import DeviceView
from compiler.contract.placement import Memory
from compiler.contract.types import DType, TensorType
from tests.shared.recording_driver import array_on, kernel_call

BYTES = TensorType(DType.UINT8, (16,))


def view_at(address):
    return DeviceView(address, BYTES, (1,))


class AddsOne:
    """out = x + 1, by one of two kernels; `seen` is where each one worked, and on what."""

    def __init__(self):
        self.seen = []
        self.calls = [kernel_call(partial(self._run, name)) for name in ("first", "second")]

    def _run(self, name, words):
        x, out, _ = [array_on(view_at(word)) for word in words]
        self.seen.append((name, tuple(words), int(x[0])))
        out[...] = x + 1

    def plan(self, attrs, inputs, outputs):
        return KernelPlan(KernelNeeds(), self._bind)

    def _bind(self, inputs, outputs, workspace):
        words = tuple([view.address for view in (*inputs, *outputs, workspace)])
        return (AlternativeCalls(tuple([(replace(call, words=words),) for call in self.calls])),)


@pytest.mark.parametrize("way", [0, 1])
def test_every_way_is_tried_on_scratch_that_lies_as_the_operands_do(make_device, driver, way):
    kernel = AddsOne()
    device = make_device({"add": kernel})
    block = device.allocate(64, 256, Memory.DEVICE)
    x, out, workspace = views = [view_at(block.address + 16 * n + 3) for n in range(3)]
    array_on(x)[...], array_on(out)[...] = 7, 9
    stream, driver.way = device.make_stream("compute"), way
    before = set(driver.memory)
    launch = device.bind("add", {}, (x,), (out,), workspace, (x.type, out.type))
    (chain,) = device.bind_chain(stream, (launch,))
    assert [(name, number) for name, _, number in kernel.seen] == [
        ("first", SCRATCH_BYTE),
        ("second", SCRATCH_BYTE),
    ]
    for _, addresses, _ in kernel.seen:
        for address, view in zip(addresses, views, strict=True):
            assert address % 256 == view.address % 256
            assert not block.address <= address < block.address + 64
    np.testing.assert_array_equal(array_on(out), 9)
    assert set(driver.memory) == before
    chain()
    assert kernel.seen[2:] == [(("first", "second")[way], tuple([v.address for v in views]), 7)]
    np.testing.assert_array_equal(array_on(out), 8)
