"""Rows that a job computes over a source, against the model's weights by numpy."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.data import DataError, files
from compiler.contract.errors import CompileError

X = np.random.default_rng(0).normal(size=(53, 5)).astype(np.float32)


@af.job(train=False)
def scores(model, batch):
    z = model(batch.x)
    return {"z": z, "class": z.argmax(1), "pairs": af.stack([z, -z], 1) > 0}


def rows(size=8):
    return af.data.from_arrays({"x": X}).batch(size, drop_last=False, mask="counts")


def assert_predicted(found, model, count=53):
    weights = model.state()
    z = X[:count] @ weights["weight"].T + weights["bias"]
    np.testing.assert_allclose(found["z"], z, rtol=1e-4, atol=1e-5)
    assert (found["class"] == z.argmax(1)).all()
    assert (found["pairs"] == (np.stack([z, -z], 1) > 0)).all()
    assert [found[name].dtype.name for name in ("z", "class", "pairs")] == [
        "float32", "int64", "bool"
    ]  # fmt: skip


def test_rows_that_fill_up_a_batch_are_no_predictions():
    model, data = nn.Linear(5, 3), rows()
    next(data)
    at = data.state()
    found = scores.predict(model, rows())
    assert found.keys() == {"z", "class", "pairs"}
    assert_predicted(found, model)
    assert len(scores.predict(model, data)["z"]) == 45
    assert data.state() == at  # the source stands where it stood
    assert_predicted(scores.predict(model, rows(), batches=2), model, 16)
    ragged = af.data.bucket({"x": X}, batch=8, epochs=1, shuffle=False)
    assert_predicted(scores.predict(model, ragged), model)


def test_a_function_gets_the_rows_of_each_batch():
    model, told = nn.Linear(5, 3), []
    assert scores.predict(model, rows(), told.append) == 53
    assert [len(batch["z"]) for batch in told] == [8, 8, 8, 8, 8, 8, 5]
    assert_predicted({n: np.concatenate([b[n] for b in told]) for n in told[0]}, model)

    def fails(batch):
        raise RuntimeError("full")

    data = rows()
    with pytest.raises(RuntimeError, match="full"):
        scores.predict(model, data, fails)
    assert len(scores.predict(model, data)["z"]) == 53


def test_rows_of_a_parquet_file_are_those_of_the_batches(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    model, path = nn.Linear(5, 3), tmp_path / "rows.parquet"
    assert scores.predict(model, rows(), path) == 53
    assert_predicted(next(af.data.from_parquet(path).batch(53)), model)
    with files.ParquetWriter(tmp_path / "groups", "a test", group_bytes=200) as write:
        for batch in X.reshape(53, 1, 5):
            write({"x": batch})
    assert parquet.ParquetFile(tmp_path / "groups").metadata.num_row_groups == 6  # of ten rows
    assert {file.name for file in tmp_path.iterdir()} <= {"rows.parquet", "groups", "plan-cache"}


def test_a_parquet_file_may_end_with_a_full_group_and_not_without_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    with files.ParquetWriter(tmp_path / "full", "a test", group_bytes=8) as write:
        write({"x": X})
    assert parquet.ParquetFile(tmp_path / "full").metadata.num_rows == 53
    with raises(DataError), files.ParquetWriter(tmp_path / "none", "a test"):
        pass

    def fail():
        with files.ParquetWriter(tmp_path / "half", "a test", group_bytes=8) as write:
            write({"x": X})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert {file.name for file in tmp_path.iterdir()} <= {"full", "plan-cache"}


def test_a_path_that_is_taken_is_an_error_and_what_fails_leaves_no_file(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    (tmp_path / "there").write_text("mine")
    for path in (tmp_path, tmp_path / "there", tmp_path / "none" / "rows.parquet"):
        with raises(DataError):
            scores.predict(nn.Linear(5, 3), rows(), path)
    with raises(DataError):
        scores.predict(nn.Linear(5, 3), rows(), tmp_path / "rows", batches=9)
    assert {file.name for file in tmp_path.iterdir()} <= {"there", "plan-cache"}


@pytest.mark.parametrize("group_bytes", [8, 1 << 20])
def test_rows_of_several_shapes_are_no_parquet_file(tmp_path, group_bytes):
    pytest.importorskip("pyarrow.parquet")

    def write_both():
        with files.ParquetWriter(tmp_path / "rows", "a test", group_bytes=group_bytes) as write:
            write({"x": X[:, :2]})
            write({"x": X[:, :3]})

    with pytest.raises(
        DataError, match=r"(?s)^a test writes rows of one shape .* give to= a function"
    ):
        write_both()
    assert not (tmp_path / "rows").exists()


def test_what_is_no_prediction_is_an_error():
    model = nn.Linear(5, 3)
    with raises(CompileError):
        af.job(lambda m, b: m(b.x).mean(), optimizer=af.optim.SGD(0.1)).predict(model, rows())
    with raises(CompileError):
        af.job(lambda m, b: {"z": m(b.x), "mean": b.x.mean()}, train=False).predict(model, rows())
    with raises(CompileError):
        scores.predict(model, rows(), to=3)
    endless = af.data.ArraySource({"x": X}, batch=8)
    with raises(DataError):
        scores.predict(model, endless)
    with raises(DataError):
        af.job(lambda m, b: m(b.x).mean(), train=False).evaluate(model, endless)
    lengths = af.data.bucket({"x": [row[:n] for row, n in zip(X, [2, 5] * 26, strict=False)]},
                             edges=(2, 5), batch=8, epochs=1)  # fmt: skip
    with raises(DataError):
        af.job(lambda m, b: b.x * 2.0, train=False).predict(model, lengths)
