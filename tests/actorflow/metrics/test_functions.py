"""Metrics of sets in batches and on ranks, against formulas over all rows at once, by numpy."""

import math

import numpy as np
import pytest
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_trainings import Training

import actorflow as af
from actorflow import nn
from actorflow.data import DataError
from compiler.contract.errors import CompileError

RNG = np.random.default_rng(0)
ROWS, CLASSES = 53, 5
Z = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32).round(1)  # rounded: there are ties
Y = RNG.integers(0, 4, ROWS)  # the last class is predicted, and is no label
Y[::9] = -1  # ignored
SCORE = RNG.normal(size=ROWS).astype(np.float32).round(1)
T = (1e6 + RNG.normal(size=(ROWS, 2))).astype(np.float32)
P = (T + RNG.normal(size=(ROWS, 2)).astype(np.float32) * 0.5).astype(np.float32)


def all_metrics(batch, mask=None):
    m, z, y = af.metrics, batch.z, batch.y
    labels, spam = {"ignore_index": -1, "mask": mask}, batch.y == 0
    return {
        "accuracy": m.accuracy(z, y, **labels),
        "top 3": m.accuracy(z, y, top_k=3, **labels),
        **{
            f"{f.__name__} {average}": f(z, y, average=average, **labels)
            for f in (m.precision, m.recall, m.f1)
            for average in ("macro", "micro", "weighted", "none")
        },
        "of classes": m.f1(z.argmax(1), y, num_classes=CLASSES, **labels),
        "confusion_matrix": m.confusion_matrix(z, y, **labels),
        "perplexity": m.perplexity(z, y, **labels),
        "binary": m.f1(batch.score, spam, mask=mask),
        "auroc": m.auroc(batch.score, spam, mask=mask),
        "average_precision": m.average_precision(batch.score, spam, mask=mask),
        "mse": m.mean_squared_error(batch.p, batch.t, mask=mask),
        "mae": m.mean_absolute_error(batch.p, batch.t, mask=mask),
        "r2": m.r2_score(batch.p, batch.t, mask=mask),
        "mean": af.weighted_mean(batch.score, af.ones(len(y)) if mask is None else mask),
    }


def of_class(kind, predicted, labels, c):
    """Return precision, recall or F1 of a class, 0 where there is nothing to divide by."""
    hits = sum((predicted == c) & (labels == c))
    shares = {"precision": sum(predicted == c), "recall": sum(labels == c)}
    shares["f1"] = (shares["precision"] + shares["recall"]) / 2
    return hits / shares[kind] if shares[kind] else 0.0


def oracle(rows):
    z, y, score, t, p = Z[rows], Y[rows], SCORE[rows], T[rows].astype(float), P[rows].astype(float)
    spam = y == 0
    z, y = z[y >= 0].astype(float), y[y >= 0]
    predicted, best = z.argmax(1), np.argsort(-z, 1, kind="stable")
    there = [c for c in range(CLASSES) if c in y or c in predicted]
    found = {
        "accuracy": (predicted == y).mean(),
        "top 3": (best[:, :3] == y[:, None]).any(1).mean(),
    }
    for kind in ("precision", "recall", "f1"):
        found[f"{kind} none"] = each = [of_class(kind, predicted, y, c) for c in range(CLASSES)]
        found[f"{kind} macro"] = np.mean([each[c] for c in there])
        found[f"{kind} weighted"] = np.mean([each[c] for c in y])
        found[f"{kind} micro"] = found["accuracy"]
    pairs = [np.sign(a - b) / 2 + 0.5 for a in score[spam] for b in score[~spam]]
    precisions = [spam[score >= s].mean() for s in score[spam]]
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    return found | {
        "of classes": found["f1 macro"],
        "confusion_matrix": [
            [sum((y == i) & (predicted == j)) for j in range(CLASSES)] for i in range(CLASSES)
        ],
        "perplexity": math.exp(-log_p[np.arange(len(y)), y].mean()),
        "binary": of_class("f1", score > 0, spam, True),
        "auroc": np.mean(pairs),
        "average_precision": np.mean(precisions),
        "mse": ((t - p) ** 2).mean(),
        "mae": abs(t - p).mean(),
        "r2": 1 - ((t - p) ** 2).sum() / ((t - t.mean()) ** 2).sum(),
        "mean": score.astype(float).mean(),
    }


def assert_near(came, want):
    assert came.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(came[name], value, rtol=1e-6, err_msg=name)


ARRAYS = {"z": Z, "y": Y, "score": SCORE, "t": T, "p": P}


@pytest.mark.parametrize("size", [4, 53])
def test_a_metric_of_a_set_is_that_of_its_rows_in_one_batch(size):
    job = af.job(lambda model, batch: all_metrics(batch, batch.counts), train=False)
    data = af.data.from_arrays(ARRAYS).batch(size, drop_last=False, mask="counts")
    assert_near(job.evaluate(nn.Identity(), data), oracle(slice(None)))


def test_a_training_reports_metrics_of_the_rows_of_a_step_and_of_an_evaluation():
    def outputs(model, batch):
        return {"loss": af.square(model(batch.z)).mean(), **all_metrics(batch)}

    train = af.job(outputs, optimizer=af.optim.SGD(0.1), accumulate=3)
    told, whole = [], af.data.ArraySource(ARRAYS, batch=9, shuffle=False)
    valid = af.Evaluation(
        af.job(lambda model, batch: all_metrics(batch), train=False), whole, every=1, batches=5,
        on_result=lambda step, results: told.append(results),
    )  # fmt: skip
    data = af.data.ArraySource(ARRAYS, batch=7, shuffle=False)
    result = train.fit(nn.Linear(CLASSES, 1), data, steps=2, evaluation=valid, progress=False)
    values = dict(result.metrics)
    values.pop("loss")
    values["mean"] = SCORE[21:42].astype(float).mean()  # of means of equal weight
    assert_near(values, oracle(slice(21, 42)))
    assert_near(told[0], oracle(slice(0, 45)))
    assert {name for name, value in told[0].items() if type(value) is not float} == {
        "confusion_matrix", "f1 none", "precision none", "recall none"
    }  # fmt: skip


@pytest.mark.usefixtures("native_toolchain")
@pytest.mark.no_gpu("ranks meet in memory of the host")
def test_ranks_report_metrics_of_all_rows():
    def outputs(model, batch):
        z, y = model(batch.x), batch.y
        m = af.metrics
        return {
            "loss": af.cross_entropy(z, y), "f1": m.f1(z, y), "auroc": m.auroc(z[:, 0], y == 0),
            "matrix": m.confusion_matrix(z, y), "r2": m.r2_score(z[:, 0], y),
        }  # fmt: skip

    training = Training(fn=outputs)
    (alone,), ranks = [training.run(mesh, 2) for mesh in (None, af.Mesh(data=2))]
    for rank in ranks:
        for came, want in zip(rank.told, alone.told, strict=True):
            for name, value in want.items():
                np.testing.assert_allclose(came[name], value, rtol=1e-5, err_msg=name)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rules_do_not_depend_on_how_rows_are_split(data):
    from actorflow.metrics.rules import auroc, average_precision, r2

    cuts = sorted(data.draw(st.lists(st.integers(1, ROWS - 1), max_size=6, unique=True)))
    parts = np.split(np.arange(ROWS), cuts)
    spam = (Y == 0).astype(np.int8)
    for rule in (auroc, average_precision):
        whole = rule([SCORE], [spam])
        assert rule([SCORE[p] for p in parts], [spam[p] for p in parts]) == whole
    t, p = T[:, 0].astype(float), P[:, 0].astype(float)
    sums = [(len(i), t[i].mean(), len(i) * t[i].var(), ((t - p)[i] ** 2).sum()) for i in parts]
    want = 1 - ((t - p) ** 2).sum() / (ROWS * t.var())
    assert r2(*zip(*sums, strict=True)) == pytest.approx(want, rel=1e-9)


def computed(metric, *arrays, **options):
    with af.eager():
        return metric(*map(np.asarray, arrays), **options).compute()


def test_what_is_not_defined_is_what_scikit_learn_gives():
    m = af.metrics
    nothing, both = np.zeros(4, np.int64), np.array([0, 1, 1, 0])
    assert computed(m.precision, nothing, both) == 0.0  # nothing is predicted
    assert computed(m.recall, both, nothing) == 0.0  # nothing is there
    assert computed(m.f1, nothing, nothing) == 0.0
    assert math.isnan(computed(m.auroc, np.float32([1, 2, 3, 4]), nothing))
    assert computed(m.average_precision, np.float32([1, 2, 3, 4]), nothing) == 0.0
    assert math.isnan(computed(m.r2_score, np.float32([1.0]), np.float32([1.0])))
    assert computed(m.r2_score, np.float32([1, 1]), np.float32([1, 1])) == 1.0
    assert computed(m.r2_score, np.float32([1, 2]), np.float32([1, 1])) == 0.0
    tenths = np.full(6, 0.1)  # whose mean in float64 is another number
    assert computed(m.r2_score, tenths + 0.001, tenths) == 0.0
    assert computed(m.r2_score, tenths, tenths) == 1.0
    assert math.isnan(computed(m.accuracy, both, both, mask=nothing))
    assert computed(m.confusion_matrix, both, both, mask=nothing).tolist() == [[0, 0], [0, 0]]


def test_scores_that_are_nan_make_a_metric_nan_where_the_row_counts():
    z, y = np.float32([[0, 1], [np.nan, 2], [3, 0]]), np.array([1, 1, 0])
    for metric in (af.metrics.accuracy, af.metrics.f1, af.metrics.perplexity):
        assert math.isnan(computed(metric, z, y))
        assert computed(metric, z, y, mask=np.array([1, 0, 1])) >= 1.0
    assert np.isnan(computed(af.metrics.confusion_matrix, z, y)).all()
    assert math.isnan(computed(af.metrics.auroc, z[:, 0], y))
    assert math.isnan(computed(af.metrics.mean_squared_error, z[:, 0], y))


def test_a_metric_takes_places_of_pictures_and_rows_that_count():
    z, y = RNG.normal(size=(4, 3, 2, 5)).astype(np.float32), RNG.integers(0, 3, (4, 2, 5))
    mask = np.array([1, 0, 1, 1])
    want = (z.argmax(1) == y)[mask == 1].mean()
    assert computed(af.metrics.accuracy, z, y, mask=mask) == pytest.approx(want)
    want = (np.argsort(-z, 1)[:, :2] == y[:, None]).any(1).mean()
    assert computed(af.metrics.accuracy, z, y, top_k=2) == pytest.approx(want)


def test_a_label_that_is_no_class_fails_the_evaluation_with_the_line_of_the_metric():
    def fn(model, batch):
        return {"f1": af.metrics.f1(batch.z, batch.y)}

    data = af.data.ArraySource({"z": Z, "y": Y}, batch=53, epochs=1)
    with raises(DataError):
        af.job(fn, train=False).evaluate(nn.Identity(), data)
    with raises(DataError):
        computed(af.metrics.auroc, np.float32([1, 2]), np.array([0, 2]))


def test_a_metric_of_no_row_is_no_result_of_an_evaluation():
    def fn(model, batch):
        return {"accuracy": af.metrics.accuracy(batch.z, batch.y, ignore_index=-1)}

    data = af.data.ArraySource({"z": Z[:4], "y": np.full(4, -1)}, batch=2, epochs=1)
    with raises(DataError):
        af.job(fn, train=False).evaluate(nn.Identity(), data)


@pytest.mark.parametrize(
    "call",
    {
        "shapes": lambda m, z, y: m.accuracy(z, y[:2]),
        "float labels": lambda m, z, y: m.f1(z, y.to("float32")),
        "classes": lambda m, z, y: m.f1(z, y, num_classes=4),
        "average": lambda m, z, y: m.f1(z, y, average="mean"),
        "binary of five": lambda m, z, y: m.f1(z, y, average="binary"),
        "top 9": lambda m, z, y: m.accuracy(z, y, top_k=9),
        "mask": lambda m, z, y: m.accuracy(z, y, mask=y[:2]),
        "ranks": lambda m, z, y: m.auroc(z, y),
        "perplexity": lambda m, z, y: m.perplexity(z, z),
        "numbers": lambda m, z, y: m.r2_score(z, y),
        "target": lambda m, z, y: m.f1(z, "y"),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_operands_that_do_not_fit_are_errors(call):
    with raises(CompileError), af.eager():
        call[1](af.metrics, af.zeros(8, 5), af.zeros(8, dtype="int64"))


def test_a_job_trains_on_no_metric():
    def fn(model, batch):
        return {"loss": af.metrics.mean_squared_error(model(batch.z)[:, 0], batch.score)}

    with raises(CompileError):
        af.job(fn, optimizer=af.optim.SGD(0.1)).step(nn.Linear(CLASSES, 1), ARRAYS)
