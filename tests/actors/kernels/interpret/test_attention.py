import tracemalloc

import numpy as np
import pytest

from actors.kernels import catalogue
from actors.kernels.interpret import attention_blocks
from actors.kernels.interpret.attention_blocks import BlockExtents

SHAPES = [
    # leading axes, queries, keys, width of keys, width of values
    ((2, 3), 7, 7, 4, 4),
    ((), 5, 9, 3, 2),
    ((4,), 1, 6, 2, 3),
    ((1, 2), 13, 13, 5, 1),
    ((3,), 1, 1, 1, 1),
    ((2,), 4, 11, 1, 5),
    ((2,), 3, 3, 0, 2),
    ((2,), 3, 5, 2, 0),
    ((0, 2), 3, 3, 2, 2),
    ((2,), 0, 3, 2, 2),
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


def attend(q, k, v, scale, causal):
    """Return y, lse and the probabilities in float64, row by row."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = scale * np.einsum("...id,...jd->...ij", q, k)
    rows, columns = scores.shape[-2:]
    p, lse = np.zeros(scores.shape), np.zeros(scores.shape[:-1])
    for i in range(rows):
        seen = scores[..., i, : i + 1 + columns - rows if causal else columns]
        largest = seen.max(axis=-1, keepdims=True) if seen.size else 0.0
        e = np.exp(seen - largest)
        p[..., i, : seen.shape[-1]] = e / e.sum(axis=-1, keepdims=True)
        lse[..., i] = np.log(e.sum(axis=-1)) + np.reshape(largest, e.shape[:-1] if e.size else ())
    return np.einsum("...ij,...je->...ie", p, v), lse, p


def pull(dy, q, k, v, scale, causal):
    """Return dq, dk, dv in float64, through the probabilities."""
    _, _, p = attend(q, k, v, scale, causal)
    dp = np.einsum("...ie,...je->...ij", dy.astype(np.float64), v.astype(np.float64))
    ds = scale * p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    return (
        np.einsum("...ij,...jd->...id", ds, k),
        np.einsum("...ij,...id->...jd", ds, q),
        np.einsum("...ij,...ie->...je", p, dy),
    )


def operands(harness, case, dtype="float32", kind="dense", seed=0):
    batch, rows, columns, width, out = case
    rng = np.random.default_rng(seed)
    shapes = ((*batch, rows, width), (*batch, columns, width), (*batch, columns, out))
    return tuple(harness.strided(rng, shape, dtype, kind) for shape in shapes)


def forward(harness, q, k, v, attrs):
    y = (*q.shape[:-1], v.shape[-1])
    return harness.call("attention", attrs, (q, k, v), ((y, q.dtype), (q.shape[:-1], q.dtype)))


def backward(harness, dy, q, k, v, attrs):
    y, lse = forward(harness, q, k, v, attrs)
    types = tuple((x.shape, x.dtype) for x in (q, k, v))
    return harness.call("attention_grad", attrs, (dy, q, k, v, y, lse), types)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "permuted", "broadcast"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_agrees_with_float64_row_by_row(dtype, kind, causal, harness, blocks):
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    for case in SHAPES:
        q, k, v = operands(harness, case, dtype, kind)
        attrs = {"scale": 0.7, "causal": causal}
        y, lse = forward(harness, q, k, v, attrs)
        expected = attend(q, k, v, 0.7, causal)
        np.testing.assert_allclose(y, expected[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse, expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "permuted", "broadcast"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_its_gradient_agrees_with_float64_through_the_probabilities(
    dtype, kind, causal, harness, blocks
):
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    for case in SHAPES:
        q, k, v = operands(harness, case, dtype, kind)
        shape = (*q.shape[:-1], v.shape[-1])
        dy = harness.strided(np.random.default_rng(1), shape, dtype, kind)
        attrs = {"scale": 0.7, "causal": causal}
        got = backward(harness, dy, q, k, v, attrs)
        for array, expected in zip(got, pull(dy, q, k, v, 0.7, causal), strict=True):
            np.testing.assert_allclose(array, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [-1e4, -60, 60, 1e4])
def test_scores_far_from_zero_are_right_where_plain_exponentials_are_not(
    offset, causal, harness, blocks
):
    q, k, v = operands(harness, ((3,), 6, 8, 4, 3))
    k[:, :, 0], q[1:, :, 0] = 1, offset  # head 0 stays near zero
    k[2, ::3, 0] = 0.5
    attrs = {"scale": 1.0, "causal": causal}
    y, lse = forward(harness, q, k, v, attrs)
    expected = attend(q, k, v, 1.0, causal)
    # Scores of 1e4 are known to about 1e-3 in float32.
    tolerance = 1e-5 * max(1.0, abs(offset) / 10)
    np.testing.assert_allclose(y, expected[0], atol=tolerance)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6, atol=tolerance)
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    got = backward(harness, dy, q, k, v, attrs)
    for array, right in zip(got, pull(dy, q, k, v, 1.0, causal), strict=True):
        scale = max(1.0, float(np.abs(right).max()))
        np.testing.assert_allclose(array, right, atol=4 * tolerance * scale)


@pytest.mark.parametrize("own_blocks", [0, 1 << 30])
@pytest.mark.parametrize("kind", ["dense", "permuted"])
def test_heads_are_right_however_they_are_grouped(kind, own_blocks, harness, monkeypatch):
    monkeypatch.setattr(attention_blocks, "STRIPS", (8, 8))
    monkeypatch.setattr(attention_blocks, "OWN_BLOCKS", own_blocks)
    q, k, v = operands(harness, ((5, 7), 20, 20, 4, 6), kind=kind)
    k[1, 2, 1], q[1, 2, :, 0] = -50, 4  # this head needs the maxima
    dy = harness.strided(np.random.default_rng(1), v.shape, "float32", kind)
    attrs = {"scale": 0.5, "causal": True}
    right = (*attend(q, k, v, 0.5, True)[:2], *pull(dy, q, k, v, 0.5, True))
    sizes = []
    for limit in (1, 5_000, 12_000, 30_000, 1 << 20):
        monkeypatch.setattr(attention_blocks, "GROUP_BYTES", limit)
        got = (*forward(harness, q, k, v, attrs), *backward(harness, dy, q, k, v, attrs))
        for array, expected in zip(got, right, strict=True):
            np.testing.assert_allclose(array, expected, rtol=2e-4, atol=2e-4)
        sizes.append(calls_of(harness, (5, 7), 20, 4)[0][1].workspace_bytes)
    assert len(set(sizes)) == len(sizes)


def chain(harness, dy, q, k, v, attrs):
    """Return what attention replaces: products and a softmax, and the gradients of each."""
    scores = (*q.shape[:-1], k.shape[-2])
    float32 = np.float32

    def matmul(a, b):
        shape = (*a.shape[:-1], b.shape[-1])
        return harness.call("matmul", {}, (a, b), ((shape, float32),))[0]

    s = matmul(q, k.swapaxes(-1, -2))
    (p,) = harness.call("softmax", attrs, (s,), ((scores, float32),))
    dp = matmul(dy, v.swapaxes(-1, -2))
    grad = {"scale": attrs["scale"]}
    (ds,) = harness.call("softmax_grad", grad, (dp, p), ((scores, float32),))
    return (
        matmul(p, v),
        matmul(ds, k),
        matmul(ds.swapaxes(-1, -2), q),
        matmul(p.swapaxes(-1, -2), dy),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_it_is_about_as_accurate_as_the_chain_that_it_replaces(spread, causal, harness):
    q, k, v = operands(harness, ((2,), 160, 160, 32, 32), seed=3)
    q *= np.float32(spread)
    dy = np.random.default_rng(4).standard_normal(q.shape).astype(np.float32)
    attrs = {"scale": 32**-0.5, "causal": causal}
    right = (attend(q, k, v, 32**-0.5, causal)[0], *pull(dy, q, k, v, 32**-0.5, causal))
    ours = (
        forward(harness, q, k, v, attrs)[0],
        *backward(harness, dy, q, k, v, attrs),
    )
    theirs = chain(harness, dy, q, k, v, attrs)
    # The gradient's probabilities come from an lse of float32, half a unit in the last place off.
    for mine, other, expected, limit in zip(ours, theirs, right, (1.1, 1.5, 1.5, 1.5), strict=True):
        error, allowed = (np.sqrt(np.square(x - expected).mean()) for x in (mine, other))
        assert error < limit * allowed


@pytest.mark.parametrize("kind", ["dense", "permuted"])
def test_two_launches_give_the_same_bits(kind, harness, blocks):
    q, k, v = operands(harness, ((2, 3), 40, 40, 8, 8), kind=kind)
    dy = harness.strided(np.random.default_rng(1), q.shape, "float32", kind)
    attrs = {"scale": 0.35, "causal": True}
    first, again = (backward(harness, dy, q, k, v, attrs) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_may_lie_over_the_outputs_and_the_values(causal, harness, blocks):
    q, k, v = operands(harness, ((2, 3), 9, 9, 4, 4))
    dy = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    attrs = {"scale": 0.5, "causal": causal}
    expected = backward(harness, dy, q, k, v, attrs)
    y, lse = forward(harness, q, k, v, attrs)
    dk = np.empty_like(k)
    launch, needs, _ = harness.bind("attention_grad", attrs, (dy, q, k, v, y, lse), (y, dk, v))
    assert needs.in_place == ((0, 4), (2, 3))
    launch()
    for got, right in zip((y, dk, v), expected, strict=True):
        np.testing.assert_array_equal(got, right)


def calls_of(harness, batch, length, width):
    """Return what a causal call and its gradient give when bound: launch, needs, workspace."""
    q = np.ones((*batch, length, width), np.float32)
    y, lse = np.zeros_like(q), np.full(q.shape[:-1], 5, np.float32)
    attrs = {"scale": width**-0.5, "causal": True}
    return (
        harness.bind("attention", attrs, (q, q, q), (y, lse)),
        harness.bind("attention_grad", attrs, (y, q, q, q, y, lse), (y + 0, y + 1, y + 2)),
    )


def objects_bytes(bind):
    """Return the bytes that Python keeps for what `bind` returns, without numpy's arrays."""
    tracemalloc.start()
    try:
        bound = bind()
        no_data = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
        kept = tracemalloc.take_snapshot().filter_traces([no_data])
        assert bound
        return sum(trace.size for trace in kept.traces)
    finally:
        tracemalloc.stop()


def test_bound_objects_grow_by_a_few_views_a_head_and_not_by_its_blocks(harness, monkeypatch):
    monkeypatch.setattr(attention_blocks, "GROUP_BYTES", 1)  # a head is a group

    def bytes_per_head():
        few, many = (objects_bytes(lambda n=n: calls_of(harness, (n,), 320, 16)) for n in (16, 48))
        return (many - few) / 32

    calls_of(harness, (2,), 320, 16)  # what is kept once is kept before
    assert bytes_per_head() < 15_000  # 18 calls of both ops, and their views
    monkeypatch.setattr(attention_blocks, "OWN_BLOCKS", 1 << 30)
    assert bytes_per_head() > 50_000


@pytest.mark.parametrize("kind", ["dense", "permuted"])
@pytest.mark.parametrize("spread", [1, 100])
def test_shared_calls_allocate_no_arrays(kind, spread, harness, monkeypatch):
    monkeypatch.setattr(attention_blocks, "OWN_BLOCKS", 0)
    monkeypatch.setattr(attention_blocks, "GROUP_BYTES", 200_000)  # two heads, or one
    q, k, v = operands(harness, ((3, 5), 160, 160, 32, 32), kind=kind)
    q *= np.float32(spread)  # the wider one needs the maxima
    y, lse, dq, dk = (np.empty(s, np.float32) for s in (q.shape, q.shape[:-1], k.shape, k.shape))
    attrs = {"scale": 32**-0.5, "causal": True}
    launches = (
        harness.bind("attention", attrs, (q, k, v), (y, lse))[0],
        harness.bind(
            "attention_grad", attrs, (y, q, k, v, y, lse), (dq, dk, np.empty(v.shape, v.dtype))
        )[0],
    )
    tracemalloc.start()
    try:
        for launch in launches:
            launch()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            launch()
            after, peak = tracemalloc.get_traced_memory()
            assert peak - before < 16_384  # the scores of a late strip take 20 KiB a head
            assert after - before < 4_096
    finally:
        tracemalloc.stop()


def scratch_bytes(harness, rows, columns, causal, heads=48):
    q, k = (np.empty((heads, n, 64), np.float32) for n in (rows, columns))
    y, lse = np.empty((heads, rows, 64), np.float32), np.empty((heads, rows), np.float32)
    attrs = {"scale": 0.125, "causal": causal}
    sizes = []
    for op, inputs, outputs in (
        ("attention", (q, k, k), (y, lse)),
        ("attention_grad", (y, q, k, k, y, lse), (q, k, k)),
    ):
        call = [tuple(map(harness.operand, arrays)) for arrays in (inputs, outputs)]
        sizes.append(catalogue.choose(op, attrs, *call)[1].workspace_bytes)
    return sizes


def test_scratch_grows_with_the_length_and_not_with_its_square(harness):
    at_most = attention_blocks.GROUP_BYTES
    for length in (64, 256):
        assert max(scratch_bytes(harness, length, length, True)) < 1.1 * at_most
    for causal in (False, True):
        sizes = [scratch_bytes(harness, n, n, causal, heads=1) for n in (2048, 4096, 8192)]
        for once, twice, four_times in zip(*sizes, strict=True):
            assert twice < 2.1 * once
            assert four_times < 2.1 * twice


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 7), (5, 12), (64, 64), (300, 700)])
def test_blocks_cover_what_is_visible_and_nothing_that_is_wholly_hidden(
    rows, columns, by_columns, blocks
):
    for causal in (False, True):
        e = BlockExtents(1, rows, columns, 1, 1, causal)
        visits = np.zeros((rows, columns), int)
        visible = np.tri(rows, columns, columns - rows if causal else columns, dtype=bool)
        for strip, chunks in e.strips_of_columns() if by_columns else e.strips():
            for chunk in chunks:
                i, j = (chunk, strip) if by_columns else (strip, chunk)
                block = np.ix_(i, j)
                assert visible[block].any()
                visits[block] += 1
        assert visits.max() == 1
        assert (visits[visible] == 1).all()


def test_a_mask_saves_work_and_the_estimate_says_so(harness):
    q = np.empty((4, 256, 64), np.float32)
    lse = np.empty((4, 256), np.float32)
    for op, inputs, outputs in (
        ("attention", (q, q, q), (q, lse)),
        ("attention_grad", (q, q, q, q, q, lse), (q, q, q)),
    ):
        call = [tuple(map(harness.operand, arrays)) for arrays in (inputs, outputs)]
        full, half = (
            catalogue.choose(op, {"scale": 0.125, "causal": causal}, *call)[1]
            for causal in (False, True)
        )
        flops = [sum(p.flops for p in needs.work.products) for needs in (full, half)]
        assert 0.5 < flops[1] / flops[0] < 0.6
        assert half.duration_ns < full.duration_ns


def test_other_dtypes_and_outputs_that_blas_cannot_write_are_refused(harness):
    q = np.empty((2, 3, 4), np.float16)
    attrs = {"scale": 0.5, "causal": False}
    with pytest.raises(LookupError, match=r"no host kernel takes attention\(float16"):
        harness.bind("attention", attrs, (q, q, q), (q, q[..., 0]))
    q = q.astype(np.float32)
    y = np.empty((2, 3, 8), np.float32)[..., ::2]
    with pytest.raises(LookupError, match=r"attention\(.*strides \(96, 32, 8\)"):
        harness.bind("attention", attrs, (q, q, q), (y, np.empty((2, 3), np.float32)))


@pytest.mark.parametrize("value", [1e25, 1e30, 1e37])
def test_values_so_large_that_plain_sums_overflow_give_what_softmax_gives(harness, value):
    q = np.full((1, 1, 4), 6.0, np.float32)
    k, v = np.full((1, 2, 4), 5.0, np.float32), np.full((1, 2, 1), value, np.float32)
    y, _ = forward(harness, q, k, v, {"scale": 32 / 60, "causal": False})
    np.testing.assert_allclose(y, np.float32(value), rtol=1e-6)
