"""The programs of docs/how_to.md run, do what their section says, and are short."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how_to.md").read_text()
PROGRAMS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL))
PACKAGES = {"parquet": "pyarrow", "images": "PIL", "predict": "pyarrow", "onnx": "onnx"}
LIGHTNING = 25
"""Lines of the shortest program with Lightning in tests/data/tasks that trains and tests."""


def logits(state, x):
    """Return what linear layers with ReLU between them make of x, by numpy in float64."""
    names = sorted([n for n in state if n.endswith("weight")])
    for number, name in enumerate(names):
        x = np.maximum(x, 0) if number else x.astype(np.float64)
        x = x @ state[name].T + state[name.replace("weight", "bias")]
    return x


def softmax(z):
    shares = np.exp(z - z.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def check_classified(ns, printed):
    if "x" not in ns:
        ns["x"], ns["y"] = (
            np.array(column) for column in zip(*list_of(ns["Points"]()), strict=True)
        )
    assert (logits(ns["model"].state(), ns["x"]).argmax(1) == ns["y"]).mean() > 0.85


def list_of(dataset):
    return [dataset[i] for i in range(len(dataset))]


def check_parquet(ns, printed):
    np.testing.assert_allclose(ns["model"].state()["weight"], [[1, -1]], atol=0.05)


def check_images(ns, printed):
    assert ns["result"].metrics["loss"] < 0.3


def check_buckets(ns, printed):
    assert ns["result"].metrics["loss"] < 0.1


def check_length(ns, printed):
    assert ns["loss"] < np.var(ns["x"].mean(1)) / 2


def check_parameter(ns, printed):
    state = ns["model"].state()
    np.testing.assert_allclose(state["scale"], 2, atol=0.05)
    np.testing.assert_allclose(state["shift"], 1, atol=0.05)


def check_loss(ns, printed):
    x, y, focal_loss = ns["x"][:32], ns["y"][:32], ns["focal_loss"]
    score = af.job(lambda model, batch: focal_loss(model(batch.x), batch.y), train=False)
    p = softmax(logits(ns["model"].state(), x))[np.arange(32), y]
    expected = ((1 - p) ** 2 * -np.log(p)).mean()
    assert score.step(ns["model"], {"x": x, "y": y})["output"] == pytest.approx(expected, rel=1e-4)
    check_classified(ns, printed)


def check_lora(ns, printed):
    assert json.loads(Path("adapter/adapter_config.json").read_text())["r"] == 2
    assert ns["model"].num_parameters() == 8 * 32 + 32 + 32 * 3 + 3
    check_classified(ns, printed)


def check_groups(ns, printed):
    first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).init(0).state()
    moved = {name: np.abs(a - first[name]).mean() for name, a in ns["model"].state().items()}
    assert 0 < moved["0.weight"] < moved["2.weight"] / 3


def check_two_jobs(ns, printed):
    np.testing.assert_allclose(ns["drawn"].mean(0), [2.0, -1.0], atol=0.7)


def check_accumulate(ns, printed):
    assert ns["data"].state()["batches"] >= 400
    check_classified(ns, printed)


def check_clip(ns, printed):
    x, y, model = ns["x"][:32], ns["y"][:32], ns["model"]
    error = (softmax(logits(model.state(), x)) - np.eye(3)[y]) / 32
    norm = np.sqrt(np.sum((error.T @ x) ** 2) + np.sum(error.sum(0) ** 2))
    assert ns["train"].step(model, {"x": x, "y": y})["grad_norm"] == pytest.approx(norm, rel=1e-3)


def check_warmup(ns, printed):
    expected = 0.5e-2 * (1 + np.cos(np.pi * 199 / 200))
    assert ns["result"].metrics["lr"] == pytest.approx(expected, rel=1e-4)
    check_classified(ns, printed)


def check_precision(ns, printed):
    assert "in bf16" in printed
    check_classified(ns, printed)


def check_resume(ns, printed):
    assert 30 <= ns["result"].first_step < 100
    data = af.data.ArraySource({"x": ns["x"], "y": ns["y"]}, batch=32)
    undisturbed = ns["train"].fit(nn.Linear(8, 3), data, steps=100, progress=False)
    assert undisturbed.metrics == ns["result"].metrics


def check_log(ns, printed):
    with open("runs/net.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 101)]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def check_evaluate(ns, printed):
    found, matrix = logits(ns["model"].state(), ns["x"]).argmax(1), np.zeros((3, 3))
    np.add.at(matrix, (ns["y"], found), 1)
    np.testing.assert_array_equal(ns["measured"]["matrix"], matrix)
    f1 = 2 * matrix.diagonal() / (matrix.sum(0) + matrix.sum(1))
    assert ns["measured"]["f1"] == pytest.approx(f1.mean())


def check_rule(ns, printed):
    errors = abs(logits(ns["model"].state(), ns["x"])[:, 0] - ns["y"]) / abs(ns["y"])
    assert ns["measured"]["error in %"] == pytest.approx(100 * errors.mean(), rel=1e-5)


def check_predict(ns, printed):
    from pyarrow import parquet

    labels = parquet.read_table("labels.parquet")["label"].to_numpy()
    np.testing.assert_array_equal(labels, logits(ns["model"].state(), ns["x"]).argmax(1))


def check_budget(ns, printed):
    assert ns["plan"].arenas[0].size_bytes < 4 << 30


def check_largest_batch(ns, printed):
    size, data = ns["size"], af.data.ArraySource({"x": ns["x"], "y": ns["y"]}, batch=ns["size"])
    assert ns["plan"].arenas[0].size_bytes > 20_000 or size == 256
    assert ns["train"].compile(ns["model"], data).arenas[0].size_bytes <= 20_000


def check_time(ns, printed):
    assert len(ns["times"]) == 200


def check_print(ns, printed):
    assert len(re.findall(r"^largest logit -?\d+\.\d\d$", printed, flags=re.MULTILINE)) == 3


def check_nan(ns, printed):
    assert re.search(r"sqrt \(.*\) is the first op whose result is not finite at step 1", printed)


def check_inference(ns, printed):
    expected = logits(af.load("weights.safetensors"), ns["x"]).argmax(1)
    assert str(expected) in printed


def check_publish(ns, printed):
    index = json.loads(Path("published/model.safetensors.index.json").read_text())
    assert {*index["weight_map"]} == {*ns["model"].state()}
    assert len({*index["weight_map"].values()}) > 1


def check_onnx(ns, printed):
    from onnx.reference import ReferenceEvaluator

    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    (scores,) = ReferenceEvaluator("net.onnx").run(None, {"x": x})
    np.testing.assert_allclose(scores, logits(ns["model"].state(), x), rtol=1e-4, atol=1e-5)


def check_generate(ns, printed):
    assert [len(text) for text in ns["texts"]] == [8, 8]
    assert all(0 <= token < 61 for text in ns["texts"] for token in text)


CHECKS = dict.fromkeys(["dataset"], check_classified) | {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and name != "check_classified"
}


def test_every_program_is_checked():
    assert {*CHECKS, "ranks"} == {*PROGRAMS}


@pytest.mark.host("the programs train on the host")
@pytest.mark.parametrize("name", CHECKS)
def test_a_program_does_what_its_section_says(name, tmp_path, monkeypatch, capsys):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"needs {PACKAGES[name]}, of an extra")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"how_to_{name}"}
    exec(compile(PROGRAMS[name], f"docs/how_to.md:{name}", "exec"), namespace)
    CHECKS[name](namespace, capsys.readouterr().out)


@pytest.mark.no_gpu("ranks of one host meet in its memory")
def test_two_ranks_train_as_one_process_does(tmp_path):
    losses = []
    for ranks, mesh in ((2, "data=2"), (1, "data=1")):
        script = tmp_path / f"ranks_{ranks}.py"
        script.write_text(PROGRAMS["ranks"].replace("data=2", mesh))
        command = [sys.executable, "-m", "actorflow", "launch", "-n", str(ranks), str(script)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses += re.findall(r"^loss (.*)$", done.stdout, flags=re.MULTILINE)
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_no_longer_than_one_of_lightning(name):
    assert len([line for line in PROGRAMS[name].splitlines() if line.strip()]) <= LIGHTNING


def test_the_index_of_the_page_has_each_section():
    index = PAGE.partition("\n## ")[0]
    for title in re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE):
        assert f"](#{title.lower().replace(' ', '-')})" in index, title
