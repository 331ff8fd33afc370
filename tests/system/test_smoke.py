import numpy as np
import pytest

import actorflow as af
from actors.machine.errors import ActorFailed


def test_a_small_job_learns(mlp, classification, classify):
    losses = []
    model = mlp()
    result = classify().fit(
        model,
        classification(),
        steps=200,
        progress=False,
        on_step=lambda step, metrics: losses.append(metrics["loss"]),
    )
    assert len(losses) == 200
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:5])
    assert result.last_step == 200
    assert result.metrics["loss"] == losses[-1]
    np.testing.assert_array_equal(model.up.weight.data, result.variables["up.weight"])


def test_no_thread_outlives_a_run(mlp, classification, classify, new_threads):
    classify().fit(mlp(), classification(), steps=3, progress=False)
    assert not new_threads()


def test_step_and_stream_give_what_fit_gives(mlp, classification, classify):
    train = classify()
    by_fit = []
    train.fit(
        mlp(), classification(), steps=6, progress=False,
        on_step=lambda step, metrics: by_fit.append(metrics["loss"]),
    )  # fmt: skip
    by_stream = [m["loss"] for m in train.stream(mlp(), classification(), steps=6)]
    model, data = mlp(), classification()
    by_step = [train.step(model, next(data))["loss"] for _ in range(6)]
    train.close(model)
    assert by_fit == by_stream == by_step


def test_leaving_a_stream_early_keeps_what_was_learned_and_ends_all_threads(
    mlp, classification, classify, new_threads
):
    model = mlp()
    stream = classify().stream(model, classification())
    next(stream)
    stream.close()
    assert not new_threads()
    assert model.up.weight.data is not None


def test_a_job_without_training_computes_its_outputs(mlp):
    @af.job(train=False)
    def predict(model, batch):
        return {"logits": model(batch.x), "twice": batch.x * 2.0}

    @af.job(optimizer=af.optim.SGD(0.0))
    def train(model, batch):
        return model(batch.x).mean()

    model = mlp()
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    train.step(model, {"x": x})
    train.close(model)
    out = predict.step(model, {"x": x})
    predict.close(model)
    w1, b1, w2, b2 = (
        model.state()[n] for n in ("up.weight", "up.bias", "down.weight", "down.bias")
    )
    expected = np.maximum(x @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(out["logits"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out["twice"], 2 * x)


@pytest.mark.parametrize("labels", ["int32", "int64"])
def test_one_row_trains_as_the_same_row_twice_does(mlp, labels):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        logits, y = model(batch.x), batch.y.to(labels)
        hits = (logits.argmax(-1) == y.to("int64")).to("float32")
        return {"loss": af.cross_entropy(logits, y), "accuracy": hits.mean()}

    found = []
    for rows in (1, 2):
        model = mlp()
        x = np.linspace(-1, 1, model.up.weight.shape[1], dtype=np.float32)
        batch = {"x": np.stack([x] * rows), "y": np.ones(rows, np.int32)}
        found.append([train.step(model, batch) for _ in range(3)])
        with pytest.raises(ActorFailed, match="label 999 at position 0 is outside 0"):
            train.step(model, {**batch, "y": np.full(rows, 999, np.int32)})
        train.close(model)
    for one, two in zip(*found, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["accuracy"] == two["accuracy"]
