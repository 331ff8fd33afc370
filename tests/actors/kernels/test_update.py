"""Updates of parameters, and sums of batches, by numpy's kernels and by native ones."""

import numpy as np
import pytest

from actors.kernels.interpret.update import UPDATE_KERNELS
from actors.kernels.native.update import NATIVE_UPDATE_KERNELS

KERNELS = {
    "numpy": {kernel.op: kernel for kernel in UPDATE_KERNELS},
    "native": {kernel.op: kernel for kernel in NATIVE_UPDATE_KERNELS},
}
NATIVE = KERNELS["native"]
SHAPES = [(5, 7), (), (130,), (0, 2), (70, 150)]
ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

every_path = pytest.mark.parametrize(
    ("path", "dtype"),
    [("numpy", "float32"), ("numpy", "float64"), ("native", "float32"), ("native", "float64")],
    indirect=["path"],
)


def tensors(count, shape, dtype, seed=1):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(count)]


def adamw(p, g, m, v, lr, step, decay):
    t = step + 1
    p = p - lr * decay * p
    m = 0.9 * m + (1 - 0.9) * g
    v = 0.95 * v + (1 - 0.95) * g * g
    mhat, vhat = m / (1 - 0.9**t), v / (1 - 0.95**t)
    return p - lr * mhat / (np.sqrt(vhat) + 1e-8), m, v


@every_path
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_in_place_reads_rate_and_step_at_every_launch(
    decay, shape, path, dtype, native_call, pieces
):
    p, m, v = tensors(3, shape, dtype)
    np.abs(v, out=v)
    g, lr, step = np.zeros_like(p), np.array(0, dtype), np.array(0, np.int64)
    want = [x.astype(np.float64) for x in (p, m, v)]
    given = (p, g, m, v, lr, step), (p, m, v)
    attrs = {**ADAMW, "weight_decay": decay}
    launch, needs, _ = native_call.bind(KERNELS[path]["adamw_update"], attrs, *given)
    assert needs.in_place == ((0, 0), (1, 2), (2, 3))
    for now in range(4):
        g[...] = tensors(1, shape, dtype, seed=2 + now)[0]
        lr[...], step[...] = 0.01 * (now + 1), now
        launch()
        want = adamw(want[0], g.astype(np.float64), *want[1:], float(lr), now, decay)
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


@pytest.mark.parametrize("op", ["sgd_update", "momentum_update"])
def test_without_decay_an_infinite_parameter_does_not_spoil_the_state(op, native, native_call):
    p, g, buffer = np.array([np.inf, 1.0]), np.ones(2), np.ones(2)
    states = (buffer,) if op == "momentum_update" else ()
    attrs = {"momentum": 0.5, "nesterov": False, "weight_decay": 0.0}
    inputs = (p, g, *states, np.array(0.1))
    got = native_call.call(NATIVE[op], attrs, inputs, (p, *states))
    assert not np.isnan(got).any()


@every_path
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "transposed"])
def test_sums_begin_anew_with_the_first_batch_of_every_step(
    kind, every, shape, path, dtype, harness, native_call, pieces
):
    total = np.full(shape, np.nan, dtype)  # what a cut step left there does no harm
    grad = harness.strided(None, shape, dtype, kind, np.zeros(shape))
    batch = np.array(0, np.int64)
    given = (total, grad, batch), (total,)
    kernel = KERNELS[path]["accumulate"]
    launch, needs, _ = native_call.bind(kernel, {"every": every}, *given)
    assert needs.in_place == ((0, 0),)
    rows = [tensors(1, shape, dtype, seed=now)[0] for now in range(2 * every)]
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


UPDATES = [
    # op, how many states it has, nesterov
    ("sgd_update", 0, False),
    ("momentum_update", 1, False),
    ("momentum_update", 1, True),
    ("adamw_update", 2, False),
]


@pytest.mark.parametrize(
    ("path", "dtype"), [("numpy", "float16"), *every_path.args[1]], indirect=["path"]
)
@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize("kind", ["dense", "transposed"])
@pytest.mark.parametrize(("op", "num_states", "nesterov"), UPDATES)
def test_an_update_that_is_skipped_keeps_every_bit_and_others_are_as_ever(
    op, num_states, nesterov, kind, is_in_place, path, dtype, harness, native_call, pieces
):
    kernel = KERNELS[path][op]
    attrs = {**ADAMW, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    for shape in SHAPES:
        p, g, *states = [np.asarray(abs(x)) for x in tensors(2 + num_states, shape, dtype)]
        g = harness.strided(None, shape, dtype, kind, g)
        scalars = (np.array(0.1, dtype), *[np.array(3, np.int64)] * (op == "adamw_update"))
        given, olds = (p, g, *states, *scalars), [np.copy(x) for x in (p, *states)]
        want = native_call.call(kernel, attrs, given, olds)
        outputs = (
            (p, *states) if is_in_place else tuple(harness.spoiled(shape, dtype) for _ in olds)
        )
        skip, kept = np.array(1, np.int64), g.copy()
        launch, needs, check = native_call.bind(kernel, attrs, (*given, skip), outputs)
        assert needs.in_place == ((0, 0), *[(1 + i, 2 + i) for i in range(num_states)])
        for skips, gradient, right in ((1, np.nan, olds), (0, kept, want)):
            skip[...], g[...] = skips, gradient
            launch()
            assert [x.tobytes() for x in outputs] == [x.tobytes() for x in right]
        check()


def test_what_these_kernels_do_not_do_is_left_to_numpy(native, native_call):
    def query(p, g):
        operands = tuple(map(native_call.operand, (p, g, np.zeros((), p.dtype))))
        return NATIVE["sgd_update"].query({"weight_decay": 0.0}, operands, operands[:1])

    half, cube = np.zeros((2, 3), np.float16), np.zeros((2, 3, 4))
    assert query(half, half) is None
    assert query(cube.transpose(2, 0, 1), cube.transpose(2, 0, 1)) is None
    assert query(np.zeros((4, 3, 2)), cube.transpose(2, 1, 0)) is None
    assert query(cube, cube) is not None


def test_updates_have_the_same_bits_with_one_thread_and_with_two(with_threads, native_call):
    p, m, v, g = tensors(4, (900, 700), "float32")
    v, lr, step = np.abs(v), np.array(0.01, np.float32), np.array(4, np.int64)
    attrs = {**ADAMW, "weight_decay": 0.1}

    def updated():
        inputs = (p, g, m, v, lr, step)
        return native_call.call(NATIVE["adamw_update"], attrs, inputs, (p, m, v))

    alone, both = with_threads(1, updated), with_threads(2, updated)
    for one, other in zip(alone, both, strict=True):
        np.testing.assert_array_equal(one, other)
