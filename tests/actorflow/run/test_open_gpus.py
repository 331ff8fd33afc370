"""GPUs are opened for a plan that names them: real ones, or the host acting as such."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from error_texts import raises

from actorflow.environment.settings import Settings
from actorflow.run import open_gpus
from actors.device.cuda.driver import DeviceProperties
from actors.device.cuda.nvml import NvmlDevices
from actors.kernels.cuda.kernel import gpu_named
from actors.testing.simulated import LateSchedule
from compiler.contract.errors import DeviceError, OutOfMemory
from compiler.contract.placement import Device, DeviceKind

CUDA = Device(DeviceKind.CUDA)
H200 = DeviceProperties("NVIDIA H200", (9, 0), 132, 140 << 30, 13_000)
ARENAS = [SimpleNamespace(place=CUDA.place, size_bytes=4096)]


def opened(settings, *indices, rank=0):
    options = {"gpu": "h200", "deterministic": True}
    plan = SimpleNamespace(name="score", option=options.get, arenas=ARENAS, actors=())
    return open_gpus.open_gpus(plan, indices, settings, LateSchedule(Random(0)), rank)


def test_the_host_acts_as_the_gpu_that_the_plan_is_for(native_toolchain):
    one, two = opened(Settings(emulated_gpus=8), 0, 2)
    assert (one.device, two.device) == (Device(DeviceKind.CUDA, 0), Device(DeviceKind.CUDA, 2))
    assert one.has_kernel("poison")
    seen = one.driver.seen()
    assert (seen.name, seen.num_sms) == ("NVIDIA H200", 132)
    assert isinstance(one.driver, open_gpus.EmulatedDriver)


def test_the_host_acts_as_the_gpu_that_the_environment_names(native_toolchain, caplog):
    (one,) = opened(Settings(emulated_gpus=8, gpu="H100"), 0)
    assert one.driver.seen().name == gpu_named("h100").says
    assert "compiled for NVIDIA H200, and cuda:0 is NVIDIA H100" in caplog.text
    with raises(DeviceError):
        opened(Settings(emulated_gpus=8, gpu="a100"), 0)


def test_the_host_acts_no_more_gpus_than_are_named(native_toolchain):
    opened(Settings(emulated_gpus=8), 0, 7)
    with raises(DeviceError):
        opened(Settings(emulated_gpus=2), 0, 2)


def test_each_rank_has_gpus_of_its_own(native_toolchain):
    """All ranks have one plan, and call theirs cuda:0."""
    for rank in (0, 2):
        devices = opened(Settings(emulated_gpus=9), 0, 2, rank=rank)
        assert [device.device.index for device in devices] == [0, 2]
    # Of rank 2 they are 6 and 8.
    with pytest.raises(DeviceError, match=r"rank 2 .* its cuda:0 is number 6 of .* no cuda:8 here"):
        opened(Settings(emulated_gpus=8), 0, 2, rank=2)


@pytest.fixture
def here(monkeypatch):
    """Let the GPU that is here be another one, or none; a device is what it was made of."""

    def set_(seen=None, refusal="", problem=""):
        class Real:
            def __init__(self, *opened):
                self.opened = opened
                if refusal:
                    raise DeviceError(refusal)

            def seen(self):
                return seen

        monkeypatch.setattr(open_gpus, "CupyDriver", Real)
        monkeypatch.setattr(open_gpus, "listed_gpus", lambda environ: NvmlDevices(problem=problem))
        monkeypatch.setattr(open_gpus, "CudaDevice", lambda *args, **options: (args, options))

    return set_


def test_a_real_gpu_gets_a_folder_for_what_is_built(here, tmp_path):
    here(H200)
    (((driver, _, index), options),) = opened(Settings(cache=tmp_path, sync=True), 1)
    assert (driver.opened, index) == ((1, tmp_path / "cuda"), 1)
    assert options.pop("reports") is not None
    assert options == {"is_stepwise": True, "is_deterministic": True}
    (((driver, *_), _),) = opened(replace(Settings(), cache=None), 1)
    assert driver.opened == (1, None)


def test_the_gpu_that_a_plan_was_made_for_is_opened_without_a_word(here, caplog):
    here(H200)
    assert len(opened(Settings(), 0)) == 1
    assert caplog.records == []


@pytest.mark.parametrize(
    "machine",
    [
        {"refusal": "a package is missing"},
        {"refusal": "a package is missing", "problem": "no driver is here"},
    ],
)
def test_a_machine_without_the_gpu_says_what_is_missing_and_what_can_be_done(here, machine):
    here(**machine)
    with raises(DeviceError):
        opened(Settings(), 0)


def test_a_plan_for_other_instructions_is_refused(here):
    here(replace(H200, name="NVIDIA A100-SXM4-80GB", capability=(8, 0)))
    with raises(DeviceError):
        opened(Settings(), 0)


def test_a_plan_for_a_gpu_with_the_same_instructions_runs_with_a_warning(here, caplog):
    here(replace(H200, name="NVIDIA H100 PCIe"))
    opened(Settings(), 0)
    assert (
        "compiled for NVIDIA H200, and cuda:0 is NVIDIA H100 PCIe: results are the" in caplog.text
    )


def test_a_gpu_that_is_too_small_is_named_with_both_sizes(here):
    here(replace(H200, memory_bytes=64))
    with raises(OutOfMemory):
        opened(Settings(), 0)


def test_emulation_needs_a_c_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with raises(DeviceError):
        opened(Settings(emulated_gpus=8), 0)
