"""Runs with on_nan="skip": a batch that breaks the step leaves everything as it was."""

import math

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.run.broken_steps import MAX_SKIPPED_IN_A_ROW

STEPS = 12
OPTIMIZERS = {
    "sgd": af.optim.SGD(0.1),
    "momentum": af.optim.SGD(0.1, momentum=0.9),
    "adamw": af.optim.AdamW(1e-2),
}


class Root(nn.Module):
    """The gradient is infinite where the sum of squares is 0, and the value is finite."""

    def __init__(self):
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 5)

    def __call__(self, x):
        return self.down(af.relu(self.up(x))) + af.sqrt((x * x).sum() * self.up.weight.sum() ** 2.0)


def source_of(batches):
    x = np.concatenate([b["x"] for b in batches])
    y = np.concatenate([b["y"] for b in batches])
    return af.data.ArraySource({"x": x, "y": y}, batch=len(batches[0]["x"]), shuffle=False)


def good_batches(count, rows=4):
    rng = np.random.default_rng(3)
    return [
        {
            "x": rng.standard_normal((rows, 8)).astype(np.float32),
            "y": rng.integers(0, 5, rows).astype(np.int32),
        }
        for _ in range(count)
    ]


def with_broken(batches, broken, value=np.nan):
    return [
        {**batch, "x": batch["x"] * np.float32(value)} if step in broken else batch
        for step, batch in enumerate(batches, 1)
    ]


def fit(train, model, batches, **options):
    rows = []
    result = train.fit(
        model, source_of(batches), steps=len(batches) // train.options.accumulate, progress=False,
        on_nan="skip", on_step=lambda step, m: rows.append((step, m["loss"], m["skipped"])),
        **options,
    )  # fmt: skip
    return result, rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_state_after_broken_batches_is_that_of_a_training_without_them(
    mlp, classify, optimizer, value, caplog
):
    broken = (1, 5, 6, STEPS)
    batches = good_batches(STEPS)
    train = classify(optimizer=OPTIMIZERS[optimizer])
    result, rows = fit(train, mlp(), with_broken(batches, broken, value))
    assert result.last_step == STEPS
    assert result.num_skipped == 4
    assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
    assert [step for step, loss, _ in rows if not math.isfinite(loss)] == list(broken)
    assert [skipped for _, _, skipped in rows] == [0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]
    for step in broken:
        assert f"step {step} is skipped: loss is nan" in caplog.text
    assert "4 of 12 steps were skipped" in caplog.text
    if optimizer == "adamw":
        return  # its correction of the bias counts steps
    good = [b for step, b in enumerate(batches, 1) if step not in broken]
    expected = classify(optimizer=OPTIMIZERS[optimizer]).fit(
        mlp(), source_of(good), steps=len(good), progress=False
    )
    assert expected.num_skipped == 0
    for name, array in expected.variables.items():
        if name != "step":
            assert result.variables[name].tobytes() == array.tobytes(), name


OPTIONS = [
    {"streams": 2}, {"metrics_every": 5}, {"recompute": "blocks"}, {"offload": "optimizer"},
    {"precision": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_options_of_a_job_change_nothing_about_it(mlp, classify, options):
    batches = with_broken(good_batches(STEPS), (3, 4))
    adamw = af.optim.AdamW(1e-2)
    plain, rows = fit(classify(optimizer=adamw), mlp(), batches)
    result, others = fit(classify(optimizer=adamw, **options), mlp(), batches)
    assert result.num_skipped == 2
    if "precision" not in options:
        np.testing.assert_array_equal(np.array(others), np.array(rows))
        for name, array in plain.variables.items():
            np.testing.assert_array_equal(result.variables[name], array, err_msg=name)


def test_without_a_broken_step_the_run_is_that_of_any_other_policy(mlp, classify):
    batches = good_batches(STEPS)
    result, rows = fit(classify(), mlp(), batches)
    expected = classify().fit(mlp(), source_of(batches), steps=STEPS, progress=False)
    assert result.num_skipped == 0
    assert rows[-1][1] == expected.metrics["loss"]
    for name, array in expected.variables.items():
        np.testing.assert_array_equal(result.variables[name], array, err_msg=name)


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_skipped_too(classify, caplog):
    batches = good_batches(4)
    batches[1]["x"] = np.zeros_like(batches[1]["x"])
    model = Root()
    result, rows = fit(classify(), model, batches)
    assert all(math.isfinite(loss) for _, loss, _ in rows)
    assert result.num_skipped == 1
    assert "step 2 is skipped: a gradient or the learning rate is not finite" in caplog.text
    assert all(np.isfinite(a).all() for a in model.state().values())


def test_a_learning_rate_of_nan_spoils_nothing_and_ends_the_run(mlp, classify):
    model = mlp()
    batches = good_batches(MAX_SKIPPED_IN_A_ROW + 20)
    classify().fit(model, source_of(batches), steps=1, progress=False)
    before = model.state()
    with pytest.raises(af.NonFiniteLoss, match=r"the last 100 steps up to 100 were all skipped"):
        fit(classify(optimizer=af.optim.SGD(lambda step: step * float("nan"))), model, batches)
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_with_accumulation_a_broken_batch_drops_its_whole_step(mlp, classify):
    batches = good_batches(8)
    train, model = classify(optimizer=af.optim.SGD(0.1), accumulate=2), mlp()
    result, rows = fit(train, model, with_broken(batches, (3,)))
    assert [skipped for _, _, skipped in rows] == [0, 0, 1, 1]
    good = [b for i, b in enumerate(batches) if i not in (2, 3)]
    expected = classify(optimizer=af.optim.SGD(0.1), accumulate=2).fit(
        mlp(), source_of(good), steps=3, progress=False
    )
    for name, array in expected.variables.items():
        if name in model.state():
            np.testing.assert_array_equal(result.variables[name], array, err_msg=name)


def test_losses_of_infinities_of_both_signs_have_a_mean(mlp, classify):
    @af.job(optimizer=af.optim.SGD(0.1), accumulate=2)
    def train(model, batch):
        return (model(batch.x) * batch.x.sum()).sum()

    batches = [{"x": np.full((4, 8), sign * 3e38, np.float32), "y": np.zeros(4, np.int32)}
               for sign in (1, -1)]  # fmt: skip
    model = nn.Linear(8, 1)
    with raises(af.NonFiniteLoss):
        train.fit(model, source_of(batches), steps=1, progress=False)
    assert fit(train, model, batches)[0].num_skipped == 1


def test_a_resumed_run_goes_on_counting_and_to_the_same_state(mlp, classify, tmp_path):
    batches = with_broken(good_batches(STEPS), (2, 7))
    whole, _ = fit(classify(), mlp(), batches)
    options = {"checkpoint": tmp_path / "run", "every": 1, "on_nan": "skip", "progress": False}
    first = classify().fit(mlp(), source_of(batches), steps=4, **options)
    second = classify().fit(mlp(), source_of(batches), steps=STEPS, **options)
    assert (first.num_skipped, second.num_skipped) == (1, 1)
    assert int(second.variables["skipped"]) == 2
    for name, array in whole.variables.items():
        np.testing.assert_array_equal(second.variables[name], array, err_msg=name)


def test_a_run_that_ended_at_a_broken_batch_says_how_to_go_on_and_goes_on(mlp, classify, tmp_path):
    batches = with_broken(good_batches(8), (5,))
    options = {"checkpoint": tmp_path / "run", "every": 1, "progress": False}

    def fit_on(steps=8, **more):
        return classify().fit(mlp(), source_of(batches), steps=steps, **options, **more)

    with raises(af.NonFiniteLoss):
        fit_on()
    for _ in range(2):
        with raises(af.NonFiniteLoss):
            fit_on()
    assert fit_on(on_nan="skip").num_skipped == 1
    assert fit_on(steps=8).last_step == 8, "and back to the first policy"
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 8


def test_stream_skips_as_well(mlp, classify):
    model, batches = mlp(), with_broken(good_batches(4), (2,))
    outputs = list(classify().stream(model, source_of(batches), steps=4, on_nan="skip"))
    assert [m["skipped"] for m in outputs] == [0, 0, 1, 1]
    assert all(np.isfinite(a).all() for a in model.state().values())
    with raises(af.NonFiniteLoss):
        list(classify().stream(mlp(), source_of(batches), steps=4))


def test_a_plan_that_makes_every_update_cannot_skip_and_says_how_to_compile_it(mlp, classify):
    batches = good_batches(2)
    plan = classify().compile(mlp(), source_of(batches))
    for call in (
        lambda: af.Runner(plan).fit(source_of(batches), steps=2, on_nan="skip", progress=False),
        lambda: next(af.Runner(plan).stream(source_of(batches), on_nan="skip")),
    ):
        with raises(af.CompileError):
            call()
    with raises(af.CompileError):
        classify().fit(mlp(), source_of(batches), steps=2, on_nan="ignore", progress=False)


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_plan_that_skips_hides_nothing_from_another_policy(classify, policy, caplog):
    batches = good_batches(4)
    batches[1]["x"] = np.zeros_like(batches[1]["x"])
    model = Root()
    plan = classify().compile(model, source_of(batches), on_nan="skip")
    runner = af.Runner(plan, seed=1)

    def run():
        return runner.fit(source_of(batches), steps=4, on_nan=policy, progress=False)

    if policy == "raise":
        with pytest.raises(af.NonFiniteLoss, match="a gradient or the learning rate is not finite"):
            run()
    else:
        assert run().num_skipped == 1
        assert "a gradient or the learning rate is not finite" in caplog.text


def test_the_means_of_a_run_are_those_of_finite_steps(mlp, classify):
    batches = good_batches(6)
    result, rows = fit(classify(), mlp(), with_broken(batches, (2, 6)))
    finite = [loss for _, loss, _ in rows if math.isfinite(loss)]
    assert len(finite) == 4
    assert result.mean_loss == pytest.approx(sum(finite) / 4)


def test_loss_every_gradient_and_the_one_learning_rate_are_searched_once(mlp, classify):
    plan = classify().compile(mlp(), source_of(good_batches(1)), on_nan="skip")
    launches = [dict(launch.attrs) for actor in plan.actors for launch in actor.launches]
    ops = [name for attrs in launches for name in attrs.get("members", ())]
    joined = [attrs["count"] for attrs in launches if "variables" in attrs]
    assert ops.count("adamw_update") + sum(joined) == 4
    assert ops.count("non_finite") == 4 + 2


def test_an_output_of_that_name_is_the_jobs_own_where_nothing_is_skipped(mlp, capsys):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return {"loss": model(batch.x).mean(), "skipped": model(batch.x).mean() * 0.0 + 3.0}

    result = train.fit(mlp(), source_of(good_batches(3)), steps=3)
    assert result.metrics["skipped"] == 3.0
    assert result.num_skipped == 0
    assert "skipped 3.0000" in capsys.readouterr().out
    with raises(af.CompileError):
        train.fit(mlp(), source_of(good_batches(3)), steps=3, on_nan="skip")


def test_a_plan_from_a_file_skips_and_evaluates_like_its_job(mlp, classify, tmp_path):
    batches = with_broken(good_batches(6), (2, 5))
    held_out = af.data.ArraySource({"x": np.ones((8, 8), np.float32)}, batch=4)

    @af.job(train=False)
    def mean(model, batch):
        return model(batch.x).mean()

    evaluation = af.Evaluation(mean, held_out, every=2, batches=2)
    model = mlp()
    options = {"evaluation": evaluation, "on_nan": "skip"}
    classify().compile(model, source_of(batches), every=1, **options).save(tmp_path / "p.plan")
    runner = af.Runner(af.Plan.load(tmp_path / "p.plan"))
    options |= {"steps": 6, "progress": False}
    result = runner.fit(source_of(batches), checkpoint=tmp_path / "run", every=1, **options)
    expected = classify().fit(mlp(), source_of(batches), **options)
    assert result.num_skipped == expected.num_skipped == 2
    assert result.evaluations == expected.evaluations
    for name, array in expected.variables.items():
        np.testing.assert_array_equal(result.variables[name], array, err_msg=name)
