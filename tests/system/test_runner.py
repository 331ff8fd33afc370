"""What a runner promises at the edges of a run."""

import json

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.manager import CheckpointManager


def test_fewer_steps_than_are_done_do_nothing(mlp, classification, classify, tmp_path, capsys):
    run = tmp_path / "run"
    classify().fit(mlp(), classification(), steps=8, checkpoint=run, progress=False)
    result = classify().fit(mlp(), classification(), steps=3, checkpoint=run)
    assert (result.first_step, result.last_step) == (8, 8)
    assert "nothing to do: 8 steps are done, 3 were asked for" in capsys.readouterr().out
    assert CheckpointManager(run).latest().manifest.step == 8


def test_negative_steps_are_an_error(mlp, classification, classify):
    train = classify()
    with raises(af.CompileError):
        train.fit(mlp(), classification(), steps=-1)
    with raises(af.CompileError):
        next(train.stream(mlp(), classification(), steps=-1))


def test_a_runner_goes_on_from_where_its_last_call_ended(mlp, classification, classify):
    plan = classify().compile(mlp(), classification())
    whole, parts = af.Runner(plan), af.Runner(plan)
    expected = whole.fit(classification(), steps=9, progress=False).variables
    data = classification()
    for _ in range(2):
        parts.step(next(data))
    parts.fit(data, steps=5, progress=False)
    assert len(list(parts.stream(data, steps=2))) == 2
    result = parts.fit(data, steps=9, progress=False)
    assert (result.first_step, result.last_step) == (7, 9)
    for name, array in expected.items():
        np.testing.assert_array_equal(result.variables[name], array, err_msg=name)
        np.testing.assert_array_equal(parts.variables()[name], array, err_msg=name)


def test_a_plan_with_snapshots_runs_without_a_checkpoint_directory(mlp, classification, classify):
    plan = classify().compile(mlp(), classification(), every=2)
    runner = af.Runner(plan)
    assert runner.fit(classification(), steps=5, progress=False).last_step == 5
    assert "loss" in runner.step(next(classification()))
    runner.close()


def test_a_plan_without_snapshots_refuses_a_checkpoint_directory(
    mlp, classification, classify, tmp_path
):
    plan = classify().compile(mlp(), classification())
    with raises(af.CompileError):
        af.Runner(plan).fit(classification(), steps=5, checkpoint=tmp_path, progress=False)


def test_warnings_reach_the_log_where_progress_is_off(
    mlp, classification, classify, tmp_path, caplog
):
    run = tmp_path / "run"
    classify().fit(mlp(), classification(), steps=4, checkpoint=run, every=1, progress=False)
    newest = max(run.glob("step-*")) / "manifest.json"
    newest.write_text("damaged")
    result = classify().fit(
        mlp(), classification(), steps=6, checkpoint=run, every=1, progress=False
    )
    assert result.first_step == 3
    assert "step-0000000004" in caplog.text


class Masked(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(8, 5)
        self.mask = nn.Parameter((5,), (("kind", "zeros"),)).freeze()
        self.mask.load(np.array([0, 0, 0, 0, -np.inf], np.float32))

    def __call__(self, x):
        return self.layer(x) + self.mask


def test_infinity_in_a_frozen_mask_is_no_reason_not_to_save(tmp_path):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.softmax(model(batch.x)).mean()

    x = np.ones((8, 8), np.float32)
    data = af.data.ArraySource({"x": x}, batch=4)
    train.fit(Masked(), data, steps=4, checkpoint=tmp_path / "run", every=2, progress=False)
    assert CheckpointManager(tmp_path / "run").steps() == (2, 4)


def test_nan_made_by_the_last_update_is_an_error_that_names_the_variable(tmp_path):
    @af.job(optimizer=af.optim.SGD(lambda step: step * float("nan")))
    def train(model, batch):
        return model(batch.x).mean()

    data = af.data.ArraySource({"x": np.ones((8, 8), np.float32)}, batch=4)
    with raises(af.NonFiniteLoss):
        train.fit(nn.Linear(8, 2), data, steps=1, checkpoint=tmp_path / "run", progress=False)
    assert CheckpointManager(tmp_path / "run").steps() == ()


def test_snapshots_by_time_come_at_least_every_sixteen_steps(mlp, classification, classify):
    plan = classify().compile(mlp(), classification(), every="1h")
    updated = next(r for r in plan.registers if r.name == "updated")
    assert updated.num_slots == 16


def test_an_unwritable_trace_is_refused_before_anything_runs(
    mlp, classification, classify, tmp_path, monkeypatch, new_threads
):
    monkeypatch.setenv("ACTORFLOW_TRACE", str(tmp_path / "nowhere" / "trace.json"))
    with raises(af.ActorflowError):
        classify().fit(mlp(), classification(), steps=1, progress=False)
    assert not new_threads()


def test_the_users_source_is_not_closed_by_a_run_that_ends(mlp, classification, classify):
    source = classification()
    source.close = lambda: pytest.fail("the source belongs to the user")
    classify().fit(mlp(), source, steps=2, progress=False)


def test_data_that_ends_early_is_said(mlp, classify, capsys):
    x = np.zeros((8, 8), np.float32)
    data = af.data.ArraySource({"x": x, "y": np.zeros(8, np.int32)}, batch=4, epochs=1)
    result = classify().fit(mlp(), data, steps=10)
    assert result.last_step == 2
    assert "the data ended after step 2 of 10" in capsys.readouterr().out


@pytest.mark.host("what a stream of a device waits for is not known")
def test_a_run_says_how_long_its_steps_waited_for_data(mlp, classify, classification, capsys):
    result = classify().fit(mlp(), classification(), steps=3, progress=False)
    assert 0 <= result.data_wait <= 1
    table, rng = next(classification(batch=320)), np.random.default_rng(0)

    def slow(sample):  # some milliseconds beside a step of a few tenths of one
        np.sort(rng.normal(size=20_000))
        return sample

    data = af.data.from_arrays(table).map(slow).batch(16)
    share = classify().fit(mlp(), data, steps=8).data_wait
    assert 0.05 < share <= 1
    assert f"steps waited for data {share:.0%} of the time" in capsys.readouterr().out


def rows(count=32, **options):
    x = np.zeros((count, 8), np.float32)
    return af.data.ArraySource({"x": x, "y": np.zeros(count, np.int32)}, batch=16, **options)


def used_up():
    source = rows(epochs=1)
    list(source)
    return source


def iterated(items):
    return af.data.from_iterable(lambda: iter(items), rows().spec())


ENDED = {
    "used up": used_up,
    "used up by two epochs": lambda: [s := rows(epochs=2), list(s)][0],
    "an empty iterator": lambda: iterated([]),
    "an iterator that others have used up": lambda: [
        i := iter([next(rows())]), next(i), af.data.from_iterable(lambda: i, rows().spec())
    ][2],
}  # fmt: skip


@pytest.mark.parametrize("call", ["fit", "stream", "predict", "runner"])
@pytest.mark.parametrize("name", ENDED)
def test_data_without_a_first_step_is_an_error_with_the_users_line(mlp, classify, name, call):
    train, model, source = classify(), mlp(), ENDED[name]()
    calls = {
        "fit": lambda: train.fit(model, source, steps=5, progress=False),
        "stream": lambda: list(train.stream(model, source, steps=5)),
        "predict": lambda: list(
            af.job(train=False)(lambda m, b: {"y": m(b.x)}).stream(model, source)
        ),
        "runner": lambda: list(af.Runner(train.compile(model, source)).stream(source)),
    }
    with raises(af.data.DataError):
        calls[call]()


def test_the_way_that_the_error_names_lets_a_second_run_have_the_data(mlp, classify):
    source = rows(epochs=1)
    start = source.state()
    for _ in range(2):
        source.restore(start)
        assert classify().fit(mlp(), source, steps=9, progress=False).last_step == 2


def test_a_run_that_is_resumed_where_its_data_ended_has_nothing_to_do(
    mlp, classify, tmp_path, caplog
):
    for _ in range(2):
        result = classify().fit(
            mlp(), rows(epochs=1), steps=9, progress=False, checkpoint=tmp_path
        )  # fmt: skip
        assert result.last_step == 2
    assert caplog.text.count("the data ended after step 2 of 9") == 1


def test_an_evaluation_of_data_that_is_used_up_says_so(mlp, classify, classification):
    score = af.job(train=False)(lambda m, b: {"loss": af.cross_entropy(m(b.x), b.y)})
    watched = af.Evaluation(score, used_up(), every=1, batches=1)
    with raises(af.data.DataError):
        classify().fit(mlp(), classification(), steps=2, evaluation=watched, progress=False)


def test_a_second_fit_of_a_model_says_once_that_it_begins_anew(mlp, classify, tmp_path, caplog):
    train, model = classify(), mlp()
    train.fit(model, rows(), steps=2, progress=False)
    train.fit(mlp(), rows(), steps=2, progress=False)  # another model
    classify().fit(model, rows(), steps=2, progress=False)  # another job
    train.fit(model, rows(), steps=2, progress=False, checkpoint=tmp_path)
    assert "step 0" not in caplog.text
    for _ in range(3):
        assert train.fit(model, rows(), steps=3, progress=False).first_step == 0
    assert caplog.text.count("starts at step 0 with new optimizer state") == 1
    assert "for 2 steps before: without checkpoint=, steps=3 counts" in caplog.text


def test_metrics_are_json_lines_that_a_resume_continues(mlp, classification, classify, tmp_path):
    run = tmp_path / "run"
    for steps in (3, 6):
        classify().fit(mlp(), classification(), steps=steps, checkpoint=run, progress=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 6
    assert [r["step"] for r in rows] == sorted(r["step"] for r in rows)


def test_a_plan_for_other_kernels_is_refused(mlp, classification, classify):
    import dataclasses

    plan = classify().compile(mlp(), classification())
    with pytest.raises(af.PlanFormatError, match="compiled for kernels 'host-0"):
        af.Runner(dataclasses.replace(plan, target="host-0 numpy-1.0"))


@pytest.mark.parametrize("steps", [2.5, "10", None, True, 10**30])
def test_steps_that_are_no_sensible_number_are_an_error(mlp, classification, classify, steps):
    with raises(af.CompileError):
        classify().fit(mlp(), classification(), steps=steps, progress=False)


def test_a_stream_that_is_alive_at_exit_does_not_keep_the_process(run_python):
    done = run_python(
        """
        import numpy as np
        import actorflow as af
        from actorflow import nn

        @af.job(train=False)
        def predict(model, batch):
            return model(batch.x)

        data = af.data.ArraySource({"x": np.ones((64, 2), np.float32)}, batch=4)
        stream = predict.stream(nn.Linear(2, 2), data)
        next(stream)
        print("end")
        """
    )
    assert done.stdout.strip() == "end"


def test_an_open_step_plan_does_not_keep_the_process(run_python):
    run_python(
        """
        import numpy as np
        import actorflow as af
        from actorflow import nn

        model = nn.Linear(2, 2)
        predict = af.job(lambda model, batch: model(batch.x), train=False)
        predict.step(model, {"x": np.ones((4, 2), np.float32)})
        """
    )


def test_a_new_run_keeps_its_first_snapshot(mlp, classification, classify, tmp_path):
    classify().fit(
        mlp(), classification(), steps=40, checkpoint=tmp_path, every="1h", progress=False
    )
    assert CheckpointManager(tmp_path).steps() == (16, 40)


def test_a_step_wants_a_dict(mlp, classify):
    with raises(af.DataError):
        classify().step(mlp(), np.ones(3))


def test_the_spec_of_an_iterable_is_checked(mlp):
    good = af.data.from_iterable(lambda: iter(()), {"x": ("float32", (32, 8))})
    assert str(good.spec()["x"]) == "float32[32, 8]"
    with raises(af.DataError):
        af.data.from_iterable(lambda: iter(()), {"x": af.TensorType((32, 8), af.DType.FLOAT32)})


@pytest.mark.parametrize("checkpoint", ["", 3, False])
def test_a_checkpoint_directory_has_a_name(mlp, classify, classification, checkpoint):
    with raises(af.CompileError):
        classify().fit(mlp(), classification(), steps=1, checkpoint=checkpoint, progress=False)
