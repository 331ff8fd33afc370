"""Which GPU a job is planned for, and what is said where that is not known."""

from pathlib import Path

import numpy as np
import pytest

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
    with pytest.raises(CompileError) as caught:
        gpu_for((CUDA,), None, Settings())
    assert str(caught.value) == (
        "which GPU cuda:0 is must be known to compile for it, and no NVIDIA"
        ' driver is here: there is no libnvidia-ml.so.1. Name it: @af.job(device="cuda",'
        ' gpu="h200"), --gpu h200 or ACTORFLOW_GPU=h200; there are descriptions of a100, b200,'
        " h100, h200, l40s, rtx4090. Plans can be made, printed and simulated without a GPU, and"
        " ACTORFLOW_CUDA=emulated runs them on the host, slowly"
    )


def test_a_job_whose_gpu_nobody_knows_names_its_line(here):
    @af.job(train=False, device="cuda")
    def score(model, batch):
        return batch.x.mean()

    with pytest.raises(CompileError, match=r"test_gpus\.py:\d+: job 'score': which GPU cuda:0 is"):
        score.step(af.nn.Module(), {"x": np.ones(3, np.float32)})


def test_a_device_beyond_the_last_gpu_is_no_gpu(here):
    here(H200)
    with pytest.raises(CompileError, match=r"which GPU cuda:1 is .* and there are 1 GPUs, counted"):
        gpu_for((CUDA, CUDA1)[1:], None, Settings())


def test_a_gpu_and_a_simulated_device_have_no_way_between_them():
    devices = (CUDA, HOST, Device(DeviceKind.SIM))
    with pytest.raises(CompileError, match="it runs on cuda:0 and on sim:0, which is simulated"):
        gpu_for(devices, "h200", Settings())


def test_an_unknown_name_gets_the_nearest_and_all_that_there_are():
    with pytest.raises(
        CompileError, match=r"'h20'; did you mean 'h200'\? There are descr.* of a100"
    ):
        gpu_called("h20")
    with pytest.raises(CompileError, match="'voodoo'; there are descriptions of a100, b200, h100"):
        gpu_called("voodoo")
    with pytest.raises(CompileError, match=r"^ACTORFLOW_GPU: no GPU is called 'h20'"):
        gpu_for((CUDA,), None, Settings(gpu="h20"))


def test_a_gpu_without_a_description_is_planned_for_as_one_with_its_instructions():
    with pytest.raises(
        CompileError, match=r"is 'NVIDIA H100 PCIe' \(compute cap.* 9\.0\).*--gpu h100"
    ):
        described(NvmlDevice("NVIDIA H100 PCIe", "GPU-3", (9, 0), 80 << 30))
    with pytest.raises(CompileError, match=r"'NVIDIA T4' .* 7\.5\).* NVIDIA H200, .*; add one"):
        described(NvmlDevice("NVIDIA T4", "GPU-4", (7, 5), 16 << 30))


def test_a_gpu_for_devices_that_are_none_is_refused():
    with pytest.raises(CompileError, match="gpu='h200' is given, and it runs on host:0, no GPU"):
        check_gpu("h200", (HOST,))
    with pytest.raises(CompileError, match='gpu must be a name such as "h200", got 7'):
        check_gpu(7, ())
    check_gpu("h200", ())
    check_gpu("h200", (HOST, CUDA))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "sim", "gpu": "h200"}, "gpu='h200' is given, and it runs on sim:0"),
        ({"device": "cuda", "gpu": "h2000"}, "no GPU is called 'h2000'; did you mean 'h200'"),
        ({"gpu": 200}, "gpu must be a name"),
    ],
)
def test_a_job_is_refused_at_the_line_of_its_decorator(options, text):
    with pytest.raises(CompileError, match=rf"test_gpus\.py:\d+: job 'score': {text}"):

        @af.job(train=False, **options)
        def score(model, batch):
            return batch.x.sum()


def test_a_gpu_for_a_job_that_comes_to_run_on_the_host_is_refused_when_it_is_compiled():
    @af.job(train=False, gpu="h200")
    def score(model, batch):
        return batch.x.sum()

    rows = af.data.ArraySource({"x": np.ones((4, 3), np.float32)}, batch=2)
    with pytest.raises(
        CompileError, match="job 'score': gpu='h200' is given, and it runs on host:0"
    ):
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
