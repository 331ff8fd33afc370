"""Which convolutions go to cuDNN; what comes of them both ways: `test_conformance`."""

from dataclasses import replace

import numpy as np
import pytest
from emulated_run import loaded, stored
from kernel_calls import bind_to, needs_of

import compiler.ops.primitives.convolution  # noqa: F401  # registers the ops
from actors.kernels.common.convolution_steps import OPS
from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.calls import RunCudnn, RunProduct
from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.cuda.kernel import DeviceView
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, contiguous_strides
from compiler.graph.registry import find_op, reference

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


def lying(array):
    """Return an array in float32, with channels last."""
    last = np.ascontiguousarray(array.astype(np.float32).transpose(0, 2, 3, 1))
    return last.transpose(0, 3, 1, 2)


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
    return needs_of(KERNELS[f"{kernel}.{op}"], own | attrs, tuple(given[:2]), tuple(given[2:]))


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


POINTWISE = ((2, 64, 5, 6), (24, 64, 1, 1), (1, 1), (1, 1), (0, 0))


@pytest.mark.parametrize("op", OPS)
def test_single_elements_with_channels_last_are_one_product(op, emulated_run):
    """The oracle is a product in float64 of all places by all channels."""
    (x_shape, weight_shape, *_), rng = POINTWISE, np.random.default_rng(1)
    attrs, _, shape = calls_of(*POINTWISE)[op]
    y_shape = (x_shape[0], weight_shape[0], *x_shape[2:])
    x, y = [lying(rng.standard_normal(s)) for s in (x_shape, y_shape)]
    weight = rng.standard_normal(weight_shape).astype(np.float32)
    rows_x, rows_y = [a.transpose(0, 2, 3, 1).reshape(-1, a.shape[1]).astype("f8") for a in (x, y)]
    matrix = weight.reshape(weight_shape[:2]).astype("f8")
    inputs, right = {
        "conv": ((x, weight), rows_x @ matrix.T),
        "conv_input_grad": ((y, weight), rows_y @ matrix),
        "conv_weight_grad": ((x, y), rows_y.T @ rows_x),
    }[op]
    is_image = op != "conv_weight_grad"
    made = emulated_run(
        kernels_by_name("h200")[f"cuda.{op}"],
        Attrs(attrs),
        inputs,
        [TensorType(DType.FLOAT32, shape)],
        output_strides=[steps(shape, 4, is_last=is_image)],
    )
    (got,) = made.outputs
    rows = got.transpose(0, 2, 3, 1) if is_image else got
    np.testing.assert_allclose(rows.reshape(right.shape), right, rtol=1e-5, atol=1e-5)
    assert [type(call) for call in made.calls] == [RunProduct]


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_product_of_rows_keeps_its_columns(op):
    """Padding, strides, groups, larger windows and channels first each leave the one product."""
    alike = asked(op, POINTWISE, is_last=True, kernel="cuda")
    others = [
        ((2, 64, 5, 6), (24, 64, 1, 1), (1, 1), (1, 1), (1, 1)),
        ((2, 64, 5, 6), (24, 64, 1, 1), (2, 2), (1, 1), (0, 0)),
        ((2, 64, 5, 6), (24, 32, 1, 1), (1, 1), (1, 1), (0, 0)),
        ((2, 64, 5, 6), (24, 64, 1, 2), (1, 1), (1, 1), (0, 0)),
    ]
    for case in others:
        needs = asked(op, case, is_last=True, kernel="cuda")
        assert needs.workspace_bytes > alike.workspace_bytes


def test_one_product_is_planned_where_it_is_faster_than_the_library():
    """Of 64 images of 14 x 14 a product of 256 by 1,024 takes 14 us at the rate of products."""
    case = ((64, 256, 14, 14), (1024, 256, 1, 1), (1, 1), (1, 1), (0, 0))
    for op in OPS:
        library, own = [asked(op, case, is_last=True, kernel=k) for k in ("cudnn", "cuda")]
        assert own.duration_ns <= library.duration_ns <= 1.1 * own.duration_ns < 25_000
        assert library.workspace_bytes >= own.workspace_bytes


@pytest.mark.parametrize("op", OPS)
def test_the_way_that_is_planned_to_be_faster_is_the_first(op):
    wide, narrow = ((64, 256, 14, 14), (1024, 256, 1, 1), (1, 1), (1, 1), (0, 0)), SQUARE
    assert isinstance(ways_of(op, wide)[0][0], RunProduct)
    assert isinstance(ways_of(op, narrow)[0][0], RunCudnn)


def ways_of(op, case):
    """Return the calls of each way, on operands of bfloat16 with channels last."""
    attrs, shapes, shape = calls_of(*case)[op]
    views, place = [], 1 << 20
    weight = 2 if op == "conv_weight_grad" else 1
    for n, s in enumerate((*shapes, shape)):
        type_ = TensorType(DType.BFLOAT16, s)
        views.append(DeviceView(place, type_, steps(s, 2, is_last=n != weight)))
        place += 1 << 32
    kernel = KERNELS[f"cudnn.{op}"]
    operands = [view.as_operand for view in views]
    needs = needs_of(kernel, attrs, tuple(operands[:2]), tuple(operands[2:]))
    scratch = DeviceView(place, TensorType(DType.UINT8, (needs.workspace_bytes,)), (1,))
    (call,) = bind_to(kernel, attrs, tuple(views[:2]), tuple(views[2:]), scratch)
    return call.alternatives


def widths_of(ways):
    """Return the channels of the image in each way of the library."""
    calls = [call for way in ways for call in way if isinstance(call, RunCudnn)]
    return [call.record.roles[0].shape[1] for call in calls]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("channels", "groups", "widths"),
    [
        (3, 1, {3, 4, 8}),
        (1, 1, {1, 4, 8}),
        (4, 1, {4, 8}),
        (6, 1, {6, 8}),
        (8, 1, {8}),
        (3, 3, {3}),
    ],
)
def test_few_channels_are_also_computed_with_zeros_beside_them(op, channels, groups, widths):
    case = ((2, channels, 9, 8), (6, channels // groups, 3, 3), (1, 1), (1, 1), (1, 1))
    assert {*widths_of(ways_of(op, case))} == widths
    assert len(widths_of(ways_of(op, case))) == len(widths)


@pytest.mark.parametrize("op", OPS)
def test_a_convolution_with_strides_is_also_one_without_on_blocks(op):
    """The first of a ResNet: 7 x 7 of 3 channels at every second place is 4 x 4 of 12."""
    case = ((2, 3, 224, 224), (64, 3, 7, 7), (2, 2), (1, 1), (3, 3))
    calls = [call for way in ways_of(op, case) for call in way if isinstance(call, RunCudnn)]
    by_blocks = [call.record for call in calls if {*call.record.strides} == {1}]
    ((image, weight, y),) = [record.roles for record in by_blocks]
    assert (image.shape, weight.shape) == ((2, 16, 115, 115), (64, 16, 4, 4))
    assert (y.shape, {*by_blocks[0].padding}) == ((2, 64, 112, 112), {0})
    for strides, dilation in (((1, 1), (1, 1)), ((2, 2), (2, 1)), ((4, 4), (1, 1))):
        ways = ways_of(op, (*case[:2], strides, dilation, (3, 3)))
        assert sorted(widths_of(ways)) == [3, 4, 8]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", [
    ((2, 3, 9, 8), (6, 3, 3, 2), (2, 1), (1, 2), (1, 0)),
    ((3, 1, 11), (5, 1, 4), (3,), (2,), (2,)),
    ((1, 6, 4, 5, 4), (3, 6, 2, 3, 1), (1, 2, 1), (1, 1, 1), (1, 1, 0)),
    ((2, 3, 13, 12), (5, 3, 7, 7), (2, 2), (1, 1), (3, 3)),
    ((2, 2, 9, 8), (6, 2, 2, 5), (2, 3), (1, 1), (1, 0)),
    ((3, 1, 11), (5, 1, 4), (3,), (1,), (2,)),
])  # fmt: skip
def test_every_way_to_compute_few_channels_gives_the_formula(op, case, is_last, emulated_run):
    """Scratch is NaN before: zeros beside the channels are written, and a gradient is cut back."""
    attrs, shapes, shape = calls_of(*case)[op]
    attrs, rng = attrs | {"high": attrs["low"]}, np.random.default_rng(3)
    weight = 2 if op == "conv_weight_grad" else 1
    inputs = []
    for n, s in enumerate(shapes):
        place = np.ndarray(s, np.uint16, np.zeros(np.prod(s), np.uint16), 0,
                           steps(s, 2, is_last=is_last and n != weight))  # fmt: skip
        place[...] = stored(rng.standard_normal(s), "bfloat16")
        inputs.append(place)
    (right,) = reference.get(find_op(op))(Attrs(attrs), *[loaded(a) for a in inputs])
    kernel, type_ = KERNELS[f"cudnn.{op}"], TensorType(DType.BFLOAT16, shape)
    strides = [steps(shape, 2, is_last=is_last and weight != 2)]
    count = len([w for w in (4, 8) if w > case[0][1]]) + 2 + ({*case[3]} == {1})
    kinds = set()
    for way in range(count):
        made = emulated_run(kernel, attrs, inputs, [type_], output_strides=strides, way=way)
        (got,) = made.outputs
        np.testing.assert_allclose(loaded(got), right, rtol=2e-2, atol=2e-2 * np.abs(right).max())
        kinds.add(tuple([type(call).__name__ for call in made.calls]))
    assert len(kinds) > 1
