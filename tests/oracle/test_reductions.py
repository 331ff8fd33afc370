"""Reductions over one axis, several and all."""

import numpy as np
from oracle import SHAPES, Case, floats, seeded, unary

import actorflow as af

CUBES = [floats((2 + i % 3, 1 + i % 4, 1 + i % 5), key=i) for i in range(20)]
FULL = [*[shape for shape in SHAPES if 0 not in shape], (2,), (6, 1, 2), (9, 9)]
COUNTS = [(seeded(i).integers(-3, 3, (2 + i % 3, i % 5, 4)),) for i in range(20)]
HOLES = [(np.where(seeded(i).random(x.shape) < 0.3, np.nan, x),) for i, (x,) in enumerate(CUBES)]
TIES = [(np.round(x),) for (x,) in CUBES]
MANY = [floats((3, 2 + i % 3, 2 + i % 4), key=i) for i in range(20)]


def case(name, call, sets, **options):
    return Case(name, lambda x: call(af, x), call, sets, **options)


CASES = [
    case("amin", lambda t, x: [t.amin(x, 1), t.amin(x, (0, 2), keepdim=True)], CUBES),
    case("min along an axis", lambda t, x: list(t.min(x, 1)), CUBES),
    case("ties along an axis", lambda t, x: [t.max(x, 1)[0], t.min(x, 2, keepdim=True)[0]], TIES),
    case("ties shared", lambda t, x: [t.amax(x, 1), t.amin(x, (0, 2)), t.max(x)], TIES),
    case("min of all", lambda t, x: t.min(x), unary(shapes=FULL)),
    case("argmin", lambda t, x: [t.argmin(x), t.argmin(x, 2, keepdim=True)], CUBES),
    case("prod of all", lambda t, x: t.prod(x), unary(0.5, 1.5)),
    case("prod", lambda t, x: [t.prod(x, 1), t.prod(x, -1, keepdim=True)], CUBES),
    case("var", lambda t, x: [t.var(x, 1), t.var(x, (0, 2), correction=0)], MANY),
    case("std", lambda t, x: [t.std(x), t.std(x, 1, keepdim=True)], MANY),
    case(
        "std_mean and var_mean",
        lambda t, x: [*t.std_mean(x, 1), *t.var_mean(x, (0, 2), correction=0, keepdim=True)],
        MANY,
    ),
    *[
        case(
            f"quantile {way}",
            lambda t, x, way=way: [
                t.quantile(x, 0.3, 1, interpolation=way),
                t.quantile(x, 0.5, interpolation=way),
                t.quantile(x, 1.0, -1, keepdim=True, interpolation=way),
            ],
            CUBES,
        )
        for way in ("linear", "lower", "higher", "nearest", "midpoint")
    ],
    Case(
        "quantile of several",
        lambda x: [
            af.quantile(x, [0.0, 0.25, 0.9], 1),
            af.nanquantile(x, [0.4, 0.5], 2, keepdim=True),
            af.nanquantile(x, 0.75),
        ],
        lambda t, x: [
            t.quantile(x, t.tensor([0.0, 0.25, 0.9], dtype=x.dtype), 1),
            t.nanquantile(x, t.tensor([0.4, 0.5], dtype=x.dtype), 2, keepdim=True),
            t.nanquantile(x, 0.75),
        ],
        HOLES,
        has_gradient=False,
    ),
    case("logsumexp", lambda t, x: [t.logsumexp(x, 1), t.logsumexp(x, (0, 2))], CUBES),
    case("nansum", lambda t, x: [t.nansum(x, 1), t.nansum(x)], HOLES),
    case("any and all", lambda t, x: [t.any(x), t.all(x), t.any(x, 1), t.all(x, 1)], COUNTS),
    case("count_nonzero", lambda t, x: [t.count_nonzero(x), t.count_nonzero(x, 1)], COUNTS),
    case("sums of integers", lambda t, x: [t.sum(x > 0, 1), t.sum(x), t.prod(x, 2)], COUNTS),
    case(
        "extremes of integers",
        lambda t, x: [t.amin(x, 2), t.argmin(x + 7 * t.abs(x), 2)],
        COUNTS[1::5] * 5,
    ),
    case(
        "no axes are all, but of any and all none",
        lambda t, x: [
            *[call(x, ()) for call in (t.sum, t.mean, t.nansum, t.amax, t.amin)],
            *[t.sum(x, (), keepdim=True), t.count_nonzero(x, ()), t.norm(x, 2, ())],
            *[t.any(x, ()), t.all(x, (), keepdim=True)],
        ],
        MANY,
    ),
    case(  # torch's own gradient of these is infinite
        "no axes are all of a variance",
        lambda t, x: [t.std(x, ()), t.var(x, ())],
        MANY,
        has_gradient=False,
    ),
    *[
        case(f"norm {p}", lambda t, x, p=p: [t.norm(x, p), t.norm(x, p, 1)], CUBES)
        for p in ("fro", 1, 2, 3, float("inf"), float("-inf"), 0)
    ],
]


def test_a_case_agrees_with_torch(case, dtype, agrees):
    agrees(case, dtype)
