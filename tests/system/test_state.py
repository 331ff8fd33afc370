"""Whoever reads a model gets its newest values, whoever writes is heard: in loops, in callbacks.

The oracle is a twin of the model that is stepped one step at a time: whatever is read while a run
is open must be, bit for bit, what the twin held after one of its steps.
"""

import copy
import gc
import sys
import threading

import numpy as np
import pytest

import actorflow as af
from actorflow import lease, nn, open_model, runner_variables
from actors.machine import Machine
from actors.table import MachineTable
from actors.transitions import Message, message
from compiler import chains

STEPS = 12
OPTIONS = [{}, {"streams": 2}, {"accumulate": 2}, {"streams": 2, "accumulate": 2}]


@pytest.fixture(params=OPTIONS, ids=str)
def options(request, monkeypatch):
    monkeypatch.setattr(chains, "MESSAGE_NS", 100.0)  # so that a tiny model has several chains
    return request.param


@af.job(train=False)
def score(model, batch):
    return {"loss": af.cross_entropy(model(batch.x), batch.y)}


@pytest.fixture
def trajectory(mlp, classification, classify):
    """The states of a model after 0, 1, 2, ... steps, by their bytes."""

    def make(options, model=None, steps=STEPS):
        job, model, data = classify(**options), model or mlp(), classification()
        each = options.get("accumulate", 1)
        states = []
        for _ in range(steps):
            job.step(model, [next(data) for _ in range(each)])
            states.append(model.state())
        job.close(model)
        return [bytes_of(state) for state in states]

    return make


def bytes_of(state):
    return b"".join([state[name].tobytes() for name in sorted(state)])


def step_of(state, expected):
    """The number of the step after which the twin held this state; fails where it never did."""
    return 1 + expected.index(bytes_of(state))


def test_in_on_step_the_model_is_as_after_the_last_finished_step(
    mlp, classification, classify, trajectory, options
):
    model, seen = mlp(), []
    classify(**options).fit(
        model, classification(), steps=STEPS, progress=False,
        on_step=lambda step, _: seen.append((step, model.state(), model.up.bias.data)),
    )  # fmt: skip
    expected = trajectory(options)
    for step, state, bias in seen:
        assert step_of(state, expected) >= step
        assert bias.shape == (16,)
    assert step_of(model.state(), expected) == STEPS


def test_in_a_stream_the_model_is_as_after_the_last_finished_step(
    mlp, classification, classify, trajectory, options
):
    model, expected = mlp(), trajectory(options)
    for step, _ in enumerate(classify(**options).stream(model, classification(), steps=STEPS), 1):
        first, second = model.state(), model.state()
        assert step <= step_of(first, expected) <= step_of(second, expected)
    assert step_of(model.state(), expected) == STEPS


def test_in_a_stream_another_job_predicts_with_the_newest_values(mlp, classification, classify):
    model, batch, losses = mlp(), next(classification()), []
    before = score.step(model, batch)["loss"]
    for _ in classify().stream(model, classification(), steps=20):
        losses.append(score.step(model, batch)["loss"])
        streamed = next(iter(score.stream(model, classification(seed=3), steps=1)))["loss"]
    assert before > losses[0] > losses[-1] > 0
    assert score.step(model, next(classification(seed=3)))["loss"] <= streamed
    score.close(model)


def test_in_on_result_the_model_is_the_one_that_was_evaluated_or_a_newer_one(
    mlp, classification, classify, trajectory, options
):
    model, seen = mlp(), []
    watched = af.Evaluation(
        score, classification(seed=7), every=3, batches=2,
        on_result=lambda step, means: seen.append((step, model.state())),
    )  # fmt: skip
    classify(**options).fit(
        model, classification(), steps=STEPS, progress=False, evaluation=watched
    )
    expected = trajectory(options)
    assert [step for step, _ in seen] == [3, 6, 9, 12]
    assert all(step_of(state, expected) >= step for step, state in seen)


def test_snapshots_evaluations_and_readers_do_not_disturb_each_other(
    mlp, classification, classify, trajectory, options, tmp_path
):
    model, seen = mlp(), []
    watched = af.Evaluation(score, classification(seed=7), every=3, batches=2)
    classify(**options).fit(
        model, classification(), steps=STEPS, progress=False, evaluation=watched,
        checkpoint=tmp_path, every=2, on_step=lambda step, _: seen.append((step, model.state())),
    )  # fmt: skip
    expected = trajectory(options)
    assert all(step_of(state, expected) >= step for step, state in seen)
    assert step_of(model.state(), expected) == STEPS


def test_other_threads_read_whole_states_that_only_grow_newer(
    mlp, classification, classify, trajectory, options
):
    model, expected = mlp(), trajectory(options)
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
    assert {step_of(state, expected) for state in states} <= set(range(1, STEPS + 1))
    assert step_of(states[-1], expected) == STEPS


def still(**options):
    """A job whose steps change nothing, and whose outputs tell the parameters they were made of."""

    @af.job(optimizer=af.optim.SGD(0.0), **options)
    def total(model, batch):
        parts = {name: p.sum() for name, p in model.named_parameters()}
        return {"loss": af.cross_entropy(model(batch.x), batch.y), **parts}

    return total


def filled(model, number):
    return {name: np.full_like(array, number) for name, array in model.state().items()}


def told(metrics, model):
    """The numbers that all parameters had in a step."""
    return {round(metrics[n] / p.type.num_elements, 4) for n, p in model.named_parameters()}


def test_what_is_loaded_in_a_stream_is_trained_on_and_stays(mlp, classification, options):
    model, heard = mlp(), []
    for step, metrics in enumerate(still(**options).stream(model, classification(), steps=30)):
        heard.append(told(metrics, model))
        if step == 5:
            model.load(filled(model, 0.5))
            assert bytes_of(model.state()) == bytes_of(filled(model, 0.5))
    assert [len(numbers) for numbers in heard[-15:]] == [1] * 15
    assert heard[-1] == {0.5}
    first = heard.index({0.5})
    assert heard[first:] == [{0.5}] * (30 - first)  # from one step on, and all parameters at once
    assert bytes_of(model.state()) == bytes_of(filled(model, 0.5))


def test_what_is_assigned_in_on_step_is_trained_on_and_stays(mlp, classification, options):
    model, heard = mlp(), []

    def listen(step, metrics):
        heard.append(round(metrics["up.bias"] / 16, 4))
        if step == 5:
            model.up.bias.data = np.full(16, 0.25, np.float32)
            assert model.up.bias.data[0] == 0.25

    still(**options).fit(model, classification(), steps=30, progress=False, on_step=listen)
    assert (heard[4] != 0.25, heard[-1]) == (True, 0.25)
    assert model.up.bias.data[0] == 0.25


def test_what_is_loaded_during_an_evaluation_waits_for_its_end(mlp, classification, options):
    model = mlp()
    results = []

    def load(step, means):
        results.append(means)
        model.load(filled(model, 0.001 * step))

    watched = af.Evaluation(score, classification(seed=7), every=1, batches=4, on_result=load)
    still(**options).fit(model, classification(), steps=8, progress=False, evaluation=watched)
    twin = mlp()
    single = still()
    single.step(twin, next(classification()))
    expected = []
    for step in range(9):
        if step:
            twin.load(filled(twin, 0.001 * step))
        data = classification(seed=7)
        losses = [score.step(twin, next(data))["loss"] for _ in range(4)]
        expected.append(sum(losses) / 4)
    for means in results:  # each is one of whole models, never of two in one evaluation
        assert min(abs(means["loss"] - loss) for loss in expected) < 1e-6
    single.close(twin)
    score.close(twin)


def test_a_write_at_the_very_end_is_not_lost(mlp, classification, classify):
    model = mlp()
    classify().fit(
        model, classification(), steps=3, progress=False,
        on_step=lambda step, _: model.load(filled(model, step)),
    )  # fmt: skip
    assert set(np.unique(model.down.bias.data)) == {3.0}


def test_frozen_parameters_are_read_and_written_like_others(mlp, classification, options):
    model = mlp()
    model.up.weight.freeze()
    sums = []
    for step, metrics in enumerate(still(**options).stream(model, classification(), steps=30)):
        sums.append(metrics["up.weight"])
        if step == 4:
            assert model.up.weight.data is not None
            model.up.weight.data = np.full((16, 8), 0.5, np.float32)
    assert sums[-1] == pytest.approx(64) != sums[4]
    assert model.up.weight.data[3, 3] == 0.5


# -- one owner ------------------------------------------------------------------------------------


def start_stream(job, model, data):
    stream = job.stream(model, data)
    next(stream)
    return stream


@pytest.mark.parametrize("call", ["fit", "stream", "step"])
@pytest.mark.parametrize("is_same_job", [True, False])
def test_a_second_training_of_a_model_in_a_stream_is_refused_with_both_lines(
    mlp, classification, classify, trajectory, call, is_same_job
):
    one, model, batch = classify(), mlp(), next(classification())
    two = one if is_same_job else classify()
    stream = start_stream(one, model, classification())
    calls = {
        "fit": lambda: two.fit(model, classification(), steps=1, progress=False),
        "stream": lambda: next(two.stream(model, classification())),
        "step": lambda: two.step(model, batch),
    }
    message = (
        rf"test_state\.py:\d+: {call} of job 'train' would train parameter 'up.weight', which is"
        r" being trained by stream of job 'train' \(.*test_state\.py:\d+\): of two copies one would"
        r" be lost\. Let that end first"
    )
    with pytest.raises(af.CompileError, match=message):
        calls[call]()
    next(stream)
    stream.close()
    assert step_of(model.state(), trajectory({}, steps=40)) >= 2
    calls[call]()
    two.close(model)


def test_of_two_fits_of_one_model_in_two_threads_one_is_refused_and_the_other_is_right(
    mlp, classification, classify, trajectory
):
    model, refusals = mlp(), []
    both, held = threading.Barrier(2), threading.Event()

    def listen(step, metrics):
        if step == 1:
            assert held.wait(30)

    def train():
        both.wait()
        try:
            classify().fit(model, classification(), steps=STEPS, progress=False, on_step=listen)
        except af.CompileError as error:
            refusals.append(str(error))
            held.set()

    threads = [threading.Thread(target=train) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(refusals) == 1
    assert "fit of job 'train' would train parameter 'up.weight'" in refusals[0]
    assert step_of(model.state(), trajectory({})) == STEPS


def test_two_models_that_share_a_part_cannot_be_trained_at_once(mlp, classification, classify):
    one, two = mlp(), mlp()
    two.up = one.up
    stream = start_stream(classify(), one, classification())
    with pytest.raises(af.CompileError, match=r"would train parameter 'up\.weight'"):
        classify().fit(two, classification(), steps=1, progress=False)
    stream.close()
    classify().fit(two, classification(), steps=2, progress=False)
    np.testing.assert_array_equal(one.state()["up.weight"], two.state()["up.weight"])


def test_two_models_are_trained_at_once_in_two_threads(mlp, classification, classify, trajectory):
    models, both = [mlp(), mlp()], threading.Barrier(2)

    def train(model):
        classify().fit(
            model, classification(), steps=STEPS, progress=False,
            on_step=lambda step, _: both.wait(30) if step == 1 else None,
        )  # fmt: skip

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [step_of(model.state(), trajectory({})) for model in models] == [STEPS, STEPS]


def test_a_stream_that_is_not_started_or_abandoned_holds_nothing(
    mlp, classification, classify, trajectory
):
    model, train = mlp(), classify()
    waiting = train.stream(model, classification())
    abandoned = start_stream(train, model, classification())
    del abandoned
    gc.collect()
    done = step_of(model.state(), trajectory({}, steps=40))
    assert done >= 1
    train.fit(model, classification(), steps=1, progress=False)
    next(waiting)
    with pytest.raises(af.CompileError, match="would train parameter"):
        train.fit(model, classification(), steps=1, progress=False)
    waiting.close()
    train.fit(model, classification(), steps=1, progress=False)


def test_threads_that_step_one_job_on_one_model_take_turns(mlp, classification, classify):
    train, model, batch = classify(optimizer=af.optim.SGD(0.01)), mlp(), next(classification())
    losses = []

    def work():
        losses.extend([train.step(model, batch)["loss"] for _ in range(10)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    twin, alone = mlp(), classify(optimizer=af.optim.SGD(0.01))
    expected = [alone.step(twin, batch)["loss"] for _ in range(30)]
    assert sorted(losses, reverse=True) == sorted(expected, reverse=True)
    assert bytes_of(model.state()) == bytes_of(twin.state())
    train.close(model)
    alone.close(twin)


@pytest.mark.parametrize("where", ["on_step", "on_result", "source"])
def test_a_run_that_fails_gives_the_model_back(
    mlp, classification, classify, trajectory, options, where
):
    model, expected = mlp(), trajectory(options, steps=60)

    def fail(*_):
        raise KeyError(step_of(model.state(), expected))

    class Source(type(classification())):
        def next_into(self, views):
            if len(seen) > 4:
                fail()
            super().next_into(views)

    seen, data = [], classification()
    data.__class__ = Source if where == "source" else type(data)
    watched = af.Evaluation(
        score, classification(seed=7), every=3, batches=2,
        on_result=fail if where == "on_result" else None,
    )  # fmt: skip

    def listen(step, metrics):
        seen.append(step)
        if where == "on_step" and step == 4:
            fail()

    with pytest.raises(KeyError) as caught:
        classify(**options).fit(
            model, data, steps=200, progress=False, on_step=listen, evaluation=watched
        )
    assert step_of(model.state(), expected) >= caught.value.args[0] >= 3
    classify().fit(model, classification(), steps=1, progress=False)


def test_a_run_that_cannot_start_holds_nothing(mlp, classification, classify):
    model = mlp()
    with pytest.raises(af.CompileError, match="on_nan"):
        classify().fit(model, classification(), steps=1, on_nan="what", progress=False)
    classify().fit(model, classification(), steps=1, progress=False)


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
    classification, monkeypatch, options, late
):
    """Or a listener that reads the model would wait for itself: some updates, and not all."""
    monkeypatch.setattr(chains, "MESSAGE_NS", 100.0)

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
            machine.receive(machine.outbox.popleft())
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


# -- what is handed out ---------------------------------------------------------------------------


def test_arrays_are_read_only_and_do_not_change(mlp, classification, classify):
    model, train = mlp(), classify()
    result = train.fit(model, classification(), steps=2, progress=False)
    data, state = model.up.weight.data, model.state()
    before = bytes_of(state), data.tobytes()
    for array in (data, state["up.weight"], result.variables["up.weight"]):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
    for _ in train.stream(model, classification(), steps=3):
        within = model.up.weight.data
        with pytest.raises(ValueError, match="read-only"):
            within[:] = 0
    train.step(model, next(classification()))
    assert (bytes_of(state), data.tobytes()) == before
    train.close(model)


def test_a_model_that_is_loaded_with_one_wrong_array_keeps_all_its_values(
    mlp, classification, classify
):
    model = mlp()
    classify().fit(model, classification(), steps=1, progress=False)
    before = model.state()
    with pytest.raises(af.CompileError, match=r"expected float32\[5\], got float32\[4\]"):
        model.load({**filled(model, 7), "down.bias": np.zeros(4, np.float32)})
    assert bytes_of(model.state()) == bytes_of(before)


def test_a_copy_of_a_model_in_training_has_the_newest_values_and_a_life_of_its_own(
    mlp, classification, classify, trajectory
):
    model, expected = mlp(), trajectory({})
    for _ in classify().stream(model, classification(), steps=4):
        twin = copy.deepcopy(model)
    assert step_of(twin.state(), expected) == 4
    classify().fit(twin, classification(), steps=1, progress=False)
    assert step_of(model.state(), expected) == 4
    with pytest.raises(ValueError, match="read-only"):
        twin.up.bias.data[:] = 1


def test_a_part_that_is_exchanged_in_the_loop_leaves_the_trained_one_its_values(
    mlp, classification, classify, trajectory
):
    model, expected = mlp(), trajectory({})
    trained = model.up
    for _ in classify().stream(model, classification(), steps=4):
        model.up = nn.Linear(8, 16)
    state = {**{f"up.{n}": a for n, a in trained.state().items()}}
    state |= {f"down.{n}": a for n, a in model.down.state().items()}
    assert step_of(state, expected) == 4
    assert model.up.weight.data is None


# -- interrupts -----------------------------------------------------------------------------------


FILES = {module.__file__ for module in (lease, open_model, runner_variables)}


def interrupted(call, at):
    """Call and raise KeyboardInterrupt where function number `at` of the hand-over returns.

    Return whether it came so far.
    """
    count = 0

    def profile(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename in FILES and event in ("return", "c_return"):
            count += 1
            if count == at:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_anywhere_in_the_hand_over_leaves_a_whole_model_that_can_be_trained(
    mlp, classification, classify, trajectory
):
    (first,) = trajectory({}, steps=1)
    train, model, at, is_cut = classify(), mlp(), 0, True
    train.fit(model, classification(), steps=1, progress=False)
    start, came = model.state(), set()
    assert bytes_of(start) == first
    other = mlp()
    other.load(start)
    train.fit(other, classification(), steps=1, progress=False)
    trained = bytes_of(other.state())
    while is_cut:
        at += 3  # of some 400 places; the lease's own are all tried in its tests
        model.load(start)
        is_cut = interrupted(
            lambda: train.fit(model, classification(), steps=1, progress=False), at
        )
        state = bytes_of(model.state())
        assert state in (first, trained)
        came.add(state)
        train.fit(model, classification(), steps=1, progress=False)
    assert came == {first, trained}


# -- runners --------------------------------------------------------------------------------------


def test_a_runner_reads_and_writes_its_variables_while_it_runs(mlp, classification, options):
    runner = af.Runner(still(**options).compile(mlp(), classification()))
    heard = []
    for step, metrics in enumerate(runner.stream(classification(), steps=30), 1):
        heard.append(round(metrics["up.bias"], 4))
        assert runner.variables()["step"] >= step
        if step == 4:
            runner.write({"up.bias": np.ones(16, np.float32)})
            assert runner.variables()["up.bias"].sum() == 16
    assert (heard[0] != 16, heard[-1]) == (True, 16)
    assert runner.variables()["up.bias"].sum() == 16
    for _ in runner.stream(classification(), steps=1):
        with pytest.raises(af.CompileError, match=r"'up.bias' is float32\[16\]"):
            runner.write({"up.bias": np.ones(3, np.float32)})


def test_two_calls_of_one_runner_at_once_are_refused(mlp, classification, classify):
    runner = af.Runner(classify().compile(mlp(), classification()))
    stream = runner.stream(classification(), steps=9)
    next(stream)
    with pytest.raises(af.CompileError, match=r"test_state\.py:\d+: a runner of plan 'train' was"):
        runner.fit(classification(), steps=5, progress=False)
    assert len(list(stream)) == 8
    assert runner.variables()["step"] == 9
