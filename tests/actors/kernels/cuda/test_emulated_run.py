"""The harness of kernels of CUDA devices finds what it is there to find."""

import numpy as np
import pytest

from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.kernels.cuda.calls import CopyBytes, FillBytes, KernelText, RunKernel, StatusWord
from compiler.contract.types import DType, TensorType

BODY = """
typedef struct { af_word w[4]; } NAME_arguments;
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    const float *x = (const float *)arguments.w[0].p;
    float *out = (float *)arguments.w[1].p;
    const int64_t n = arguments.w[2].i;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    %s
}
"""
DOUBLE = "if (i < n) out[i] = 2 * x[i];"


class Doubling:
    name = op = "double"

    def __init__(self, body=DOUBLE):
        self.text = KernelText.of("af_double", BODY % body, ("NAME",), "2 x", has_exchanges=False)

    def plan(self, attrs, inputs, outputs):
        return KernelPlan(KernelNeeds(workspace_bytes=64, in_place=((0, 0),)), self._bind)

    def _bind(self, inputs, outputs, workspace):
        n = inputs[0].shape[0]
        words = (inputs[0].address, outputs[0].address, n, 0)
        status = StatusWord(3, lambda place, value: IndexError(f"{value} at {place}"))
        run = RunKernel(self.text, self.text.kernels[0], -(-n // 32), 32, words, status=status)
        fill = FillBytes(workspace.address, 7, 64)
        return fill, run, CopyBytes(workspace.address, workspace.address + 32, 32)


def ran(emulated_run, body=DOUBLE, **options):
    x = np.arange(100, dtype=np.float32)
    return x, emulated_run(
        Doubling(body), {}, (x,), (TensorType(DType.FLOAT32, (100,)),), **options
    )


def test_a_kernel_runs_on_bytes_of_its_own(emulated_run):
    x, found = ran(emulated_run, offset_bytes=4)
    np.testing.assert_array_equal(found.outputs[0], 2 * x)
    assert found.error is None


def test_an_output_may_lie_over_an_input(emulated_run):
    x, found = ran(emulated_run, in_place=((0, 0),))
    np.testing.assert_array_equal(found.outputs[0], 2 * x)


def test_a_hole_holds_what_nobody_wrote(emulated_run):
    _, found = ran(emulated_run, "if (i < n - 1) out[i] = 2 * x[i];")
    assert np.isnan(found.outputs[0]).sum() == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[i] = 2;", "beside a tensor"),
        ("if (i == 0) out[-1] = 0;", "beside a tensor"),
        ("out[0] = (float)i;", "other bits"),
        ("((float *)x)[0] = 1;", "Arrays are not equal"),
    ],
)
def test_what_a_kernel_may_not_do_is_found(emulated_run, body, message):
    with pytest.raises(AssertionError, match=message):
        ran(emulated_run, body)


def test_a_bad_index_comes_out_as_the_error_it_is(emulated_run):
    _, found = ran(emulated_run, "if (i == 3) af_report(arguments.w[3].p, i, 77);")
    assert repr(found.error) == repr(IndexError("77 at 3"))
