"""What is said of a plan that is larger than the memory of its device."""

from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.compile.compiling import check_fits
from actorflow.compile.cuda_target import CudaTarget
from actorflow.compile.hardware import target_for
from actorflow.compile.targets import HostTarget
from compiler.contract.errors import BudgetError, OutOfMemory
from compiler.contract.placement import HOST, Device, DeviceKind
from compiler.graph.target import one_device

CUDA = Device(DeviceKind.CUDA)
HARDWARE = one_device(target_for(CUDA, "h200"), CUDA)
THERE = HARDWARE.targets[0].memory_bytes


@pytest.fixture(scope="module")
def plan():
    @af.job(train=False)
    def score(model, batch):
        return batch.x.sum()

    rows = af.data.ArraySource({"x": np.ones((4, 3), np.float32)}, batch=2)
    return score.compile(af.nn.Linear(3, 2), rows)


def sized(plan, size_bytes):
    arena = replace(plan.arenas[0], device=CUDA, memory=CUDA.place.memory, size_bytes=size_bytes)
    return replace(plan, arenas=(arena,), options=(*plan.options, ("gpu", "h200")))


def needing(smallest_bytes):
    def make(budget):
        raise BudgetError(f"{budget} is too little", smallest_bytes=smallest_bytes)

    return make


def test_a_plan_that_fills_its_device_fits(plan):
    check_fits(sized(plan, THERE), HARDWARE, pytest.fail)


def test_the_memory_of_the_host_is_looked_at_when_the_plan_is_loaded(plan):
    huge = replace(plan, arenas=(replace(plan.arenas[0], size_bytes=1 << 60),))
    check_fits(huge, one_device(HostTarget(), HOST), pytest.fail)


def test_a_plan_that_is_too_large_is_told_the_budgets_that_do(plan):
    with raises(OutOfMemory):
        check_fits(sized(plan, THERE + 1), HARDWARE, needing(1 << 30))


def test_a_job_that_no_budget_fits_is_told_so(plan):
    with raises(OutOfMemory):
        check_fits(sized(plan, THERE + 1), HARDWARE, needing(THERE + 1))


class Deep(af.nn.Module):
    def __init__(self):
        self.layers = [af.nn.Linear(256, 256) for _ in range(6)]


def largest_of_two_gpus():
    """Return the bytes of the fuller one of two GPUs, with a job that names neither."""

    @af.job(optimizer=af.optim.AdamW(0.1), devices=["cuda:0", "cuda:1"], gpu="h200")
    def train(model, batch):
        h = batch.x
        for layer in model.layers:
            h = af.gelu(layer(h), approximate="tanh")
        return h.mean()

    plan = train.compile(Deep(), {"x": af.TensorType("float32", (64, 256))})
    return max([a.size_bytes for a in plan.arenas if a.place == a.device.place])


def test_a_job_is_spread_over_two_gpus_where_one_is_too_small_for_it(monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    alone = largest_of_two_gpus()
    there = alone * 7 // 8
    monkeypatch.setattr(CudaTarget, "memory_bytes", there)
    assert largest_of_two_gpus() <= there
    monkeypatch.setattr(CudaTarget, "memory_bytes", alone // 8)
    with pytest.raises(OutOfMemory, match="spread over cuda:0, cuda:1 by the best placement found"):
        largest_of_two_gpus()
