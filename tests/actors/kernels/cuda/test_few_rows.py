"""Products of few rows: the kernel that is tried beside the library's."""

import numpy as np
import pytest
from emulated_run import execute
from kernel_calls import bind_to, needs_of

from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.calls import AlternativeCalls
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.few_rows import few_rows_call
from actors.kernels.cuda.kernel import DeviceView, gpu_named
from actors.testing.emulated import kernels
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h100")
SHAPES = [(1, 128, 512), (3, 130, 517), (20, 512, 2048), (20, 2048, 512), (24, 133, 500)]
"""Rows, inner extent, columns."""


def view_of(array):
    type_ = TensorType(DType(array.dtype.name), array.shape)
    return DeviceView(array.ctypes.data, type_, array.strides)


def placed(values, *, offset=0, spare=0, is_turned=False):
    """Return values in rows that are longer, from an odd element on, or by columns."""
    values = values.T if is_turned else values
    rows, columns = values.shape
    memory = np.full(offset + rows * (columns + spare), np.nan, np.float32)
    array = memory[offset:].reshape(rows, columns + spare)[:, :columns]
    array[...] = values
    return array.T if is_turned else array


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_are_multiplied_as_float64_does(shape, is_turned, native_toolchain):
    rows, inner, columns = shape
    rng = np.random.default_rng(rows)
    a = rng.standard_normal((rows, inner)).astype(np.float32)
    b = rng.standard_normal((inner, columns)).astype(np.float32)
    want, results = a.astype(np.float64) @ b.astype(np.float64), []
    for offset, spare in ((0, 0), (1, 3)):
        left = placed(a, offset=offset, spare=spare)
        right = placed(b, offset=offset, spare=spare, is_turned=is_turned)
        out = placed(np.zeros((rows, columns), np.float32), spare=spare)
        call = few_rows_call(GPU, view_of(left), view_of(right), view_of(out))
        kernels.load([call.text], native_toolchain)
        execute((call,), offset, np.zeros(7, np.int64))
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5 * np.sqrt(inner))
        results.append(out.copy())
    # How elements are loaded changes no bit, nor does the order of threads.
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "dtype"),
    [
        (25, 512, 2048, np.float32),
        (20, 64, 2048, np.float32),
        (20, 512, 64, np.float32),
        (20, 512, 2048, np.float64),
    ],
)
def test_other_products_are_the_librarys_alone(rows, inner, columns, dtype):
    a, b, out = [np.zeros(s, dtype) for s in ((rows, inner), (inner, columns), (rows, columns))]
    assert few_rows_call(GPU, view_of(a), view_of(b), view_of(out)) is None


def test_a_product_of_few_rows_has_two_ways_and_the_librarys_is_first():
    a, b, out = [np.zeros(s, np.float32) for s in ((20, 512), (512, 2048), (20, 2048))]
    views = view_of(a), view_of(b), view_of(out)
    needs = needs_of(
        kernels_on(GPU)["cuda.matmul"],
        {},
        tuple([v.as_operand for v in views[:2]]),
        (view_of(out).as_operand,),
    )
    scratch = np.zeros(max(1, needs.workspace_bytes), np.uint8)
    (call,) = bind_to(kernels_on(GPU)["cuda.matmul"], {}, views[:2], views[2:], view_of(scratch))
    assert isinstance(call, AlternativeCalls)
    library, own = call.alternatives
    assert own == (few_rows_call(GPU, *views),)
    assert library != own


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("rows", [20, 24])
def test_it_keeps_all_in_registers(arch, rows):
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed")
    a, b, out = [np.zeros(s, np.float32) for s in ((rows, 512), (512, 2048), (rows, 2048))]
    call = few_rows_call(GPU, view_of(a), view_of(b), view_of(out))
    for used in nvrtc.usage(call.text, arch).values():
        assert used.spilled_bytes == 0
        assert used.registers <= 168  # of 384 threads
