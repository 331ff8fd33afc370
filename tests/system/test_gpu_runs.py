"""Runs on an emulated GPU: chains as graphs, launch by launch or watched; and how they fail."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.run import open_gpus
from actorflow.run.runner import Runner
from actors.kernels.common.kernel import KernelPlan
from actors.kernels.cuda.calls import KernelText, RunKernel
from actors.machine.errors import ActorFailed
from actors.machine.protocol import DeviceFault
from actors.testing.emulated.driver import EmulatedDriver
from compiler.contract.errors import OutOfMemory

pytestmark = pytest.mark.host("it is about emulated GPUs")

HANGS = KernelText.of(
    "af_hangs",
    """
typedef struct { af_word w[1]; } NAME_arguments;
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    if (AF_THREAD < 7) return;
    AF_BARRIER();
}
""",
    ("NAME",),
    "waits for threads that have ended",
)
ROWS = {
    "x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32),
    "y": np.arange(32, dtype=np.int32) % 5,
}


class Model(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(af.dropout(af.gelu(self.up(x), approximate="tanh"), 0.1))


@af.job(optimizer=af.optim.AdamW(1e-2), device="cuda", gpu="h200")
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def rows():
    return af.data.ArraySource(ROWS, batch=4)


@pytest.fixture(scope="module")
def plan():
    return train.compile(Model(), rows(), every=3)


@pytest.fixture
def settings(cached_toolchain):
    """Of an emulated GPU; kernels are built once for all tests."""
    return replace(Settings.from_env(os.environ), emulated_gpus=8)


def fit(plan, settings, steps=7, **options):
    result = Runner(plan, settings=settings).fit(rows(), steps=steps, progress=False, **options)
    return result.metrics, {name: array.tobytes() for name, array in result.variables.items()}


def test_graphs_single_launches_and_watched_ones_give_the_same_bits(plan, settings, tmp_path):
    expected = fit(plan, settings)
    assert fit(plan, replace(settings, sync=True, sim_seed=5)) == expected
    trace = tmp_path / "trace.json"
    assert fit(plan, replace(settings, trace=trace, sim_seed=6)) == expected
    events = json.loads(trace.read_text())["traceEvents"]
    (title,) = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert title.endswith(
        "on cuda:0: launches of a GPU one by one, each waited for, without graphs"
    )
    kernels = {e["args"]["kernel"] for e in events if e.get("cat") == "launch"}
    assert {launch.kernel for actor in plan.actors for launch in actor.launches} <= kernels


def test_a_plan_that_the_gpu_has_no_room_for_fails_before_its_first_step(
    plan, settings, monkeypatch
):
    def small(*args, **options):
        return EmulatedDriver(*args, memory_bytes=2_000, **options)

    monkeypatch.setattr(open_gpus, "EmulatedDriver", small)
    steps = []
    with raises(OutOfMemory):
        fit(plan, settings, on_step=lambda step, metrics: steps.append(step))
    assert steps == []


@pytest.fixture
def breaks(plan, settings, monkeypatch):
    """Have the last launch of a step fail on the device: not all of its threads meet."""
    step = max(plan.actors, key=lambda actor: len(actor.launches))
    name = step.launches[-1].kernel

    class Broken:
        def __init__(self, kernel):
            self._kernel, self.op, self.name = kernel, kernel.op, kernel.name

        def plan(self, attrs, inputs, outputs):
            plan = self._kernel.plan(attrs, inputs, outputs)
            hangs = RunKernel(HANGS, HANGS.kernels[0], 1, 64, (0,))
            return KernelPlan(plan.needs, lambda *places: (*plan.bind(*places), hangs))

    before = open_gpus.catalogue.kernels_by_name

    def binders(gpu):
        kernels = before(gpu)
        return {**kernels, name: Broken(kernels[name])}

    monkeypatch.setattr(open_gpus.catalogue, "kernels_by_name", binders)
    first = next(i for i, launch in enumerate(step.launches) if launch.kernel == name)
    return step.launches[first], first + 1


def test_a_kernel_that_fails_ends_the_run_and_says_how_to_find_it(plan, settings, breaks, tmp_path):
    with pytest.raises(DeviceFault) as caught:
        fit(plan, settings, checkpoint=tmp_path / "run", every=3)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "cuda:0 failed: a kernel failed (" in text
    assert "CUDA takes no further call of this process, which must be started again" in text
    assert "ACTORFLOW_SYNC=1 runs launch by launch, and names the one that fails" in text
    assert "enqueued and not ended: " in text
    assert "the variables lay in the memory of the device and are lost; no checkpoint was" in text


def test_launch_by_launch_a_failure_is_that_of_an_op(plan, settings, breaks, tmp_path):
    launch, number = breaks
    with pytest.raises(ActorFailed) as caught:
        fit(plan, replace(settings, sync=True), checkpoint=tmp_path / "run", every=3)
    failed = caught.value
    assert (failed.actor, failed.firing, failed.launch) == ("step", 0, number - 1)
    assert failed.op == " + ".join(launch.made_of)
    assert __file__.rpartition("/")[2] in failed.source
