"""Which plans for CUDA are refused before anything of theirs is loaded, and in which words."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
from actorflow.run import gpus_here
from actorflow.run.gpus_here import check_gpus
from actorflow.settings import Settings
from actors.device.cuda.nvml import GpuListed, Listing
from compiler.errors import DeviceError, OutOfMemory, PlanFormatError
from compiler.placement import Device, DeviceKind

CUDA = Device(DeviceKind.CUDA)
H200 = GpuListed("NVIDIA H200", "GPU-1", (9, 0), 140 << 30)


@pytest.fixture
def plan():
    """A plan whose arena is said to lie on a GPU."""

    @af.job(train=False)
    def score(model, batch):
        return batch.x.sum()

    rows = af.data.ArraySource({"x": np.ones((4, 3), np.float32)}, batch=2)
    made = score.compile(af.nn.Linear(3, 2), rows)
    arenas = tuple([replace(a, device=CUDA, memory=CUDA.place.memory) for a in made.arenas])
    return replace(made, arenas=arenas, options=(*made.options, ("gpu", "h200")))


@pytest.fixture
def here(monkeypatch):
    """Let this machine have some GPUs, a driver and packages."""

    def set_(*seen, cuda=(13, 0), problem="", has_cupy=True):
        listing = Listing(seen, "580.65.06", cuda, problem)
        monkeypatch.setattr(gpus_here, "listed_gpus", lambda environ: listing)
        found = object() if has_cupy else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)

    return set_


def test_a_plan_for_the_gpu_that_is_here_passes_without_a_word(plan, here, caplog):
    here(H200)
    check_gpus(plan, Settings())
    assert caplog.records == []


def test_an_emulated_plan_asks_for_no_gpu(plan, here):
    here(problem="no NVIDIA driver is here")
    check_gpus(plan, Settings(cuda_emulated=True))


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (
            {"problem": "no NVIDIA driver is here: there is no libnvidia-ml.so.1"},
            "plan 'score' runs on cuda:0, and no NVIDIA driver is here: there is no"
            " libnvidia-ml.so.1. Run it where its GPU is; ACTORFLOW_CUDA=emulated runs it on the"
            " host, slowly",
        ),
        (
            {},
            "plan 'score' runs on cuda:0, and there is no cuda:0, but 0 GPUs. Run it where its GPU"
            " is; ACTORFLOW_CUDA=emulated runs it on the host, slowly",
        ),
    ],
)
def test_a_machine_without_the_gpu_says_what_is_missing(plan, here, machine, text):
    here(**machine)
    with pytest.raises(DeviceError) as caught:
        check_gpus(plan, Settings())
    assert str(caught.value) == text


def test_a_driver_of_cuda_12_is_refused_by_its_version(plan, here):
    here(H200, cuda=(12, 9))
    with pytest.raises(
        DeviceError, match=r"driver here, 580\.65\.06, serves CUDA 12\.9 at most; 13\.0"
    ):
        check_gpus(plan, Settings())


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(plan, here):
    here(H200, has_cupy=False)
    with pytest.raises(DeviceError, match=r"cupy is missing, .* pip install 'actorflow\[cuda\]'"):
        check_gpus(plan, Settings())


def test_a_plan_for_other_instructions_is_refused(plan, here):
    here(GpuListed("NVIDIA A100-SXM4-80GB", "GPU-2", (8, 0), 80 << 30))
    with pytest.raises(DeviceError) as caught:
        check_gpus(plan, Settings())
    assert str(caught.value) == (
        "plan 'score' was compiled for NVIDIA H200, and cuda:0 is NVIDIA A100-SXM4-80GB: its"
        " kernels are built for compute capability 9.0, and it has 8.0; compile the job here"
    )


def test_a_plan_for_a_gpu_with_the_same_instructions_runs_with_a_warning(plan, here, caplog):
    here(GpuListed("NVIDIA H100 PCIe", "GPU-2", (9, 0), 80 << 30))
    check_gpus(plan, Settings())
    assert (
        "compiled for NVIDIA H200, and cuda:0 is NVIDIA H100 PCIe: results are the" in caplog.text
    )


def test_a_gpu_that_is_too_small_is_named_with_both_sizes(plan, here):
    here(replace(H200, memory_bytes=64))
    with pytest.raises(
        OutOfMemory, match=r"it needs \d.* there, and the GPU has 64 B; compile the"
    ):
        check_gpus(plan, Settings())


def test_a_plan_that_names_no_gpu_that_is_known_is_no_plan_of_this_version(plan):
    options = tuple([("gpu", "z9") if name == "gpu" else (name, v) for name, v in plan.options])
    with pytest.raises(
        PlanFormatError, match="GPU called 'z9', and there are descriptions of h200"
    ):
        check_gpus(replace(plan, options=options), Settings(cuda_emulated=True))
