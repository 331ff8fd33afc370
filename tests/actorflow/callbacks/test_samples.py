"""Rows that a callback keeps in the folder of a run, as images and texts."""

from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.callbacks.protocol import StartedRun
from actorflow.callbacks.samples import SAMPLES_FILE, pixels_of, read_samples

EVIL = "<b>\u202e\x1b[2J"
RNG = np.random.default_rng(0)
BATCH = {
    "photo": RNG.integers(0, 256, (20, 6, 4, 3), np.uint8),
    "digit": RNG.integers(0, 256, (20, 5, 7), np.uint8),
    "signed": RNG.standard_normal((20, 1, 8, 8)).astype(np.float32),
    "large": np.zeros((20, 300, 200, 3), np.float32),
    "ids": np.arange(60).reshape(20, 3),
    "wide": RNG.standard_normal((20, 100)),
    "label": np.arange(20),
    "words": [EVIL] * 20,
}


@pytest.fixture
def run(tmp_path):
    """A run that begins in a folder."""
    return StartedRun(
        job="", model=None, first_step=0, total_steps=9, directory=tmp_path, rank=0, outputs=(),
        evaluated=(), evaluations=(), options={},
    )  # fmt: skip


def values(folder, place=-1, row=0):
    return {value.name: value for value in read_samples(folder)[place].rows[row]}


def test_rows_are_kept_as_images_texts_and_ranges(run, tmp_path):
    def words(ids):
        return "-".join(map(str, ids))

    af.callbacks.ReportSamples(BATCH, count=3, decode={"ids": words}).on_start(run)
    (one,) = read_samples(tmp_path)
    assert (one.step, len(one.rows)) == (0, 3)
    second = values(tmp_path, row=1)
    assert (pixels_of(second["photo"]) == BATCH["photo"][1]).all()
    assert (pixels_of(second["digit"])[..., 0] == BATCH["digit"][1]).all()
    signed = BATCH["signed"][1].astype(np.float64)
    scaled = np.rint((signed - signed.min()) / (signed.max() - signed.min()) * 255)
    assert (pixels_of(second["signed"])[..., 0] == scaled[0]).all()
    assert second["signed"].text == f"{signed.min():.4g} to {signed.max():.4g}"
    assert max(pixels_of(second["large"]).shape) <= 96
    texts = {name: value.text for name, value in second.items() if not value.pixels}
    assert texts["ids"] == "3-4-5"
    assert texts["label"] == "1"
    assert texts["wide"].startswith("float64[100], ")
    assert texts["words"] == EVIL


def test_a_function_is_asked_again_after_evaluations_and_few_sets_stay(run, tmp_path):
    asked = iter(range(100))
    samples = af.callbacks.ReportSamples(lambda: {"n": [str(next(asked))]})
    samples.on_start(run)
    for step in range(2, 12, 2):
        samples.on_evaluation(step, {})
    assert [one.step for one in read_samples(tmp_path)] == [4, 6, 8, 10]
    assert values(tmp_path)["n"].text == "5"
    samples.on_start(replace(run, first_step=6))  # it goes on from there
    assert [one.step for one in read_samples(tmp_path)] == [4, 6]
    still = af.callbacks.ReportSamples({"n": ["a"]})
    still.on_start(run)
    still.on_evaluation(2, {})
    assert [one.step for one in read_samples(tmp_path)] == [0]


def test_the_file_stays_small_whatever_the_rows_are(run, tmp_path):
    rows = {f"image{i}": np.zeros((32, 96, 96, 3), np.uint8) for i in range(40)}
    rows = {"text": ["x" * 10**6] * 32} | rows
    for count, kept in ((32, 4), (3, 3)):
        samples = af.callbacks.ReportSamples(lambda: rows, count=count)
        samples.on_start(run)
        for step in range(1, 4):
            samples.on_evaluation(step, {})
        assert (tmp_path / SAMPLES_FILE).stat().st_size <= 4 << 20
        assert len(read_samples(tmp_path)[-1].rows) == kept
        assert values(tmp_path)["text"].text == "x" * 2000


def test_a_damaged_file_is_said_and_written_anew(run, tmp_path, caplog):
    (tmp_path / SAMPLES_FILE).write_bytes(b"{")
    af.callbacks.ReportSamples({"label": np.arange(2)}).on_start(run)
    assert "it is damaged or of another version" in caplog.text
    assert "it is written anew" in caplog.text
    assert values(tmp_path)["label"].text == "0"


@pytest.mark.parametrize("rows", [3, None], ids=["number", "none"])
def test_what_are_no_rows_is_refused(rows):
    with raises(af.CompileError):
        af.callbacks.ReportSamples(rows)


@pytest.mark.parametrize("count", [0, 33])
def test_as_many_rows_as_nobody_looks_at_are_refused(count):
    with raises(af.CompileError):
        af.callbacks.ReportSamples({}, count=count)


def test_a_function_that_returns_no_rows_and_a_run_without_a_folder_are_refused(run):
    with raises(af.CompileError):
        af.callbacks.ReportSamples(lambda: [1]).on_start(run)
    with raises(af.CompileError):
        af.callbacks.ReportSamples(BATCH).on_start(replace(run, directory=None))
