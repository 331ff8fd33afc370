"""Attention and its gradient on a GPU, chunk by chunk, against the references in float64."""

import numpy as np
import pytest
from emulated_run import loaded, stored

import compiler.ops.families.attention  # noqa: F401  # registers the ops
from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import attention, nvrtc
from actors.kernels.cuda.attention import CudaAttention, CudaAttentionGrad
from actors.kernels.cuda.attention_rows import attention_text
from actors.kernels.cuda.calls import RunProduct
from actors.kernels.cuda.kernel import DeviceView, gpu_named
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, contiguous_strides
from compiler.graph.registry import find_op, reference

GPU = gpu_named("h200")
FORWARD, BACKWARD = CudaAttention(GPU), CudaAttentionGrad(GPU)
SHAPES = [
    # leading axes, queries, keys, width of keys, width of values
    ((2, 3), 7, 7, 4, 4),
    ((), 5, 9, 3, 2),
    ((4,), 1, 6, 2, 3),
    ((1, 2), 13, 13, 5, 1),
    ((3,), 1, 1, 1, 1),
    ((2,), 4, 11, 1, 5),
    ((0, 2), 3, 3, 2, 2),
    ((2,), 0, 3, 2, 2),
    ((2,), 3, 3, 0, 2),
    ((2,), 3, 5, 2, 0),
    ((2,), 70, 75, 33, 40),
]
LIMITS = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}
FLOATS = tuple(LIMITS)
both_masks = pytest.mark.parametrize("causal", [False, True])


@pytest.fixture(params=["tiny chunks", "usual chunks"])
def chunks(request, monkeypatch):
    """Runs a test with chunks of few rows of few heads as well."""
    if request.param != "usual chunks":
        monkeypatch.setattr(attention, "CHUNK_BYTES", 700)
        monkeypatch.setattr(attention, "_LEAST_ROWS", 3)


def laid_out(x, kind):
    """Return the same numbers in another layout."""
    *batch, rows, width = x.shape
    if kind == "transposed":
        out = np.empty((*batch, width, rows), x.dtype).swapaxes(-1, -2)
    elif kind == "windowed":
        out = np.empty((*batch, rows + 1, width + 5), x.dtype)[..., 1:, 2 : 2 + width]
    elif kind == "turned":  # [rows, batch, width], as heads lie in a projection
        out = np.moveaxis(np.empty((rows, *batch, width), x.dtype), 0, -2)
    else:
        return x
    out[...] = x
    return out


def operands(case, dtype, kind="dense"):
    """Return dy, q, k and v, stored."""
    batch, rows, columns, width, out = case
    shapes = (rows, out), (rows, width), (columns, width), (columns, out)
    found = [
        np.random.default_rng(i).standard_normal((*batch, *end)) for i, end in enumerate(shapes)
    ]
    return [laid_out(stored(x, dtype), kind) for x in found]


def types_of(dtype, *shapes):
    return tuple([TensorType(DType(dtype), shape) for shape in shapes])


def statistics(dtype):
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def forward(emulated_run, dtype, q, k, v, attrs, strides=None, **more):
    (y,), (lse,) = (
        types_of(dtype, (*q.shape[:-1], v.shape[-1])),
        types_of(statistics(dtype), q.shape[:-1]),
    )
    options = {"dtypes": [DType(dtype)] * 3, "output_strides": [strides, None], **more}
    return emulated_run(FORWARD, attrs, (q, k, v), (y, lse), **options)


def backward(emulated_run, dtype, dy, q, k, v, y, lse, attrs, strides=None, **more):
    dtypes = [*[DType(dtype)] * 5, DType(statistics(dtype))]
    types = types_of(dtype, q.shape, k.shape, v.shape)
    options = {"dtypes": dtypes, "output_strides": strides, **more}
    return emulated_run(BACKWARD, attrs, (dy, q, k, v, y, lse), types, **options)


def expected(op, attrs, *inputs):
    with np.errstate(all="ignore"):
        return reference.get(find_op(op))(Attrs(attrs), *[loaded(x) for x in inputs])


def agree(got, wanted, limit):
    for array, right in zip(got, wanted, strict=True):
        scale = max(1.0, float(np.abs(right).max(initial=0)))
        np.testing.assert_allclose(loaded(array), right, rtol=limit, atol=limit * scale)


@both_masks
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *[(dtype, "dense") for dtype in FLOATS],
        *[("float32", kind) for kind in ("transposed", "windowed", "turned")],
        ("bfloat16", "turned"),
    ],
)
def test_attention_and_its_gradient_agree_with_float64(dtype, kind, causal, emulated_run, chunks):
    attrs = {"scale": 0.7, "causal": causal}
    for case in SHAPES if kind in ("dense", "turned") else SHAPES[:4]:
        dy, q, k, v = operands(case, dtype, kind)
        found = forward(emulated_run, dtype, q, k, v, attrs, dy.strides, seeds=(1,))
        y, lse = expected("attention", attrs, q, k, v)
        agree(found.outputs, (y, lse), LIMITS[dtype])
        given = [laid_out(found.outputs[0], kind), found.outputs[1]]
        strides = [x.strides for x in (q, k, v)]
        made = backward(emulated_run, dtype, dy, q, k, v, *given, attrs, strides, seeds=(1,))
        right = expected("attention_grad", attrs, dy, q, k, v, *given)
        agree(made.outputs, right, 2 * LIMITS[dtype])


MASKS = {"none": None, "whole": (2, 3, 9, 40), "of keys": (2, 1, 1, 40), "of rows": (1, 1, 9, 1)}


@pytest.mark.parametrize("dropped", ["", "dropped", "numbered"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_masks_and_dropout_agree_with_the_reference(dtype, name, dropped, emulated_run, chunks):
    dy, q, k, v = operands(((2, 3), 9, 40, 6, 8), dtype)
    attrs, more, dtypes = {"scale": 0.7, "causal": name == "none"}, (), ()
    if MASKS[name]:
        rng = np.random.default_rng(3)
        mask = np.where(rng.random(MASKS[name]) < 0.3, -np.inf, rng.standard_normal(MASKS[name]))
        mask[..., -1, :] = -np.inf if mask.shape[-2] > 1 else mask[..., -1, :]
        more, dtypes = (stored(mask, dtype),), (DType(dtype),)
    if dropped:
        more = (*more, np.array(7), np.array(9))
        attrs, dtypes = {**attrs, "p": 0.4, "key": 2}, (*dtypes, DType.INT64, DType.INT64)
    if dropped == "numbered":
        more = (*more, np.array([[5, 720, 77], [4000, 0, 13]]))
        attrs, dtypes = {**attrs, "numbered": True}, (*dtypes, DType.INT64)
    own, low = DType(dtype), DType(statistics(dtype))
    made = types_of(dtype, dy.shape) + types_of(statistics(dtype), q.shape[:-1])
    options = {"dtypes": [own] * 3 + [*dtypes], "seeds": (1,)}
    y, lse = emulated_run(FORWARD, attrs, (q, k, v, *more), made, **options).outputs
    right = expected("attention", attrs, q, k, v, *more)
    some = right[1] > -1e30  # queries that see something
    assert (lse[~some] < -1e30).all()
    agree((y, lse[some]), (right[0], right[1][some]), LIMITS[dtype])
    options = {"dtypes": [*[own] * 5, low, *dtypes], "seeds": (1,)}
    types = types_of(dtype, q.shape, k.shape, v.shape)
    given = (dy, q, k, v, y, lse, *more)
    found = emulated_run(BACKWARD, attrs, given, types, **options)
    agree(found.outputs, expected("attention_grad", attrs, *given), 2 * LIMITS[dtype])


@pytest.mark.parametrize("rows", [40, 65])
def test_causal_queries_beyond_the_last_key_see_all(rows, emulated_run, chunks):
    dy, q, k, v = operands(((2,), rows, 21, 4, 4), "float32")
    attrs = {"scale": 0.7, "causal": True}
    y, lse = forward(emulated_run, "float32", q, k, v, attrs, seeds=(1,)).outputs
    agree((y, lse), expected("attention", attrs, q, k, v), 1e-5)
    made = backward(emulated_run, "float32", dy, q, k, v, y, lse, attrs, seeds=(1,)).outputs
    agree(made, expected("attention_grad", attrs, dy, q, k, v, y, lse), 2e-5)


@pytest.mark.parametrize("columns", [31, 33, 1024, 1025, 2100, 4100, 8192, 8193])
def test_rows_of_every_length_have_threads_enough(columns, emulated_run):
    """A warp for each, a block of 64 to 256 threads, and rows that no block holds at once."""
    dy, q, k, v = operands(((1,), 3, columns, 2, 2), "float32")
    attrs = {"scale": 0.7, "causal": True}
    y, lse = forward(emulated_run, "float32", q, k, v, attrs, seeds=(1,)).outputs
    agree((y, lse), expected("attention", attrs, q, k, v), 1e-5)
    made = backward(emulated_run, "float32", dy, q, k, v, y, lse, attrs, seeds=(1,)).outputs
    agree(made, expected("attention_grad", attrs, dy, q, k, v, y, lse), 1e-5)


@both_masks
def test_any_order_of_threads_gives_the_same_bits(causal, emulated_run, chunks):
    dy, q, k, v = operands(((2,), 20, 24, 8, 5), "bfloat16")
    attrs = {"scale": 0.7, "causal": causal}
    y, lse = forward(emulated_run, "bfloat16", q, k, v, attrs, seeds=(0, 1, 2)).outputs
    backward(emulated_run, "bfloat16", dy, q, k, v, y, lse, attrs, seeds=(0, 1, 2))


@both_masks
@pytest.mark.parametrize("offset", [-1e4, -60, 60, 1e4])
def test_scores_far_from_zero_are_right(offset, causal, emulated_run, chunks):
    dy, q, k, v = operands(((3,), 20, 40, 4, 3), "float32")
    k[:, :, 0], q[1:, :, 0] = 1, offset  # head 0 stays near zero
    k[2, ::3, 0] = 0.5
    attrs = {"scale": 1.0, "causal": causal}
    y, lse = forward(emulated_run, "float32", q, k, v, attrs, seeds=(1,)).outputs
    right = expected("attention", attrs, q, k, v)
    limit = 1e-5 * max(1.0, abs(offset) / 10)  # scores of 1e4 are known to about 1e-3
    agree((y,), right[:1], limit)
    np.testing.assert_allclose(lse, right[1], rtol=1e-6, atol=limit)
    got = backward(emulated_run, "float32", dy, q, k, v, y, lse, attrs, seeds=(1,)).outputs
    agree(got, expected("attention_grad", attrs, dy, q, k, v, *right), 4 * limit)


@both_masks
@pytest.mark.parametrize(
    ("dtype", "over"),
    [
        *[("float32", (given,)) for given in (4, 1, 0)],
        *[("bfloat16", given) for given in ((4, 2, 3), (1, 3, 2), (0, 2, 3))],
    ],
)
def test_gradients_may_lie_over_operands_that_are_done_with(
    dtype, over, causal, emulated_run, chunks
):
    dy, q, k, v = operands(((2, 2), 10, 10, 4, 4), dtype)
    attrs = {"scale": 0.5, "causal": causal}
    y, lse = forward(emulated_run, dtype, q, k, v, attrs, seeds=(1,)).outputs
    apart = backward(emulated_run, dtype, dy, q, k, v, y, lse, attrs, seeds=(1,))
    pairs = tuple(enumerate(over))
    found = backward(emulated_run, dtype, dy, q, k, v, y, lse, attrs, in_place=pairs)
    for one, other in zip(found.outputs, apart.outputs, strict=True):
        np.testing.assert_array_equal(one, other)
    wanted = {(0, 0), (0, 1), (0, 4)}
    wanted |= {(1, 2), (1, 3), (2, 2), (2, 3)} if dtype == "bfloat16" else set()
    assert {*found.needs.in_place} == wanted


BATCH, ROWS, COLUMNS, WIDTH, OUT = 2, 21, 25, 5, 7


def both_ways(emulated_run, dtype, dy, q, k, v, attrs):
    y, lse = forward(emulated_run, dtype, q, k, v, attrs, seeds=(1,)).outputs
    dq, dk, dv = backward(emulated_run, dtype, dy, q, k, v, y, lse, attrs, seeds=(1,)).outputs
    found = {"y": y, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: loaded(x) for name, x in found.items()}


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [("float32", np.nan), ("float32", np.inf), ("float32", -np.inf), ("bfloat16", np.nan)],
)
@pytest.mark.parametrize("key", [24, 15])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_queries_that_do_not_see_a_bad_position_do_not_feel_it(
    where, bad, key, dtype, emulated_run, chunks
):
    attrs = {"scale": 0.5, "causal": True}
    dy, q, k, v = operands(((BATCH,), ROWS, COLUMNS, WIDTH, OUT), dtype)
    clean = both_ways(emulated_run, dtype, dy, q, k, v, attrs)
    if where in ("key", "both"):
        k[:, key] = stored(np.array(bad), dtype)
    if where in ("value", "both"):
        v[:, key] = stored(np.array(bad), dtype)
    got = both_ways(emulated_run, dtype, dy, q, k, v, attrs)
    unseen = key - (COLUMNS - ROWS)
    for name in ("y", "lse", "dq"):
        np.testing.assert_array_equal(got[name][:, :unseen], clean[name][:, :unseen], name)
    if where != "key":
        assert not np.isfinite(got["y"][:, unseen:]).any()
    if where == "both" and np.isnan(bad):
        assert np.isnan(got["y"][:, unseen:]).all()
        assert np.isnan(got["dq"][:, unseen:]).all()


def test_a_bad_value_of_one_head_leaves_the_others_alone(emulated_run, chunks):
    attrs = {"scale": 0.5, "causal": True}
    dy, q, k, v = operands(((BATCH,), ROWS, COLUMNS, WIDTH, OUT), "float32")
    clean = both_ways(emulated_run, "float32", dy, q, k, v, attrs)
    v[0, 20, 3] = np.nan
    got = both_ways(emulated_run, "float32", dy, q, k, v, attrs)
    for name, array in got.items():
        np.testing.assert_array_equal(array[1], clean[name][1], name)
    np.testing.assert_array_equal(
        np.isnan(got["y"][0, 16:]), [[column == 3 for column in range(7)]] * 5
    )


def test_keys_without_any_weight_count_nothing(emulated_run, chunks):
    _, q, k, v = operands(((1,), 3, 40, 4, 4), "float32")
    q[...] = 1
    k[:, :37] = -np.inf
    attrs = {"scale": 1.0, "causal": False}
    found = forward(emulated_run, "float32", q, k, v, attrs, seeds=(1,))
    agree(found.outputs, expected("attention", attrs, q, k[:, 37:], v[:, 37:]), 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_query_that_is_no_number_spoils_its_own_row_only(value, emulated_run, chunks):
    _, q, k, v = operands(((2,), 9, 9, 4, 4), "float32")
    k[...] = np.abs(k)
    q[1, 4] = value
    y, lse = forward(emulated_run, "float32", q, k, v, {"scale": 1.0, "causal": True}).outputs
    assert np.isnan(y[1, 4]).all()
    assert np.isnan(lse[1, 4])
    y[1, 4], lse[1, 4] = 0, 0
    assert np.isfinite(y).all()
    assert np.isfinite(lse).all()


def needs_of(kernel, shapes, dtype, causal, strides=None):
    """Return the needs of a call of these shapes, statistics last among inputs or outputs."""

    def operand(shape):
        label = statistics(dtype) if len(shape) == len(shapes["q"]) - 1 else dtype
        type_ = TensorType(DType(label), shape)
        own = contiguous_strides(shape, type_.dtype.itemsize)
        if strides is not None and len(shape) == len(shapes["q"]):
            own = strides
        return Operand(type_, 0, own)

    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    y, lse = (*q[:-1], v[-1]), q[:-1]
    inputs, outputs = (
        ((q, k, v), (y, lse)) if kernel is FORWARD else ((y, q, k, v, y, lse), (q, k, v))
    )
    attrs = {"scale": 0.125, "causal": causal}
    return kernel.query(attrs, *[tuple(map(operand, s)) for s in (inputs, outputs)])


@both_masks
def test_the_library_works_where_it_may(causal):
    """It wants its workspace at multiples of 256, as the scratch of a launch lies."""
    shape = (2, 3, 601, 64)  # what else lies there is no multiple of that
    shapes = {"q": shape, "k": shape, "v": shape}
    q, lse = types_of("float32", shape, shape[:-1])
    ends = [(FORWARD, (q, q, q), (q, lse)), (BACKWARD, (q, q, q, q, q, lse), (q, q, q))]
    for kernel, *sides in ends:
        size = needs_of(kernel, shapes, "float32", causal).workspace_bytes
        scratch = DeviceView(1 << 30, TensorType(DType.UINT8, (size,)), (1,))
        views = [
            tuple([DeviceView(1 << 40, t, contiguous_strides(t.shape, 4)) for t in side])
            for side in sides
        ]
        calls = kernel.bind({"scale": 0.125, "causal": causal}, *views, scratch)
        places = [call.workspace for call in calls if isinstance(call, RunProduct)]
        assert any(places)
        assert [place % 256 for place in places] == [0] * len(places)


def heads_of(batch, heads, length, width=64):
    shape = (batch, heads, length, width)
    return {"q": shape, "k": shape, "v": shape}


def test_scratch_is_bounded_whatever_the_lengths():
    cap = attention.CHUNK_BYTES + (64 << 20)
    packed = (1024 * 3 * 768 * 2, 64 * 2, 3 * 768 * 2, 2)
    for causal in (False, True):
        assert (
            needs_of(FORWARD, heads_of(64, 12, 1024), "bfloat16", causal, packed).workspace_bytes
            < cap
        )
        for length in (1024, 16_384):
            shapes = heads_of(1, 12, length)
            assert needs_of(FORWARD, shapes, "float32", causal).workspace_bytes < cap
            assert needs_of(BACKWARD, shapes, "float32", causal).workspace_bytes < cap
    wide = needs_of(BACKWARD, heads_of(64, 12, 1024), "bfloat16", True, packed)
    assert wide.workspace_bytes < 2 * cap


def test_heads_cut_out_of_a_projection_take_hardly_more_calls_than_dense_ones():
    packed = (1024 * 3 * 768 * 2, 64 * 2, 3 * 768 * 2, 2)
    for kernel in (FORWARD, BACKWARD):
        apart, dense = (
            needs_of(kernel, heads_of(64, 12, 1024), "bfloat16", True, strides)
            for strides in (packed, None)
        )
        assert apart.duration_ns < 1.15 * dense.duration_ns


def test_a_mask_saves_work_and_the_estimate_says_so():
    for kernel in (FORWARD, BACKWARD):
        full, half = (
            needs_of(kernel, heads_of(8, 12, 4096), "bfloat16", causal).duration_ns
            for causal in (False, True)
        )
        assert half < 0.7 * full


def test_integers_are_refused():
    shapes = heads_of(1, 2, 8, 4)
    assert needs_of(FORWARD, shapes, "int32", False) is None


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("is_masked", "is_dropped"), [(False, False), (True, False), (True, True)])
def test_texts_are_built_for_every_gpu_and_spill_nothing(dtype, arch, is_masked, is_dropped):
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed")
    text = attention_text(DType(dtype), is_masked, is_dropped)
    for usage in nvrtc.usage(text, arch).values():
        assert usage.spilled_bytes == 0
        assert usage.registers <= (160 if dtype == "float64" else 96)
