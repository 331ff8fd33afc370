import numpy as np
import pytest

from actors.kernels.native.update import NATIVE_UPDATE_KERNELS

KERNELS = {kernel.op: kernel for kernel in NATIVE_UPDATE_KERNELS}
SHAPES = [(5, 7), (), (130,), (0, 2), (70, 150)]
ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


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


def wide(*arrays):
    return [x.astype(np.float64) for x in arrays]


def test_adamw_reads_rate_and_step_at_every_launch(native, native_call):
    p, m, v, g = tensors(4, (40,), "float32")
    v, lr, step = np.abs(v), np.array(0, np.float32), np.array(0, np.int64)
    attrs = {**ADAMW, "weight_decay": 0.1}
    launch = KERNELS["adamw_update"].bind(attrs, (p, g, m, v, lr, step), (p, m, v), None)
    want = wide(p, m, v)
    for now in range(4):
        lr[...], step[...] = 0.01 * (now + 1), now
        g[...] = tensors(1, (40,), "float32", seed=now)[0]
        launch()
        want = adamw(want[0], *wide(g), *want[1:], float(lr), now, 0.1)
    for got, expected in zip((p, m, v), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["sgd_update", "momentum_update"])
def test_without_decay_an_infinite_parameter_does_not_spoil_the_state(op, native, native_call):
    p, g, buffer = np.array([np.inf, 1.0]), np.ones(2), np.ones(2)
    states = (buffer,) if op == "momentum_update" else ()
    attrs = {"momentum": 0.5, "nesterov": False, "weight_decay": 0.0}
    inputs = (p, g, *states, np.array(0.1))
    got = native_call.call(KERNELS[op], attrs, inputs, (p, *states))
    assert not np.isnan(got).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "transposed"])
def test_sums_begin_anew_with_the_first_batch_of_every_step(
    kind, every, dtype, native, harness, chunk_bytes
):
    total = np.full((70, 150), np.nan, dtype)  # what a cut step left there does no harm
    grad = harness.strided(None, total.shape, dtype, kind, np.zeros(total.shape))
    batch = np.array(0, np.int64)
    kernel = KERNELS["accumulate"]
    launch = kernel.bind({"every": every}, (total, grad, batch), (total,), None)
    rows = [tensors(1, total.shape, dtype, seed=now)[0] for now in range(2 * every)]
    for now, row in enumerate(rows):
        grad[...], batch[...] = row, now
        launch()
        first = now - now % every
        want = sum(rows[first + 1 : now + 1], start=rows[first])
        np.testing.assert_array_equal(total, want)


STATES = {"sgd_update": 0, "momentum_update": 1, "adamw_update": 2}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["dense", "transposed"])
@pytest.mark.parametrize("op", STATES)
def test_an_update_that_is_skipped_keeps_every_bit_and_others_are_as_ever(
    op, kind, dtype, shape, native, harness, native_call, chunk_bytes
):
    p, g, *states = [np.asarray(abs(x)) for x in tensors(2 + STATES[op], shape, dtype)]
    g = harness.strided(None, shape, dtype, kind, g)
    attrs = {**ADAMW, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    scalars = (np.array(0.1, dtype), *[np.array(3, np.int64)] * (op == "adamw_update"))
    given, olds = (p, g, *states, *scalars), (p, *states)
    pairs = ((0, 0), *[(1 + i, 2 + i) for i in range(len(states))])
    for skip, want in ((0, native_call.call(KERNELS[op], attrs, given, olds)), (1, olds)):
        inputs = (*given, np.array(skip, np.int64))
        apart = native_call.call(KERNELS[op], attrs, inputs, olds)
        over = native_call.in_place(KERNELS[op], attrs, inputs, pairs)
        for got in (apart, over):
            assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


def test_what_these_kernels_do_not_do_is_left_to_numpy(native, native_call):
    def query(p, g):
        operands = tuple(map(native_call.operand, (p, g, np.zeros((), p.dtype))))
        return KERNELS["sgd_update"].query({"weight_decay": 0.0}, operands, operands[:1])

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
        return native_call.call(KERNELS["adamw_update"], attrs, inputs, (p, m, v))

    alone, both = with_threads(1, updated), with_threads(2, updated)
    for one, other in zip(alone, both, strict=True):
        np.testing.assert_array_equal(one, other)
