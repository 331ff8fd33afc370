"""The programs of docs/tasks.md run, are right, and are as short as with torch and Lightning."""

import json
import re

import numpy as np
import pytest
from task_programs import (
    LOSSES,
    PAGE,
    PROGRAMS,
    WITH_LOSSES,
    counterpart,
    num_lines,
    our_losses,
    run,
)


def relu(x):
    return np.maximum(x, 0.0)


def mlp(state, x, *names):
    """Return what linear layers with ReLU between them make of rows, by numpy in float64."""
    for number, name in enumerate(names):
        x = relu(x) if number else x.astype(np.float64)
        x = x @ state[f"{name}.weight"].T + state[f"{name}.bias"]
    return x


def cross_entropy(logits, labels):
    log_sum = np.log(np.exp(logits).sum(1))
    return (log_sum - logits[np.arange(len(labels)), labels]).mean()


def check_classify(ns):
    logits, y = mlp(ns["model"].state(), ns["x"][768:], "0", "2"), ns["y"][768:]
    tested = ns["test"].step(ns["model"], {"x": ns["x"][768:], "y": y})
    assert tested["accuracy"] == pytest.approx((logits.argmax(1) == y).mean())
    assert tested["loss"] == pytest.approx(cross_entropy(logits, y), rel=1e-4)
    assert tested["accuracy"] > 0.9


def check_keep_best(ns):
    x, y, best = ns["x"], ns["y"], ns["stopping"].best
    logits = mlp(ns["model"].state(), x[128:], "0", "2")
    assert cross_entropy(logits, y[128:]) == pytest.approx(best, rel=1e-4)
    assert best < 0.6


def check_fine_tune(ns):
    published, state = ns["published"].state(), ns["model"].state()
    np.testing.assert_array_equal(state["body.0.weight"], published["body.0.weight"])
    logits = mlp(state, ns["x"], "body.0", "head")
    np.testing.assert_allclose(ns["scores"], logits, rtol=1e-3, atol=1e-4)
    assert (logits.argmax(1) == ns["y"] // 2).mean() > 0.85


def check_labels(ns):
    batch = {name: ns[name] for name in ("x", "lengths", "words") if name in ns}
    assert (ns["predict"].step(ns["model"], batch)["label"] == ns["y"]).mean() > 0.9


def check_language_model(ns):
    np.testing.assert_array_equal(ns["written"], ns["ids"][: len(ns["written"])])


def check_seq2seq(ns):
    translated = ns["translate"].step(ns["model"], {"x": ns["x"]})["y"]
    assert (translated == ns["x"][:, ::-1]).mean() > 0.9


def check_embeddings(ns):
    assert np.abs(ns["error"]).max() < 0.05


def check_unet(ns):
    mask, truth = ns["mask"], ns["truth"]
    assert (mask & truth).sum() / (mask | truth).sum() > 0.8


def check_contrastive(ns):
    assert (ns["chosen"] == np.arange(128)).mean() > 0.9


def check_distill(ns):
    state, x = ns["model"].state(), ns["x"]
    teacher, student = [mlp(state, x, f"{n}.0", f"{n}.2") for n in ("teacher", "student")]
    assert (teacher.argmax(1) == ns["y"]).mean() > 0.9
    assert (teacher.argmax(1) == student.argmax(1)).mean() > 0.9


def check_vae(ns):
    kinds, loss = np.unique(ns["kinds"], axis=0), ns["result"].mean_loss
    assert np.log(len(kinds)) < loss < 3.6  # the loss bounds the entropy of the data from above
    assert (ns["drawn"][:, None] == kinds).all(2).any(1).mean() > 0.5


def check_gan(ns):
    np.testing.assert_allclose(ns["drawn"].mean(0), ns["real"].mean(0), atol=0.6)
    assert ns["drawn"].std(0).min() > 0.02


def check_diffusion(ns):
    np.testing.assert_allclose(ns["drawn"].mean(0), ns["real"].mean(0), atol=0.2)
    np.testing.assert_allclose(ns["drawn"].std(0), ns["real"].std(0), atol=0.15)


def check_gradient_penalty(ns):
    # The slope s of the best critic minimises 10 (s - 1)^2 - 3 s: it is 1.15.
    assert ns["result"].metrics["distance"] == pytest.approx(3.45, abs=0.2)


def check_physics(ns):
    np.testing.assert_allclose(
        ns["solve"].step(ns["model"], {"t": ns["t"]})["u"], np.sin(ns["t"]), atol=0.02
    )


def check_policy(ns):
    assert ns["reward"].mean() > 0.9


def check_q_learning(ns):
    place, move = np.arange(5)[:, None], np.array([-1, 1])
    after, q = np.clip(place + move, 0, 4), np.zeros((5, 2))
    for _ in range(60):
        q = (after == 4) + 0.5 * q.max(1)[after]
    learned = ns["values"].step(ns["online"], {"state": ns["states"]})["q"]
    np.testing.assert_allclose(learned, q, atol=0.1)


CHECKS = {"lstm": check_labels, "transformer": check_labels} | {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and name != "check_labels"
}


def test_every_program_is_checked():
    assert {*CHECKS} == {*PROGRAMS}
    assert len(PROGRAMS) == 18


@pytest.mark.host("the programs train on the host")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_is_right(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = run(name)
    CHECKS[name](namespace)
    if name in WITH_LOSSES:
        expected = json.loads(LOSSES.read_text())[name]
        np.testing.assert_allclose(our_losses(namespace), expected, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_short_as_with_torch_and_lightning(name):
    assert num_lines(PROGRAMS[name]) <= num_lines(counterpart(name)) + 2


def test_the_table_has_the_lines_of_each_program():
    table = re.search(r"<!-- lines -->\n(.*?)<!-- end -->", PAGE.read_text(), flags=re.DOTALL)[1]
    rows = re.findall(r"\| \[.*\]\(#.*\) \| (\d+) \| (\d+) \|", table)
    expected = [(num_lines(code), num_lines(counterpart(n))) for n, code in PROGRAMS.items()]
    assert [(int(ours), int(theirs)) for ours, theirs in rows] == expected
