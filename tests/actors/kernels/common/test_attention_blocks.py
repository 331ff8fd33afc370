"""The blocks of numpy's attention: what they cover, and what they take in scratch and objects."""

import tracemalloc

import numpy as np
import pytest
from error_texts import raises
from small_blocks import cut_attention

from actors.kernels.common import attention_blocks
from actors.kernels.common.attention_blocks import BlockExtents
from actors.kernels.host import catalogue


def calls_of(harness, batch, length, width):
    """Return what a causal call and its gradient give when bound: launch, needs, workspace."""
    q = np.ones((*batch, length, width), np.float32)
    y, lse = np.zeros_like(q), np.full(q.shape[:-1], 5, np.float32)
    attrs = {"scale": width**-0.5, "causal": True}
    return (
        harness.bind("attention", attrs, (q, q, q), (y, lse, lse)),
        harness.bind("attention_grad", attrs, (y, q, q, q, y, lse, 0 * lse), (y + 0, y + 1, y + 2)),
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
    cut_attention(monkeypatch, GROUP_BYTES=1)  # a head is a group

    def bytes_per_head():
        few, many = (objects_bytes(lambda n=n: calls_of(harness, (n,), 320, 16)) for n in (16, 48))
        return (many - few) / 32

    calls_of(harness, (2,), 320, 16)  # what is kept once is kept before
    assert bytes_per_head() < 15_000  # 18 calls of both ops, and their views; blocks take 50,000


@pytest.mark.parametrize("kind", ["dense", "permuted"])
@pytest.mark.parametrize("spread", [1, 100])
def test_shared_calls_allocate_no_arrays(kind, spread, harness, monkeypatch):
    cut_attention(monkeypatch, GROUP_BYTES=200_000)  # two heads, or one
    rng = np.random.default_rng(0)
    q, k, v = [harness.strided(rng, (3, 5, 160, 32), np.float32, kind) for _ in range(3)]
    q *= np.float32(spread)  # the wider one needs the maxima
    shapes = q.shape, q.shape[:-1], q.shape[:-1], k.shape, k.shape
    y, lse, tail, dq, dk = (np.empty(shape, np.float32) for shape in shapes)
    attrs = {"scale": 32**-0.5, "causal": True}
    launches = (
        harness.bind("attention", attrs, (q, k, v), (y, lse, tail))[0],
        harness.bind(
            "attention_grad", attrs, (y, q, k, v, y, lse, tail), (dq, dk, np.empty_like(v))
        )[0],
    )
    tracemalloc.start()
    try:
        for launch in launches:
            launch()
            peaks, kept = [], []
            # The least of some: another thread of the process may allocate meanwhile.
            for _ in range(3):
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                launch()
                after, peak = tracemalloc.get_traced_memory()
                peaks.append(peak - before)
                kept.append(after - before)
            assert min(peaks) < 16_384  # the scores of a late strip take 20 KiB a head
            assert min(kept) < 4_096
    finally:
        tracemalloc.stop()


def scratch_bytes(harness, rows, columns, causal, heads=48):
    q, k = (np.empty((heads, n, 64), np.float32) for n in (rows, columns))
    y, lse = np.empty((heads, rows, 64), np.float32), np.empty((heads, rows), np.float32)
    attrs = {"scale": 0.125, "causal": causal}
    sizes = []
    for op, inputs, outputs in (
        ("attention", (q, k, k), (y, lse, lse)),
        ("attention_grad", (y, q, k, k, y, lse, lse), (q, k, k)),
    ):
        call = [tuple(map(harness.operand, arrays)) for arrays in (inputs, outputs)]
        sizes.append(catalogue.select_kernel(op, attrs, *call)[1].workspace_bytes)
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


@pytest.fixture(params=[True, False], ids=["tiny blocks", "usual blocks"])
def blocks(request, monkeypatch):
    if request.param:
        cut_attention(monkeypatch, STRIPS=(3, 3), CHUNKS=(4, 4))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 7), (5, 12), (64, 64), (300, 700)])
def test_blocks_cover_what_is_visible_and_nothing_that_is_wholly_hidden(rows, columns):
    for causal in (False, True):
        e = BlockExtents(1, rows, columns, 1, 1, causal)
        visits = np.zeros((rows, columns), int)
        visible = np.tri(rows, columns, columns - rows if causal else columns, dtype=bool)
        for strip, chunks in e.strips():
            for chunk in chunks:
                block = np.ix_(strip, chunk)
                assert visible[block].any()
                visits[block] += 1
        assert visits.max() == 1
        assert (visits[visible] == 1).all()


def test_a_mask_saves_work_and_the_estimate_says_so(harness):
    q = np.empty((4, 256, 64), np.float32)
    lse = np.empty((4, 256), np.float32)
    for op, inputs, outputs in (
        ("attention", (q, q, q), (q, lse, lse)),
        ("attention_grad", (q, q, q, q, q, lse, lse), (q, q, q)),
    ):
        call = [tuple(map(harness.operand, arrays)) for arrays in (inputs, outputs)]
        full, half = (
            catalogue.select_kernel(op, {"scale": 0.125, "causal": causal}, *call)[1]
            for causal in (False, True)
        )
        flops = [sum(p.flops for p in needs.work.products) for needs in (full, half)]
        assert 0.5 < flops[1] / flops[0] < 0.6
        assert half.duration_ns < full.duration_ns


def test_other_dtypes_are_refused(harness):
    q = np.empty((2, 3, 4), np.int32)
    attrs = {"scale": 0.5, "causal": False}
    with raises(LookupError):
        harness.bind("attention", attrs, (q, q, q), (q, q[..., 0]))
