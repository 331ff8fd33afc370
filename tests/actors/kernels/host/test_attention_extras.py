"""Masks and dropout in attention and its gradient, by numpy's kernels and native ones."""

import numpy as np
import pytest

from actors.kernels.common import attention_blocks
from actors.kernels.native import attention
from actors.kernels.native.attention import NATIVE_ATTENTION_KERNELS as NATIVE_KERNELS
from actors.kernels.reference.attention import ATTENTION_KERNELS
from actors.kernels.reference.attention_grad import ATTENTION_GRAD_KERNELS

KERNELS = {"numpy": (*ATTENTION_KERNELS, *ATTENTION_GRAD_KERNELS), "native": NATIVE_KERNELS}
BATCH, ROWS, COLUMNS = (2, 3), 21, 40
MASKS = {
    "none": None,
    "of all scores": (*BATCH, ROWS, COLUMNS),
    "of queries and keys": (1, 1, ROWS, COLUMNS),
    "of keys by batch": (2, 1, 1, COLUMNS),
    "of queries": (1, 3, ROWS, 1),
}
SEED, STEP, KEY, P = 5, 11, 3, 0.3


@pytest.fixture(params=["tiny blocks", "usual blocks"], autouse=True)
def blocks(request, monkeypatch):
    if request.param != "usual blocks":
        monkeypatch.setattr(attention_blocks, "STRIPS", (3, 3))
        monkeypatch.setattr(attention_blocks, "CHUNKS", (4, 4))
        monkeypatch.setattr(attention_blocks, "GROUP_BYTES", 1)
        monkeypatch.setattr(attention, "_KEYS", 16)
        monkeypatch.setattr(attention, "_STRIP", 6)
        monkeypatch.setattr(attention, "_BLOCK", 12)


def mask_of(shape, dtype):
    """Return a mask that hides a third of the keys, and all from the second query."""
    rng = np.random.default_rng(len(shape))
    mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)).astype(dtype)
    if shape[-2] > 1:
        mask[..., 1, :] = -np.inf
    return mask


def kept_of(shape):
    """Return what weights are multiplied with: numpy's own stream of float32 in [0, 1)."""
    generator = np.random.Generator(np.random.Philox(key=[SEED, KEY], counter=[0, 0, STEP, 0]))
    return (generator.random(shape, np.float32) >= P) / (1 - P)


def expected(q, k, v, dy, scale, causal, mask, is_dropped):
    """Return y, dq, dk, dv in float64 from whole matrices."""
    scores = scale * (q.astype(np.float64) @ k.swapaxes(-1, -2))
    rows, columns = scores.shape[-2:]
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = ~np.tri(rows, columns, max(columns - rows, 0), dtype=bool)
        scores[..., hidden] = -np.inf
    e = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
    p = e / np.maximum(e.sum(-1, keepdims=True), 1e-300)
    kept = kept_of(scores.shape) if is_dropped else 1.0
    dp = kept * (dy @ v.swapaxes(-1, -2))
    ds = scale * p * (dp - (dp * p).sum(-1, keepdims=True))
    y = (p * kept) @ v
    return y, ds @ k, ds.swapaxes(-1, -2) @ q, (p * kept).swapaxes(-1, -2) @ dy


def operands(dtype, rows=ROWS, columns=COLUMNS, width=8, out=16):
    rng = np.random.default_rng(rows)
    shapes = (rows, width), (columns, width), (columns, out), (rows, out)
    return [rng.standard_normal((*BATCH, *shape)).astype(dtype) for shape in shapes]


def run(native_call, path, given, attrs, mask, is_dropped):
    q, k, v, dy = given
    more = () if mask is None else (mask,)
    if is_dropped:
        more = (*more, np.array(SEED), np.array(STEP))
        attrs = {**attrs, "p": P, "key": KEY}
    forward, backward = KERNELS[path]
    lse = np.empty(q.shape[:-1], q.dtype)
    y, lse = native_call.call(forward, attrs, (q, k, v, *more), (dy, lse))
    return y, *native_call.call(backward, attrs, (dy, q, k, v, y, lse, *more), (q, k, v))


@pytest.mark.parametrize("is_dropped", [False, True], ids=["whole", "dropped"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("path", "dtype"),
    [("numpy", "float32"), ("numpy", "float64"), ("native", "float32")],
    indirect=["path"],
)
def test_masked_and_dropped_weights_agree_with_whole_matrices(
    path, dtype, name, is_dropped, native_call
):
    mask = None if MASKS[name] is None else mask_of(MASKS[name], dtype)
    given = operands(dtype)
    attrs = {"scale": 0.4, "causal": False}
    limit = 2e-5 if dtype == "float32" else 1e-12
    made = run(native_call, path, given, attrs, mask, is_dropped)
    for got, right in zip(made, expected(*given, 0.4, False, mask, is_dropped), strict=True):
        np.testing.assert_allclose(got, right, rtol=limit, atol=limit)


@pytest.mark.parametrize("is_dropped", [False, True], ids=["whole", "dropped"])
@pytest.mark.parametrize(("rows", "columns"), [(40, 21), (21, 21), (21, 40), (33, 1)])
def test_causal_queries_beyond_the_last_key_see_all(rows, columns, is_dropped, path, native_call):
    given = operands("float32", rows, columns)
    attrs = {"scale": 0.4, "causal": True}
    made = run(native_call, path, given, attrs, None, is_dropped)
    for got, right in zip(made, expected(*given, 0.4, True, None, is_dropped), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5)


def test_a_query_that_sees_nothing_is_zero_and_gives_no_gradient(path, native_call):
    given = operands("float32")
    mask = np.zeros((1, 1, ROWS, COLUMNS), np.float32)
    mask[..., 4, :] = -np.inf
    y, dq, _, _ = run(native_call, path, given, {"scale": 0.4, "causal": False}, mask, False)
    assert not y[..., 4, :].any()
    assert not dq[..., 4, :].any()
    assert y[..., 5, :].all()


def test_keys_and_values_shared_by_heads_are_read_where_they_are(path, native_call):
    q, k, v, dy = operands("float32")
    shared = [np.broadcast_to(x[:, :1], x.shape) for x in (k, v)]
    attrs = {"scale": 0.4, "causal": False}
    forward, _ = KERNELS[path]
    lse = np.empty(q.shape[:-1], q.dtype)
    y, _ = native_call.call(forward, attrs, (q, *shared), (dy, lse))
    right = expected(q, *shared, dy, 0.4, False, None, False)[0]
    np.testing.assert_allclose(y, right, rtol=2e-5, atol=2e-5)
