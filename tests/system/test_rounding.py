"""What one op rounds is what the next one reads, whatever kernel computes both.

A compiler that contracts a product of one op and a difference of the next rounds once where the
program says twice: then a difference of equal numbers is half a last place, which at 1e10 is
hundreds, and its exponential is infinite. The oracle is numpy, which rounds after each operation.
"""

import math

import numpy as np
import pytest

import actorflow as af

pytestmark = pytest.mark.host("it says where each job runs")


SIZES = (1e4, 1e6, 1e10, 3e12)


@pytest.mark.parametrize("size", SIZES)
def test_equal_numbers_have_equal_shares_after_a_product(options, computed, size):
    x = np.full((3, 7), size, np.float32)
    scaled = np.float32(size) * np.float32(0.3)

    def outputs(b):
        y = b.x * 0.3
        return {
            "softmax": af.softmax(y, dim=-1),
            "log_softmax": af.log_softmax(y, dim=-1),
            "logsumexp": y.logsumexp(-1),
            "less the largest": y - y.amax(-1, keepdim=True),
            "less itself": y - b.z * 0.3,
            "sum less product": (b.x * 0.3 + b.x) - (b.z * 0.3 + b.z),
            "slope": af.grad((af.softmax(y, dim=-1) ** 2).sum(), [b.x])[0],
        }

    expected = {
        "softmax": 1 / 7,
        "log_softmax": -math.log(7),
        "logsumexp": np.float64(scaled) + math.log(7),
        **dict.fromkeys(("less the largest", "less itself", "sum less product", "slope"), 0.0),
    }
    for name, y in computed(outputs, options, x=x, z=x.copy()).items():
        slack = 1e-8 if name == "slope" else 0.0
        np.testing.assert_allclose(y, expected[name], 5e-7, slack, err_msg=name)


@pytest.mark.parametrize("width", [8, 32, 50])
@pytest.mark.parametrize("size", [2.0**10, 2.0**17, 2.0**20])  # sums of products are exact
def test_attention_weighs_equal_scores_alike_where_its_scale_is_no_power_of_2(
    options, computed, size, width
):
    q = np.full((1, 2, 40, width), size, np.float32)
    v = np.random.default_rng(0).normal(size=q.shape).astype(np.float32)

    def outputs(b):
        y = af.attention(b.q, b.k, b.v)
        return {"y": y, "dv": af.grad(y.sum(), [b.v])[0]}

    found = computed(outputs, options, q=q, k=q.copy(), v=v)
    mean = v.astype(np.float64).mean(-2, keepdims=True)
    np.testing.assert_allclose(found["y"], np.broadcast_to(mean, v.shape), 2e-6, 2e-7)
    # A probability is exp(score - lse), and lse has last places of the size of the score.
    place = np.spacing(np.float32(size * size * math.sqrt(width)))
    assert np.isfinite(found["dv"]).all()
    if place < 1:
        np.testing.assert_allclose(found["dv"], 1.0, math.expm1(place))


def formulas(seed):
    """Return a function of x, y and z by arithmetic alone, and its text."""
    rng = np.random.default_rng(seed)
    terms = ["x", "y", "z", "0.3", "1.7"]
    for _ in range(12):
        a, b = rng.choice(terms[:3] + terms[5:]), rng.choice(terms)
        terms.append(f"({a} {rng.choice(['+', '-', '*', '*'])} {b})")
    text = " + ".join(terms[-3:])
    return eval(f"lambda x, y, z: {text}"), text


@pytest.mark.parametrize("seed", range(8))
def test_a_formula_has_the_bits_of_numpy_which_rounds_each_operation(options, computed, seed):
    function, text = formulas(seed)
    rng = np.random.default_rng(100 + seed)
    x, y, z = (rng.normal(size=(9, 33)).astype(np.float32) for _ in range(3))
    found = computed(lambda b: {"o": function(b.x, b.y, b.z)}, options, x=x, y=y, z=z)
    np.testing.assert_array_equal(found["o"], function(x, y, z), err_msg=text)
