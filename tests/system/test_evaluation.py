"""Evaluation between steps, against an independent one: train so far, then run the other job."""

import json
import math

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same, rows_of_fit

import actorflow as af
from actorflow import nn
from actorflow.compile.plan_facts import credits_after
from actors.race.race import check_unrolled
from compiler.verify.verify import verify_plan


@pytest.fixture
def evaluate():
    @af.job(train=False)
    def evaluate(model, batch):
        logits = model(batch.x)
        return {"loss": af.cross_entropy(logits, batch.y), "spread": logits.max(), "logits": logits}

    return evaluate


@pytest.fixture
def evaluation(evaluate, classification):
    def make(every=5, batches=3, **options):
        return af.Evaluation(
            evaluate, classification(seed=7), every=every, batches=batches, **options
        )

    return make


def means_by_hand(evaluate, model, data, batches):
    rows = [evaluate.step(model, next(data)) for _ in range(batches)]
    evaluate.close(model)
    return {name: math.fsum(row[name] for row in rows) / batches for name in ("loss", "spread")}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"streams": 2}], ids=str)
@pytest.mark.parametrize(("every", "batches"), [(1, 1), (3, 2), (2, 5)])
def test_results_equal_an_independent_evaluation_after_the_same_steps(
    mlp, classification, classify, evaluate, evaluation, every, batches, options
):
    train, steps = classify(**options), 7
    result = train.fit(
        mlp(), classification(), steps=steps, progress=False, evaluation=evaluation(every, batches)
    )
    assert [step for step, _ in result.evaluations] == list(range(every, steps + 1, every))
    for step, means in result.evaluations:
        model = mlp()
        train.fit(model, classification(), steps=step, progress=False)
        assert dict(means) == means_by_hand(evaluate, model, classification(seed=7), batches)


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"streams": 2}], ids=str)
def test_training_is_the_same_bit_by_bit_with_and_without_evaluation(
    mlp, classification, classify, evaluation, options
):
    runs = []
    for watched in (None, evaluation(2, 3)):
        model, source = mlp(dropout=0.3), classification()
        runs.append(rows_of_fit(classify(**options), model, source, 9, evaluation=watched))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1].variables, runs[1][1].variables)


def test_every_evaluation_sees_the_same_batches(mlp, classification, evaluate):
    @af.job(optimizer=af.optim.SGD(0.0))
    def stand_still(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    watched = af.Evaluation(evaluate, classification(seed=7), every=2, batches=3)
    result = stand_still.fit(mlp(), classification(), steps=9, progress=False, evaluation=watched)
    means = [dict(row) for _, row in result.evaluations]
    assert len(means) == 4
    assert all(row == means[0] for row in means)


def test_an_evaluation_that_is_used_again_starts_with_its_first_batch_again(
    mlp, classification, classify, evaluation
):
    watched = evaluation(4, 3)
    first, second = (
        classify().fit(mlp(), classification(), steps=9, progress=False, evaluation=watched)
        for _ in range(2)
    )
    assert first.evaluations == second.evaluations


@pytest.mark.parametrize("cut", [3, 5, 7])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"streams": 2}], ids=str)
def test_a_resumed_run_evaluates_at_the_steps_of_an_uninterrupted_one(
    mlp, classification, classify, evaluation, tmp_path, options, cut
):
    whole = classify(**options).fit(
        mlp(), classification(), steps=17, progress=False, evaluation=evaluation(5, 3)
    )
    rows = []
    for steps in (cut, 17):
        result = classify(**options).fit(
            mlp(), classification(), steps=steps, checkpoint=tmp_path / "run", every=2,
            progress=False, evaluation=evaluation(5, 3),
        )  # fmt: skip
        rows += result.evaluations
    assert [step for step, _ in rows] == [5, 10, 15]
    assert tuple(rows) == whole.evaluations
    assert_same(result.variables, whole.variables)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"streams": 2}], ids=str)
def test_nothing_races_from_whatever_step_a_run_goes_on(
    mlp, classification, classify, evaluation, options, many_chains
):
    plan = classify(**options).compile(
        mlp(), classification(), every=2, evaluation=evaluation(5, 3)
    )
    for step in range(11):
        check_unrolled(plan, initial=credits_after(plan, step))


def test_credits_after_some_steps_are_those_that_a_played_period_holds(
    mlp, classification, classify, evaluation
):
    plan = classify(accumulate=2).compile(
        mlp(), classification(), every=3, evaluation=evaluation(5, 3)
    )
    period = verify_plan(plan)[0] // 2
    assert period == 15
    for step in range(2 * period):
        held = credits_after(plan, step)
        assert held.get("updated", 0) == step % 3
        assert {held.get(n, 0) for n in held if n.startswith("eval_due")} <= {
            step % 5,
            2 * (step % 5),
        }
        assert not [n for n in held if n.startswith(("eval_leave", "accumulated"))]


def test_listeners_are_called_in_order_and_the_log_has_the_rows(
    mlp, classification, classify, evaluation, tmp_path
):
    heard = []
    result = classify().fit(
        mlp(), classification(), steps=10, checkpoint=tmp_path / "run", progress=False,
        evaluation=evaluation(5, 2, on_result=lambda step, means: heard.append((step, means))),
    )  # fmt: skip
    assert tuple(heard) == result.evaluations
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    written = [row for row in rows if "evaluation/loss" in row]
    assert [(r["step"], r["evaluation/loss"]) for r in written] == [
        (step, means["loss"]) for step, means in heard
    ]


def test_a_listener_that_fails_ends_the_run_and_all_threads(
    mlp, classification, classify, evaluation, new_threads
):
    def fail(step, means):
        raise KeyError("no such metric")

    with raises(KeyError) as caught:
        classify().fit(
            mlp(), classification(), steps=10, progress=False,
            evaluation=evaluation(5, 2, on_result=fail),
        )  # fmt: skip
    notes = ["raised by on_result after step 5", "what was trained is kept"]
    assert caught.value.__notes__ == notes
    assert not new_threads()


def test_the_users_evaluation_source_is_not_closed_by_a_run_that_ends(
    mlp, classification, classify, evaluate
):
    source = classification(seed=7)
    source.close = lambda: pytest.fail("the source belongs to the user")
    watched = af.Evaluation(evaluate, source, every=2, batches=2)
    classify().fit(mlp(), classification(), steps=4, progress=False, evaluation=watched)


def test_a_source_with_too_few_batches_is_an_error_that_names_the_number(
    mlp, classification, classify, evaluate
):
    x = np.zeros((32, 8), np.float32)
    short = af.data.ArraySource({"x": x, "y": np.zeros(32, np.int32)}, batch=16, epochs=1)
    watched = af.Evaluation(evaluate, short, every=2, batches=5)
    with raises(af.DataError):
        classify().fit(mlp(), classification(), steps=4, progress=False, evaluation=watched)


def test_a_job_that_trains_cannot_evaluate(classification, classify):
    with raises(af.CompileError):
        af.Evaluation(classify(), classification(), every=1, batches=1)


@pytest.mark.parametrize("name", ["every", "batches"])
@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_counts_that_are_no_positive_integers_are_an_error(evaluation, name, count):
    with raises(af.CompileError):
        evaluation(**{name: count})


def test_an_evaluation_without_a_scalar_has_nothing_to_report(mlp, classification, classify):
    @af.job(train=False)
    def predict(model, batch):
        return model(batch.x)

    watched = af.Evaluation(predict, classification(), every=1, batches=1)
    with raises(af.CompileError):
        classify().fit(mlp(), classification(), steps=1, progress=False, evaluation=watched)


def test_a_plan_and_its_run_agree_on_whether_it_evaluates(
    mlp, classification, classify, evaluation
):
    plain = af.Runner(classify().compile(mlp(), classification()))
    with raises(af.CompileError):
        plain.fit(classification(), steps=1, progress=False, evaluation=evaluation())
    watching = classify().compile(mlp(), classification(), evaluation=evaluation(2, 2))
    with raises(af.CompileError):
        af.Runner(watching).fit(classification(), steps=1, progress=False)
    result = af.Runner(watching).fit(
        classification(), steps=4, progress=False, evaluation=evaluation(2, 2)
    )
    assert [step for step, _ in result.evaluations] == [2, 4]


def test_a_source_of_other_types_than_the_plans_is_refused(
    mlp, classification, classify, evaluate, evaluation
):
    plan = classify().compile(mlp(), classification(), evaluation=evaluation(2, 2))
    wide = af.Evaluation(evaluate, classification(batch=8), every=2, batches=2)
    with raises(af.DataError):
        af.Runner(plan).fit(classification(), steps=2, progress=False, evaluation=wide)


class Broken:
    """Promises what another source gives, and gives something else."""

    def __init__(self, source, batch):
        self._source, self._batch = source, batch

    def spec(self):
        return self._source.spec()

    def state(self):
        return {}

    def restore(self, state):
        pass

    def __next__(self):
        return self._batch


@pytest.mark.parametrize(
    "batch", [[1, 2], {"x": np.zeros((16, 8), np.float32)}, {"x": np.zeros((3, 8), np.float32)}]
)
def test_a_batch_that_is_not_what_the_source_promised_is_a_data_error_with_the_line(
    mlp, classification, classify, evaluate, batch
):
    watched = af.Evaluation(evaluate, Broken(classification(), batch), every=1, batches=2)
    with raises(af.DataError):
        classify().fit(mlp(), classification(), steps=2, progress=False, evaluation=watched)


def test_an_evaluation_of_another_batch_size_runs_beside_the_training(
    mlp, classification, classify, evaluate
):
    watched = af.Evaluation(evaluate, classification(batch=40, seed=7), every=2, batches=4)
    result = classify().fit(mlp(), classification(), steps=2, progress=False, evaluation=watched)
    model = mlp()
    classify().fit(model, classification(), steps=2, progress=False)
    expected = means_by_hand(evaluate, model, classification(batch=40, seed=7), 4)
    assert dict(result.evaluations[0][1]) == expected


class Tempered(nn.Module):
    """Has a parameter that only the evaluation reads."""

    def __init__(self):
        self.layer = nn.Linear(8, 5)
        self.temperature = nn.Parameter((), (("kind", "ones"),)).freeze()
        self.temperature.load(np.array(3.0, np.float32))

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("is_first_watched", [False, True])
def test_a_parameter_that_only_the_evaluation_reads_is_no_part_of_a_checkpoint(
    classification, classify, tmp_path, is_first_watched
):
    @af.job(train=False)
    def judge(model, batch):
        return {"loss": af.cross_entropy(model(batch.x) * model.temperature, batch.y)}

    def fit(steps, *, is_watched=True, **options):
        watched = af.Evaluation(judge, classification(seed=7), every=3, batches=2)
        return classify().fit(
            Tempered(), classification(), steps=steps, progress=False,
            evaluation=watched if is_watched else None, **options,
        )  # fmt: skip

    whole = fit(9)
    first = fit(4, is_watched=is_first_watched, checkpoint=tmp_path / "run", every=2)
    second = fit(9, checkpoint=tmp_path / "run", every=2)
    assert second.evaluations == whole.evaluations[1:]
    assert first.evaluations == (whole.evaluations[:1] if is_first_watched else ())
    assert_same(second.variables, whole.variables)
    assert fit(10, is_watched=False, checkpoint=tmp_path / "run", every=2).first_step == 9
