"""Images in other sizes, channels as places, windows as columns."""

import numpy as np
import pytest
from error_texts import raises
from oracle import Case, floats

import actorflow as af
from actorflow import nn

LINES = [(2, 3, n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33)]
LINES += [(n, 1, 6) for n in range(1, 11)]
PLANES = [(2, 3, h, w) for h, w in ((1, 1), (1, 4), (4, 1), (2, 2), (3, 5), (5, 3), (4, 4), (7, 6))]
PLANES += [(1, n, 3, 4) for n in range(1, 7)] + [(n, 1, 5, 2) for n in range(1, 7)]
SOLIDS = [(1, 2, d, h, w) for d, h, w in ((1, 1, 1), (2, 1, 3), (3, 2, 1), (2, 2, 2), (3, 4, 2))]
SOLIDS += [(n, c, 2, 3, 2) for n in (1, 2, 3) for c in (1, 2, 3, 4, 5)]
CORNERS = ((1, 1, 1), (2, 3, 1), (1, 1, 2), (2, 3, 2))


def of(shapes):
    return [floats(shape, key=number) for number, shape in enumerate(shapes)]


def resized(name, shapes, *calls):
    """Return a case of several calls of interpolate."""
    return Case(
        name,
        lambda x: [af.interpolate(x, **own) for own in calls],
        lambda t, x: [t.nn.functional.interpolate(x, **own) for own in calls],
        of(shapes),
    )


def sampled(name, shapes, *calls):
    """Return a case of several calls of grid_sample, at places inside and outside."""
    sets = []
    for number, (n, c, *extents) in enumerate(shapes):
        rank = len(extents)
        places = (n, 3, *[2] * (rank - 2), 4, rank)
        sets.append(
            floats((n, c, *extents), key=number) + floats(places, low=-1.6, high=1.6, key=number)
        )
    return Case(
        name,
        lambda x, grid: [af.grid_sample(x, grid, **own) for own in calls],
        lambda t, x, grid: [t.nn.functional.grid_sample(x, grid, **own) for own in calls],
        sets,
    )


def ways(mode):
    return [
        {"mode": mode, "padding_mode": padding, "align_corners": aligned}
        for padding in ("zeros", "border", "reflection")
        for aligned in (False, True)
    ]


def maps(rank):
    return [floats((n, rank, rank + 1), key=(n, rank, k)) for n in (1, 2) for k in range(10)]


CASES = [
    *[sampled(f"grid_sample {m}", PLANES, *ways(m)) for m in ("bilinear", "nearest", "bicubic")],
    *[sampled(f"grid_sample of solids {m}", SOLIDS, *ways(m)) for m in ("bilinear", "nearest")],
    *[
        Case(
            f"affine_grid of {rank} axes",
            lambda x, rank=rank: [
                af.affine_grid(x, (x.shape[0], 5, *size[:rank]), aligned)
                for size in ((2, 3, 4), (1, 5, 1))
                for aligned in (False, True)
            ],
            lambda t, x, rank=rank: [
                t.nn.functional.affine_grid(x, (x.shape[0], 5, *size[:rank]), aligned)
                for size in ((2, 3, 4), (1, 5, 1))
                for aligned in (False, True)
            ],
            maps(rank),
        )
        for rank in (2, 3)
    ],
    resized(
        "nearest",
        PLANES,
        {"size": (4, 6)},
        {"size": 3},
        {"scale_factor": 2},
        {"scale_factor": (1.5, 2.3)},
        {"scale_factor": 1.7, "recompute_scale_factor": True},
    ),
    resized("nearest of lines", LINES, {"size": 5}, {"scale_factor": 3}, {"scale_factor": 2.6}),
    resized("nearest of solids", SOLIDS, {"size": (2, 3, 4)}, {"scale_factor": 2.0}),
    resized(
        "nearest-exact", PLANES, {"size": (4, 6), "mode": "nearest-exact"},
        {"scale_factor": 1.4, "mode": "nearest-exact"},
    ),
    resized("area", PLANES, {"size": (1, 1), "mode": "area"}, {"size": (3, 2), "mode": "area"}),
    resized(
        "linear", LINES, {"size": 5, "mode": "linear"},
        {"size": 5, "mode": "linear", "align_corners": True},
        {"scale_factor": 1.7, "mode": "linear"},
    ),
    resized(
        "bilinear", PLANES, {"size": (4, 6), "mode": "bilinear"},
        {"size": (3, 1), "mode": "bilinear", "align_corners": True},
        {"scale_factor": 2, "mode": "bilinear", "align_corners": False},
        {"scale_factor": (1.3, 2.1), "mode": "bilinear", "recompute_scale_factor": True},
        {"scale_factor": (1.3, 2.1), "mode": "bilinear"},
    ),
    resized(
        "bicubic", PLANES, {"size": (4, 6), "mode": "bicubic"},
        {"size": (3, 5), "mode": "bicubic", "align_corners": True},
        {"scale_factor": 1.6, "mode": "bicubic"},
    ),
    resized(
        "trilinear", SOLIDS, {"size": (2, 3, 4), "mode": "trilinear"},
        {"scale_factor": 1.5, "mode": "trilinear", "align_corners": True},
    ),
    Case(
        "upsample as a layer",
        lambda x: nn.Upsample(scale_factor=2, mode="bilinear")(x),
        lambda t, x: t.nn.Upsample(scale_factor=2, mode="bilinear")(x),
        of(PLANES),
    ),
    Case(
        "pixel_shuffle",
        lambda x: [af.pixel_shuffle(x, 2), nn.PixelShuffle(1)(x), af.pixel_shuffle(x[0], 2)],
        lambda t, x: [t.pixel_shuffle(x, 2), t.pixel_shuffle(x, 1), t.pixel_shuffle(x[0], 2)],
        of([(n, c * 4, h, w) for n, c, h in CORNERS for w in (1, 2, 3, 4, 5)]),
    ),
    Case(
        "pixel_unshuffle",
        lambda x: [af.pixel_unshuffle(x, 2), nn.PixelUnshuffle(1)(x)],
        lambda t, x: [t.pixel_unshuffle(x, 2), t.pixel_unshuffle(x, 1)],
        of([(n, c, 2 * h, 2 * w) for n, c, h in CORNERS for w in (1, 2, 3, 4, 5)]),
    ),
    Case(
        "channel_shuffle",
        lambda x: [af.channel_shuffle(x, 3), nn.ChannelShuffle(2)(x)],
        lambda t, x: [t.channel_shuffle(x, 3), t.channel_shuffle(x, 2)],
        of([(n, 6 * c, h, w) for n, c, h in CORNERS for w in (1, 2, 3, 4, 5)]),
    ),
    Case(
        "unfold",
        lambda x: [
            af.unfold(x, 2), nn.Unfold((3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1))(x),
            af.unfold(x[0], 3, padding=2, dilation=2),
        ],
        lambda t, x: [
            t.nn.functional.unfold(x, 2),
            t.nn.functional.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1)),
            t.nn.functional.unfold(x[0], 3, padding=2, dilation=2),
        ],
        of([(n, c, h, w) for n, c in ((1, 1), (2, 3)) for h in (2, 5) for w in (3, 4, 5, 6, 9)]),
    ),
    Case(
        "fold",
        lambda x: [
            af.fold(x, (4, 5), 2), af.fold(x[0], (4, 5), 2),
            af.fold(x[:, :, :6], (3, 4), 2),
            nn.Fold((6, 5), 2, dilation=2, padding=1, stride=(2, 1))(
                af.concat([x, x, x], 2)[:, :, :15]
            ),
        ],
        lambda t, x: [
            t.nn.functional.fold(x, (4, 5), 2), t.nn.functional.fold(x[0], (4, 5), 2),
            t.nn.functional.fold(x[:, :, :6], (3, 4), 2),
            t.nn.functional.fold(
                t.cat([x, x, x], 2)[:, :, :15], (6, 5), 2, dilation=2, padding=1, stride=(2, 1)
            ),
        ],
        of([(n, 4 * c, 12) for n in (1, 2, 3, 4) for c in (1, 2, 3, 4, 5)]),
    ),
]  # fmt: skip


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: af.interpolate(x),
        lambda x: af.interpolate(x, 3, 2.0),
        lambda x: af.interpolate(x, (3,) * 3),
        lambda x: af.interpolate(x, scale_factor=0.01),
        lambda x: af.interpolate(x, scale_factor=(2, 2, 2)),
        lambda x: af.interpolate(x, scale_factor=1e30),
        lambda x: af.interpolate(x, scale_factor=float("nan")),
        lambda x: af.interpolate(x, 3, mode="linear"),
        lambda x: af.interpolate(x, 3, mode="lanczos"),
        lambda x: af.interpolate(x, 3, align_corners=True),
        lambda x: af.interpolate(x, 3, antialias=True),
        lambda x: af.interpolate(x[0, 0], 3),
        lambda x: af.pixel_shuffle(x, 2),
        lambda x: af.pixel_unshuffle(x, 3),
        lambda x: af.channel_shuffle(x, 2),
        lambda x: af.unfold(x, 9),
        lambda x: af.fold(x.reshape(1, 3, 16), 4, 2),
    ],
)
def test_what_cannot_be_is_an_error_with_the_users_line(call):
    x = np.zeros((1, 3, 4, 4), np.float32)
    job = af.job(lambda model, batch: call(batch.x), train=False)
    with raises(af.CompileError):
        job.step(nn.Module(), {"x": x})
