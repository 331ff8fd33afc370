"""Several calls and several jobs on one model: nobody sees old values, nothing is lost."""

import dataclasses
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.tensor.initial_values import initial_value


@af.job(train=False)
def predict(model, batch):
    return {"logits": model(batch.x)}


def logits_by_hand(model, x):
    s = model.state()
    hidden = np.maximum(x @ s["up.weight"].T + s["up.bias"], 0)
    return hidden @ s["down.weight"].T + s["down.bias"]


def assert_predicts_what_the_model_holds(model, batch):
    x = {"x": batch["x"]}
    np.testing.assert_allclose(
        predict.step(model, x)["logits"], logits_by_hand(model, batch["x"]), rtol=1e-4, atol=1e-5
    )


def test_a_prediction_always_sees_the_newest_parameters(mlp, classification, classify):
    train, model = classify(), mlp()
    batch = next(classification())
    train.fit(model, classification(), steps=2, progress=False)
    assert_predicts_what_the_model_holds(model, batch)
    before = model.state()["up.weight"]
    train.fit(model, classification(), steps=20, progress=False)
    assert_predicts_what_the_model_holds(model, batch)
    train.step(model, batch)
    assert_predicts_what_the_model_holds(model, batch)
    predict.close(model)
    assert not np.array_equal(model.state()["up.weight"], before)
    train.close(model)


def test_parameters_loaded_between_steps_are_used(mlp, classification, classify):
    train, model, batch = classify(), mlp(), next(classification())
    first = train.step(model, batch)["loss"]
    start = model.state()
    train.step(model, batch)
    model.load(start)
    again, other = train.step(model, batch)["loss"], mlp()
    other.load(start)
    assert again == classify().step(other, batch)["loss"] != first
    train.close(model)


def test_two_training_jobs_take_turns_on_one_model(mlp, classification, classify):
    batch = next(classification())
    one, two = classify(optimizer=af.optim.SGD(0.1)), classify(optimizer=af.optim.SGD(0.1))
    alone, shared = mlp(), mlp()
    expected = [one.step(alone, batch)["loss"] for _ in range(6)]
    got = [(one, two)[i % 2].step(shared, batch)["loss"] for i in range(6)]
    for train in (one, two):
        train.close(alone)
        train.close(shared)
    assert got == expected


def test_another_batch_shape_keeps_the_optimizer_state(mlp, classification, classify):
    train, model = classify(), mlp()
    source = classification()
    for rows in (16, 16, 7, 16):
        train.step(model, {k: v[:rows] for k, v in next(source).items()})
    left = train._open.get(model).runner.variables()
    train.close(model)
    assert left["step"] == 4
    assert np.abs(left["adam_m/up.weight"]).max() > 0


@pytest.mark.host("a launch that fails on a device takes the memory along")
def test_a_refused_batch_and_a_failed_launch_change_nothing(mlp, classification, classify):
    good = [next(classification()) for _ in range(3)]
    train, model, other = classify(), mlp(), mlp()
    expected = [train.step(other, batch)["loss"] for batch in good]
    got = [train.step(model, good[0])["loss"]]
    with pytest.raises(af.ActorFailed):
        train.step(model, {**good[1], "y": np.full(16, 99, np.int32)})
    got.append(train.step(model, good[1])["loss"])
    runner = train._open.get(model).runner
    with raises(af.DataError):
        runner.step({**good[2], "x": good[2]["x"].astype(np.float64)})
    got.append(train.step(model, good[2])["loss"])
    train.close(model)
    train.close(other)
    assert got == expected


def test_steps_go_on_after_a_loss_that_is_not_finite(mlp, classification, classify):
    train, model, batch = classify(optimizer=af.optim.SGD(0.0)), mlp(), next(classification())
    with pytest.raises(af.NonFiniteLoss):
        train.step(model, {**batch, "x": batch["x"] * np.float32(np.nan)})
    model.load({n: np.zeros_like(a) for n, a in model.state().items()})
    assert train.step(model, batch)["loss"] == pytest.approx(np.log(5))
    train.close(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.scales.append(2.0),
        lambda m: m.table.update(a=3),
        lambda m: setattr(m.config, "depth", 9),
        lambda m: setattr(m, "factor", np.float32(4)),
        lambda m: m.array.fill(5),
    ],
)
def test_a_changed_setting_of_a_module_traces_anew(change):
    @dataclasses.dataclass
    class Config:
        depth: int = 1

    class Model(nn.Module):
        def __init__(self):
            self.w = nn.Parameter((1,), (("kind", "ones"),))
            self.scales, self.table, self.config = [1.0], {"a": 1}, Config()
            self.factor, self.array = np.float32(1), np.ones(2)

        def __call__(self, x):
            k = sum(self.scales) * self.table["a"] * self.config.depth
            return x * self.w * float(k * self.factor * self.array[0])

    @af.job(train=False)
    def run(model, batch):
        return model(batch.x)

    model, x = Model(), {"x": np.ones(1, np.float32)}
    before = run.step(model, x)["output"]
    change(model)
    after = run.step(model, x)["output"]
    run.close(model)
    assert before[0] == 1
    assert after[0] > 1


def test_a_model_that_is_a_dataclass_can_be_trained(classification, classify):
    @dataclasses.dataclass
    class Model(nn.Module):
        width: int = 5

        def __post_init__(self):
            self.layer = nn.Linear(8, self.width)

        def __call__(self, x):
            return self.layer(x)

    result = classify().fit(Model(), classification(), steps=2, progress=False)
    assert result.last_step == 2


def test_a_model_that_is_dropped_takes_its_open_plan_with_it(
    mlp, classification, classify, new_threads
):
    train = classify()
    model = mlp()
    train.step(model, next(classification()))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not new_threads()


def test_alternating_batch_shapes_leave_no_runner_behind(mlp, classification, classify):
    train, model, batch = classify(), mlp(), next(classification())
    runners = []
    for rows in (16, 7, 16, 7):
        train.step(model, {k: v[:rows] for k, v in batch.items()})
        runners.append(weakref.ref(train._open.get(model).runner))
    assert len({id(runner()) for runner in runners}) == 1
    train.close(model)
    gc.collect()
    assert runners[0]() is None


class Counting(nn.Module):
    """Each step takes 1 from the weight, and adds 1 to the count."""

    def __init__(self):
        self.weight, self.count = (
            nn.Parameter((2,), (("kind", "zeros"),)),
            nn.Buffer((), dtype="int64"),
        )


def decrease(model, batch):
    model.count.assign(model.count + 1)
    return {"loss": model.weight.sum() + batch.x.sum() * 0.0, "rows": batch.x.sum()}


def count(model, batch):
    model.count.assign(model.count + 1)
    return {"count": model.count + 0, "rows": batch.x.sum()}


def draw(model, batch):
    return {"drawn": af.rand(8).to("float64").sum(), "rows": batch.x.sum()}


def look(model, batch):
    return {"rows": batch.x.sum() + model.weight.sum()}


@pytest.fixture
def hurried():
    """Have Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work, count=3):
    """Run a function in several threads, with their numbers; return what they raised."""
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return errors


@pytest.mark.parametrize("lengths", [1, 2, 3])
@pytest.mark.parametrize("kind", ["train", "momentum", "count", "draw", "look"])
@pytest.mark.usefixtures("hurried")
def test_threads_that_step_one_job_take_turns_whatever_their_batches(kind, lengths):
    function = {"count": count, "draw": draw, "look": look}.get(kind, decrease)
    sgd = af.optim.SGD(1.0, momentum=0.5 if kind == "momentum" else 0.0)
    how = {"optimizer": sgd} if function is decrease else {"train": False}
    job, model, outputs = af.job(function, **how), Counting(), []

    def work(number):
        for step in range(6):
            rows = 1 + (number + step) % lengths
            output = job.step(model, {"x": np.ones(rows, np.float32)})
            assert output["rows"] == rows
            outputs.append(output)

    assert in_threads(work) == []
    total = len(outputs)
    assert total == 18
    if kind == "train":
        np.testing.assert_array_equal(model.weight.data, np.full(2, -18.0, np.float32))
    if kind == "momentum":  # the sum of 2 - 0.5^n over the steps
        expected = -sum(2.0 - 0.5**n for n in range(total))
        np.testing.assert_allclose(model.weight.data, expected, rtol=1e-6)
    if kind in ("train", "momentum", "count"):
        assert model.count.data == total
    if kind == "count":
        assert sorted(o["count"] for o in outputs) == list(range(1, total + 1))
    if kind == "draw":
        sums = [
            np.random.Generator(np.random.Philox(key=[0, 1], counter=[0, 0, step, 0]))
            .random(8, np.float32).sum(dtype=np.float64)
            for step in range(total)
        ]  # fmt: skip
        np.testing.assert_allclose(sorted(o["drawn"] for o in outputs), sorted(sums), rtol=1e-12)


@pytest.mark.usefixtures("hurried")
def test_threads_that_step_close_and_stream_one_job_disturb_nobody():
    job, model = af.job(look, train=False), Counting()

    def work(number):
        for rows in (1, 2, 3, 4):
            x = np.ones(rows, np.float32)
            if number == 0:
                assert job.step(model, {"x": x})["rows"] == rows
            elif number == 1:
                job.close(model)
                assert job.graph(model, {"x": af.TensorType("float32", (rows,))}).nodes
            else:
                source = af.data.ArraySource({"x": x}, batch=rows)
                assert [o["rows"] for o in job.stream(model, source, steps=1)] == [rows]

    assert in_threads(work) == []


@pytest.mark.usefixtures("hurried")
def test_threads_that_step_one_job_on_models_of_their_own_do_not_wait_for_each_other():
    job = af.job(decrease, optimizer=af.optim.SGD(1.0))
    models, meeting = [Counting() for _ in range(3)], threading.Barrier(3)

    def work(number):
        for step in range(4):
            job.step(models[number], {"x": np.ones(1 + step % 2, np.float32)})
            meeting.wait(60)

    assert in_threads(work) == []
    assert [float(m.weight.data[0]) for m in models] == [-4.0] * 3


class Parts(nn.Module):
    """Some of it is of no use to a job, and a buffer is drawn, too."""

    def __init__(self):
        self.up, self.down, self.unused = nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(2, 2).freeze()
        self.noise = nn.Buffer((6,), init=(("kind", "normal"), ("std", 1.0)))

    def __call__(self, x):
        return self.down(self.up(x) + self.noise)


def logits_of(model, batch):
    return {"logits": model(batch.x)}


def still(seed, **options):
    """A training that changes nothing."""
    return af.job(optimizer=af.optim.SGD(0.0), seed=seed, **options)(
        lambda model, batch: af.square(model(batch.x)).mean()
    )


TOUCHES = {
    "step": lambda model, data: af.job(logits_of, train=False, seed=1).step(model, next(data)),
    "stream": lambda model, data: list(
        af.job(logits_of, train=False, seed=1).stream(model, data, steps=1)
    ),
    "fit of no training": lambda model, data: af.job(logits_of, train=False).fit(
        model, data, steps=1, seed=1, progress=False
    ),
    "sim": lambda model, data: af.job(logits_of, train=False, seed=1, device="sim").step(
        model, next(data)
    ),
    "training step": lambda model, data: still(1).step(model, next(data)),
    "training stream": lambda model, data: list(still(1).stream(model, data, steps=1)),
    "fit": lambda model, data: still(0).fit(model, data, steps=1, seed=1, progress=False),
    "streams": lambda model, data: still(1, streams=2).fit(model, data, steps=1, progress=False),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_the_first_job_gives_a_model_its_values_and_all_others_see_them(classification, touch):
    model, x = Parts(), next(classification())["x"]
    TOUCHES[touch](model, classification())
    state = model.state()
    assert list(state) == [path for path, _ in model.named_stored()]
    for path, stored in model.named_stored():  # as by the seed and the path alone
        expected = initial_value(path, stored.type, stored.init, 1)
        assert state[path].tobytes() == expected.tobytes(), path
    by_hand = (x @ state["up.weight"].T + state["up.bias"] + state["noise"]).astype(np.float64)
    by_hand = by_hand @ state["down.weight"].T + state["down.bias"]
    for seed in (1, 2):
        seen = af.job(logits_of, train=False, seed=seed).step(model, {"x": x})["logits"]
        np.testing.assert_allclose(seen, by_hand, rtol=1e-4, atol=1e-5)
    still(3).fit(model, classification(), steps=1, progress=False, seed=4)
    after = model.state()
    assert [after[path].tobytes() for path in state] == [a.tobytes() for a in state.values()]


def test_a_part_of_a_model_that_had_its_values_first_keeps_them_in_the_whole(classification):
    model = Parts()
    first = af.job(lambda part, batch: {"y": part(batch.x)}, train=False, seed=5)
    made = first.step(model.up, {"x": np.eye(8, dtype=np.float32)})["y"]
    still(6).fit(model, classification(), steps=1, progress=False)
    np.testing.assert_allclose(made, model.up.weight.data.T + model.up.bias.data, rtol=1e-6)


def test_scalar_parameters_that_multiply_each_other_are_updated_from_their_old_values():
    class Model(nn.Module):
        def __init__(self):
            self.a = nn.Parameter((3,), (("kind", "uniform"), ("bound", 1.0)))
            self.b = nn.Parameter((3,), (("kind", "uniform"), ("bound", 1.0)))

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return (model.a * model.b).sum() + batch.x.sum() * 0.0

    model, x = Model(), {"x": np.zeros(1, np.float32)}
    train.step(model, x)
    a, b = model.state()["a"], model.state()["b"]
    for _ in range(3):
        train.step(model, x)
        a, b = a - np.float32(0.1) * b, b - np.float32(0.1) * a
    np.testing.assert_allclose(model.state()["a"], a, rtol=1e-6)
    np.testing.assert_allclose(model.state()["b"], b, rtol=1e-6)
    train.close(model)


def test_an_evaluating_job_may_call_an_output_loss_and_return_any_shape(mlp, classification):
    @af.job(train=False)
    def score(model, batch):
        return {"loss": model(batch.x) * float("nan")}

    model = mlp()
    out = score.step(model, {"x": next(classification())["x"]})
    score.close(model)
    assert np.isnan(out["loss"]).all()
    assert out["loss"].shape == (16, 5)


def test_a_parameter_named_like_the_engines_counters_is_refused_with_its_line():
    class Model(nn.Module):
        def __init__(self):
            self.step = nn.Parameter((1,), (("kind", "ones"),))

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model.step.sum() * batch.x.sum()

    with raises(af.CompileError):
        train.step(Model(), {"x": np.ones(1, np.float32)})
