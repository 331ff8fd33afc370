"""What attention promises of numbers that are none, huge or hidden, on every target.

torch 2.13's scaled_dot_product_attention on the CPU lets NaN in a hidden value through to every
query; here it is a promise that it does not.
"""

from __future__ import annotations

import numpy as np
import pytest
from attention_formulas import attention, attention_grad
from emulated_run import loaded, stored
from kernel_calls import needs_of, operand
from kernel_problems import operands
from kernel_targets import TARGETS, Target, compare

from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, numpy_dtype
from compiler.graph.registry import find_op, reference
from compiler.ops.families import attention as _ops  # noqa: F401  # registers the ops

BAD = (np.nan, np.inf, -np.inf)
CAUSAL = {"scale": 0.5, "causal": True}
NAMES = "y", "lse", "tail", "dq", "dk", "dv"
ROWS, COLUMNS = 41, 45
CASE = (2,), ROWS, COLUMNS, 5, 7
both_masks = pytest.mark.parametrize("causal", [False, True])


@pytest.fixture(params=["usual", "tiny"])
def sizes(request):
    """Blocks and chunks as they are, and so small that there are many."""
    if request.param == "tiny":
        request.getfixturevalue("tiny")


class Pair:
    """The kernels of attention and of its gradient on one target, or the references."""

    def __init__(self, target, family=None):
        self.target = target
        self.family = family or (target and f"{target.name}.")

    def _run(self, op, attrs, dtypes, arrays, results, **options):
        if self.target is None:
            with np.errstate(all="ignore"):
                return reference.get(find_op(op))(Attrs(attrs), *arrays)
        name = self.target.name
        upcast = ".upcast" if (name, dtypes[0]) == ("numpy", DType.BFLOAT16) else ""
        kernel = self.target.all[f"{self.family}{op}{upcast}"]
        return self.target.run(kernel, attrs, dtypes, arrays, results, **options)[0]

    def forward(self, attrs, q, k, v, *mask, dtype="float32"):
        own, low = DType(dtype), DType("float32" if dtype == "bfloat16" else dtype)
        statistics = [TensorType(low, q.shape[:-1])] * 2
        results = TensorType(own, (*q.shape[:-1], v.shape[-1])), *statistics
        arrays = [stored(x, dtype) for x in (q, k, v, *mask)]
        return [*map(loaded, self._run("attention", attrs, [own] * len(arrays), arrays, results))]

    def both(self, attrs, dy, q, k, v, *mask, dtype="float32"):
        own, low = DType(dtype), DType("float32" if dtype == "bfloat16" else dtype)
        y, *statistics = self.forward(attrs, q, k, v, *mask, dtype=dtype)
        arrays = [stored(x, dtype) for x in (dy, q, k, v, y)]
        arrays += [stored(x, low.value) for x in statistics]
        arrays += [stored(x, dtype) for x in mask]
        results = [TensorType(own, x.shape) for x in (q, k, v)]
        dtypes = [*[own] * 5, low, low, *[own] * len(mask)]
        grads = map(loaded, self._run("attention_grad", attrs, dtypes, arrays, results))
        return dict(zip(NAMES, (y, *statistics, *grads), strict=True))


@pytest.fixture(params=["reference", *TARGETS])
def pair(request):
    """The references, and the kernels of each target."""
    if request.param == "reference":
        return Pair(None)
    fixture = {"c": "native", "cuda": "native_toolchain"}.get(request.param)
    toolchain = request.getfixturevalue(fixture) if fixture else None
    return Pair(Target(request.param, toolchain))


def drawn(case=CASE):
    q, k, v, dy = operands(case)
    return dy, q, k, v


@both_masks
@pytest.mark.parametrize("offset", [-1e4, -60, 60, 1e4])
def test_scores_far_from_zero_are_right_where_plain_exponentials_are_not(
    offset, causal, pair, sizes
):
    dy, q, k, v = drawn(((3,), 20, 40, 4, 3))
    k[:, :, 0], q[1:, :, 0] = 1, offset  # head 0 stays near zero
    k[2, ::3, 0] = 0.5
    attrs = {"scale": 1.0, "causal": causal}
    dy, q, k, v = [x.astype("f4").astype("f8") for x in (dy, q, k, v)]
    got = pair.both(attrs, dy, q, k, v)
    y, lse, tail = attention(q, k, v, **attrs)
    # Scores of 1e4 are known to about 1e-3 in float32.
    limit = 1e-5 * max(1.0, abs(offset) / 10)
    compare(got["y"], y, limit, "whole", "y")
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-6, atol=limit)
    grads = attention_grad(dy, q, k, v, y, lse, tail, **attrs)
    for name, want in zip(NAMES[3:], grads, strict=True):
        compare(got[name], want, 4 * limit, "whole", name)


LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 4e-2}
LARGE = [
    *[("reference", "", dtype) for dtype in ("float32", "float64")],
    *[("numpy", "numpy.", dtype) for dtype in ("float32", "float64")],
    *[("c", "c.", dtype) for dtype in ("float32", "bfloat16")],
    *[("cuda", "cuda.", dtype) for dtype in LIMITS],
    ("cuda", "cuda.flash_", "bfloat16"),
]
"""Targets, beginnings of names of kernels, and types."""


@pytest.fixture(params=LARGE, ids=lambda p: f"{p[1] or p[0]}{p[2]}")
def typed_pair(request):
    """Kernels and a type that they take."""
    target, family, dtype = request.param
    fixture = {"c": "native", "cuda": "native_toolchain"}.get(target)
    toolchain = request.getfixturevalue(fixture) if fixture else None
    return Pair(None if target == "reference" else Target(target, toolchain), family), dtype


def large_scores(size, dtype, masked):
    """Return operands whose scores are exact: some equal, some a last place less, some far less."""
    q, k, v, dy = operands(((2,), 37, 70, 16, 8))
    place = 2.0 ** (-52 if dtype == "float64" else -23)
    rng = np.random.default_rng(5)
    q[..., :8], k[..., 8:] = 0, 0  # one of them is 0 from the third number on
    k[..., 2:8], q[..., 8:] = [loaded(stored(x, dtype)) for x in (k[..., 2:8], q[..., 8:])]
    q[..., 0], q[..., 1] = size, size * place
    k[..., 0] = rng.choice([0.5, -0.5, 1, 1], k.shape[:-1])
    k[..., 1] = rng.choice([0, 1], k.shape[:-1])
    v, dy = [loaded(stored(x, dtype)) for x in (v, dy)]
    if not masked:
        return dy, q, k, v
    mask = rng.choice([0, 0, -size, -np.inf], (1, 37, 70))
    mask[:, 4] = -np.inf
    return dy, q, k, v, mask


@pytest.mark.thinned(3)
@pytest.mark.parametrize("exponent", [0, 13, 17, 27, 40, 66, 100])
@pytest.mark.parametrize("hidden", ["nothing", "causal", "mask"])
def test_scores_of_any_size_give_the_gradients_of_their_softmax(
    hidden, exponent, typed_pair, sizes
):
    pair, dtype = typed_pair
    size = 2.0**exponent
    arrays = large_scores(size, dtype, hidden == "mask")
    attrs = {"scale": 0.5, "causal": hidden == "causal"}
    got = pair.both(attrs, *arrays, dtype=dtype)
    with np.errstate(all="ignore"):
        y, grads, sizes_of_terms = softmax_gradients(attrs, *arrays)
    compare(got["y"], y, LIMITS[dtype], "whole", "y")
    for name, want, terms in zip(NAMES[3:], grads, sizes_of_terms, strict=True):
        compare(got[name], want, LIMITS[dtype], float(terms.max()), name)


def softmax_gradients(attrs, dy, q, k, v, mask=0.0):
    """Return y; dq, dk and dv, without a logarithm; and the sums of their terms' sizes."""
    scores = attrs["scale"] * (q @ k.swapaxes(-1, -2)) + mask
    rows, columns = scores.shape[-2:]
    if attrs["causal"]:
        scores = np.where(np.tri(rows, columns, columns - rows, dtype=bool), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
    weights = e / np.maximum(e.sum(-1, keepdims=True), 1)
    y = weights @ v
    dp = dy @ v.swapaxes(-1, -2)
    delta = (weights * dp).sum(-1, keepdims=True)
    factor, turned = attrs["scale"] * weights, weights.swapaxes(-1, -2)

    def products(ds, q, k, dy):
        return ds @ k, ds.swapaxes(-1, -2) @ q, turned @ dy

    grads = products(factor * (dp - delta), q, k, dy)
    terms = products(factor * (abs(dp) + abs(delta)), abs(q), abs(k), abs(dy))
    return y, grads, terms


def test_scores_of_a_query_whose_weight_is_on_one_key_have_no_gradient(typed_pair, sizes):
    pair, dtype = typed_pair
    q, k, v, dy = operands(((2,), 37, 70, 16, 8))
    q[..., 1:], q[..., 0] = 0, 2.0**14
    k[..., 0] = np.random.default_rng(3).permuted(np.tile(np.arange(70), (2, 1)), axis=1)
    got = pair.both({"scale": 0.5, "causal": False}, dy, q, k, v, dtype=dtype)
    assert not got["dq"].any()
    assert not got["dk"].any()
    largest = np.arange(70) == k[..., 0].argmax(-1)[:, None]
    compare(got["dv"], largest[..., None] * dy.sum(1, keepdims=True), LIMITS[dtype], "whole", "dv")


def test_a_query_that_sees_the_least_numbers_alone_weighs_its_keys_alike(typed_pair, sizes):
    pair, dtype = typed_pair
    q, k, v, dy = operands(((2,), 37, 70, 16, 8))
    least = {"float64": -np.finfo(np.float64).max, "bfloat16": -3.3895313892515355e38}
    mask = np.full((1, 37, 70), least.get(dtype, float(np.finfo(np.float32).min)))
    got = pair.both({"scale": 0.5, "causal": False}, dy, q, k, v, mask, dtype=dtype)
    even = np.broadcast_to(v.mean(1, keepdims=True), got["y"].shape)
    compare(got["y"], even, LIMITS[dtype], "whole", "y")
    shares = np.broadcast_to(dy.sum(1, keepdims=True) / 70, got["dv"].shape)
    compare(got["dv"], shares, LIMITS[dtype], "whole", "dv")


def test_keys_without_any_weight_in_the_first_blocks_count_nothing(pair, sizes):
    _, q, k, v = drawn(((1,), 3, 40, 4, 4))
    q[...] = 1
    k[:, :37] = -np.inf
    attrs = {"scale": 1.0, "causal": False}
    for got, want in zip(
        pair.forward(attrs, q, k, v), attention(q, k[:, 37:], v[:, 37:], **attrs), strict=True
    ):
        compare(got, want, 1e-5, "whole", "of three keys")


@pytest.mark.parametrize("value", BAD)
def test_a_query_that_is_no_number_spoils_its_own_row_only(value, pair, sizes):
    _, q, k, v = drawn(((2,), 9, 9, 4, 4))
    k[...] = np.abs(k)
    q[1, 4] = value
    y, lse, _ = [np.array(x) for x in pair.forward({"scale": 1.0, "causal": True}, q, k, v)]
    assert np.isnan(y[1, 4]).all()
    assert np.isnan(lse[1, 4])
    y[1, 4], lse[1, 4] = 0, 0
    assert np.isfinite(y).all()
    assert np.isfinite(lse).all()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("pair", "dtype"),
    [("reference", "float32"), *[(t, d) for t in TARGETS for d in ("float32", "bfloat16")]],
    indirect=["pair"],
)
@pytest.mark.parametrize("key", [44, 13])
@pytest.mark.parametrize("bad", [*BAD, 77.0])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_queries_that_do_not_see_a_bad_position_do_not_feel_it(where, bad, key, dtype, pair, sizes):
    dy, q, k, v = drawn()
    clean = pair.both(CAUSAL, dy, q, k, v, dtype=dtype)
    if where in ("key", "both"):
        k[:, key] = bad
    if where in ("value", "both"):
        v[:, key] = bad
    got = pair.both(CAUSAL, dy, q, k, v, dtype=dtype)
    unseen = slice(0, key - (COLUMNS - ROWS))
    # A host takes another way with the blocks that hold such a number.
    name = pair.target.name if pair.target else "reference"
    is_same = name == "cuda" or (name == "c" and np.isfinite(bad))
    tolerance = 0 if is_same else 2e-2 if dtype == "bfloat16" else 1e-5
    for name in ("y", "lse", "dq"):
        old, new = clean[name][:, unseen], got[name][:, unseen]
        np.testing.assert_allclose(new, old, rtol=tolerance, atol=tolerance, err_msg=name)
    if where != "key" and not np.isfinite(bad):
        assert not np.isfinite(got["y"][:, unseen.stop :]).any()
    if where == "both" and np.isnan(bad):
        assert np.isnan(got["y"][:, unseen.stop :]).all()
        assert np.isnan(got["dq"][:, unseen.stop :]).all()


def test_a_bad_value_of_one_head_leaves_the_others_alone(pair, sizes):
    dy, q, k, v = drawn()
    clean = pair.both(CAUSAL, dy, q, k, v)
    v[0, 20, 3] = np.nan
    got = pair.both(CAUSAL, dy, q, k, v)
    for name, array in got.items():
        np.testing.assert_allclose(array[1], clean[name][1], rtol=1e-5, atol=1e-5, err_msg=name)
    seen = np.arange(ROWS)[:, None] >= 20 - (COLUMNS - ROWS)
    np.testing.assert_array_equal(np.isnan(got["y"][0]), seen & (np.arange(7) == 3))


OVER = {
    ("numpy", "float32"): {(0, 4), (2, 3)},
    ("c", "float32"): {(0, 4), (0, 1), (0, 0), (1, 2), (1, 3), (2, 3), (2, 2)},
    ("cuda", "float32"): {(0, 0), (0, 1), (0, 4)},
    ("cuda", "bfloat16"): {(0, 0), (0, 1), (0, 4), (1, 2), (1, 3), (2, 2), (2, 3)},
}


@pytest.mark.parametrize(("target", "dtype"), OVER)
def test_gradients_are_offered_the_places_of_operands_that_are_done_with(target, dtype, native):
    """That they are right there is part of every cell of the suite of conformance."""
    machine = Target(target)
    x, lse = np.zeros((2, 2, 10, 4), numpy_dtype(DType(dtype))), np.zeros((2, 2, 10), "f4")
    one, other = operand(x, DType(dtype)), operand(lse)
    kernel = machine.all[f"{target}.attention_grad"]
    needs = needs_of(kernel, CAUSAL, (*[one] * 5, other, other), (one,) * 3)
    assert {*needs.in_place} == OVER[target, dtype]
