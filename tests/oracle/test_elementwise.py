"""Functions of each element: analysis, rounding, comparison, logic, integers; and promotion."""

import json
from pathlib import Path

import numpy as np
import pytest
from oracle import PAIRS, SHAPES, Case, binary, floats, seeded, unary

import actorflow as af
from actorflow.tensor.literals import promote
from compiler.contract.types import DType

ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-30, 1e30])


def integers(dtype, low=-9, high=9):
    """Return argument sets of two tensors of integers that broadcast, zeros among them."""
    return [
        tuple(seeded(i, side).integers(low, high, s).astype(dtype) for side, s in enumerate(pair))
        for i, pair in enumerate(PAIRS)
    ]


UNARY = {
    "abs": unary(),
    "neg": unary(),
    "reciprocal": unary(0.5, 3.0),
    "rsqrt": unary(0.5, 3.0),
    "exp2": unary(),
    "expm1": [*unary(), *unary(-1e-6, 1e-6, [(9,)])],
    "log1p": [*unary(-0.5, 3.0), *unary(-1e-6, 1e-6, [(9,)])],
    "log2": unary(0.1, 3.0),
    "log10": unary(0.1, 3.0),
    "erf": unary(),
    "erfc": [*unary(), *unary(4.0, 9.0, [(9,)])],
    "tan": unary(-1.2, 1.2),
    "asin": unary(-0.95, 0.95),
    "acos": unary(-0.95, 0.95),
    "atan": [*unary(), *unary(-1e9, 1e9, [(9,)])],
    "sinh": [*unary(), *unary(-80.0, 80.0, [(9,)])],
    "cosh": [*unary(), *unary(-80.0, 80.0, [(9,)])],
    "asinh": [*unary(), *unary(-1e9, 1e9, [(9,)])],
    "acosh": unary(1.1, 9.0),
    "atanh": unary(-0.95, 0.95),
    "floor": unary(-9.0, 9.0),
    "ceil": unary(-9.0, 9.0),
    "trunc": unary(-9.0, 9.0),
    "frac": unary(-9.0, 9.0),
    "sign": unary(),
    "round": [*unary(-9.0, 9.0), (np.arange(-4.5, 5.0),)],
}
TWO = {
    "atan2": binary(),
    "hypot": binary(),
    "logaddexp": binary(),
    "fmod": binary(0.75, 9.0),
    "remainder": binary(0.75, 9.0),
    "floor_divide": binary(0.75, 9.0),
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LOGIC = ("logical_and", "logical_or", "logical_xor")
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")
TESTS = ("isnan", "isinf", "isfinite", "logical_not")
SPECIAL = [*[(*x,) for x in unary()], (ODD,)]


def divisors(dtype):
    return [(a, np.where(b == 0, 3, b).astype(dtype)) for a, b in integers(dtype)]


def named(name, sets, has_gradient=True):
    return Case(
        name,
        getattr(af, name),
        lambda t, *args: getattr(t, name)(*args),
        sets,
        has_gradient=has_gradient,
    )


CASES = [
    *[named(name, sets) for name, sets in UNARY.items()],
    *[named(name, sets, name != "floor_divide") for name, sets in TWO.items()],
    *[named(name, SPECIAL) for name in TESTS],
    *[named(name, [*binary(), *integers("int32", 0, 3)]) for name in (*COMPARISONS, *LOGIC)],
    *[named(name, integers("int32")) for name in BITS],
    Case(
        "rounding to decimals",
        lambda x: [af.round(x, decimals=2), af.round(x * 1e3, decimals=-2)],
        lambda t, x: [t.round(x, decimals=2), t.round(x * 1e3, decimals=-2)],
        unary(-9.0, 9.0),
        has_gradient=False,
        tolerance=1e-2,  # a float32 may lie on the other side of a tie
    ),
    *[
        Case(
            f"integers of {dtype}",
            lambda a, b: [
                a // b, a % b, af.fmod(a, b), a + b, a - b, a * b, a & b, a | b, a ^ b, ~a,
            ],
            lambda t, a, b: [
                a // b, a % b, t.fmod(a, b), a + b, a - b, a * b, a & b, a | b, a ^ b, ~a,
            ],
            divisors(dtype),
        )
        for dtype in ("int8", "int16", "int32", "int64", "uint8")
    ],
    Case(
        "powers of integers and shifts",
        lambda a, b: [a**3, a**0, a << 2, a >> 1, abs(a), af.sign(b), 2.0**b],
        lambda t, a, b: [a**3, a**0, a << 2, a >> 1, abs(a), t.sign(b), 2.0**b],
        integers("int32", 0, 9),
    ),
    Case(
        "powers of floats",
        lambda x: [x**-1, x**-3, x**4, x**0.7, x**0],
        lambda t, x: [x**-1, x**-3, x**4, x**0.7, x**0],
        unary(0.5, 3.0),
    ),
    Case(
        "clamp by numbers",
        lambda x: [x.clamp(-1.0, 1.5), x.clip(min=0.5), af.clamp(x, max=0.25)],
        lambda t, x: [x.clamp(-1.0, 1.5), x.clip(min=0.5), t.clamp(x, max=0.25)],
        unary(),
    ),
    Case(
        "clamp by tensors",
        lambda x, low, high: x.clamp(low, high),
        lambda t, x, low, high: x.clamp(low, high),
        [(*floats(s), *floats(s, key="low"), *floats(s[-1:], key="high")) for s in SHAPES],
    ),
    Case(
        "lerp",
        lambda a, b: [af.lerp(a, b, 0.3), af.lerp(a, b, b)],
        lambda t, a, b: [t.lerp(a, b, 0.3), t.lerp(*t.broadcast_tensors(a, b, b))],
        binary(),
    ),
    Case(
        "nan_to_num",
        lambda x: af.nan_to_num(x, 1.0, 2.0, -3.0),
        lambda t, x: t.nan_to_num(x, 1.0, 2.0, -3.0),
        SPECIAL,
    ),
    Case(
        "operands of several dtypes",
        lambda x, i: [
            x + i, i / 2, i * 0.5, (x > 0) + (i > 0), (i > 0) * i,
            af.where(x > 0, i, 0.5),
        ],
        lambda t, x, i: [
            x + i, i / 2, i * 0.5, (x > 0) + (i > 0), (i > 0) * i,
            t.where(x > 0, i, 0.5),
        ],
        [(x, i) for (x, _), (_, i) in zip(binary(), integers("int16"), strict=True)],
    ),
]  # fmt: skip

TABLE = Path(__file__).resolve().parents[1] / "data" / "promotion.json"


def test_a_case_agrees_with_torch(case, dtype, agrees):
    agrees(case, dtype)


def test_every_pair_of_dtypes_meets_where_torchs_do(request):
    known = json.loads(TABLE.read_text())
    if request.config.getoption("--torch"):
        import torch

        for pair, met in known.items():
            a, b = (getattr(torch, name) for name in pair.split())
            assert f"torch.{met}" == str(torch.promote_types(a, b)), pair
    for pair, met in known.items():
        a, b = map(DType, pair.split())
        assert promote([a, b]) is promote([b, a]) is DType(met), pair


@pytest.mark.parametrize(("first", "second"), [("float64", "float32"), ("float32", "float64")])
def test_a_tensor_without_axes_does_not_widen_one_that_has_some(first, second):
    @af.job(train=False)
    def job(model, batch):
        return {"made": batch["x"] * batch["y"]}

    given = {"x": np.ones(3, first), "y": np.array(2.0, second)}
    assert job.step(af.nn.Module(), given)["made"].dtype == first


def test_integers_divided_by_zero_give_zero():
    @af.job(train=False)
    def job(model, batch):
        x, zero = batch["x"], batch["zero"]
        return {"quotient": x // zero, "rest": x % zero}

    made = job.step(af.nn.Module(), {"x": np.array([-3, 0, 5]), "zero": np.zeros(3, np.int64)})
    np.testing.assert_array_equal(made["quotient"], [0, 0, 0])
    np.testing.assert_array_equal(made["rest"], [0, 0, 0])
