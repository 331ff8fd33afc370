import numpy as np
import pytest

SHAPES = [(5, 7), (), (130,), (0, 2)]


def tensors(count, shape, dtype):
    rng = np.random.default_rng(len(shape) + count)
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(count)]


def adamw(p, g, m, v, lr, step, beta1, beta2, eps, weight_decay):
    t = step + 1
    p = p - lr * weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    mhat, vhat = m / (1 - beta1**t), v / (1 - beta2**t)
    return p - lr * mhat / (np.sqrt(vhat) + eps), m, v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_three_steps_of_adamw_in_place_agree_with_float64(
    decay, dtype, shape, harness, block_bytes
):
    attrs = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": decay}
    p, m, v = tensors(3, shape, dtype)
    np.abs(v, out=v)
    g, lr, step = np.zeros_like(p), np.array(0, dtype), np.array(0, np.int64)
    want = [x.astype(np.float64) for x in (p, m, v)]
    launch, needs, workspace = harness.bind(
        "adamw_update", attrs, (p, g, m, v, lr, step), (p, m, v)
    )
    assert needs.in_place == ((0, 0), (1, 2), (2, 3))
    for now in range(3):
        g[...] = tensors(1 + now, shape, dtype)[0]
        lr[...], step[...] = 0.01 * (now + 1), now
        workspace[:] = 0xFF
        launch()
        want = adamw(want[0], g.astype(np.float64), *want[1:], float(lr), now, *attrs.values())
    for got, expected in zip((p, m, v), want, strict=True):
        tolerance = 1e-5 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_increment_adds_what_it_is_given(harness):
    count, by = np.array(41, np.int64), np.array(0, np.int64)
    launch, _, _ = harness.bind("increment", {}, (count, by), (count,))
    for given, expected in ((0, 41), (1, 42), (1, 43)):
        by[...] = given
        launch()
        assert count == expected


UPDATES = {
    "sgd_update": (0, False),
    "momentum_update": (1, False),
    "adamw_update": (2, True),
}
ALL = {"momentum": 0.9, "nesterov": False, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize("op", UPDATES)
def test_an_update_that_is_skipped_keeps_every_bit_and_others_are_as_ever(
    op, is_in_place, dtype, shape, harness, block_bytes
):
    num_states, has_step = UPDATES[op]
    attrs, step = {**ALL, "weight_decay": 0.1}, (np.array(3, np.int64),) * has_step
    p, g, *states = [np.asarray(abs(x)) for x in tensors(2 + num_states, shape, dtype)]
    olds = [np.copy(x) for x in (p, *states)]
    given = (p, g, *states, np.array(0.1, dtype), *step)
    outputs = tuple(harness.spoiled(shape, dtype) for _ in olds)
    if is_in_place:
        outputs = (given[0], *given[2 : 2 + num_states])
    skip = np.array(1, np.int64)
    launch, needs, _ = harness.bind(op, attrs, (*given, skip), outputs)
    assert needs.in_place[0] == (0, 0)
    g[...] = np.nan
    launch()
    for got, old in zip(outputs, olds, strict=True):
        assert got.tobytes() == old.tobytes()
    skip[...], g[...] = 0, 0.5
    want = harness.call(op, attrs, given, ((shape, dtype),) * len(olds))
    launch()
    for got, expected in zip(outputs, want, strict=True):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("every", [1, 3])
def test_sums_begin_anew_with_the_first_batch_of_every_step(every, dtype, shape, harness):
    total, grad = tensors(2, shape, dtype)
    total[...] = np.nan  # what a cut step left there does no harm
    batch = np.array(0, np.int64)
    launch, needs, _ = harness.bind("accumulate", {"every": every}, (total, grad, batch), (total,))
    assert needs.in_place == ((0, 0),)
    rows = [tensors(3 + now, shape, dtype)[0] for now in range(2 * every)]
    for now, row in enumerate(rows):
        grad[...], batch[...] = row, now
        launch()
        first = now - now % every
        want = sum(rows[first + 1 : now + 1], start=rows[first])
        np.testing.assert_array_equal(total, want)
        np.testing.assert_array_equal(grad, row)


def test_a_sum_of_integers_has_no_kernel(harness):
    total = np.zeros(3, np.int32)
    with pytest.raises(LookupError, match="accumulate"):
        harness.bind("accumulate", {"every": 2}, (total, total, np.array(0, np.int64)), (total,))
