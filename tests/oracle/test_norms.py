"""Normalisation."""

from oracle import Case, floats

import actorflow as af

ROWS = [(*s, n) for s in ((1,), (3,), (2, 2)) for n in (5, 7, 8, 11, 17, 33, 40)]
CHANNELS = [(n, c, *s) for n in (1, 3) for c in (2, 4, 6) for s in ((6,), (9,), (3, 4), (2, 1, 5))]


def of_rows(shapes=ROWS, axes=1, own=2):
    return [floats(s, *[s[-axes:]] * own, key=s) for s in shapes]


def of_channels(own=2):
    return [floats(s, *[s[1:2]] * own, key=s) for s in CHANNELS]


CASES = [
    Case(
        "layer_norm of two axes",
        lambda x, w, b: af.layer_norm(x, x.shape[-2:], w, b, 1e-3),
        lambda t, x, w, b: t.nn.functional.layer_norm(x, x.shape[-2:], w, b, 1e-3),
        of_rows(CHANNELS, 2),
    ),
    Case(
        "layer_norm without weight, without bias",
        lambda x, w: [
            af.layer_norm(x, x.shape[-1]),
            af.layer_norm(x, x.shape[-1:], w),
            af.layer_norm(x, x.shape[-1:], bias=w),
        ],
        lambda t, x, w: [
            t.nn.functional.layer_norm(x, x.shape[-1:]),
            t.nn.functional.layer_norm(x, x.shape[-1:], w),
            t.nn.functional.layer_norm(x, x.shape[-1:], bias=w),
        ],
        of_rows(own=1),
    ),
    Case(
        "rms_norm",
        lambda x, w: [af.rms_norm(x, x.shape[-1:], w, 1e-3), af.rms_norm(x, x.shape[-1:])],
        lambda t, x, w: [
            t.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-3),
            t.nn.functional.rms_norm(x, x.shape[-1:]),
        ],
        of_rows(own=1),
    ),
    Case(
        "group_norm",
        lambda x, w, b: [af.group_norm(x, 2, w, b, 1e-3), af.group_norm(x, 1)],
        lambda t, x, w, b: [
            t.nn.functional.group_norm(x, 2, w, b, 1e-3),
            t.nn.functional.group_norm(x, 1),
        ],
        of_channels(),
    ),
    Case(
        "instance_norm",
        lambda x, w, b: [af.instance_norm(x, weight=w, bias=b, eps=1e-3), af.instance_norm(x)],
        lambda t, x, w, b: [
            t.nn.functional.instance_norm(x, weight=w, bias=b, eps=1e-3),
            t.nn.functional.instance_norm(x),
        ],
        of_channels(),
    ),
    Case(
        "local_response_norm",
        lambda x: [af.local_response_norm(x, 3), af.local_response_norm(x, 2, 0.5, 0.5, 2.0)],
        lambda t, x: [
            t.nn.functional.local_response_norm(x, 3),
            t.nn.functional.local_response_norm(x, 2, 0.5, 0.5, 2.0),
        ],
        of_channels(0),
    ),
    Case(
        "normalize",
        lambda x: [af.normalize(x), af.normalize(x, 1.0, -1)],
        lambda t, x: [t.nn.functional.normalize(x), t.nn.functional.normalize(x, 1.0, -1)],
        of_channels(0),
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
