import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

import actorflow as af
from actorflow import nn
from actorflow.compile import num_streams
from actorflow.compile.num_streams import GAIN, choose_num_streams
from compiler.contract.placement import HOST, Device, DeviceKind
from compiler.contract.types import DType, TensorType
from compiler.graph.target import CompileOptions, Hardware
from compiler.pipeline.printer import summarise

ASKS_FOR_CHOICE = num_streams.asks_for_choice


class Towers(nn.Module):
    """Networks that meet at the end; each is a chain of small launches."""

    def __init__(self, width):
        self.towers = [[nn.Linear(width, width) for _ in range(4)] for _ in range(2)]

    def __call__(self, x):
        ends = []
        for layers in self.towers:
            h = x
            for layer in layers:
                h = af.tanh(layer(h))
            ends.append(h)
        return (ends[0] * ends[1]).mean()


def compiled(width, num_streams, batch=64):
    @af.job(optimizer=af.optim.SGD(0.1), streams=num_streams)
    def towers(model, batch):
        return model(batch.x)

    return towers.compile(Towers(width), {"x": TensorType(DType.FLOAT32, (batch, width))})


@pytest.fixture(scope="module")
def plans():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_NATIVE", "0")
        patch.setenv("ACTORFLOW_CACHE", "off")
        return [compiled(16, number) for number in (1, 2, 3)]


def choose(plans, times):
    """Choose among plans whose steps take these times."""
    with pytest.MonkeyPatch.context() as patch:
        known = {plan.fingerprint: time for plan, time in zip(plans, times, strict=True)}
        patch.setattr(num_streams, "step_ns", lambda plan: known[plan.fingerprint])
        return choose_num_streams("towers", len(plans), lambda number: plans[number - 1])


@given(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=3))
def test_a_stream_that_is_asked_for_never_makes_the_chosen_step_longer(plans, times):
    chosen = choose(plans, times)
    of = {plan.actors: time for plan, time in zip(plans, times, strict=True)}
    assert of[chosen.actors] <= times[0]
    assert chosen.actors is plans[0].actors or of[chosen.actors] * GAIN < times[0]


def test_streams_that_gain_less_than_the_rates_are_sure_of_are_left_out(plans, caplog):
    caplog.set_level(logging.INFO, "actorflow")
    chosen = choose(plans, (100.0, 96.0, 180.0))
    assert chosen.actors == plans[0].actors
    text = "1 of 3 used: with 3, a step would take 1.80 times as long"
    assert chosen.option("streams") == text
    assert f"  compute streams: {text}" in summarise(chosen)
    assert f"plan 'towers': compute streams: {text}" in caplog.text


def test_streams_that_pay_are_used_and_the_plan_says_so(plans):
    chosen = choose(plans, (100.0, 60.0, 58.0))
    assert chosen.actors == plans[1].actors
    assert chosen.option("streams") == "2 of 3 used: a step takes 0.60 times as long as with 1"


def test_the_compiler_asks_where_a_host_is_shared_and_nowhere_else():
    two, one = CompileOptions("job", num_streams=2), CompileOptions("job")
    assert ASKS_FOR_CHOICE(Hardware((HOST,), (None,)), two)
    assert not ASKS_FOR_CHOICE(Hardware((HOST,), (None,)), one)
    assert not ASKS_FOR_CHOICE(Hardware((Device(DeviceKind.SIM, 0),), (None,)), two)


def test_a_job_whose_launches_use_all_cores_gets_one_stream(native, monkeypatch, tmp_path):
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(num_streams, "asks_for_choice", ASKS_FOR_CHOICE)
    plan = compiled(512, 2, batch=256)
    assert plan.option("num_streams") == 1
    assert plan.option("streams").startswith("1 of 2 used: with 2, a step would take ")
    assert compiled(512, 2, batch=256) == plan  # the cache keeps what was chosen
    assert compiled(512, 1, batch=256).actors == plan.actors


def test_the_choice_is_made_with_fixed_rates(native, monkeypatch, tmp_path):
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))
    plan = compiled(64, 2)
    assert num_streams.step_ns(plan) == num_streams.step_ns(plan) > 0
