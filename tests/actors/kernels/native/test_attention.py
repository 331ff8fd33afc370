import numpy as np
import pytest
from kernel_calls import spoiled

from actors.kernels.common.attention_blocks import BlockExtents
from actors.kernels.common.kernel import operands_of
from actors.kernels.native.attention import _CHUNK_FLOPS, _chunks, _plan_attention


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 31, 32, 33, 128, 1000])
@pytest.mark.parametrize("rows", [1, 32, 64, 300])
def test_chunks_are_equal_and_as_many_as_a_power_of_two(heads, rows, is_forward):
    e = BlockExtents(heads, rows, rows, 32, 32, True)
    block, group = _chunks(e, is_forward=is_forward)
    parts = heads * (-(-rows // block) if is_forward else 1)
    count = min(parts, 1 << (-(-parts // group) - 1).bit_length())
    assert group == -(-parts // count)
    each = min(block, rows) if is_forward else rows
    flops = each * rows * 64 * (2.0 if is_forward else 5.0)
    assert group == 1 or (group - 1) * flops <= _CHUNK_FLOPS


def test_two_threads_share_few_short_heads_evenly():
    e = BlockExtents(32, 32, 32, 32, 32, True)
    for is_forward, group in ((True, 16), (False, 8)):
        assert _chunks(e, is_forward=is_forward)[1] == group


def attended(q, k, v, mask):
    """Return what the kernel makes of float32 operands."""
    shapes = (*q.shape[:-1], v.shape[-1]), q.shape[:-1], q.shape[:-1]
    outputs = tuple([spoiled(shape, np.dtype(np.float32)) for shape in shapes])
    attrs = {"scale": 0.5, "causal": False}
    plan = _plan_attention(attrs, operands_of((q, k, v, mask)), operands_of(outputs))
    workspace = np.zeros(plan.needs.workspace_bytes, np.uint8)
    plan.bind((q, k, v, mask), outputs, workspace)()
    return outputs


@pytest.mark.parametrize("first", [0, 300, 700])
@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_keys_that_a_mask_hides_are_not_read(native, first, rows):
    """What is in them, be it NaN, changes no bit; nor does it where all keys are hidden."""
    rng = np.random.default_rng(0)
    q, k, v = [rng.standard_normal((2, n, 8), np.float32) for n in (rows, 1024, 1024)]
    mask = np.full((2, 1, 1024), -np.inf, np.float32)
    mask[0, 0, first : first + 90] = 0.0
    got = attended(q, k, v, mask)
    seen = slice(first, first + 90)
    scores = 0.5 * q[0].astype(float) @ k[0, seen].T.astype(float)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights @ v[0, seen] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got[0][0], expected, rtol=1e-4, atol=1e-5)
    assert (got[0][1] == 0).all()
    start = first // 256 * 256
    k[:, : max(start, 0)] = v[:, :start] = k[:, start + 512 :] = v[:, start + 512 :] = np.nan
    for a, b in zip(attended(q, k, v, mask), got, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
