"""The loop in C: entries are worked on where they lie, or copied where a launch cannot be moved."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actors.kernels.host import control

pytestmark = pytest.mark.usefixtures("native")

STEPS, ROWS, WIDTH = 5, 3, 7


class Weight(nn.Module):
    def __init__(self):
        self.w = nn.Parameter((WIDTH, WIDTH), (("kind", "normal"), ("std", 0.5)))


@pytest.fixture
def moved(monkeypatch):
    """Return the entries of all loops that are bound: whether each is worked on where it lies."""
    found = {}

    class Watched(control.BoundStep):
        def windows(self, move):
            words = super().windows(move)
            found[move.name] = words is not None
            return words

    monkeypatch.setattr(control, "BoundStep", Watched)
    return found


def run(step, expected_step, reverse=False, **options):
    """Run a scan, and hold it against the same in numpy; return nothing."""

    @af.job(train=False, **options)
    def loop(model, batch):
        last, ys = af.scan(lambda c, x: step(model, c, x), batch.c, batch.x, reverse=reverse)
        return {"last": last, **ys}

    rng = np.random.default_rng(0)
    c, x = [
        rng.standard_normal(e).astype(np.float32) for e in ((ROWS, WIDTH), (STEPS, ROWS, WIDTH))
    ]
    w = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    model, before = Weight(), x.copy()
    model.load({"w": w})
    for _ in range(2):
        found = loop.step(model, {"c": c, "x": x})
    held, ys = c, [None] * STEPS
    for at in range(STEPS)[:: -1 if reverse else 1]:
        held, ys[at] = expected_step(w, held, x[at])
    np.testing.assert_allclose(found["last"], held, rtol=1e-5, atol=1e-6)
    for name in ys[0]:
        stacked = np.stack([y[name] for y in ys])
        np.testing.assert_allclose(found[name], stacked, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_computed_element_by_element_copies_no_entry(moved, reverse):
    def step(model, c, x):
        new = af.tanh(c * 0.5 + x)
        return new, {"part": new[:, 2:] + x[:, 2:], "old": c, "twice": 2.0 * x}

    def expected(w, c, x):
        new = np.tanh(c * 0.5 + x)
        return new, {"part": new[:, 2:] + x[:, 2:], "old": c, "twice": 2.0 * x}

    run(step, expected, reverse)
    assert moved
    assert all(moved.values())


def test_an_entry_that_a_library_reads_is_copied_and_the_others_are_not(moved):
    def step(model, c, x):
        new = af.tanh(x @ model.w + c)
        return new, {"y": c * 3.0}

    run(step, lambda w, c, x: (np.tanh(x @ w + c), {"y": 3.0 * c}))
    assert sorted(moved.values()) == [False, True]
