"""What `af.scan` and `af.map` say of functions and arguments that do not fit."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actors.machine.errors import ActorFailed

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
    "function",
    [
        lambda b: af.scan(lambda c, x: c + x, b.x[0], b.x),
        lambda b: af.scan(lambda c, x: (c, x, x), b.x[0], b.x),
        lambda b: af.scan(lambda c, x: (c.to("float64"), x), b.x[0], b.x),
        lambda b: af.scan(lambda c, x: ({"h": c["h"].sum()}, x), {"h": b.x[0]}, b.x),
        lambda b: af.scan(lambda c, x: ((c, c), x), b.x[0], b.x),
        lambda b: af.scan(add, b.x[0], {"a": b.x, "b": b.x[1:]}),
        lambda b: af.scan(add, b.x[0], b.x.sum()),
        lambda b: af.scan(add, b.x[0], b.x, length=3),
        lambda b: af.scan(add, b.x[0]),
        lambda b: af.scan(add, b.x[0], length=-1),
        lambda b: af.scan(add, "no", b.x),
    ],
)
def test_what_does_not_fit_is_an_error_on_the_users_line(function):
    job = af.job(optimizer=af.optim.SGD(0.1))(lambda model, batch: function(batch)[0].sum())
    with raises(af.CompileError):
        job.compile(nn.Linear(2, 2), {"x": af.TensorType(af.DType.FLOAT32, (5, 2))})


def test_a_tensor_from_within_does_not_leave_its_function():
    kept = []

    def leak(batch):
        af.scan(lambda c, x: (kept.append(c) or c, None), batch.x[0], batch.x)
        return kept[0] + 1.0

    with raises(af.CompileError):
        stepped(leak)


def test_outside_of_a_job_there_is_no_scan():
    with raises(af.CompileError):
        af.scan(add, X[0], X)


@pytest.mark.parametrize(
    "function",
    [
        lambda b: af.cond(b.x > 0.0, lambda: b.x, lambda: b.x),
        lambda b: af.cond(b.x.sum() > 0.0, lambda: b.x, lambda: (b.x, b.x)),
        lambda b: af.cond(b.x.sum() > 0.0, lambda: b.x, lambda: b.x.sum()),
        lambda b: af.while_loop(lambda v: v, lambda v: v, b.x),
        lambda b: af.while_loop(lambda v: v.sum() > 0.0, lambda v: v.sum(), b.x),
        lambda b: af.while_loop(lambda v: v, lambda v: v, ()),
    ],
)
def test_a_choice_that_does_not_fit_is_an_error_on_the_users_line(function):
    with raises(af.CompileError):
        stepped(function)


def test_a_loop_of_unknown_length_has_no_gradient():
    def job(model, batch):
        return af.while_loop(lambda v: v.sum() < 10.0, lambda v: v * v + 1.0, model(batch.x)).sum()

    train = af.job(optimizer=af.optim.SGD(0.1))(job)
    with raises(af.CompileError):
        train.compile(nn.Linear(2, 2), {"x": af.TensorType(af.DType.FLOAT32, (5, 2))})


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setenv("ACTORFLOW_DEVICE", "cuda")
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


def doubled(x, **options):
    return af.while_loop(lambda v: v.sum() < 10.0, lambda v: v * 2.0, x, **options)


def test_a_loop_of_unknown_length_on_a_gpu_is_told_of_max_steps(on_a_gpu):
    with raises(af.CompileError):
        stepped(lambda b: doubled(b.x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: doubled(x, max_steps="many"),
        lambda x: doubled(x, max_steps=-1),
        lambda x: af.while_loop(lambda v: v, lambda v: v, x, max_steps=2),
        lambda x: af.while_loop(lambda v: v.sum() < 1.0, lambda v: v.sum(), x, max_steps=2),
    ],
)
def test_a_loop_of_so_many_steps_that_does_not_fit_is_an_error_on_the_users_line(function):
    with raises(af.CompileError):
        stepped(lambda b: function(b.x))


def test_a_loop_of_no_steps_gives_its_first_value_back():
    made = stepped(lambda b: doubled(b.x, max_steps=0), x=X + 1.0)["output"]
    np.testing.assert_array_equal(made, X + 1.0)


def rows_of_choices(batch):
    """Return sums of rows by id, in the one of three bodies that two flags choose."""

    def rows(off):
        return af.embedding(batch.ids + off, batch.x).sum()

    return af.cond(
        batch.outer,
        lambda: af.cond(batch.inner, lambda: rows(0), lambda: rows(90)),
        lambda: rows(900),
    )


def read_rows(ids, outer, inner):
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    ids = np.array(ids, np.int32)
    flags = {"outer": np.array(outer), "inner": np.array(inner)}
    return stepped(rows_of_choices, x=x, ids=ids, **flags)["output"]


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_a_bad_index_counts_where_its_body_is_chosen(device, request):
    if device == "cuda":
        request.getfixturevalue("on_a_gpu")
    assert read_rows([1, 3], True, True) == 2 + 3 + 6 + 7
    for ids, flags in (
        ([1, 5], (True, True)),
        ([-88, -87], (False, True)),
        ([1, 3], (True, False)),
        ([1, 3], (False, False)),
    ):
        with raises(ActorFailed):
            read_rows(ids, *flags)
    assert read_rows([-88, -87], True, False) == 4 + 5 + 6 + 7
    assert read_rows([-899, -900], False, True) == 0 + 1 + 2 + 3


def test_choices_within_loops_give_a_gpu_the_bits_of_the_host(monkeypatch):
    """What a step does not choose is NaN, and its flag is another one in every step."""

    def job(batch):
        def step(total, x):
            made = af.cond(
                x.sum() > 0.0,
                lambda: total - x,
                lambda: af.cond(total.sum() > 0.0, lambda: total * x / 0.0 * 0.0, lambda: x * 2.0),
            )
            made = af.where(af.isnan(made), -total, made)
            return made, (made, total[:1])

        last, (rows, firsts) = af.scan(step, batch.x[0], batch.x)
        return {"last": last, "rows": rows, "firsts": firsts}

    x = np.random.default_rng(3).standard_normal((9, 3)).astype(np.float32)
    host = stepped(job, x=x)
    monkeypatch.setenv("ACTORFLOW_DEVICE", "cuda")
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    for name, made in stepped(job, x=x).items():
        np.testing.assert_array_equal(made, host[name])
