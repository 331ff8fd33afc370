"""GPUs are opened for a plan that names them: real ones, or the host acting as such."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

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


def opened(settings, *indices):
    options = {"gpu": "h200", "deterministic": True}
    plan = SimpleNamespace(name="score", option=options.get, arenas=ARENAS, actors=())
    return open_gpus.open_gpus(plan, indices, settings, LateSchedule(Random(0)))


def test_the_host_acts_as_the_gpu_that_the_plan_is_for(native_toolchain):
    one, two = opened(Settings(emulated_gpus=8), 0, 2)
    assert (one.device, two.device) == (Device(DeviceKind.CUDA, 0), Device(DeviceKind.CUDA, 2))
    assert one.has_kernel("poison")
    seen = one._kept.driver.seen()
    assert (seen.name, seen.num_sms) == ("NVIDIA H200", 132)
    assert isinstance(one._kept.driver, open_gpus.EmulatedDriver)


def test_the_host_acts_as_the_gpu_that_the_environment_names(native_toolchain, caplog):
    (one,) = opened(Settings(emulated_gpus=8, gpu="H100"), 0)
    assert one._kept.driver.seen().name == gpu_named("h100").says
    assert "compiled for NVIDIA H200, and cuda:0 is NVIDIA H100" in caplog.text
    with pytest.raises(DeviceError, match=r"and cuda:0 is NVIDIA A100.*9\.0, and it has 8\.0;"):
        opened(Settings(emulated_gpus=8, gpu="a100"), 0)


def test_the_host_acts_no_more_gpus_than_are_named(native_toolchain):
    opened(Settings(emulated_gpus=8), 0, 7)
    with pytest.raises(DeviceError, match=r"^there is no cuda:2 here, but 2 GPUs, counted from 0$"):
        opened(Settings(emulated_gpus=2), 0, 2)


def test_a_real_gpu_gets_a_folder_for_what_is_built(monkeypatch, tmp_path):
    given = []

    class Real:
        def __init__(self, *args):
            given.append(args)

        def seen(self):
            return H200

    monkeypatch.setattr(open_gpus, "CupyDriver", Real)
    monkeypatch.setattr(open_gpus, "CudaDevice", lambda driver, *args, **options: (args, options))
    (device,) = opened(Settings(cache=tmp_path, sync=True), 1)
    assert given == [(1, tmp_path / "cuda")]
    assert device[0][1] == 1
    assert device[1].pop("reports") is not None
    assert device[1] == {"is_stepwise": True, "is_deterministic": True}
    opened(replace(Settings(), cache=None), 1)
    assert given[1] == (1, None)


@pytest.fixture
def here(monkeypatch):
    """Let the GPU that is here be another one, or none."""

    def set_(seen=None, refusal="", problem=""):
        class Real:
            def __init__(self, index, folder):
                if refusal:
                    raise DeviceError(refusal)

            def seen(self):
                return seen

        monkeypatch.setattr(open_gpus, "CupyDriver", Real)
        monkeypatch.setattr(open_gpus, "listed_gpus", lambda environ: NvmlDevices(problem=problem))
        monkeypatch.setattr(open_gpus, "CudaDevice", lambda *args, **options: args)

    return set_


def test_the_gpu_that_a_plan_was_made_for_is_opened_without_a_word(here, caplog):
    here(H200)
    assert len(opened(Settings(), 0)) == 1
    assert caplog.records == []


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        ({"refusal": "a package is missing"}, "a package is missing"),
        ({"refusal": "a package is missing", "problem": "no driver is here"}, "no driver is here"),
    ],
)
def test_a_machine_without_the_gpu_says_what_is_missing_and_what_can_be_done(
    here, machine, problem
):
    here(**machine)
    with pytest.raises(DeviceError) as caught:
        opened(Settings(), 0)
    assert str(caught.value) == (
        f"plan 'score' cannot run on a GPU here: {problem}. Run it where its GPU is;"
        " ACTORFLOW_CUDA=emulated runs it on the host, slowly"
    )


def test_a_plan_for_other_instructions_is_refused(here):
    here(replace(H200, name="NVIDIA A100-SXM4-80GB", capability=(8, 0)))
    with pytest.raises(DeviceError) as caught:
        opened(Settings(), 0)
    assert str(caught.value) == (
        "plan 'score' was compiled for NVIDIA H200, and cuda:0 is NVIDIA A100-SXM4-80GB: its"
        " kernels are built for compute capability 9.0, and it has 8.0; compile the job here"
    )


def test_a_plan_for_a_gpu_with_the_same_instructions_runs_with_a_warning(here, caplog):
    here(replace(H200, name="NVIDIA H100 PCIe"))
    opened(Settings(), 0)
    assert (
        "compiled for NVIDIA H200, and cuda:0 is NVIDIA H100 PCIe: results are the" in caplog.text
    )


def test_a_gpu_that_is_too_small_is_named_with_both_sizes(here):
    here(replace(H200, memory_bytes=64))
    with pytest.raises(
        OutOfMemory, match=r"it needs 4\.0 KiB there, and the GPU has 64 B; compile"
    ):
        opened(Settings(), 0)


def test_emulation_needs_a_c_compiler(monkeypatch):
    monkeypatch.setattr(open_gpus, "toolchain_of", lambda settings: None)
    with pytest.raises(DeviceError, match="ACTORFLOW_CUDA=emulated builds kernels for the host"):
        opened(Settings(emulated_gpus=8), 0)
