"""Whole jobs whose optimizer state and activations live in host memory, on the ordinary runner."""

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same, rows_of_fit

import actorflow as af
from actorflow import nn
from actors.loop import load as loading
from compiler.budget import offload
from compiler.contract.placement import HOST_SIDE
from compiler.contract.plan_tables import ActorKind
from compiler.contract.types import Phase
from compiler.pipeline import pipeline


class Net(nn.Module):
    def __init__(self):
        self.up, self.mid, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(
            af.gelu(self.mid(af.dropout(af.relu(self.up(x)), 0.2)), approximate="tanh")
        )


def data(seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(64, 8)).astype(np.float32), rng.integers(0, 5, 64).astype(np.int32)
    return af.data.ArraySource({"x": x, "y": y}, batch=8, seed=seed)


def job(**options):
    @af.job(optimizer=af.optim.AdamW(1e-2), seed=3, deterministic=True, **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return train


@af.job(train=False)
def evaluate(model, batch):
    return {"loss": af.cross_entropy(model(batch.x), batch.y)}


def move(graph, target):
    names = offload.state_names(graph)
    idle = [i.value for i in offload.idle_values(graph, target) if names and i.idle_ns > 0]
    moved = offload.offload_variables(graph, names, target, bucket_bytes=600)
    return offload.spill_values(moved, idle, target, bucket_bytes=600)


@pytest.fixture
def moving(monkeypatch, tmp_path):
    """A switch: jobs compiled behind it keep on the host whatever can live there."""
    lower = pipeline.lower

    def switch():
        monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "moved"))
        monkeypatch.setattr(
            pipeline,
            "lower",
            lambda graph, target, *rest: lower(move(graph, target), target, *rest),
        )

    return switch


def run(steps, **options):
    fit = {k: options.pop(k) for k in ("checkpoint", "every", "evaluation") if k in options}
    return rows_of_fit(job(**options), Net(), data(), steps, **fit)


@pytest.mark.one_device("looks for the one arena of a device")
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"streams": 2}, {"accumulate": 2, "metrics_every": 2}],
    ids=str,
)  # fmt: skip
def test_losses_and_variables_are_the_same_bits_as_with_all_on_the_device(options, moving):
    expected, plain = run(7, **options)
    moving()
    plan = job(**options).compile(Net(), data())
    assert [a.name for a in plan.actors if a.kind is ActorKind.COPY]
    assert len(plan.arenas) == 2
    rows, moved = run(7, **options)
    assert rows == expected
    assert_same(moved.variables, plain.variables)


def test_checkpoints_and_evaluations_are_the_same_and_a_run_goes_on_either_way(moving, tmp_path):
    def evaluation():
        return af.Evaluation(evaluate, data(9), every=3, batches=2)

    expected, plain = run(9, evaluation=evaluation())
    rows, evaluations = [], ()
    for steps in (4, 6, 9):
        if steps == 6:
            moving()
        part, result = run(steps, checkpoint=tmp_path / "run", every=1, evaluation=evaluation())
        rows += part
        evaluations += result.evaluations
    assert rows == expected
    assert evaluations == plain.evaluations
    assert_same(result.variables, plain.variables)


def test_the_state_read_right_after_a_step_is_that_of_the_step(moving):
    source = data()
    batches = [next(source) for _ in range(6)]
    states = []
    for is_moved in (False, True):
        if is_moved:
            moving()
        train, model = job(), Net()
        for batch in batches:
            train.step(model, batch)
            states.append({name: array.copy() for name, array in model.state().items()})
        train.close(model)
    for plain, moved in zip(states[:6], states[6:], strict=True):
        assert_same(moved, plain)


def test_a_plan_file_with_two_memories_runs_without_the_model(moving, tmp_path):
    _, plain = run(5)
    moving()
    job().compile(Net(), data()).save(tmp_path / "net.plan")
    runner = af.Runner(af.Plan.load(tmp_path / "net.plan"), seed=3)
    result = runner.fit(data(), steps=5, progress=False)
    assert_same(result.variables, plain.variables)


@pytest.mark.parametrize("call", range(40, 52))
def test_a_copy_back_that_fails_leaves_no_half_updated_variables(call, moving, monkeypatch):
    """Some state would be of the step before: the model keeps what it had."""
    bind, calls = loading._bind, []

    def failing(plan, views, device, launch, slots):
        made = bind(plan, views, device, launch, slots)

        def body():
            calls.append(launch.op)
            if len(calls) == call:
                raise OSError("the link is down")
            made()

        is_back = launch.phase is Phase.UPDATE and dict(launch.attrs).get("to") == HOST_SIDE
        return body if is_back else made

    moving()
    fresh = Net()
    job().fit(fresh, data(), steps=0, progress=False)
    monkeypatch.setattr(loading, "_bind", failing)
    model = Net()
    with pytest.raises(af.ActorFailed, match="copy_to"):
        job().fit(model, data(), steps=9, progress=False)
    assert_same(model.state(), fresh.state())


@pytest.mark.one_device("looks for the one arena of a device")
def test_a_job_may_keep_all_optimizer_state_in_host_memory_and_trains_to_the_same_bits():
    plain, moved = job(), job(offload="optimizer")
    models = Net(), Net()
    for one, model in zip((plain, moved), models, strict=True):
        one.fit(model, data(), steps=5, progress=False)
    assert_same(models[0].state(), models[1].state())
    plan = moved.compile(Net(), data())
    device, host = plan.memory
    assert device.optimizer_bytes == 0
    assert host.optimizer_bytes == plain.compile(Net(), data()).memory[0].optimizer_bytes > 0
    assert any(actor.kind is ActorKind.COPY for actor in plan.actors)


def test_state_in_host_memory_and_a_budget_for_the_device_go_together():
    free = job(offload="optimizer").compile(Net(), data()).arenas[0].size_bytes
    with pytest.raises(af.BudgetError) as caught:
        job(offload="optimizer", memory_budget=1).compile(Net(), data())
    least = caught.value.smallest_bytes
    assert least <= free
    plan = job(offload="optimizer", memory_budget=least).compile(Net(), data())
    assert plan.arenas[0].size_bytes <= least


@pytest.mark.host("a device has a link")
def test_a_host_without_a_link_moves_nothing_of_its_own_accord():
    least = job(memory_budget=1 << 30).compile(Net(), data())
    assert len(least.arenas) == 1


def test_an_offload_that_is_none_of_the_known_ones_is_refused_with_the_users_line():
    with raises(af.CompileError):
        job(offload="disk")
