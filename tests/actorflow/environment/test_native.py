"""Which jobs have the host's native kernels readied, and whose plans depend on them."""

import pytest

import actorflow as af
from actorflow import nn
from actorflow.compile.compiling import cache_key
from actorflow.compile.hardware import hardware_for
from actorflow.environment import native
from actorflow.environment.settings import Settings
from actorflow.run.devices import verify_and_build
from actors.kernels.library import tuning
from compiler.contract.placement import HOST, Device, DeviceKind
from compiler.contract.types import DType, TensorType
from compiler.graph.target import CompileOptions

SPEC = {"x": TensorType(DType.FLOAT32, (4, 3))}
GPU, SIM = Device(DeviceKind.CUDA), Device(DeviceKind.SIM)


def job_on(*devices):
    @af.job(optimizer=af.optim.SGD(0.1), devices=[str(device) for device in devices], gpu="h200")
    def train(model, batch):
        return model(batch.x).mean()

    return train


@pytest.fixture
def readied(monkeypatch):
    """List the times that native kernels are readied; they are not, and numpy's serve."""
    times = []
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    monkeypatch.setattr(native, "enable_native", lambda *given, **named: bool(times.append(1)))
    return times


def test_a_job_on_gpus_alone_neither_asks_for_a_compiler_nor_starts_a_pool(readied):
    plan = job_on(GPU).compile(nn.Linear(3, 2), SPEC)
    verify_and_build(plan, Settings())
    assert readied == []


def test_a_job_that_computes_on_the_host_too_has_native_kernels_there(readied):
    job_on(GPU, HOST).compile(nn.Linear(3, 2), SPEC)
    assert len(readied) == 1


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", [GPU, HOST, SIM])
def test_how_the_host_chose_its_kernels_is_no_part_of_a_plan_for_gpus(device, tmp_path):
    tuning.configure(tmp_path, deterministic=False)
    graph = job_on(GPU).graph(nn.Linear(3, 2), SPEC)
    hardware, keys = hardware_for((device,), "h200"), set()
    for _ in range(2):
        keys.add(cache_key(graph, CompileOptions(name="train"), hardware))
        tuning.retune()
    assert len(keys) == (1 if device is GPU else 2)
