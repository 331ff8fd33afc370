"""Means over all that counts in several batches, of a step or of an evaluation, by numpy."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError

IGNORED, RATE, CLASSES = -100, 0.5, 3
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(CLASSES, 5)).astype(np.float32)
X = RNG.normal(size=(4, 6, 5)).astype(np.float32)
Y = RNG.integers(0, CLASSES, (4, 6))
for _row, _count in enumerate((1, 6, 3, 0)):  # in the last batch nothing counts
    Y[_row, _count:] = IGNORED
BATCHES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


def made():
    model = nn.Linear(5, CLASSES, bias=False)
    model.load({"weight": WEIGHT})
    return model


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y, ignore_index=IGNORED, reduction="tokens")


def loss_by_mask(model, batch):
    is_label = batch.y != IGNORED
    losses = af.cross_entropy(model(batch.x), af.where(is_label, batch.y, 0), reduction="none")
    return af.weighted_mean(losses, is_label)


def mean_and_gradient(x, y):
    """Return the mean cross-entropy of the labels that count and its gradient, in float64."""
    x, y = x.reshape(-1, 5).astype(np.float64), y.reshape(-1)
    x, y = x[y != IGNORED], y[y != IGNORED]
    z = x @ WEIGHT.T.astype(np.float64)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    rows = np.arange(len(y))
    return -np.log(p[rows, y]).mean(), (p - np.eye(CLASSES)[y]).T @ x / len(y)


@pytest.mark.parametrize("fn", [loss, loss_by_mask])
@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}, {"debug": "nan"}], ids=str)
def test_a_step_of_several_batches_is_that_of_one_batch_with_all_labels(fn, options):
    model = made()
    job = af.job(fn, optimizer=af.optim.SGD(RATE), accumulate=len(BATCHES), **options)
    told = job.step(model, BATCHES)
    want, slope = mean_and_gradient(X, Y)
    near = 2e-3 if options.get("precision") else 1e-5
    assert told["loss"] == pytest.approx(want, rel=near)
    np.testing.assert_allclose(model.state()["weight"], WEIGHT - RATE * slope, rtol=near, atol=near)
    assert told.keys() <= {"loss", "loss_scale", "skipped"}


def test_labels_that_all_count_give_the_bits_of_a_plain_mean():
    full = [{"x": x, "y": np.maximum(y, 0)} for x, y in zip(X, Y, strict=True)]
    states = []
    for reduction in ("mean", "tokens"):
        job = af.job(
            lambda m, b, r=reduction: af.cross_entropy(m(b.x), b.y, reduction=r),
            optimizer=af.optim.SGD(RATE), accumulate=4,
        )  # fmt: skip
        states.append((job.step(model := made(), full), model.state()["weight"].tobytes()))
    assert states[0] == states[1]


def test_a_penalty_counts_as_much_as_in_one_batch():
    def with_penalty(model, batch):
        return loss(model, batch) + 0.1 * af.square(model.weight).sum()

    job = af.job(with_penalty, optimizer=af.optim.SGD(RATE), accumulate=len(BATCHES))
    told = job.step(model := made(), BATCHES)
    want, slope = mean_and_gradient(X, Y)
    assert told["loss"] == pytest.approx(want + 0.1 * (WEIGHT.astype(float) ** 2).sum(), rel=1e-5)
    new = WEIGHT - RATE * (slope + 0.2 * WEIGHT)
    np.testing.assert_allclose(model.state()["weight"], new, rtol=1e-5, atol=1e-5)


def test_a_step_in_which_nothing_counts_has_no_gradient():
    job = af.job(loss, optimizer=af.optim.SGD(RATE), accumulate=2)
    assert job.step(model := made(), [BATCHES[3]] * 2) == {"loss": 0.0}
    assert model.state()["weight"].tobytes() == WEIGHT.tobytes()


def test_two_losses_have_weights_of_their_own():
    def two(model, batch):
        is_first = batch.y == 0
        return {
            "loss": loss(model, batch),
            "first": af.weighted_mean(model(batch.x)[:, 0], is_first),
            "plain": af.square(model(batch.x)).mean(),
        }

    job = af.job(two, optimizer=af.optim.SGD(RATE), accumulate=len(BATCHES))
    told = job.step(made(), BATCHES)
    z = X.astype(np.float64) @ WEIGHT.T
    assert told["loss"] == pytest.approx(mean_and_gradient(X, Y)[0], rel=1e-5)
    assert told["first"] == pytest.approx(z[..., 0][Y == 0].mean(), rel=1e-5)
    assert told["plain"] == pytest.approx((z**2).mean(), rel=1e-5)


def test_a_loss_of_two_weights_is_refused_where_batches_meet():
    def mixed(model, batch):
        return loss(model, batch) + af.weighted_mean(model(batch.x)[:, 0], batch.y == 0)

    def alike(model, batch):
        return loss_by_mask(model, batch) + 0.5 * loss_by_mask(model, batch)

    af.job(mixed, optimizer=af.optim.SGD(RATE)).step(made(), BATCHES[0])
    af.job(alike, optimizer=af.optim.SGD(RATE), accumulate=2).step(made(), BATCHES[:2])
    with raises(CompileError):
        af.job(mixed, optimizer=af.optim.SGD(RATE), accumulate=2).step(made(), BATCHES[:2])


def test_the_name_of_a_weight_is_no_name_of_an_output():
    def named(model, batch):
        return {"loss": loss(model, batch), "statistic/mean/1/loss": batch.x.mean()}

    with raises(CompileError):
        af.job(named, optimizer=af.optim.SGD(RATE), accumulate=2).step(made(), BATCHES[:2])


def test_a_weight_fits_what_it_weighs():
    with raises(CompileError):
        af.job(lambda m, b: af.weighted_mean(b.y, b.x), train=False).step(made(), BATCHES[0])


def rows(batch=1):
    return af.data.ArraySource({"x": X, "y": Y}, batch=batch, shuffle=False, epochs=1)


def one(fn):
    """Return a job that evaluates batches [1, 6]."""

    class Rows:
        def __init__(self, batch):
            self.x, self.y = batch.x.flatten(0, 1), batch.y.flatten()

    return af.job(lambda model, batch: fn(model, Rows(batch)), train=False)


@pytest.mark.parametrize("fn", [loss, loss_by_mask])
def test_an_evaluation_is_the_mean_over_all_that_counts(fn):
    evaluate, data, model = one(fn), rows(), made()
    want = pytest.approx(mean_and_gradient(X, Y)[0], rel=1e-5)
    assert evaluate.evaluate(model, data) == {"output": want}
    assert evaluate.evaluate(model, data) == {"output": want}  # the source stands where it stood
    assert evaluate.evaluate(model, data, batches=2) == {
        "output": pytest.approx(mean_and_gradient(X[:2], Y[:2])[0], rel=1e-5)
    }
    told = []
    train = af.job(lambda m, b: m(b.x).mean(), optimizer=af.optim.SGD(0.0))
    valid = af.Evaluation(
        evaluate, data, every=1, batches=4, on_result=lambda step, means: told.append(means)
    )
    train.fit(model, rows(), steps=1, progress=False, evaluation=valid)
    assert told == [{"output": want}]


def test_an_evaluation_says_what_it_cannot_do():
    data = rows()
    with raises(CompileError):
        af.job(loss, optimizer=af.optim.SGD(RATE)).evaluate(made(), data)
    with raises(CompileError):
        af.job(lambda m, b: m(b.x), train=False).evaluate(made(), data)
    with raises(af.DataError):
        one(loss).evaluate(made(), data, batches=9)
    with raises(af.CompileError):
        one(loss).evaluate(made(), data, batches=0)
    hidden = af.data.ArraySource({"x": X[:1], "y": Y[3:]}, batch=1, epochs=1)
    with raises(af.DataError):
        one(loss).evaluate(made(), hidden)


def test_rows_that_fill_up_a_batch_count_in_no_mean():
    x, y = X.reshape(24, 5)[:10], np.maximum(Y, 0).reshape(24)[:10]

    def fn(model, batch):
        losses = af.cross_entropy(model(batch.x), batch.y, reduction="none")
        return {"loss": af.weighted_mean(losses, batch.weights)}

    def data():
        return af.data.bucket({"x": x, "y": y}, batch=4, epochs=1, pad={"x": 9.0})

    want, slope = mean_and_gradient(x, y)
    assert af.job(fn, train=False).evaluate(made(), data()) == {
        "loss": pytest.approx(want, rel=1e-5)
    }
    job = af.job(fn, optimizer=af.optim.SGD(RATE), accumulate=3)
    result = job.fit(model := made(), data(), steps=1, progress=False)
    assert result.metrics["loss"] == pytest.approx(want, rel=1e-5)
    new = WEIGHT - RATE * slope
    np.testing.assert_allclose(model.state()["weight"], new, rtol=1e-5, atol=1e-5)


def test_large_logits_exist_in_parts_also_by_weight():
    rows, classes = 1024, 8192
    spec = {
        "x": af.TensorType(af.DType.FLOAT32, (rows, 5)), "y": af.TensorType(af.DType.INT64, (rows,))
    }  # fmt: skip
    job = af.job(loss, optimizer=af.optim.SGD(RATE), accumulate=2)
    *_, memory = job.compile(nn.Linear(5, classes, bias=False), spec).memory
    assert memory.temporary_bytes < 0.7 * 4 * rows * classes


def test_an_alignment_counts_as_much_as_its_target():
    def fn(model, batch):
        x = af.log_softmax(batch.x, -1)
        losses = [
            af.ctc_loss(x, batch.y, batch.inputs, batch.sizes, reduction=reduction)
            for reduction in ("tokens", "sum")
        ]
        return dict(zip(("loss", "sum"), losses, strict=True))

    batch = {
        "x": RNG.normal(size=(7, 2, 4)).astype(np.float32), "y": np.array([[1, 2, 3], [3, 0, 0]]),
        "inputs": np.array([7, 5]), "sizes": np.array([3, 1]),
    }  # fmt: skip
    told = af.job(fn, train=False).step(nn.Identity(), batch)
    assert told["loss"] == pytest.approx(told["sum"] / 4, rel=1e-6)


def test_batches_of_several_shapes_have_one_mean():
    x, y = X.reshape(24, 5), np.maximum(Y, 0).reshape(24)
    lengths = [*range(1, 6)] * 4 + [5] * 4
    rows = {"x": [row[:n] for row, n in zip(x, lengths, strict=True)], "y": y}

    def fn(model, batch):
        z = af.einsum("bt,ct->bc", batch.x, model.weight[:, : batch.x.shape[1]])
        return {
            "loss": af.weighted_mean(af.cross_entropy(z, batch.y, reduction="none"), batch.weights)
        }

    def data(**options):
        return af.data.bucket(rows, edges=(2, 5), batch=4, **options)

    cut = np.array([np.append(row[:n], np.zeros(5 - n)) for row, n in zip(x, lengths, strict=True)])
    want, _ = mean_and_gradient(cut, y)
    evaluate, model, told = af.job(fn, train=False), made(), []
    assert evaluate.evaluate(model, data(epochs=1)) == {"loss": pytest.approx(want, rel=1e-5)}
    assert evaluate.step(model, next(data())).keys() == {"loss"}
    valid = af.Evaluation(
        evaluate, whole := data(epochs=1), every=1, batches=len(whole),
        on_result=lambda step, means: told.append(means),
    )  # fmt: skip
    train = af.job(fn, optimizer=af.optim.SGD(0.0), accumulate=2)
    train.fit(model, data(group=2), steps=2, progress=False, evaluation=valid)
    assert told == [{"loss": pytest.approx(want, rel=1e-5)}] * 2
