"""What `af.scan` and `af.map` say of functions and arguments that do not fit."""

import re

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

X = np.zeros((5, 2), np.float32)


def stepped(function, **batch):
    """Return what a job computes in one step."""
    job = af.job(train=False)(lambda model, batch: function(batch))
    return job.step(nn.Module(), batch or {"x": X})


def add(carry, x):
    return carry + x, carry


def test_a_form_of_carry_and_entries_is_kept():
    def f(carry, entry):
        total = carry["total"] + entry[0] * entry[1][0]
        return {"count": carry["count"] + 1, "total": total}, (total, [None, carry["count"]])

    def job(batch):
        init = {"total": batch.x[0], "count": np.int64(0)}
        carry, (totals, (nothing, counts)) = af.scan(f, init, (batch.x, [batch.y]))
        assert nothing is None
        assert list(carry) == ["total", "count"]
        return {**carry, "totals": totals, "counts": counts}

    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    made = stepped(job, x=x, y=x + 1)
    np.testing.assert_array_equal(made["totals"], x[0] + np.cumsum(x * (x + 1), 0))
    np.testing.assert_array_equal(made["counts"], np.arange(5))
    assert made["count"] == 5


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda b: af.scan(lambda c, x: c + x, b.x[0], b.x), "returns a pair (carry, y), got Tens"),
        (
            lambda b: af.scan(lambda c, x: (c, x, x), b.x[0], b.x),
            "returns a pair (carry, y), got 3 values",
        ),
        (
            lambda b: af.scan(lambda c, x: (c.to("float64"), x), b.x[0], b.x),
            "carry came as float32[2], and the function returns float64[2]",
        ),
        (
            lambda b: af.scan(lambda c, x: ({"h": c["h"].sum()}, x), {"h": b.x[0]}, b.x),
            "carry['h'] came as float32[2], and the function returns float32[]",
        ),
        (
            lambda b: af.scan(lambda c, x: ((c, c), x), b.x[0], b.x),
            "came as a tensor, and the function returns (a tensor, a tensor)",
        ),
        (
            lambda b: af.scan(add, b.x[0], {"a": b.x, "b": b.x[1:]}),
            "different extents: float32[5, 2] (number 0) and float32[4, 2] (number 1)",
        ),
        (lambda b: af.scan(add, b.x[0], b.x.sum()), "tensor 0 of them is float32[], without any"),
        (lambda b: af.scan(add, b.x[0], b.x, length=3), "got length=3, expected 5, the extent"),
        (lambda b: af.scan(add, b.x[0]), "without xs needs length="),
        (lambda b: af.scan(add, b.x[0], length=-1), "got length=-1, expected 0 or more"),
        (lambda b: af.scan(add, "no", b.x), "init is 'no'; expected a tensor, None, or a tuple"),
        (
            lambda b: af.scan(lambda c, x: (af.dropout(c, 0.5), x), b.x[0], b.x),
            "draws random numbers",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_on_the_users_line(function, says):
    job = af.job(optimizer=af.optim.SGD(0.1))(lambda model, batch: function(batch)[0].sum())
    with pytest.raises(af.CompileError, match=re.escape(says)) as error:
        job.compile(nn.Linear(2, 2), {"x": af.TensorType(af.DType.FLOAT32, (5, 2))})
    assert "test_control.py:" in str(error.value)


def test_a_tensor_from_within_does_not_leave_its_function():
    kept = []

    def leak(batch):
        af.scan(lambda c, x: (kept.append(c) or c, None), batch.x[0], batch.x)
        return kept[0] + 1.0

    with pytest.raises(af.CompileError, match="is used in another trace"):
        stepped(leak)


def test_outside_of_a_job_there_is_no_scan():
    with pytest.raises(af.CompileError, match=r"af\.scan was called outside of a job"):
        af.scan(add, X[0], X)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            lambda b: af.cond(b.x > 0.0, lambda: b.x, lambda: b.x),
            "chooses by a bool of shape [], got bool[5, 2]",
        ),
        (
            lambda b: af.cond(b.x.sum() > 0.0, lambda: b.x, lambda: (b.x, b.x)),
            "one returns a tensor, the other (a tensor, a tensor)",
        ),
        (
            lambda b: af.cond(b.x.sum() > 0.0, lambda: b.x, lambda: b.x.sum()),
            "result is float32[5, 2] of one, float32[] of the other",
        ),
        (
            lambda b: af.while_loop(lambda v: v, lambda v: v, b.x),
            "the condition of af.while_loop is a bool of shape [], got float32[5, 2]",
        ),
        (
            lambda b: af.while_loop(lambda v: v.sum() > 0.0, lambda v: v.sum(), b.x),
            "carry came as float32[5, 2], and the function returns float32[]",
        ),
        (lambda b: af.while_loop(lambda v: v, lambda v: v, ()), "needs at least one tensor"),
    ],
)
def test_a_choice_that_does_not_fit_is_an_error_on_the_users_line(function, says):
    with pytest.raises(af.CompileError, match=re.escape(says)) as error:
        stepped(function)
    assert "test_control.py:" in str(error.value)


def test_a_loop_of_unknown_length_has_no_gradient():
    def job(model, batch):
        return af.while_loop(lambda v: v.sum() < 10.0, lambda v: v * v + 1.0, model(batch.x)).sum()

    train = af.job(optimizer=af.optim.SGD(0.1))(job)
    with pytest.raises(af.CompileError, match=r"test_control\.py:\d+: while has no gradient"):
        train.compile(nn.Linear(2, 2), {"x": af.TensorType(af.DType.FLOAT32, (5, 2))})


def test_a_gpu_that_cannot_choose_says_so_with_the_users_line(monkeypatch):
    monkeypatch.setenv("ACTORFLOW_DEVICE", "cuda")
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    with pytest.raises(af.CompileError, match=r"test_control\.py:\d+: .*no kernel for op 'cond'"):
        stepped(lambda b: af.cond(b.x.sum() > 0.0, lambda: b.x, lambda: -b.x))
