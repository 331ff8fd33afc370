"""Which plans are refused here: those of other kernels, and of devices that this machine lacks."""

import os
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.run.devices import verify_and_build
from compiler.contract.errors import PlanFormatError
from compiler.contract.placement import Device, DeviceKind


@pytest.fixture(params=["host", "sim"])
def plan(request):
    @af.job(train=False, device=request.param)
    def score(model, batch):
        return {"sum": af.tanh(model(batch.x)).sum()}

    rows = af.data.ArraySource({"x": np.ones((4, 3), np.float32)}, batch=2)
    return score.compile(nn.Linear(3, 2), rows)


@pytest.fixture
def settings():
    return Settings.from_env(os.environ)


def test_a_plan_runs_where_its_devices_have_the_kernels_it_was_compiled_for(plan, settings, caplog):
    verify_and_build(plan, settings)
    assert caplog.records == []


def test_a_plan_of_another_generation_of_kernels_is_refused(plan, settings):
    with pytest.raises(PlanFormatError, match=r"compiled for kernels 'host-0 .* job again"):
        verify_and_build(replace(plan, target=plan.target.replace("host-", "host-0 ")), settings)


def test_a_plan_of_other_libraries_is_said_to_differ_in_its_last_bits(plan, settings, caplog):
    verify_and_build(replace(plan, target=plan.target.replace("numpy-", "numpy-0.")), settings)
    assert "results may differ in their last bits" in caplog.text


@pytest.mark.parametrize("table", ["arenas", "streams"])
def test_a_plan_for_a_gpu_that_nobody_described_is_none_of_this_version(plan, settings, table):
    cuda = Device(DeviceKind.CUDA)
    rows = tuple([replace(row, device=cuda) for row in getattr(plan, table)])
    options = (*plan.options, ("gpu", "z9"))
    with raises(PlanFormatError):
        verify_and_build(replace(plan, **{table: rows}, options=options), settings)
