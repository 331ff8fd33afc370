"""Whoever reads a model in training gets its newest values: in loops, callbacks, threads."""

import copy
import threading

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actors.machine.machine import Machine
from actors.machine.table import MachineTable
from actors.machine.transitions import Message, message

STEPS = 12


def test_in_on_step_the_model_is_as_after_that_step(mlp, classification, classify, twin, options):
    model, seen = mlp(), []
    classify(**options).fit(
        model, classification(), steps=STEPS, progress=False,
        on_step=lambda step, _: seen.append((step, model.state(), model.up.bias.data)),
    )  # fmt: skip
    expected = twin(options)
    for step, state, bias in seen:
        assert expected.step_of(state) == step
        np.testing.assert_array_equal(bias, state["up.bias"])
    assert expected.step_of(model.state()) == STEPS


def test_in_a_stream_the_model_is_as_after_the_last_finished_step(
    mlp, classification, classify, twin, options
):
    model, expected = mlp(), twin(options)
    for step, _ in enumerate(classify(**options).stream(model, classification(), steps=STEPS), 1):
        first, second = model.state(), model.state()
        assert step <= expected.step_of(first) <= expected.step_of(second)
    assert expected.step_of(model.state()) == STEPS


def test_in_a_stream_another_job_predicts_with_the_newest_values(
    mlp, classification, classify, score
):
    model, batch, losses = mlp(), next(classification()), []
    before = score.step(model, batch)["loss"]
    for _ in classify().stream(model, classification(), steps=20):
        losses.append(score.step(model, batch)["loss"])
        streamed = next(iter(score.stream(model, classification(seed=3), steps=1)))["loss"]
    assert before > losses[0] > losses[-1] > 0
    assert score.step(model, next(classification(seed=3)))["loss"] <= streamed
    score.close(model)


@pytest.mark.parametrize("more", [{"device": "sim"}, {"metrics_every": 3}], ids=str)
def test_in_on_step_reads_of_all_kinds_are_of_that_step(mlp, classification, classify, twin, more):
    model, seen = mlp(), []

    @af.job(train=False)
    def total(model, batch):
        return {"sum": model.up.bias.sum() + batch.x[0, 0] * 0.0}

    def listen(step, outputs):
        seen.append((step, model.state(), copy.deepcopy(model).state()))
        own = model.up.bias.data.sum(dtype=np.float64)
        assert total.step(model, batch)["sum"] == pytest.approx(own, rel=1e-5)

    batch, every = next(classification()), more.get("metrics_every", 1)
    train = classify(**more)
    train.fit(model, classification(), steps=STEPS, progress=False, on_step=listen)
    expected = twin({})
    for step, state, copied in seen:  # of steps that are told together, the values of the last
        assert expected.step_of(state) == -(-step // every) * every
        assert expected.step_of(copied) == -(-step // every) * every


def test_in_on_step_of_a_resumed_run_the_model_is_as_after_that_step(
    mlp, classification, classify, twin, options, tmp_path
):
    seen, train = [], classify(**options)
    for steps in (5, STEPS):
        model = mlp()
        train.fit(
            model, classification(), steps=steps, progress=False, checkpoint=tmp_path, every=2,
            on_step=lambda step, _, m=model: seen.append((step, m.state())),
        )  # fmt: skip
    expected = twin(options)
    assert [expected.step_of(state) for _, state in seen] == [step for step, _ in seen]
    assert len(seen) == STEPS


def test_a_plan_that_waits_for_its_listener_says_so(mlp, classification, classify):
    plan = classify().compile(mlp(), classification(), on_step=True)
    runner, seen = af.Runner(plan), []
    runner.fit(
        classification(), steps=6, progress=False,
        on_step=lambda step, _: seen.append(int(runner.variables()["step"]) - step),
    )  # fmt: skip
    assert seen == [0] * 6
    assert plan.option("waits_for_listener")
    assert classify().compile(mlp(), classification()).option("waits_for_listener") is None


def test_in_on_result_the_model_is_the_one_that_was_evaluated(
    mlp, classification, classify, twin, options, score
):
    model, seen = mlp(), []
    watched = af.Evaluation(
        score, classification(seed=7), every=3, batches=2,
        on_result=lambda step, means: seen.append((step, model.state())),
    )  # fmt: skip
    classify(**options).fit(
        model, classification(), steps=STEPS, progress=False, evaluation=watched
    )
    expected = twin(options)
    assert [step for step, _ in seen] == [3, 6, 9, 12]
    assert all(expected.step_of(state) == step for step, state in seen)


@pytest.mark.parametrize("device", ["host", "sim"])
def test_the_best_state_of_two_runs_is_the_same_and_gives_the_loss_it_was_kept_for(
    mlp, classification, classify, score, bytes_of, device
):
    held_out, kept = next(classification(seed=7)), []
    for _ in range(2):
        model, best = mlp(), {}

        def keep(step, means, model=model, best=best):
            if means["loss"] < best.get("loss", 1e9):
                best.update(loss=means["loss"], state=model.state())

        watched = af.Evaluation(score, classification(seed=7), every=2, batches=1, on_result=keep)
        train = classify(optimizer=af.optim.AdamW(5e-2), device=device)
        train.fit(model, classification(), steps=40, progress=False, evaluation=watched)
        model.load(best["state"])
        assert score.step(model, held_out)["loss"] == pytest.approx(best["loss"], rel=1e-6)
        kept.append(best)
    assert kept[0]["loss"] == kept[1]["loss"]
    assert bytes_of(kept[0]["state"]) == bytes_of(kept[1]["state"])


def test_snapshots_evaluations_and_readers_do_not_disturb_each_other(
    mlp, classification, classify, twin, options, tmp_path, score
):
    model, seen = mlp(), []
    watched = af.Evaluation(score, classification(seed=7), every=3, batches=2)
    classify(**options).fit(
        model, classification(), steps=STEPS, progress=False, evaluation=watched,
        checkpoint=tmp_path, every=2, on_step=lambda step, _: seen.append((step, model.state())),
    )  # fmt: skip
    expected = twin(options)
    assert all(expected.step_of(state) == step for step, state in seen)
    assert expected.step_of(model.state()) == STEPS


def test_other_threads_read_whole_states_that_only_grow_newer(
    mlp, classification, classify, twin, options
):
    model, expected = mlp(), twin(options)
    states, is_over = [], threading.Event()

    def read():
        while not is_over.is_set():
            states.append(model.state())

    threads = [threading.Thread(target=read) for _ in range(2)]
    for step, _ in enumerate(classify(**options).stream(model, classification(), steps=STEPS)):
        if step == 0:
            [thread.start() for thread in threads]
    is_over.set()
    [thread.join() for thread in threads]
    states.append(model.state())
    assert {expected.step_of(state) for state in states} <= set(range(1, STEPS + 1))
    assert expected.step_of(states[-1]) == STEPS


class Late(nn.Module):
    """Its loss is known long after its gradients."""

    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 5)
        self.side = nn.Linear(16, 16, bias=False)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"metrics_every": 3}, {"metrics_every": 2}], ids=str
)
@pytest.mark.parametrize("late", [1, 10, 40])
def test_updates_that_have_begun_end_though_the_listener_does_not_return(
    classification, many_chains, options, late
):
    """Or a listener that reads the model would wait for itself: some updates, and not all."""

    @af.job(optimizer=af.optim.SGD(0.01), streams=2, **options)
    def train(model, batch):
        slow = model.side.weight.argmax(-1).to("float32")
        for _ in range(late):
            slow = af.tanh(slow)
        fast = af.cross_entropy(model(batch.x), batch.y) + af.square(model.side.weight).mean()
        return fast + slow.mean()

    plan = train.compile(Late(), classification())
    machine = Machine(MachineTable.of(plan))
    machine.admit(next(a.id for a in plan.actors if a.name == "data"), 40)
    heard = 0
    while machine.outbox or machine.fireable or machine.detached:
        while machine.outbox:
            machine.receive(machine.outbox.pop(0))
        for queue in (machine.fireable, machine.detached):
            if queue:
                actor = queue.popleft()
                if plan.actors[actor].name == "metrics":
                    heard += 1
                else:
                    machine.receive(message(Message.DONE, actor))
    variables = {plan.views[v.view].register for v in plan.state}
    updates = {
        machine.firing_index(a.id)
        for a in plan.actors
        for launch in a.launches
        if {plan.views[view].register for view in launch.outputs} & variables
    }
    assert heard == 1
    assert len(updates) == 1
    assert updates.pop() > 0
