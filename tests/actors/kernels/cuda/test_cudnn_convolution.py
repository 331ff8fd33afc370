"""Which convolutions go to cuDNN; what comes of them both ways: `test_conformance`."""

from dataclasses import replace

import pytest

import compiler.ops.primitives.convolution  # noqa: F401  # registers the ops
from actors.kernels.common.convolution_steps import OPS
from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import catalogue
from compiler.contract.types import DType, TensorType, contiguous_strides

KERNELS = catalogue.kernels_by_name("h200")
CASES = [
    # x, weight, strides, dilation, padding
    ((2, 8, 7, 6), (4, 8, 3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 6, 9, 8), (4, 3, 3, 2), (2, 1), (1, 2), (0, 1)),
    ((3, 3, 11), (5, 3, 4), (3,), (2,), (2,)),
    ((1, 2, 4, 5, 4), (3, 2, 2, 3, 1), (1, 2, 1), (1, 1, 1), (1, 1, 0)),
    ((2, 4, 5, 5), (6, 4, 1, 1), (1, 1), (1, 1), (0, 0)),
]


def calls_of(x, weight, strides, dilation, padding):
    """Return attributes, shapes of inputs and of the result by op."""
    spans = [(k - 1) * d + 1 for k, d in zip(weight[2:], dilation, strict=True)]
    ends = zip(x[2:], spans, strides, padding, strict=True)
    y = (x[0], weight[0], *[(n + 2 * p - k) // s + 1 for n, k, s, p in ends])
    ways = {"strides": strides, "dilation": dilation, "low": padding, "high": padding}
    ways["groups"] = x[1] // weight[1]
    return {
        "conv": (ways, (x, weight), y),
        "conv_input_grad": (ways | {"spatial": x[2:]}, (y, weight), x),
        "conv_weight_grad": (ways | {"kernel": weight[2:]}, (x, y), weight),
    }


def steps(shape, itemsize, *, is_last):
    if not is_last:
        return contiguous_strides(shape, itemsize)
    n, c, *spatial = shape
    first, *inner, last = contiguous_strides((n, *spatial, c), itemsize)
    return (first, last, *inner)


def asked(op, case, dtype="bfloat16", *, is_last=False, changes=(), kernel="cudnn", **attrs):
    """Return what a kernel says of a call; `changes` are of its operands."""
    own, shapes, shape = calls_of(*case)[op]
    weight = 2 if op == "conv_weight_grad" else 1
    given = []
    for n, s in enumerate((*shapes, shape)):
        kind = DType(dtype)
        lie = steps(s, kind.itemsize, is_last=is_last and n != weight)
        given.append(Operand(TensorType(kind, s), 0, lie))
    given = [replace(one, **dict(changes)) for one in given]
    return KERNELS[f"{kernel}.{op}"].query(own | attrs, tuple(given[:2]), tuple(given[2:]))


SQUARE = ((4, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize(
    ("case", "dtype", "ops", "changes", "attrs"),
    [
        (SQUARE, "float64", OPS, (), {}),
        (SQUARE, "float32", OPS, [("offset_bytes", 8)], {}),
        (SQUARE, "float32", ["conv"], [("strides_bytes", (802816, 12544, 240, 4))], {}),
        (CASES[0], "float32", ["conv"], (), {"low": (0, 0), "high": (2, 2)}),
        (CASES[0], "float32", ["conv"], (), {"low": (-1, 1), "high": (3, 1)}),
        (((0, 8, 7, 6), *CASES[0][1:]), "float32", OPS, (), {}),
        (((1, 2, *[3] * 4), (2, 2, *[1] * 4), *[(1,) * 4] * 2, (0,) * 4), "float32", OPS, (), {}),
        (((70, 1 << 19, 8, 8), (1, 1 << 19, 1, 1), *SQUARE[2:4], (0, 0)), "float16", OPS, (), {}),
    ],
)  # fmt: skip
def test_what_the_library_does_not_take_is_left_to_products(case, dtype, ops, changes, attrs):
    for op in ops:
        assert asked(op, case, dtype, changes=changes, **attrs) is None


def test_halves_are_planned_to_take_less_time_with_channels_last_and_floats_are_not():
    for op in OPS:
        first, last = [
            [asked(op, SQUARE, dtype, is_last=is_last).duration_ns for is_last in (False, True)]
            for dtype in ("float32", "bfloat16")
        ]
        assert first[0] < first[1]
        assert last[1] < last[0] < asked(op, SQUARE, kernel="cuda").duration_ns


def test_scratch_is_for_what_is_turned_and_for_sums_or_for_a_chunk_of_ours():
    x, y, weight = [2 * 64 * n for n in (256 * 56 * 56, 256 * 56 * 56, 64 * 9)]
    many = ((256, 64, 56, 56), *SQUARE[1:])
    assert asked("conv", many).workspace_bytes == x + y + weight + (16 << 20)
    assert asked("conv", many, is_last=True).workspace_bytes < 96 << 20
    assert asked("conv", many, kernel="cuda").workspace_bytes > 256 << 20
