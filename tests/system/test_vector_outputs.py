"""Training jobs that return tensors of any shape beside their loss."""

import json

import numpy as np
import pytest
from jobs import assert_same

import actorflow as af
from actorflow import nn


def job(**options):
    @af.job(optimizer=af.optim.SGD(0.1), **options)
    def train(model, batch):
        y = model(batch.x)
        loss = af.cross_entropy(y, batch.y)
        return {"loss": loss, "mean": y.mean(0), "picked": y.argmax(1), "logits": y}

    return train


def rows_of(train, model, source, steps, **options):
    rows = []
    result = train.fit(
        model, source, steps=steps, on_step=lambda step, m: rows.append(m),
        **{"progress": False, **options},
    )  # fmt: skip
    return rows, result


def forward(variables, x):
    h = x @ variables["up.weight"].T + variables["up.bias"]
    return np.maximum(h, 0) @ variables["down.weight"].T + variables["down.bias"]


def test_a_listener_gets_arrays_and_numbers(mlp, classification, classify):
    model = mlp()
    job().step(model, next(classification()))
    before, batch = model.state(), next(classification())
    rows, result = rows_of(job(), model, classification(), 2)
    first = rows[0]
    assert isinstance(first["loss"], float)
    assert first["mean"].dtype == np.float32
    assert first["picked"].dtype == np.int64
    logits = forward(before, batch["x"])
    np.testing.assert_allclose(first["logits"], logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first["mean"], first["logits"].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first["picked"], first["logits"].argmax(1))
    assert not np.array_equal(first["logits"], rows[1]["logits"]), "each step has its own copy"
    np.testing.assert_array_equal(result.metrics["logits"], rows[1]["logits"])
    plain, again = classify(optimizer=af.optim.SGD(0.1)), mlp()
    again.load(before)
    alone = plain.fit(again, classification(), steps=2, progress=False)
    assert_same(result.variables, alone.variables)


@pytest.mark.parametrize("options", [{"metrics_every": 3}, {"streams": 2}], ids=str)
def test_rows_that_come_together_are_those_that_come_alone(mlp, classification, options):
    alone, _ = rows_of(job(), mlp(), classification(), 7)
    together, _ = rows_of(job(**options), mlp(), classification(), 7)
    assert len(together) == 7
    for one, other in zip(alone, together, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])


def test_a_step_of_several_batches_tells_means_element_by_element(mlp, classification):
    model = mlp()
    job().step(model, next(classification()))
    before, source = model.state(), classification()
    logits = np.stack([forward(before, next(source)["x"].copy()) for _ in range(2)])
    (row,), _ = rows_of(job(accumulate=2), model, classification(), 1)
    assert row["logits"].dtype == np.float32
    np.testing.assert_allclose(row["logits"], logits.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(row["picked"], logits.argmax(2).mean(0))


def test_progress_and_the_metrics_file_have_the_numbers(mlp, classification, tmp_path, capsys):
    rows_of(job(), mlp(), classification(), 3, checkpoint=tmp_path, progress=True)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3
    assert "loss" in rows[-1]
    assert not {"mean", "picked", "logits"} & rows[-1].keys()
    shown = capsys.readouterr().out
    assert "step 3/3  loss" in shown
    assert "logits" not in shown.partition("step 1")[2]


def test_step_and_stream_give_the_same_arrays(mlp, classification):
    model, other = mlp(), mlp()
    train = job()
    source = classification()
    for row in train.stream(model, classification(), steps=2):
        step = train.step(other, next(source))
        for name, value in row.items():
            np.testing.assert_array_equal(value, step[name])
    train.close(other)


@pytest.mark.parametrize("kernels", ["native", "numpys_kernels"])
def test_a_mean_of_float16_is_finite_beside_a_sum_that_is_not(kernels, request):
    request.getfixturevalue(kernels)
    job = af.job(lambda model, batch: {"s": batch.x.sum(1), "m": batch.x.mean(1)}, train=False)
    got = job.step(nn.Module(), {"x": np.array([[65504, 65504, 1, -2], [1, 2, 3, 4]], np.float16)})
    np.testing.assert_array_equal(got["s"], np.array([np.inf, 10], np.float16))
    np.testing.assert_array_equal(got["m"], np.array([32752, 2.5], np.float16))
