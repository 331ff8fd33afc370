"""A CUDA device over a driver that notes what it is asked for."""

from types import SimpleNamespace

import pytest

from actors.device.cuda.device import CudaDevice
from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.kernels.cuda.calls import CopyBytes
from compiler.contract.placement import Memory
from tests.shared.recording_driver import RecordingDriver


class Given:
    """A kernel whose launches are the calls that it was given."""

    def __init__(self, calls):
        self.calls = calls

    def plan(self, attrs, inputs, outputs):
        return KernelPlan(KernelNeeds(), lambda *places: self.calls)


@pytest.fixture
def driver():
    return RecordingDriver()


@pytest.fixture
def make_device(driver):
    """Return a function that opens a device with kernels by name: their calls, or kernels."""

    def make(kernels=None, **options):
        made = {
            name: Given(kernel) if isinstance(kernel, tuple) else kernel
            for name, kernel in (kernels or {}).items()
        }
        return CudaDevice(driver, made, **options)

    return make


@pytest.fixture
def copies(driver, make_device):
    """A device with memory and the kernel "copy", which copies 8 bytes within it."""
    device = make_device()
    block = device.allocate(64, 256, Memory.DEVICE)
    call = CopyBytes(block.address, block.address + 8, 8)
    device._kernels = {"copy": Given((call,))}
    launches = tuple([device.bind("copy", {}, (), (), None, ()) for _ in range(4)])
    return SimpleNamespace(device=device, block=block, launches=launches)
