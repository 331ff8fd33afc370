import numpy as np
import pytest

from actors.kernels.interpret import attention_blocks

CASES = [
    # batch, rows, heads, width
    (2, 7, 3, 4),
    (1, 1, 1, 1),
    (3, 20, 2, 5),
    (2, 30, 4, 1),
    (0, 3, 2, 4),
    (2, 3, 0, 4),
]


@pytest.fixture(params=["tiny blocks", "tiny shared blocks", "usual blocks"])
def blocks(request, monkeypatch):
    """Runs a test with blocks of 3 x 4 scores, and a head at a time, as well."""
    if request.param == "tiny shared blocks":
        monkeypatch.setattr(attention_blocks, "OWN_BLOCKS", 0)
    if request.param != "usual blocks":
        monkeypatch.setattr(attention_blocks, "STRIPS", (3, 3))
        monkeypatch.setattr(attention_blocks, "CHUNKS", (4, 4))
        monkeypatch.setattr(attention_blocks, "GROUP_BYTES", 1)


def by_head(packed):
    """Return [B, T, H, D] as a dense [B, H, T, D]."""
    return np.ascontiguousarray(packed.swapaxes(1, 2))


def attend(harness, q, k, v, attrs):
    lse = (q.shape[:-1], q.dtype)
    return harness.call("attention", attrs, (q, k, v), ((q.shape, q.dtype), lse))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_packed_attention_is_attention_of_each_part(case, dtype, causal, harness, blocks):
    batch, rows, heads, width = case
    rng = np.random.default_rng(0)
    attrs = {"scale": 0.7, "causal": causal}
    qkv = rng.standard_normal((batch, rows, 3, heads, width)).astype(dtype)
    dy = rng.standard_normal((batch, rows, heads, width)).astype(dtype)
    types = ((dy.shape, dtype), ((batch, heads, rows), dtype))
    y, lse = harness.call("packed_attention", attrs, (qkv,), types)
    parts = [by_head(qkv[:, :, i]) for i in range(3)]
    expected = attend(harness, *parts, attrs)
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-12, "atol": 1e-14}
    np.testing.assert_allclose(by_head(y), expected[0], **near)
    np.testing.assert_allclose(lse, expected[1], **near)
    operands = (dy, qkv, y, lse)
    (grad,) = harness.call("packed_attention_grad", attrs, operands, ((qkv.shape, dtype),))
    operands = (by_head(dy), *parts, by_head(y), lse)
    expected = harness.call("attention_grad", attrs, operands, ((parts[0].shape, dtype),) * 3)
    for index, right in enumerate(expected):
        np.testing.assert_allclose(by_head(grad[:, :, index]), right, **near)


def test_a_gradient_is_not_promised_the_bytes_that_the_parts_lie_in(harness):
    qkv = np.zeros((2, 5, 3, 2, 4), np.float32)
    y, lse = qkv[:, :, 0].copy(), np.zeros((2, 2, 5), np.float32)
    attrs = {"scale": 1.0, "causal": True}
    _, needs, _ = harness.bind("packed_attention_grad", attrs, (y, qkv, y, lse), (qkv.copy(),))
    assert needs.in_place == ()
