"""What every engine is given is the same, and our engine takes it."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
LIGHT = ("tiny", "mlp", "char-gpt", "lenet")


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
        ("bert", ("fp32",)),
        ("gpt2-block", ("fp32",)),
        ("wide-deep", ("fp32",)),
        ("lstm", ("fp32",)),
        ("inference", ("fp32",)),
        ("lenet", ("fp32",)),
        ("resnet-18", ("fp32",)),
        ("resnet-50", ("fp32",)),
        ("resnet-50-inference", ("fp32",)),
    ]


SMALL = {"layers": 1, "width": 32, "heads": 2, "seq": 14, "vocab": 64, "batch": 2}


@pytest.fixture
def small_gpu_rows(all_rows):
    """The models that only a GPU is asked for, at sizes of a test."""
    models = importlib.import_module("rows.gpt2"), importlib.import_module("rows.bert")
    return models[0].gpt2_row("gpt2", SMALL), models[1].bert_row("bert", SMALL)


def test_rows_of_a_gpu_alone_are_listed_apart(all_rows):
    rows = importlib.import_module("rows.all_rows").GPU_ROWS
    assert [(row.name, row.precisions, row.items) for row in rows] == [
        ("gpt2-b1", ("bf16",), 1024),
        ("gpt2-b8", ("bf16",), 8192),
        ("gpt2-b64", ("bf16",), 65536),
        ("bert-base", ("bf16",), 64),
        ("resnet-50-b64", ("bf16",), 64),
    ]
    assert not {row.name for row in rows} & {row.name for row in all_rows}


def test_the_models_of_a_gpu_learn_on_the_host_too(small_gpu_rows):
    models = importlib.import_module("engines.actorflow_models")
    for row in small_gpu_rows:
        running = models.start(row, "fp32", models.Running)
        losses = [running.step() for _ in range(9)]
        assert abs(losses[0] - np.log(64)) < 0.2
        assert losses[8] < losses[4] < losses[0]
        running.stream.close()


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50"])
def test_a_resnet_of_a_row_is_the_model_of_the_same_names_and_strides(all_rows, name):
    row = next(row for row in all_rows if row.name == name)
    model, _ = importlib.import_module("engines.actorflow_models").FAMILIES[row.family](row)
    weights = row.weights()
    stored = dict(model.named_stored())
    assert {n: a.shape for n, a in weights.items()} == {n: s.shape for n, s in stored.items()}
    met = []

    def noted(convolution, norm, x, stride):
        met.append(convolution)
        assert layers[convolution].stride == (stride, stride)
        assert norm in layers
        return x

    layers = dict(model.named_modules())
    structure = importlib.import_module("engines.structure")
    structure.resnet_features(weights, 1, noted, abs, abs if name == "resnet-50" else None)
    assert sorted(met) == sorted(n for n, layer in layers.items() if hasattr(layer, "stride"))


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
