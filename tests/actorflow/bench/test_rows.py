"""What every engine is given is the same, and our engine takes it."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
LIGHT = ("tiny", "mlp", "char-gpt")


@pytest.fixture
def all_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rows.all_rows").ALL_ROWS


def test_the_rows_are_those_that_were_agreed(all_rows):
    assert [(row.name, row.precisions) for row in all_rows] == [
        ("tiny", ("fp32",)),
        ("mlp", ("fp32", "bf16")),
        ("char-gpt", ("fp32",)),
        ("gpt", ("fp32", "bf16")),
        ("gpt-vocab", ("fp32",)),
        ("gpt2-block", ("fp32",)),
        ("wide-deep", ("fp32",)),
        ("inference", ("fp32",)),
    ]


def test_weights_and_batches_are_the_same_at_every_call(all_rows):
    for row in all_rows:
        if row.name not in LIGHT:
            continue
        pairs = [(row.weights(), row.weights()), *zip(row.batches(), row.batches(), strict=True)]
        for one, other in pairs:
            assert one.keys() == other.keys()
            for name, array in one.items():
                assert array.dtype in (np.float32, np.int32)
                np.testing.assert_array_equal(array, other[name])


def test_the_rows_need_nothing_but_numpy():
    for file in sorted((BENCHMARKS / "rows").glob("*.py")):
        for line in file.read_text().split("\n"):
            if line.startswith(("import ", "from ")):
                root = line.split()[1].split(".")[0]
                assert root in {"rows", "numpy"} | sys.stdlib_module_names, f"{file.name}: {line}"
