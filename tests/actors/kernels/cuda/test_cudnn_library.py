"""What may be planned for which cuDNN."""

from dataclasses import replace

import pytest

from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import catalogue, flash
from actors.kernels.cuda.cudnn_library import CudnnLibrary, library_of, oldest_for
from compiler.contract.types import DType, TensorType, contiguous_strides

LIBRARIES = [CudnnLibrary(v, is_jit=j) for v in ((9, 19), (9, 25)) for j in (False, True)]


def dense(dtype, *shape):
    kind = DType(dtype)
    return Operand(TensorType(kind, shape), 0, contiguous_strides(shape, kind.itemsize))


def gradient(rows):
    """Return a call of attention's gradient for one head."""
    x, lse = dense("bfloat16", 1, rows, 64), dense("float32", 1, rows)
    return "attention_grad", {"scale": 0.5, "causal": True}, (*[x] * 5, lse, lse), (x,) * 3


def convolution(dtype, op="conv", *, x=256, y=256, taps=3, stride=1, groups=1, last="xy"):
    """Return a call on images of 14 x 14; `last` are the tensors that have channels last."""
    shapes = {"x": (16, x, 14, 14), "w": (y, x // groups, taps, taps)}
    shapes["y"] = (16, y, 14 // stride, 14 // stride)
    held = {name: lying(dtype, shape, is_last=name in last) for name, shape in shapes.items()}
    low, high = taps // 2, taps // 2 - (stride - 1)
    ways = {"low": (low,) * 2, "high": (high,) * 2, "strides": (stride,) * 2, "dilation": (1, 1)}
    order = {"conv": "xwy", "conv_input_grad": "ywx", "conv_weight_grad": "xyw"}[op]
    *inputs, output = [held[name] for name in order]
    more = {"conv_input_grad": {"spatial": (14, 14)}, "conv_weight_grad": {"kernel": (taps,) * 2}}
    return op, ways | {"groups": groups} | more.get(op, {}), tuple(inputs), (output,)


def lying(dtype, shape, *, is_last):
    x = dense(dtype, *shape)
    if not is_last:
        return x
    n, c, h, w = shape
    first, row, column, step = contiguous_strides((n, h, w, c), x.type.dtype.itemsize)
    return replace(x, strides_bytes=(first, step, row, column))


def chosen(call, library):
    return catalogue.select_kernel("h100", *call, uses_cudnn=library)[0]


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_a_gradient_in_order_is_planned_for_libraries_that_have_it(library, monkeypatch):
    monkeypatch.setattr(flash, "_RATES", {9: (0.1, 0.01)})
    assert chosen(gradient(1024), library) == "cudnn.attention_grad"
    is_old = library.version == (9, 19)
    wanted = "cuda.flash_attention_grad" if is_old else "cudnn.ordered_attention_grad"
    assert chosen(gradient(16_384), library) == wanted


@pytest.mark.parametrize("uses_cudnn", [False, *LIBRARIES], ids=str)
@pytest.mark.parametrize("rows", [1024, 16_384])
def test_our_gradient_is_planned_where_it_is_to_be_faster(rows, uses_cudnn):
    assert chosen(gradient(rows), uses_cudnn) == "cuda.flash_attention_grad"


OPS = "conv", "conv_input_grad", "conv_weight_grad"


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("last", ["", "xy", "xwy"])
def test_convolutions_of_float32_are_ours_where_the_library_has_none_without_tf32(
    library, op, last
):
    whose = "cuda" if library.is_jit else "cudnn"
    assert chosen(convolution("float32", op, last=last), library) == f"{whose}.{op}"
    assert chosen(convolution("bfloat16", op, last=last), library) == f"cudnn.{op}"


@pytest.mark.parametrize(
    ("ways", "theirs"),
    [
        # As the planner of 9.27 answers, given the description of an H200; of fewer than 8 channels
        # it is asked with zeros beside them.
        ({"last": "xy", "stride": 2, "taps": 3}, "conv conv_weight_grad"),
        ({"last": "xwy", "stride": 2, "taps": 3}, "conv conv_input_grad conv_weight_grad"),
        ({"last": "xy", "stride": 2, "taps": 1}, "conv conv_input_grad conv_weight_grad"),
        ({"last": "", "stride": 2, "taps": 3}, "conv conv_weight_grad"),
        ({"last": "xwy", "x": 3}, "conv conv_input_grad conv_weight_grad"),
        ({"last": "xwy", "x": 9}, "conv conv_input_grad"),
        ({"last": "xwy", "x": 6}, "conv conv_input_grad conv_weight_grad"),
        ({"last": "xy", "x": 6}, "conv conv_input_grad conv_weight_grad"),
        ({"last": "xy", "x": 10}, "conv"),
        ({"last": "xwy", "y": 5}, "conv conv_input_grad"),
        ({"last": "xwy", "x": 24, "y": 24, "groups": 4}, "conv conv_input_grad"),
        ({"last": "", "x": 32, "y": 32, "groups": 2}, "conv conv_input_grad conv_weight_grad"),
        ({"last": "xy", "x": 32, "y": 32, "groups": 32}, "conv conv_input_grad"),
        ({"last": "", "x": 32, "y": 32, "groups": 32}, ""),
    ],
    ids=str,
)
def test_what_the_engines_of_the_small_library_do_not_load_is_ours(ways, theirs):
    small, whole = [CudnnLibrary(is_jit=is_jit) for is_jit in (True, False)]
    for dtype in ("bfloat16", "float16"):
        calls = {op: convolution(dtype, op, **ways) for op in OPS}
        assert {chosen(call, whole) for call in calls.values()} == {f"cudnn.{op}" for op in OPS}
        kernels = {op: chosen(call, small) for op, call in calls.items()}
        assert " ".join([op for op in OPS if kernels[op].startswith("cudnn")]) == theirs


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_a_fingerprint_says_which_library_a_plan_is_for(library):
    newer = CudnnLibrary((library.version[0], library.version[1] + 3), library.is_jit)
    words = [catalogue.fingerprint("h100", uses_cudnn=one) for one in (library, newer)]
    assert words[0] == words[1]
    assert words[0].endswith(f" cudnn{'-jit' * library.is_jit}-9.{library.version[1]}")
    assert library_of(words[0]) == library
    without, newest = [catalogue.fingerprint("h100", uses_cudnn=uses) for uses in (False, True)]
    assert library_of(without) is None
    assert library_of(newest) == CudnnLibrary((9, 25))


def test_a_plan_needs_the_version_that_has_all_of_its_kernels():
    assert oldest_for(("cudnn.conv", "cudnn.attention_grad")) == (9, 19)
    assert oldest_for(("cudnn.conv", "cudnn.ordered_attention_grad")) == (9, 25)
