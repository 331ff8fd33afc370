from functools import partial

import numpy as np
import pytest

from actors.kernels.kernel import Operand
from actors.kernels.native import attention
from actors.kernels.native.attention import (
    ATTENTION_KERNELS,
    NativeAttention,
    NativeAttentionGrad,
)
from compiler.bfloat16 import from_bits, to_bits
from compiler.types import DType, TensorType

SHAPES = [
    # leading axes, queries, keys, width of keys, width of values
    ((2, 3), 7, 7, 4, 4),
    ((), 5, 9, 3, 2),
    ((4,), 1, 6, 2, 3),
    ((1, 2), 13, 13, 5, 1),
    ((3,), 1, 1, 1, 1),
    ((2,), 30, 50, 16, 48),
    ((2, 2), 70, 70, 33, 64),
    ((0, 2), 3, 3, 2, 2),
    ((2,), 0, 3, 2, 2),
]

LONG = ((2,), 300, 530, 24, 40)

FORWARD, BACKWARD = ATTENTION_KERNELS


@pytest.fixture(params=["tiny blocks", "usual blocks"])
def blocks(request, monkeypatch):
    """Runs a test with blocks of 6 queries by 16 keys, of two heads a chunk, as well."""
    if request.param == "tiny blocks":
        monkeypatch.setattr(attention, "_KEYS", 16)
        monkeypatch.setattr(attention, "_STRIP", 6)
        monkeypatch.setattr(attention, "_BLOCK", 12)


def probabilities(q, k, scale, causal):
    """Return the probabilities and lse in float64, row by row."""
    scores = scale * np.einsum("...id,...jd->...ij", q.astype(np.float64), k.astype(np.float64))
    rows, columns = scores.shape[-2:]
    p, lse = np.zeros(scores.shape), np.zeros(scores.shape[:-1])
    for i in range(rows):
        seen = scores[..., i, : i + 1 + columns - rows if causal else columns]
        largest = seen.max(axis=-1, keepdims=True, initial=-1e300)
        e = np.exp(seen - largest)
        p[..., i, : seen.shape[-1]] = e / e.sum(axis=-1, keepdims=True)
        lse[..., i] = np.log(e.sum(axis=-1)) + largest[..., 0]
    return p, lse


def attend(q, k, v, scale, causal):
    p, lse = probabilities(q, k, scale, causal)
    return np.einsum("...ij,...je->...ie", p, v), lse


def pull(dy, q, k, v, scale, causal, y=None):
    """Return dq, dk, dv in float64, through the probabilities, as if y had been computed."""
    p, _ = probabilities(q, k, scale, causal)
    dp = np.einsum("...ie,...je->...ij", dy.astype(np.float64), v.astype(np.float64))
    of_rows = (dp * p) if y is None else dy.astype(np.float64) * y
    ds = scale * p * (dp - of_rows.sum(axis=-1, keepdims=True))
    return (
        np.einsum("...ij,...jd->...id", ds, k),
        np.einsum("...ij,...id->...jd", ds, q),
        np.einsum("...ij,...ie->...je", p, dy),
    )


def laid_out(shape, kind, seed):
    """Return random float32 whose rows are contiguous and lie as `kind` says."""
    *batch, rows, width = shape
    if kind == "apart":
        array = np.empty((*batch, rows + 1, width + 5), np.float32)[..., 1:, 2 : 2 + width]
    elif kind == "turned":  # [rows, batch, width], as heads lie in a projection
        array = np.moveaxis(np.empty((rows, *batch, width), np.float32), 0, -2)
    else:
        array = np.empty(shape, np.float32)
    array[...] = np.random.default_rng(seed).standard_normal(shape)
    return array


def operands(case, kind="dense"):
    batch, rows, columns, width, out = case
    shapes = ((rows, width), (columns, width), (columns, out), (rows, out))
    return tuple([laid_out((*batch, *end), kind, seed) for seed, end in enumerate(shapes)])


def forward(native_call, q, k, v, dy, attrs):
    lse = np.empty(q.shape[:-1], np.float32)
    return native_call.call(NativeAttention(), attrs, (q, k, v), (dy, lse))


def backward(native_call, q, k, v, dy, attrs):
    y, lse = forward(native_call, q, k, v, dy, attrs)
    return native_call.call(NativeAttentionGrad(), attrs, (dy, q, k, v, y, lse), (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["dense", "apart", "turned"])
def test_attention_agrees_with_float64_row_by_row(kind, causal, native, native_call, blocks):
    for case in (*SHAPES, LONG):
        q, k, v, dy = operands(case, kind)
        y, lse = forward(native_call, q, k, v, dy, {"scale": 0.7, "causal": causal})
        expected = attend(q, k, v, 0.7, causal)
        np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["dense", "apart", "turned"])
def test_its_gradient_agrees_with_float64_through_the_probabilities(
    kind, causal, native, native_call, blocks
):
    for case in (*SHAPES, LONG):
        q, k, v, dy = operands(case, kind)
        got = backward(native_call, q, k, v, dy, {"scale": 0.4, "causal": causal})
        for array, expected in zip(got, pull(dy, q, k, v, 0.4, causal), strict=True):
            np.testing.assert_allclose(array, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [-1e4, -60, 60, 1e4])
def test_scores_far_from_zero_are_right(offset, causal, native, native_call, blocks):
    q, k, v, dy = operands(((3,), 20, 40, 4, 3))
    k[:, :, 0], q[1:, :, 0] = 1, offset  # head 0 stays near zero
    k[2, ::3, 0] = 0.5
    attrs = {"scale": 1.0, "causal": causal}
    y, lse = forward(native_call, q, k, v, dy, attrs)
    expected = attend(q, k, v, 1.0, causal)
    # Scores of 1e4 are known to about 1e-3 in float32.
    tolerance = 1e-5 * max(1.0, abs(offset) / 10)
    np.testing.assert_allclose(y, expected[0], atol=tolerance)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6, atol=tolerance)
    got = backward(native_call, q, k, v, dy, attrs)
    for array, right in zip(got, pull(dy, q, k, v, 1.0, causal), strict=True):
        scale = max(1.0, float(np.abs(right).max()))
        np.testing.assert_allclose(array, right, atol=4 * tolerance * scale)


def test_keys_without_any_weight_in_the_first_blocks_count_nothing(native, native_call, blocks):
    q, k, v, dy = operands(((1,), 3, 40, 4, 4))
    q[...] = 1
    k[:, :37] = -np.inf
    y, lse = forward(native_call, q, k, v, dy, {"scale": 1.0, "causal": False})
    expected = attend(q, k[:, 37:], v[:, 37:], 1.0, False)
    np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_no_number_spoils_its_own_row_only(value, native, native_call, blocks):
    q, k, v, dy = operands(((2,), 9, 9, 4, 4))
    k[...] = np.abs(k)
    q[1, 4] = value
    attrs = {"scale": 1.0, "causal": True}
    y, lse = forward(native_call, q, k, v, dy, attrs)
    assert np.isnan(y[1, 4]).all()
    assert np.isnan(lse[1, 4])
    y[1, 4], lse[1, 4] = 0, 0
    assert np.isfinite(y).all()
    assert np.isfinite(lse).all()


def test_hidden_keys_change_no_bit(native, native_call, blocks):
    attrs = {"scale": 0.5, "causal": True}
    q, k, v, dy = operands(((2,), 40, 40, 8, 8))
    before = forward(native_call, q, k, v, dy, attrs)
    k[:, 20:], v[:, 20:] = 77, 3
    after = forward(native_call, q, k, v, dy, attrs)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[:, :20], new[:, :20])


def test_one_thread_and_two_give_the_same_bits(with_threads, native_call, blocks):
    q, k, v, dy = operands(((3, 5), 100, 110, 20, 24))
    attrs = {"scale": 0.3, "causal": True}
    for run in (forward, backward):
        make = partial(run, native_call, q, k, v, dy, attrs)
        one, two = with_threads(1, make), with_threads(2, make)
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("over", [(4, 2, 3), (1, 3, 2), (0, 2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_may_lie_over_operands(over, causal, native, blocks):
    q, k, v, dy = operands(((4,), 50, 50, 16, 16))
    y, lse = attend(q, k, v, 0.5, causal)
    inputs = [dy, q, k, v, *(x.astype(np.float32) for x in (y, lse))]
    expected = pull(dy, q, k, v, 0.5, causal)
    attrs = {"scale": 0.5, "causal": causal}
    shapes = tuple(map(as_operand, inputs)), tuple(map(as_operand, (q, k, v)))
    needs = NativeAttentionGrad().query(attrs, *shapes)
    assert {*enumerate(over)} <= {*needs.in_place}
    outputs = tuple([inputs[index] for index in over])
    launch = NativeAttentionGrad().bind(attrs, tuple(inputs), outputs, scratch_of(needs))
    launch()
    for array, right in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(array, right, rtol=2e-5, atol=2e-5)


def as_operand(array, dtype=None):
    kind = dtype or DType(array.dtype.name)
    return Operand(TensorType(kind, array.shape), 0, array.strides)


def scratch_of(needs):
    raw = np.full(needs.workspace_bytes + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + needs.workspace_bytes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [((2,), 40, 45, 12, 10), ((3,), 33, 35, 7, 33)])
def test_bfloat16_rounds_factors_of_the_second_products_and_results_once(
    case, causal, native, blocks
):
    """Each term of a sum is off by half a unit of its factor, and the sum by another: 2 * 2**-8."""
    halves = tuple([to_bits(x) for x in operands(case)])
    q, k, v, dy = [from_bits(x).astype(np.float64) for x in halves]
    y, lse = np.empty_like(halves[3]), np.empty(q.shape[:-1], np.float32)
    attrs = {"scale": 0.5, "causal": causal}
    run_in_place(NativeAttention(), attrs, halves[:3], (y, lse))
    p, right = probabilities(q, k, 0.5, causal)
    np.testing.assert_allclose(lse, right, rtol=1e-5, atol=1e-5)
    expect_rounded(y, "...ij,...je->...ie", p, v)
    grads = tuple([np.empty_like(x) for x in halves[:3]])
    run_in_place(NativeAttentionGrad(), attrs, (halves[3], *halves[:3], y, lse), grads)
    dp = np.einsum("...ie,...je->...ij", dy, v)
    ds = 0.5 * p * (dp - (dy * from_bits(y)).sum(axis=-1, keepdims=True))
    expect_rounded(grads[0], "...ij,...jd->...id", ds, k)
    expect_rounded(grads[1], "...ij,...id->...jd", ds, q)
    expect_rounded(grads[2], "...ij,...ie->...je", p, dy)


def expect_rounded(got, formula, a, b):
    error = np.abs(from_bits(got) - np.einsum(formula, a, b))
    assert (error <= 2**-7 * np.einsum(formula, np.abs(a), np.abs(b)) + 1e-5).all()


def run_in_place(kernel, attrs, inputs, outputs):
    types = [
        tuple([as_operand(x, DType.BFLOAT16 if x.itemsize == 2 else None) for x in group])
        for group in (inputs, outputs)
    ]
    needs = kernel.query(attrs, *types)
    kernel.bind(attrs, inputs, outputs, scratch_of(needs))()


def columns(batch, heads, rows, width, parts=3):
    """Return windows [B, H, T, D] on the parts of one array [B, T, n, H, D]."""
    whole = np.zeros((*batch, rows, parts, heads, width), np.float32)
    return [part.swapaxes(-2, -3) for part in np.moveaxis(whole, -3, 0)]


@pytest.mark.parametrize("causal", [False, True])
def test_heads_are_read_and_written_where_a_projection_has_them(
    causal, native, native_call, blocks
):
    q, k, v, dy = operands(((2, 3), 30, 30, 8, 8))
    attrs = {"scale": 0.5, "causal": causal}
    y, lse = forward(native_call, q, k, v, dy, attrs)
    grads = backward(native_call, q, k, v, dy, attrs)
    wide, given = columns((2,), 3, 30, 8), columns((2,), 3, 30, 8, 1) + columns((2,), 3, 30, 8, 1)
    for window, part in zip((*wide, given[1]), (q, k, v, dy), strict=True):
        np.copyto(window, part)
    again = np.zeros_like(lse)
    run_in_place(FORWARD, attrs, wide, (given[0], again))
    np.testing.assert_array_equal(given[0], y)
    np.testing.assert_array_equal(again, lse)
    made = columns((2,), 3, 30, 8)
    run_in_place(BACKWARD, attrs, (given[1], *wide, given[0], lse), made)
    for window, grad in zip(made, grads, strict=True):
        np.testing.assert_array_equal(window, grad)


DECLINED = {
    "float64": lambda: [x.astype(np.float64) for x in operands(SHAPES[0])],
    "elements that lie apart": lambda: [
        np.repeat(x, 2, axis=-1)[..., ::2] for x in operands(SHAPES[0])
    ],
    "rows that are too long": lambda: operands(((1,), 2, 2, 257, 4)),
    "rows of nothing": lambda: operands(((1,), 2, 2, 4, 0)),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_it_does_not_take_is_left_to_others(name, native):
    q, k, v, dy = map(as_operand, DECLINED[name]())
    lse = as_operand(np.empty(q.shape[:-1], np.float32))
    attrs = {"scale": 1.0, "causal": False}
    assert NativeAttention().query(attrs, (q, k, v), (dy, lse)) is None
    assert NativeAttentionGrad().query(attrs, (dy, q, k, v, dy, lse), (q, k, v)) is None


def test_it_takes_no_call_while_native_kernels_are_off(native):
    q, k, v, dy = map(as_operand, operands(SHAPES[0]))
    lse = as_operand(np.empty(q.shape[:-1], np.float32))
    attrs = {"scale": 1.0, "causal": False}
    assert NativeAttention().query(attrs, (q, k, v), (dy, lse)) is not None
    native.turn_off()
    assert NativeAttention().query(attrs, (q, k, v), (dy, lse)) is None


def test_scratch_grows_with_the_lengths_not_with_their_product(native):
    def scratch(kernel, length):
        q, k, v, dy = map(as_operand, operands(((1,), length, length, 64, 64)))
        lse = as_operand(np.empty(q.shape[:-1], np.float32))
        attrs = {"scale": 1.0, "causal": True}
        if isinstance(kernel, NativeAttention):
            return kernel.query(attrs, (q, k, v), (dy, lse)).workspace_bytes
        return kernel.query(attrs, (dy, q, k, v, dy, lse), (q, k, v)).workspace_bytes

    assert scratch(NativeAttention(), 4096) == scratch(NativeAttention(), 8192)
    longer = scratch(NativeAttentionGrad(), 8192) - scratch(NativeAttentionGrad(), 4096)
    assert longer == 2 * 4096 * (64 + 1) * 4
