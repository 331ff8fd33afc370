"""Which GPU a job is planned for, and what is said where that is not known."""

from pathlib import Path

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.environment import host
from actorflow.environment.host import check_gpu, described, gpu_called, gpu_for, gpu_of
from actorflow.environment.settings import Settings
from actors.device.cuda.nvml import NvmlDevice, NvmlDevices
from actors.kernels.cuda.kernel import known_gpus
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST, Device, DeviceKind

CUDA, CUDA1 = Device(DeviceKind.CUDA), Device(DeviceKind.CUDA, 1)
H200 = NvmlDevice("NVIDIA H200", "GPU-1", (9, 0), 140 << 30)


@pytest.fixture
def here(monkeypatch):
    """Let this machine have some GPUs."""

    def set_(*seen, problem=""):
        monkeypatch.setattr(host, "listed_gpus", lambda environ: NvmlDevices(seen, problem=problem))

    set_(problem="no NVIDIA driver is here: there is no libnvidia-ml.so.1")
    return set_


def test_a_job_without_cuda_has_no_gpu_whatever_the_environment_names(here):
    assert gpu_for((HOST,), None, Settings(gpu="h200")) == ""


def test_the_job_names_its_gpu_before_the_environment_and_that_before_the_machine(here):
    here(NvmlDevice("NVIDIA A100", "GPU-2", (8, 0), 80 << 30))
    assert gpu_for((CUDA,), "h200", Settings(gpu="a100")) == "h200"
    assert gpu_for((CUDA,), None, Settings(gpu="H200")) == "h200"
    assert gpu_for((CUDA,), None, Settings(emulated_gpus=8)) == "h200"


def test_the_gpu_that_is_here_is_known_by_what_its_driver_says(here):
    here(NvmlDevice("NVIDIA A100", "GPU-2", (8, 0), 80 << 30), H200)
    assert gpu_for((HOST, CUDA1), None, Settings()) == "h200"


def test_without_a_gpu_and_a_name_the_error_says_how_to_name_one(here):
    with raises(CompileError):
        gpu_for((CUDA,), None, Settings())


def test_a_job_whose_gpu_nobody_knows_names_its_line(here):
    @af.job(train=False, device="cuda")
    def score(model, batch):
        return batch.x.mean()

    with raises(CompileError):
        score.step(af.nn.Module(), {"x": np.ones(3, np.float32)})


def test_a_device_beyond_the_last_gpu_is_no_gpu(here):
    here(H200)
    with raises(CompileError):
        gpu_for((CUDA, CUDA1)[1:], None, Settings())


def test_a_gpu_and_a_simulated_device_have_no_way_between_them():
    devices = (CUDA, HOST, Device(DeviceKind.SIM))
    with raises(CompileError):
        gpu_for(devices, "h200", Settings())


def test_an_unknown_name_gets_the_nearest_and_all_that_there_are():
    with raises(CompileError):
        gpu_called("h20")
    with raises(CompileError):
        gpu_called("voodoo")
    with raises(CompileError):
        gpu_for((CUDA,), None, Settings(gpu="h20"))


def test_a_gpu_without_a_description_is_planned_for_as_one_with_its_instructions():
    with raises(CompileError):
        described(NvmlDevice("NVIDIA H100 PCIe", "GPU-3", (9, 0), 80 << 30))
    with raises(CompileError):
        described(NvmlDevice("NVIDIA T4", "GPU-4", (7, 5), 16 << 30))


def test_a_gpu_for_devices_that_are_none_is_refused():
    with raises(CompileError):
        check_gpu("h200", (HOST,))
    with raises(CompileError):
        check_gpu(7, ())
    check_gpu("h200", ())
    check_gpu("h200", (HOST, CUDA))


@pytest.mark.parametrize(
    "options", [{"device": "sim", "gpu": "h200"}, {"device": "cuda", "gpu": "h2000"}, {"gpu": 200}]
)
def test_a_job_is_refused_at_the_line_of_its_decorator(options):
    with raises(CompileError):

        @af.job(train=False, **options)
        def score(model, batch):
            return batch.x.sum()


def test_a_gpu_for_a_job_that_comes_to_run_on_the_host_is_refused_when_it_is_compiled():
    @af.job(train=False, gpu="h200")
    def score(model, batch):
        return batch.x.sum()

    rows = af.data.ArraySource({"x": np.ones((4, 3), np.float32)}, batch=2)
    with raises(CompileError):
        score.compile(af.nn.Linear(3, 2), rows)


def test_a_plan_of_the_host_says_nothing_of_gpus():
    @af.job(train=False, deterministic=True)
    def score(model, batch):
        return batch.x.sum()

    rows = af.data.ArraySource({"x": np.ones((4, 3), np.float32)}, batch=2)
    plan = score.compile(af.nn.Linear(3, 2), rows)
    assert gpu_of(plan) == ""
    assert not {"gpu", "deterministic"} & {name for name, _ in plan.options}


def test_the_page_on_cuda_names_every_gpu_that_there_is_a_description_of():
    page = (Path(__file__).parents[3] / "docs" / "cuda.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("There are descriptions of")]
    assert [name for name in known_gpus() if name not in line] == []
