"""GPUs are opened for a plan that names them: real ones, or the host acting as such."""

import importlib.util
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from actorflow.run import open_gpus
from actorflow.settings import Settings
from actors.device.schedule import LateSchedule
from compiler.errors import DeviceError
from compiler.placement import Device, DeviceKind


def opened(settings, *indices):
    options = {"gpu": "h200", "deterministic": True}
    plan = SimpleNamespace(option=options.get)
    return open_gpus.open_gpus(plan, indices, settings, LateSchedule(Random(0)))


def test_the_host_acts_as_the_gpu_that_the_plan_is_for(native_toolchain):
    one, two = opened(Settings(cuda_emulated=True), 0, 2)
    assert (one.device, two.device) == (Device(DeviceKind.CUDA, 0), Device(DeviceKind.CUDA, 2))
    assert one.has_kernel("poison")
    seen = one._kept.driver.seen()
    assert (seen.name, seen.num_sms) == ("NVIDIA H200", 132)
    assert isinstance(one._kept.driver, open_gpus.EmulatedDriver)


def test_a_real_gpu_gets_a_folder_for_what_is_built(monkeypatch, tmp_path):
    given = []

    class Real:
        def __init__(self, *args):
            given.append(args)

    monkeypatch.setattr(open_gpus, "CupyDriver", Real)
    monkeypatch.setattr(open_gpus, "CudaDevice", lambda driver, *args, **options: (args, options))
    (device,) = opened(Settings(cache=tmp_path, sync=True), 1)
    assert given == [(1, tmp_path / "cuda")]
    assert device[0][1] == 1
    assert device[1] == {"is_stepwise": True, "is_deterministic": True}
    opened(replace(Settings(), cache=None), 1)
    assert given[1] == (1, None)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is not None, reason="cupy is here")
def test_without_the_package_a_real_gpu_cannot_be_opened():
    with pytest.raises(DeviceError, match="needs the package cupy"):
        opened(Settings(), 0)


def test_emulation_needs_a_c_compiler(monkeypatch):
    monkeypatch.setattr(open_gpus, "toolchain_of", lambda settings: None)
    with pytest.raises(DeviceError, match="ACTORFLOW_CUDA=emulated builds kernels for the host"):
        opened(Settings(cuda_emulated=True), 0)
