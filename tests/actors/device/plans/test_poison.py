"""Bytes that a plan calls free may hold anything: right plans do not notice, wrong ones do."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from kernel_calls import bind_to

from actors.kernels.cuda.calls import FillBytes
from actors.kernels.cuda.kernel import DeviceView
from actors.kernels.host import catalogue
from actors.race.race import check_races
from actors.testing.simulated import CUDA_POISON_KERNELS, poison
from compiler.contract.placement import DeviceKind
from compiler.contract.plan_tables import RegisterKind
from compiler.contract.types import DType, TensorType


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_training_job_gives_the_same_bits_when_all_free_bytes_are_scribbled_over(
    is_apart, job_plan, plans
):
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(job_plan, kernels)
    plan = poison(plans.put_on_device(job_plan, is_apart=is_apart))
    check_races(plan)
    poisoned = {
        a.name: a.launches[-1].outputs
        for a in plan.actors
        if a.launches[-1:] and a.launches[-1].op == "poison"
    }
    names = {plan.registers[plan.views[v].register].name for v in poisoned["step"]}
    assert "batch" in names
    assert len(names) > 3
    for seed in range(30):
        assert plans.on_device(plan, kernels, Random(seed)) == expected, seed


def test_poison_spares_what_somebody_else_may_need(pipeline, log_of, plans):
    plan = poison(pipeline(num_slots=2))
    names = [
        [plan.registers[plan.views[v].register].name for v in actor.launches[-1].outputs]
        for actor in plan.actors
        if actor.launches
    ]
    assert names == [["batch", "one"], ["x", "other"], ["y"]]
    check_races(plan)
    assert all([log_of(plan, seed) == plans.as_on_paper(8) for seed in range(100)])


def test_poison_shows_a_state_that_was_planned_as_temporary(pipeline, log_of, plans):
    plan = pipeline()
    kinds = [
        replace(r, kind=RegisterKind.TEMPORARY) if r.name == "state" else r for r in plan.registers
    ]
    plan = replace(plan, registers=tuple(kinds))
    assert log_of(plan, 0) == plans.as_on_paper(8)
    with np.errstate(invalid="ignore"):
        assert log_of(poison(plan), 0) != plans.as_on_paper(8)


def test_poison_is_for_the_kinds_of_devices_that_the_host_acts(pipeline):
    plan = pipeline()
    assert poison(plan, (DeviceKind.CUDA,)) == plan
    assert poison(plan, (DeviceKind.CUDA, DeviceKind.SIM)) == poison(plan)


def test_poison_of_a_gpu_fills_every_byte():
    views = [DeviceView(a, TensorType(DType.UINT8, (n,)), (1,)) for a, n in ((256, 300), (512, 0))]
    calls = bind_to(CUDA_POISON_KERNELS["poison"], {}, (), tuple(views), None)
    assert calls == (FillBytes(256, 0xFF, 300),)
