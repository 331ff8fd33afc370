"""Updates in the memory of their variables, by numpy's kernels and by generated code."""

import numpy as np
import pytest

from compiler.ops.language.define import update_op

SHAPES = [(5, 7), (), (130,), (0, 2), (70, 150)]
ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}


def lion(param, grad, m, lr, *, beta1: float, beta2: float):
    """Chen et al., 2023; here the new state comes first, and then the old one is read again."""
    state = m * beta2 + grad * (1 - beta2)
    return param - (m * beta1 + grad * (1 - beta1)).sign() * lr, state


LION = update_op("lion", "param: float, grad = param, m = param, lr = param [] -> param, m", lion)
UPDATES = {
    # op -> its states, whether it reads the step, attributes
    "sgd_update": (0, False, {"weight_decay": 0.1}),
    "momentum_update": (1, False, MOMENTUM),
    "adamw_update": (2, True, ADAMW),
    "lion": (1, False, {"beta1": 0.9, "beta2": 0.99}),
}

every_path = pytest.mark.parametrize(
    ("path", "dtype"),
    [(path, dtype) for path in ("numpy", "native") for dtype in ("float32", "float64")],
    indirect=["path"],
)


def tensors(count, shape, dtype, seed=1):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(count)]


@every_path
def test_a_rule_that_reads_old_state_after_the_new_one_is_right_in_place(path, dtype, harness):
    p, g, m = tensors(3, (70, 150), dtype)
    lr, old = np.array(0.1, dtype), [p.copy(), m.copy()]
    launch, needs, _ = harness.bind("lion", UPDATES["lion"][2], (p, g, m, lr), (p, m))
    assert {(0, 0), (1, 2)} <= {*needs.in_place}
    launch()
    np.testing.assert_allclose(p, old[0] - 0.1 * np.sign(0.9 * old[1] + 0.1 * g), rtol=1e-5)
    np.testing.assert_allclose(m, 0.99 * old[1] + 0.01 * g, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("op", ["sgd_update", "momentum_update"])
def test_without_decay_an_infinite_parameter_does_not_spoil_the_state(op, path, harness):
    p, g, buffer = np.array([np.inf, 1.0]), np.ones(2), np.ones(2)
    states = (buffer,) if op == "momentum_update" else ()
    attrs = {"weight_decay": 0.0} | ({"momentum": 0.5, "nesterov": False} if states else {})
    launch, _, _ = harness.bind(op, attrs, (p, g, *states, np.array(0.1)), (p, *states))
    launch()
    assert not np.isnan((p, *states)).any()


@every_path
@pytest.mark.parametrize("every", [1, 3])
def test_sums_begin_anew_with_the_first_batch_of_every_step(every, path, dtype, harness, pieces):
    total = np.full((5, 7), np.nan, dtype)  # what a cut step left there does no harm
    grad, batch = np.zeros_like(total), np.array(0, np.int64)
    launch, _, _ = harness.bind("accumulate", {"every": every}, (total, grad, batch), (total,))
    rows = [tensors(1, total.shape, dtype, seed=now)[0] for now in range(2 * every)]
    for now, row in enumerate(rows):
        grad[...], batch[...] = row, now
        launch()
        first = now - now % every
        np.testing.assert_array_equal(total, sum(rows[first + 1 : now + 1], start=rows[first]))


@every_path
@pytest.mark.parametrize("op", UPDATES)
def test_an_update_that_is_skipped_keeps_every_bit_and_others_are_as_ever(
    op, path, dtype, harness, pieces
):
    num_states, has_step, attrs = UPDATES[op]
    for shape in SHAPES:
        p, g, *states = [np.asarray(abs(x)) for x in tensors(2 + num_states, shape, dtype)]
        scalars = (np.array(0.1, dtype), *[np.array(3, np.int64)] * has_step)
        olds, kept, skip = [np.copy(x) for x in (p, *states)], g.copy(), np.array(1, np.int64)
        want = [harness.spoiled(shape, dtype) for _ in olds]
        harness.bind(op, attrs, (p, g, *states, *scalars), tuple(want))[0]()
        given = (p, g, *states, *scalars, skip)
        launch, needs, _ = harness.bind(op, attrs, given, (p, *states))
        assert {(0, 0), *[(1 + i, 2 + i) for i in range(num_states)]} <= {*needs.in_place}
        for skips, gradient, right in ((1, np.nan, olds), (0, kept, want)):
            skip[...], g[...] = skips, gradient
            launch()
            assert [x.tobytes() for x in (p, *states)] == [x.tobytes() for x in right]
