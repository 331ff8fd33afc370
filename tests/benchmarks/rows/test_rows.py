"""What every engine is given is the same, and our engine takes it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
LIGHT = ("tiny", "mlp", "char-gpt", "lenet", "mlp-inference")


@pytest.fixture
def all_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rows.all_rows").ALL_ROWS


def test_the_rows_are_those_that_were_agreed(all_rows):
    assert [(row.name, row.precisions) for row in all_rows] == [
        ("tiny", ("fp32",)),
        ("mlp", ("fp32", "bf16")),
        ("char-gpt", ("fp32", "bf16")),
        ("gpt", ("fp32", "bf16")),
        ("gpt-vocab", ("fp32", "bf16")),
        ("bert", ("fp32", "bf16")),
        ("gpt2-block", ("fp32",)),
        ("wide-deep", ("fp32", "bf16")),
        ("wide-deep-large", ("fp32", "bf16")),
        ("dlrm", ("fp32", "bf16")),
        ("lstm", ("fp32",)),
        ("lenet", ("fp32", "bf16")),
        ("resnet-18", ("fp32", "bf16")),
        ("resnet-50", ("fp32", "bf16")),
        ("unet", ("fp32", "bf16")),
        ("vit-s", ("fp32", "bf16")),
        ("mlp-inference", ("fp32", "bf16")),
        ("inference", ("fp32", "bf16")),
        ("resnet-50-inference", ("fp32", "bf16")),
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


def small_rows():
    """Rows of the larger models of the host, at sizes of a test."""
    unet, vit, dlrm, wide_deep = [
        importlib.import_module(f"rows.{name}") for name in ("unet", "vit", "dlrm", "wide_deep")
    ]
    clicks = {"rows": 50, "batch": 8}
    yield unet.unet_row("unet", unet.SIZES | {"width": 4, "depth": 2, "extent": 8})
    sizes = {"layers": 2, "width": 12, "heads": 2, "patch": 4, "extent": 8, "classes": 5}
    yield vit.vit_row("vit", vit.SIZES | sizes)
    yield dlrm.dlrm_row("dlrm", dlrm.SIZES | clicks | {"tables": 3})
    yield wide_deep.wide_deep_row("wide", wide_deep.SIZES | clicks, (6,))
    yield wide_deep.wide_deep_row("table", wide_deep.LARGE | clicks, (6, 5))


def test_rows_have_the_parameters_of_our_models_and_lose_by_their_rule(all_rows):
    models = importlib.import_module("engines.actorflow_models")
    for row in small_rows():
        model, _ = models.FAMILIES[row.family](row)
        stored = {name: array.shape for name, array in model.named_stored()}
        assert stored == {name: array.shape for name, array in row.weights().items()}
        running = models.start(row, "fp32", models.Running)
        classes = row.sizes.get("classes", 2)
        assert abs(running.step() - np.log(classes)) < 0.3
        assert np.isfinite(running.step())
        running.stream.close()


def test_an_inference_is_a_call_for_each_batch_in_their_order(all_rows):
    models = importlib.import_module("engines.actorflow_models")
    row = next(row for row in all_rows if row.name == "mlp-inference")
    weights, expected = row.weights(), []
    for batch in row.batches():
        h = batch["x"].astype(np.float64)
        for i in range(3):
            h = np.maximum(h, 0) if i else h
            h = h @ weights[f"layers.{i}.weight"].T + weights[f"layers.{i}.bias"]
        expected.append(np.mean(h**2))
    running = models.start(row, "fp32", models.Running)
    found = [running.step(), running.step()]
    running.run(1)
    found.append(running.step())
    running.job.close(running.model)
    np.testing.assert_allclose(found, [expected[i] for i in (0, 1, 3)], rtol=1e-5)


def test_onnxruntime_infers_what_we_export(all_rows, tmp_path):
    pytest.importorskip("onnxruntime")
    script = str(BENCHMARKS / "engines" / "onnx_engine.py")
    command = [sys.executable, script, "mlp-inference", "fp32", "session"]
    environ = os.environ | {"BENCH_ONNX": str(tmp_path)}
    asked = '{"do": "first"}\n{"do": "losses", "count": 2}\n'
    for _ in range(2):  # exported, and then read from the cache
        done = subprocess.run(command, input=asked, env=environ, capture_output=True, text=True)
        first, rest = map(json.loads, done.stdout.splitlines())
        assert len([*tmp_path.iterdir()]) == 1
    models = importlib.import_module("engines.actorflow_models")
    running = models.start(
        next(r for r in all_rows if r.name == "mlp-inference"), "fp32", models.Running
    )
    want = [running.step() for _ in range(3)]
    running.job.close(running.model)
    np.testing.assert_allclose([first["loss"], *rest["losses"]], want, rtol=1e-5)


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
