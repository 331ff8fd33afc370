"""Jobs that are compiled for a simulated device: fed, late on purpose, and with the host's bits."""

import re
from random import Random

import numpy as np
import pytest
from small_blocks import offload_small

import actorflow as af
from actorflow import nn
from actorflow.compile.targets import SimTarget
from actors.kernels.host import catalogue
from actors.race.race import check_races
from actors.testing.simulated import POISON_KERNELS, poison
from compiler.contract.placement import HOST_SIDE, Device, DeviceKind, Memory, StreamRole
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.contract.types import Phase
from compiler.graph.target import Link
from compiler.verify.verify import verify_plan

SIM = Device(DeviceKind.SIM)
SEEDS = 50


class Model(nn.Module):
    def __init__(self):
        self.up, self.mid, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def __call__(self, x):
        hidden = af.dropout(af.relu(self.up(x)), 0.2)
        return self.down(af.gelu(self.mid(hidden), approximate="tanh"))


def rows():
    data = {"x": np.zeros((16, 8), np.float32), "y": np.zeros(16, np.int32)}
    return af.data.ArraySource(data, batch=4)


@af.job(train=False)
def evaluate(model, batch):
    logits = model(batch.x)
    return {"loss": af.cross_entropy(logits, batch.y), "logits": logits}


def compiled(cache, device, *, is_evaluated=False, **options):
    """The plan of a job with a snapshot after every third step."""

    @af.job(optimizer=af.optim.AdamW(1e-2), device=device, **options)
    def train(model, batch):
        logits = model(batch.x)
        return {"loss": af.cross_entropy(logits, batch.y), "sum": batch.x.sum()}

    evaluation = af.Evaluation(evaluate, rows(), every=2, batches=3) if is_evaluated else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CACHE", str(cache))
        return train.compile(Model(), rows(), every=3, evaluation=evaluation)


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"accumulate": 2},
        {"streams": 2},
        {"is_evaluated": True},
        {"offload": "optimizer"},
    ],
    ids=str,
)
def both(request, tmp_path_factory):
    """The plans of a job for the host and for a simulated device."""
    return [
        compiled(tmp_path_factory.mktemp(device), device, **request.param)
        for device in ("host", "sim")
    ]


def test_a_fed_job_gives_the_hosts_bits_however_late_the_device_is(both, plans):
    plain, fed = both
    kernels = dict(catalogue.kernels_by_name()) | POISON_KERNELS
    plan = poison(fed)
    check_races(plan)
    expected = plans.on_host(plain, kernels)
    for seed in range(SEEDS):
        rng = Random(seed)
        assert plans.on_device(plan, kernels, rng, max_ahead=rng.randint(1, 3)) == expected, seed


def test_only_ports_run_on_the_host_and_they_see_pinned_memory_alone(both):
    _, fed = both
    verify_plan(fed)
    for actor in fed.actors:
        is_ported = actor.kind in (ActorKind.SOURCE, ActorKind.SINK)
        stream = fed.streams[actor.stream]
        assert (stream.device == SIM) != is_ported
        assert (stream.role is StreamRole.PORT) == is_ported
        registers = [fed.registers[p.register] for p in (*actor.inputs, *actor.outputs)]
        arenas = {fed.arenas[r.arena] for r in registers if r.kind is RegisterKind.DATA}
        if is_ported:
            assert {arena.memory for arena in arenas} == {Memory.PINNED}


def test_a_feed_that_does_not_wait_for_its_batch_gives_other_bits(both, plans):
    plain, fed = both
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(plain, kernels)
    feed = next(a for a in fed.actors if a.name == "feed")
    fed_registers = {p.register for p in feed.outputs}
    readers = {a.id for a in fed.actors if fed_registers & {p.register for p in a.inputs}}
    forgetful = plans.without_waits(lambda actor, wait: actor in readers)
    with np.errstate(all="ignore"):
        options = {"max_ahead": 3, "find_waits": forgetful}
        runs = (plans.on_device(fed, kernels, Random(s), **options) for s in range(20))
        assert any(found != expected for found in runs)


class Deep(nn.Module):
    """Its activations are far larger than its state."""

    def __init__(self):
        self.layers = [nn.Linear(8, 8) for _ in range(12)]

    def __call__(self, x):
        for layer in self.layers:
            x = af.tanh(layer(x))
        return x


def deep(cache, device, **options):
    @af.job(optimizer=af.optim.AdamW(1e-2), device=device, recompute="none", **options)
    def train(model, batch):
        return ((model(batch.x) - batch.y) * batch.y).mean()

    data = {name: np.zeros((512, 8), np.float32) for name in "xy"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CACHE", str(cache))
        return train.compile(Deep(), af.data.ArraySource(data, batch=256), every=3)


def test_a_budget_below_the_activations_has_them_copied_out_and_back(tmp_path, plans, monkeypatch):
    monkeypatch.setattr(SimTarget, "link", Link(1e3, 1e3, 0.0))
    monkeypatch.setattr(SimTarget, "message_ns", 0.0)
    offload_small(monkeypatch, activation_bytes=1, bucket_bytes=1 << 13)
    size = deep(tmp_path / "free", "sim").arenas[0].size_bytes
    plan = deep(tmp_path / "tight", "sim", memory_budget=int(0.75 * size))
    assert plan.arenas[0].size_bytes <= 0.75 * size
    (note,) = plan.recomputation
    assert re.fullmatch(r"\d+ variables and [4-9] activations live in .*", note.certificate)
    moved = [n for a in plan.actors for n in a.launches if n.op == "copy_to" and a.name != "fetch"]
    ways = {(launch.phase, dict(launch.attrs)["to"]) for launch in moved}
    assert {(Phase.FORWARD, HOST_SIDE), (Phase.BACKWARD, 0)} <= ways
    kernels = dict(catalogue.kernels_by_name()) | POISON_KERNELS
    expected = plans.on_host(deep(tmp_path / "host", "host"), kernels)
    poisoned = poison(plan)
    check_races(poisoned)
    for seed in range(SEEDS):
        assert plans.on_device(poisoned, kernels, Random(seed)) == expected, seed
