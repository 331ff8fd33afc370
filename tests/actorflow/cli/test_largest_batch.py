"""The largest batch that fits into a memory, found without a run."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.cli.largest_batch import MOST_ROWS, largest_that_fits
from actorflow.cli.main import main

SCRIPT = """
import numpy as np
import actorflow as af
from actorflow import nn

class Net(nn.Module):
    def __init__(self):
        self.layers = [nn.Linear(64, 64) for _ in range(8)]

    def __call__(self, x):
        for layer in self.layers:
            x = af.gelu(layer(x))
        return x

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean() + batch.{rows}.sum()

arrays = {{"x": np.ones((8, 64), np.float32), "y": np.ones(8, np.float32)}}
data = af.data.ArraySource(arrays, batch=4)
if {is_ragged}:
    data = af.data.from_iterable(lambda: iter([{{"x": arrays["x"], "y": arrays["y"][:3]}}]))
train.fit(Net(), data, steps=2)
"""


@given(st.integers(1, 5000), st.integers(0, 3000), st.integers(1, 300), st.integers(1, 100))
def test_the_largest_count_within_a_limit_is_found_to_a_64th(limit, base, per_row, start):
    asked = []

    def size(count):
        asked.append(count)
        return base + per_row * count

    low, low_size = largest_that_fits(size, start, limit)
    exact = max(0, (limit - base) // per_row)
    assert low <= exact <= low + max(1, low // 64) - (low < 128)
    assert low_size == (base + per_row * low if low else 0)
    assert len(asked) < 40
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("start", [3, 5 * MOST_ROWS])
def test_what_fits_always_ends_at_the_most_rows_that_are_tried(start):
    low, _ = largest_that_fits(lambda count: 1, start, 10)
    assert MOST_ROWS / 2 < low <= MOST_ROWS


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_NATIVE", "0")

    def write(rows="y", is_ragged=False):
        file = tmp_path / "script.py"
        file.write_text(SCRIPT.format(rows=rows, is_ragged=is_ragged))
        return str(file)

    return write


def planned(script, capsys, *words):
    assert main(["plan", script, *words]) == 0
    return capsys.readouterr().out


def test_a_script_is_told_its_largest_batch_and_what_twice_that_costs(script, capsys):
    file = script()
    *_, largest, twice = planned(file, capsys, "--largest-batch", "2MiB").splitlines()
    rows = int(re.match(r"largest batch in 2\.0 MiB: ([\d,]+) rows", largest)[1].replace(",", ""))
    assert largest.endswith("without recomputation; the script has 4")
    assert twice.startswith(f"{2 * rows:,} rows fit as well where ")
    assert "launches run again" in twice
    nothing = planned(file, capsys, "--largest-batch", "10KiB").splitlines()[-1]
    assert nothing.startswith("no batch fits into 10.0 KiB: one row takes ")


def test_arrays_with_different_rows_and_a_memory_that_is_none_are_refused(script, capsys):
    assert main(["plan", script(is_ragged=True), "--largest-batch", "1GiB"]) == 1
    assert "as many rows each, came x: float32[8, 64], y: float32[3]" in capsys.readouterr().err
    assert main(["plan", script(), "--largest-batch", "much"]) == 1
    assert "--largest-batch: " in capsys.readouterr().err
