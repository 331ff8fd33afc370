import numpy as np
import pytest


def reference(logits, labels):
    z = logits.astype(np.float64)
    top = z.max(axis=1, initial=-np.inf)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    return (lse - z[np.arange(len(z)), labels]).mean(), lse


def forward(harness, logits, labels):
    dtype = logits.dtype.name
    return harness.call(
        "cross_entropy", {}, (logits, labels), (((), dtype), ((len(labels),), dtype))
    )


@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("label", ["int64", "int32", "uint8", "uint64"])
def test_cross_entropy_agrees_with_float64(label, dtype, kind, harness, block_bytes):
    rng = np.random.default_rng(1)
    for rows, columns in ((5, 7), (40, 3), (1, 1), (3, 30)):
        logits = harness.strided(rng, (rows, columns), dtype, kind)
        labels = rng.integers(0, columns, rows).astype(label)
        loss, lse = forward(harness, logits, labels)
        want_loss, want_lse = reference(logits, labels.astype(int))
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [-1e4, -100, 100, 1e4])
def test_cross_entropy_is_right_far_from_zero(offset, harness, block_bytes):
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((9, 5)).astype(np.float32)
    logits[4:] += np.float32(offset)
    labels = rng.integers(0, 5, 9)
    loss, lse = forward(harness, logits, labels)
    want_loss, want_lse = reference(logits, labels)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    np.testing.assert_allclose(loss, want_loss, atol=2e-3)


@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cross_entropy_grad_agrees_with_float64(dtype, kind, harness, block_bytes):
    rng = np.random.default_rng(3)
    for rows, columns in ((5, 7), (40, 3), (1, 1)):
        logits = harness.strided(rng, (rows, columns), dtype, kind)
        labels = rng.integers(0, columns, rows)
        _, lse = reference(logits, labels)
        dloss = np.array(1.5, dtype)
        inputs = (dloss, logits, labels, lse.astype(dtype))
        (dx,) = harness.call("cross_entropy_grad", {}, inputs, (((rows, columns), dtype),))
        p = np.exp(logits.astype(np.float64) - lse[:, None])
        p[np.arange(rows), labels] -= 1
        np.testing.assert_allclose(dx, p * 1.5 / rows, rtol=1e-5, atol=1e-6)


def test_the_gradient_may_lie_over_the_logits(harness, block_bytes):
    rng = np.random.default_rng(4)
    logits, labels = rng.standard_normal((11, 6), dtype=np.float32), rng.integers(0, 6, 11)
    lse = reference(logits, labels)[1].astype(np.float32)
    inputs = (np.array(1, np.float32), logits, labels, lse)
    (expected,) = harness.call("cross_entropy_grad", {}, inputs, (((11, 6), "float32"),))
    launch, needs, _ = harness.bind("cross_entropy_grad", {}, inputs, (logits,))
    assert needs.in_place == ((0, 1),)
    launch()
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("bad", [130, 128, -1])
def test_a_label_out_of_range_is_named_with_its_position(bad, harness, block_bytes):
    logits = np.zeros((20, 128), np.float32)
    labels = np.zeros(20, np.int32)
    labels[17:] = bad
    text = rf"label {bad} at position 17 is outside 0\.\.127"
    with pytest.raises(IndexError, match=text):
        forward(harness, logits, labels)
    inputs = (np.array(1, np.float32), logits, labels, np.zeros(20, np.float32))
    with pytest.raises(IndexError, match=text):
        harness.call("cross_entropy_grad", {}, inputs, ((logits.shape, "float32"),))


def test_labels_too_large_for_the_index_type_are_refused_by_value(harness):
    labels = np.array([0, 2**64 - 1], np.uint64)
    with pytest.raises(IndexError, match="label 18446744073709551615 at position 1"):
        forward(harness, np.zeros((2, 3), np.float32), labels)


def test_the_loss_of_no_rows_is_nan(harness):
    loss, _ = forward(harness, np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    assert np.isnan(loss)
