"""Without any one dependency a plan is found wrong, or the others imply it: plans of every kind."""

from dataclasses import replace

import numpy as np
import pytest
from plans import actor_of, register_of, with_actor

import actorflow as af
from actorflow import nn
from actorflow.compile.targets import HostTarget
from actors.testing.dependencies import Consequence, DependencyKind, main, removals
from compiler.contract.plan_tables import Port, Register, RegisterKind
from compiler.contract.types import RegisterId

DATA, CONTROL, CREDIT, SLOT = (
    DependencyKind.DATA, DependencyKind.CONTROL, DependencyKind.CREDIT, DependencyKind.SLOT,
)  # fmt: skip
EVENT, HOST_WAIT = DependencyKind.EVENT, DependencyKind.HOST
CAUGHT = (Consequence.REFUSED, Consequence.RACE, Consequence.PROMISE)


class Net(nn.Module):
    def __init__(self):
        self.emb, self.up, self.down = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(24, 5)

    def __call__(self, x):
        return self.down(af.dropout(af.gelu(self.up(self.emb(x)), approximate="tanh"), 0.2))


class Towers(nn.Module):
    def __init__(self):
        self.left, self.right = Net(), Net()

    def __call__(self, x):
        return self.left(x) * self.right(x)


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@af.job(train=False)
def judged(model, batch):
    return {"loss": loss(model, batch)}


def data():
    rng = np.random.default_rng(7)
    x, y = rng.integers(0, 9, 64).astype(np.int32), rng.integers(0, 5, 64).astype(np.int32)
    return af.data.ArraySource({"x": x, "y": y}, batch=8)


def compiled(model, *, is_evaluated=False, **options):
    """The plan of a job with a snapshot after every other step."""
    evaluation = af.Evaluation(judged, data(), every=2, batches=2) if is_evaluated else None
    job = af.job(optimizer=af.optim.AdamW(1e-2), seed=3, **options)(loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CACHE", "off")
        patch.setattr(HostTarget, "message_ns", 100.0)  # small models are cut into many chains
        return job.compile(model, data(), every=2, evaluation=evaluation)


PLANS = {
    "one chain": lambda: compiled(Net()),
    "two streams": lambda: compiled(Towers(), streams=2),
    "accumulate": lambda: compiled(Net(), accumulate=2),
    "accumulate on two streams": lambda: compiled(Towers(), accumulate=2, streams=2),
    "metrics of several steps": lambda: compiled(Towers(), metrics_every=2, streams=2),
    "evaluation": lambda: compiled(Net(), is_evaluated=True),
    "evaluation and accumulate": lambda: compiled(Net(), is_evaluated=True, accumulate=2),
    "evaluation on two streams": lambda: compiled(Towers(), is_evaluated=True, streams=2),
    "offload": lambda: compiled(Net(), offload="optimizer"),
    "four ranks": lambda: compiled(Net(), mesh=af.Mesh(data=4)),
    "a device": lambda: compiled(Net(), device="sim"),
    "offload from a device": lambda: compiled(Net(), device="sim", offload="optimizer"),
    "evaluation on a device": lambda: compiled(Net(), device="sim", is_evaluated=True),
}

LEAST = {
    "one chain": {DATA: (3, 3), CREDIT: (1, 1), SLOT: (4, 4)},
    "two streams": {DATA: (30, 10), CONTROL: (6, 6), CREDIT: (2, 2), SLOT: (30, 5)},
    "accumulate": {DATA: (3, 3), CREDIT: (2, 2), SLOT: (5, 3)},
    "accumulate on two streams": {DATA: (25, 8), CONTROL: (8, 6), CREDIT: (5, 5), SLOT: (30, 7)},
    "metrics of several steps": {DATA: (30, 10), CREDIT: (3, 3), SLOT: (30, 5)},
    "evaluation": {DATA: (5, 5), CREDIT: (4, 4), SLOT: (8, 5)},
    "evaluation and accumulate": {DATA: (5, 5), CREDIT: (6, 5), SLOT: (11, 6)},
    "evaluation on two streams": {DATA: (35, 15), CONTROL: (9, 9), CREDIT: (6, 4), SLOT: (40, 9)},
    "offload": {DATA: (7, 4), CONTROL: (5, 5), CREDIT: (1, 1), SLOT: (12, 3)},
    "four ranks": {DATA: (4, 4), CREDIT: (1, 1), SLOT: (6, 4)},
    "a device": {DATA: (5, 5), SLOT: (6, 6), EVENT: (4, 4), HOST_WAIT: (3, 3)},
    "offload from a device": {DATA: (6, 6), CONTROL: (5, 4), EVENT: (9, 6), HOST_WAIT: (4, 4)},
    "evaluation on a device": {DATA: (8, 8), CREDIT: (4, 4), EVENT: (6, 5), HOST_WAIT: (5, 4)},
}
"""By plan and kind how many dependencies are removed at least, and how many of them are caught."""


@pytest.mark.parametrize("name", PLANS)
def test_each_dependency_that_a_planner_made_is_missed_or_implied_by_the_others(name):
    counts = {}
    for removal in removals(PLANS[name]()):
        assert removal.consequence is not Consequence.MISSED, (removal.dependency, removal.text)
        assert removal.text
        removed, caught = counts.get(removal.dependency.kind, (0, 0))
        is_caught = removal.consequence in CAUGHT
        counts[removal.dependency.kind] = removed + 1, caught + is_caught
    for kind, (removed, caught) in LEAST[name].items():
        assert counts[kind][0] >= removed, counts
        assert counts[kind][1] >= caught, counts


def test_each_credit_at_the_start_of_a_resumed_run_is_missed_or_implied():
    plan = PLANS["evaluation and accumulate"]()
    due = [r for r in plan.registers if r.name.startswith("eval_due")]
    initial = {r.name: r.num_slots // 2 for r in due}
    found = [r for r in removals(plan, initial) if r.dependency.kind is DependencyKind.TOKEN]
    assert len(found) == len(due) == 2
    assert {r.consequence for r in found} <= {
        Consequence.RACE,
        Consequence.REFUSED,
        Consequence.PROMISE,
    }


def with_control(plan, producer, consumer, num_slots):
    """The plan with one control edge more, for no reason."""
    number = RegisterId(len(plan.registers))
    extra = Register(
        number, "extra", RegisterKind.CONTROL, 0, 0, num_slots, (0,) * num_slots, (0, 1),
        "for no reason",
    )  # fmt: skip
    plan = replace(plan, registers=(*plan.registers, extra))
    for actor, side in ((producer, "outputs"), (consumer, "inputs")):
        row = getattr(actor_of(plan, actor), side)
        plan = with_actor(plan, actor, **{side: (*row, Port(number, 1))})
    return plan


def test_an_edge_that_another_one_implies_is_told_with_the_way():
    plan = PLANS["one chain"]()
    num_slots = register_of(plan, "metrics").num_slots
    found = removals(with_control(plan, "step", "metrics", num_slots))
    (extra,) = [r for r in found if r.dependency.text.startswith("'extra' from")]
    assert extra.consequence is Consequence.IMPLIED
    assert extra.text == "step > metrics; metrics > step"


def test_an_edge_that_nobody_needs_is_not_missed_and_the_command_says_so(tmp_path, capsys):
    with_control(PLANS["one chain"](), "step", "metrics", 1).save(tmp_path / "extra.plan")
    assert main([str(tmp_path / "extra.plan")]) == 1
    said = capsys.readouterr().out
    assert "not missed: slot 1 slots of 'extra' from 'step': for no reason" in said


def test_a_sink_that_hears_too_early_breaks_a_promise():
    plan = PLANS["accumulate"]()
    found = {r.dependency.text: r for r in removals(plan) if r.consequence is Consequence.PROMISE}
    told = found["'done' from 'update' to 'metrics'"]
    assert told.text.startswith("'metrics' hears of a step before 'update' has changed")


def test_the_command_prints_a_table_of_a_plan_that_misses_everything(tmp_path, capsys):
    PLANS["one chain"]().save(tmp_path / "net.plan")
    assert main([str(tmp_path / "net.plan"), "--all"]) == 0
    said = capsys.readouterr().out
    assert "| slot | 0 | 4 | 0 | 0 | 0 | 0 |" in said
    assert "race: slot 1 slots of 'staging' from 'snapshot'" in said
