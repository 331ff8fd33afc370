"""Callbacks of `fit`: when each is called, what it may ask for, and how it ends a run."""

import threading
import traceback

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same
from rank_trainings import Training

import actorflow as af
from actorflow import nn
from actorflow.run.callback_calls import earlier_evaluations


class Heard:
    """Notes every call with the thread that makes it."""

    def __init__(self, is_waited_for=True):
        self.is_waited_for = is_waited_for
        self.calls = []

    def note(self, *call):
        self.calls.append((*call, threading.current_thread().name))

    def on_start(self, run):
        self.run = run
        self.note("start", run.first_step)

    def on_step(self, step, metrics):
        self.note("step", step)

    def on_evaluation(self, step, means):
        self.note("evaluation", step)

    def on_end(self, result):
        self.note("end", result.last_step)

    def close(self):
        self.note("close", None)

    def of(self, name):
        return [call[1] for call in self.calls if call[0] == name]


@pytest.fixture
def fit(mlp, classification, classify, tmp_path):
    evaluate = af.job(train=False)(
        lambda model, batch: {"loss": af.cross_entropy(model(batch.x), batch.y)}
    )

    def run(*callbacks, steps=8, job=None, **options):
        run.model = mlp()
        if options.pop("is_evaluated", True):
            options["evaluation"] = af.Evaluation(
                evaluate, classification(seed=7), every=3, batches=2, on_result=run.on_result
            )
        return (job or classify()).fit(
            run.model, classification(), steps=steps, progress=False, callbacks=callbacks, **options
        )

    run.on_result = None
    return run


def test_a_callback_hears_of_the_run_in_order_and_on_its_threads(fit, tmp_path):
    heard = Heard()
    fit(heard, checkpoint=tmp_path / "run")
    main = threading.current_thread().name
    assert heard.calls[0] == ("start", 0, main)
    assert heard.calls[-2:] == [("end", 8, main), ("close", None, main)]
    assert heard.of("step") == [*range(1, 9)]
    assert heard.of("evaluation") == [3, 6]
    threads = {name: thread for name, _, thread in heard.calls}
    assert threads["step"] != threads["evaluation"]
    run = heard.run
    assert (run.job, run.model, run.total_steps, run.rank) == ("train", fit.model, 8, 0)
    assert (run.outputs, run.evaluated) == (("loss",), ("loss",))
    assert run.directory == tmp_path / "run"
    assert {"seed", "steps", "data", "precision"} <= {*run.options}


def test_what_is_an_array_is_no_number_to_go_by(fit, mlp, classification, tmp_path):
    def evaluate(model, batch):
        z, y = model(batch.x), batch.y
        return {
            "each": af.metrics.recall(z, y, average="none"),
            "loss": af.cross_entropy(z, y),
            "matrix": af.metrics.confusion_matrix(z, y),
            "mean": af.metrics.recall(z, y),
        }

    heard, job = Heard(), af.job(evaluate, train=False)
    watched = af.Evaluation(job, classification(seed=7), every=2, batches=2)
    result = fit(heard, steps=2, evaluation=watched, is_evaluated=False)
    assert heard.run.evaluated == ("loss", "mean")
    assert result.evaluations[0][1].keys() == {"each", "loss", "matrix", "mean"}
    keep = af.Keep(best=1, metric="each")
    with raises(af.CompileError):
        fit(evaluation=watched, is_evaluated=False, checkpoint=tmp_path / "run", keep=keep)
    with raises(af.CompileError):
        fit(af.callbacks.EarlyStopping("matrix"), evaluation=watched, is_evaluated=False)


def test_a_resumed_run_is_told_of_the_evaluations_before_it(fit, tmp_path):
    first = fit(Heard(), steps=7, checkpoint=tmp_path / "run")
    heard = Heard()
    fit(heard, steps=8, checkpoint=tmp_path / "run")
    assert heard.run.first_step == 7
    assert heard.run.evaluations == first.evaluations


def test_lines_that_tell_of_no_evaluation_are_left_out_and_an_unreadable_file_is_told(tmp_path):
    path, reported = tmp_path / "metrics.jsonl", []
    assert earlier_evaluations(path, 9, reported.append) == ()
    path.write_text(
        '{"step": 3, "loss": 1.0}\n'
        '{"step": "4", "evaluation/loss": 1.0}\n'
        '{"evaluation/loss": 1.0}\n'
        '{"step": 5, "evaluation/loss": "NaN", "evaluation/top": [1]}\n'
        '{"step": 6, "evaluation/loss": {}}\n'
        '{"step": 7, "evaluation/loss": 2.0}\n'
        '{"step": 10, "evaluation/loss": 2.0}\n'
    )
    (fifth, values), seventh = earlier_evaluations(path, 9, reported.append)
    assert (fifth, [*values]) == (5, ["loss"])
    assert np.isnan(values["loss"])
    assert seventh == (7, {"loss": 2.0})
    assert not reported
    path.unlink()
    path.mkdir()
    assert earlier_evaluations(path, 9, reported.append) == ()
    assert "cannot be read" in reported[0]


def test_the_step_waits_only_for_callbacks_that_ask_for_it(mlp, classification, classify):
    class Quiet:
        is_waited_for = False

        def on_step(self, step, metrics):
            pass

    plans = [
        af.options.run_spec.RunSpec(classification(), steps=1, callbacks=callbacks).plan_options
        for callbacks in ([], [Quiet()], [Heard(is_waited_for=False)], [Heard()])
    ]
    assert [plan.has_listener for plan in plans] == [False, False, False, True]


def test_a_waiting_callback_sees_the_values_after_its_step(fit):
    states = {}

    class Reads:
        def on_step(self, step, metrics):
            states[step] = fit.model.state()

    fit(Reads(), is_evaluated=False)
    for step in (1, 5, 8):
        fit(steps=step, is_evaluated=False)
        assert_same(states[step], fit.model.state())


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_evaluation", "on_end"])
def test_what_a_callback_raises_comes_out_with_its_name_and_traceback(fit, method):
    error = KeyError("no such thing")

    def fail(*_):
        raise error

    broken, other = type("Broken", (), {method: staticmethod(fail)})(), Heard()
    with pytest.raises(KeyError) as caught:
        fit(broken, other)
    assert caught.value is error
    assert f"raised by Broken.{method}" in error.__notes__[0]
    assert traceback.extract_tb(error.__traceback__)[-1].name == "fail"
    assert other.of("close") == [None]
    assert other.of("end") == []


def test_a_close_that_raises_is_an_error_and_hides_no_other(fit):
    class Closes(Heard):
        def close(self):
            raise OSError("disk")

    with raises(OSError) as caught:
        fit(Closes())
    assert caught.value.__notes__ == ["raised by Closes.close"]

    class Fails(Closes):
        def on_step(self, step, metrics):
            raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        fit(Fails())
    assert "after that OSError('disk') was raised by Fails.close" in caught.value.__notes__


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_evaluation"])
def test_stop_training_ends_the_run_cleanly(fit, method, tmp_path, capsys):
    def stop(*_):
        raise af.StopTraining("enough")

    stopping = type("Stops", (), {method: staticmethod(stop)})()
    heard = Heard()
    result = fit(stopping, heard, steps=1000, checkpoint=tmp_path / "run", every=1000)
    assert result.last_step < 1000
    assert (result.last_step == 0) == (method == "on_start")
    assert heard.of("end") == [result.last_step]
    assert fit(steps=5000 if method == "on_start" else 1000).last_step  # a later run is its own


def test_early_stopping_ends_at_the_same_evaluation_after_a_resume(fit, tmp_path, mlp):
    stand_still = af.job(optimizer=af.optim.SGD(0.0))(
        lambda model, batch: af.cross_entropy(model(batch.x), batch.y)
    )
    results = []
    for steps in (8, 500, 500):
        stopping = af.callbacks.EarlyStopping("loss", patience=4)
        results.append(fit(stopping, steps=steps, job=stand_still, checkpoint=tmp_path / "run"))
    first, second, third = results
    assert first.last_step == 8
    assert [step for step, _ in second.evaluations][:3] == [9, 12, 15]
    assert 15 <= second.last_step < 100
    assert third.last_step == second.last_step  # it had ended


def test_the_rates_and_the_norm_of_gradients_are_outputs_where_they_are_asked_for(
    fit, classify, mlp, classification
):
    schedule = af.optim.cosine(0.1, steps=8)

    def job(optimizer, **options):
        return af.job(optimizer=optimizer, **options)(
            lambda model, batch: af.cross_entropy(model(batch.x), batch.y)
        )

    rows = {}
    callbacks = [af.callbacks.LearningRate(), af.callbacks.GradientNorms()]
    for accumulate in (1, 2):
        rows = {}
        fit(
            *callbacks, job=job(af.optim.SGD(schedule), accumulate=accumulate), is_evaluated=False,
            on_step=rows.__setitem__,
        )  # fmt: skip
        expected = [0.05 * (1 + np.cos(np.pi * step / 8)) for step in range(8)]
        np.testing.assert_allclose([row["lr"] for row in rows.values()], expected, rtol=1e-6)
    clipped = {}
    fit(
        job=job(af.optim.SGD(schedule), accumulate=2, clip_norm=float("inf")),
        is_evaluated=False, on_step=clipped.__setitem__,
    )  # fmt: skip
    for step, row in clipped.items():
        assert row["grad_norm"] == rows[step]["grad_norm"]
    groups = [af.optim.group("*.bias", lr_scale=2.0)]
    result = fit(callbacks[0], job=job(af.optim.SGD(schedule, groups=groups)), is_evaluated=False)
    rates = {name: rate for name, rate in result.metrics.items() if name.startswith("lr/")}
    first, second = rates.values()
    assert len(rates) == 2
    assert second == 2 * first
    plain = job(af.optim.SGD(schedule)).compile(mlp(), classification())
    assert "lr" not in {field.name for field in plain.fields}


def test_an_output_that_is_called_lr_already_is_an_error(mlp, classification):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        loss = af.cross_entropy(model(batch.x), batch.y)
        return {"loss": loss, "lr": loss}

    with raises(af.CompileError):
        train.fit(mlp(), classification(), steps=1, callbacks=[af.callbacks.LearningRate()])


def test_a_plan_without_the_outputs_that_a_callback_asks_for_is_refused(
    mlp, classification, classify
):
    plan = classify().compile(mlp(), classification())
    with raises(af.CompileError):
        af.Runner(plan).fit(
            classification(), steps=1, progress=False, callbacks=[af.callbacks.GradientNorms()]
        )


def test_norms_of_gradients_that_nothing_clips_are_no_obstacle_to_a_checkpoint(
    fit, classification, tmp_path
):
    fit(af.callbacks.GradientNorms(), steps=4, checkpoint=tmp_path, every=2)
    assert af.callbacks.GradientNorms.asked_outputs == ("grad_norm",)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))][-1].endswith("4")


def test_a_plateau_is_a_callback(fit, mlp, classification):
    class Net(nn.Module):
        def __init__(self):
            self.net, self.plateau = mlp(), nn.Buffer((4,), dtype="float64")

        def __call__(self, x):
            return self.net(x)

    model = Net()
    plateau = af.optim.ReduceLROnPlateau(model.plateau, 0.5, factor=0.1, patience=1, threshold=10.0)
    loss = lambda model, batch: af.cross_entropy(model(batch.x), batch.y)  # noqa: E731
    watched = af.Evaluation(af.job(loss, train=False), classification(seed=7), every=2, batches=1)
    rates = {}
    with raises(af.CompileError):
        af.job(loss, optimizer=af.optim.SGD(plateau)).fit(
            model, classification(), steps=4, evaluation=watched, callbacks=[plateau]
        )
    plateau = af.optim.ReduceLROnPlateau(
        model.plateau, 0.5, factor=0.1, patience=1, threshold=10.0, metric="output"
    )
    af.job(loss, optimizer=af.optim.SGD(plateau)).fit(
        model, classification(), steps=8, evaluation=watched, progress=False,
        callbacks=[plateau, af.callbacks.LearningRate()],
        on_step=lambda step, row: rates.__setitem__(step, row["lr"]),
    )  # fmt: skip
    # The evaluation of step 2 is the best, those of 4 and 6 are bad: the second lowers the rate.
    expected = [0.5] * 6 + [0.05] * 2
    np.testing.assert_allclose([*rates.values()], expected, rtol=1e-6)


def test_a_summary_counts_the_parameters_of_each_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2).freeze())
    texts = []
    run = af.callbacks.StartedRun(
        job="", model=model, first_step=0, total_steps=1, directory=None, rank=0, outputs=(),
        evaluated=(), evaluations=(), options={},
    )  # fmt: skip
    af.callbacks.ModelSummary(report=texts.append).on_start(run)
    rows = [line.split() for line in texts[0].splitlines()]
    assert rows[1] == ["0", "Linear", "16", "16"]
    assert rows[3] == ["2", "Linear", "10", "0"]
    assert rows[4] == ["all", "Sequential", "26", "16"]
    assert rows[5][:2] == ["104", "B"]


class Misspelt(Heard):
    def on_epoch_end(self, trainer):
        pass


class TakesOne:
    def on_step(self, step):
        pass


class Yields:
    def on_step(self, step, metrics):
        yield metrics["loss"]


@pytest.mark.parametrize(
    "callbacks",
    [Heard(), [object()], [Heard], [Misspelt()], [TakesOne()], [Yields()]],
    ids=["no_list", "no_callback", "class", "misspelt", "arguments", "generator"],
)
def test_what_is_no_callback_is_refused_with_the_users_line(
    mlp, classification, classify, callbacks
):
    with raises(af.CompileError):
        classify().fit(mlp(), classification(), steps=1, callbacks=callbacks)


@pytest.mark.usefixtures("native_toolchain")
@pytest.mark.no_gpu("ranks meet in memory of the host")
def test_of_several_ranks_the_first_calls_and_its_stop_ends_all():
    class OnAll(Heard):
        is_on_every_rank = True

    class Stops(Heard):
        def on_step(self, step, metrics):
            super().on_step(step, metrics)
            if step == 3:
                raise af.StopTraining

    first, every = Stops(), OnAll()
    ranks = Training().run(af.Mesh(data=2), steps=500, checkpoint=None, callbacks=[first, every])
    last = {own.result.last_step for own in ranks}
    assert len(last) == 1
    assert 3 <= last.pop() < 500
    assert first.of("start") == [0]
    assert len(first.of("close")) == 1
    assert every.of("start") == [0, 0]
    assert len(every.of("end")) == 2
