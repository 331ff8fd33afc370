"""What may be planned for which cuDNN."""

import pytest

from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.cudnn_library import CudnnLibrary, library_of, oldest_for
from compiler.contract.types import DType, TensorType, contiguous_strides

LIBRARIES = [CudnnLibrary(v, is_jit=j) for v in ((9, 19), (9, 25)) for j in (False, True)]


def dense(dtype, *shape):
    kind = DType(dtype)
    return Operand(TensorType(kind, shape), 0, contiguous_strides(shape, kind.itemsize))


def gradient(rows):
    """Return a call of attention's gradient for one head."""
    x, lse = dense("bfloat16", 1, rows, 64), dense("float32", 1, rows)
    return "attention_grad", {"scale": 0.5, "causal": True}, (*[x] * 5, lse), (x,) * 3


def convolution(dtype):
    x, weight = dense(dtype, 16, 256, 14, 14), dense(dtype, 256, 256, 3, 3)
    ways = dict.fromkeys(("strides", "dilation", "low", "high"), (1, 1))
    return "conv", {"groups": 1} | ways, (x, weight), (x,)


def chosen(call, library):
    return catalogue.select_kernel("h100", *call, uses_cudnn=library)[0]


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_a_gradient_in_order_is_planned_for_libraries_that_have_it(library):
    assert chosen(gradient(1024), library) == "cudnn.attention_grad"
    is_old = library.version == (9, 19)
    wanted = "cuda.attention_grad" if is_old else "cudnn.ordered_attention_grad"
    assert chosen(gradient(16_384), library) == wanted


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_convolutions_of_float32_are_ours_where_the_library_has_none_without_tf32(library):
    assert chosen(convolution("bfloat16"), library) == "cudnn.conv"
    assert (
        chosen(convolution("float32"), library) == f"{'cuda' if library.is_jit else 'cudnn'}.conv"
    )


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
