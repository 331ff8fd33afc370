"""The kernels of `matmul` as the catalogue asks them."""

import numpy as np
import pytest
from kernel_calls import bind_kernel, needs_of, operand

from actors.kernels.library import gemm_launch, onednn, tuning
from actors.kernels.native.matmul import NATIVE_MATMUL_KERNELS

pytestmark = pytest.mark.usefixtures("untuned")


def asked(a, b, out):
    """Return the kernels that are chosen for a call and take it, with their needs."""
    operands = tuple(map(operand, (a, b))), (operand(out),)
    kernels = [kernel for kernel in NATIVE_MATMUL_KERNELS if kernel.is_chosen({}, *operands)]
    answers = [(kernel, needs_of(kernel, {}, *operands)) for kernel in kernels]
    return [(kernel, needs) for kernel, needs in answers if needs is not None]


def run(a, b, out):
    ((kernel, _),) = asked(a, b, out)
    launch, _, check = bind_kernel(kernel, {}, (a, b), (out,))
    launch()
    check()
    return kernel.name


@pytest.mark.parametrize("shape", [(8, 8, 8), (64, 300, 200), (1, 64, 64)])
def test_exactly_one_kernel_takes_a_product(native, shape):
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    out = np.empty((m, n), np.float32)
    run(a, b, out)
    np.testing.assert_allclose(out, a.astype(float) @ b, rtol=1e-4, atol=1e-4)


def test_the_small_product_is_taken_by_rule_for_tiny_matrices(native):
    a = np.ones((32, 32), np.float32)
    assert run(a, a, np.empty_like(a)) == "c.matmul"


def test_nothing_is_taken_while_native_kernels_are_off():
    a = np.ones((32, 32), np.float32)
    assert asked(a, a, np.empty_like(a)) == []


def test_integers_and_layouts_without_a_form_are_left_to_numpy(native):
    whole = np.ones((8, 8), np.int32)
    assert asked(whole, whole, np.empty_like(whole)) == []
    gapped = np.ones((8, 16), np.float32)[:, ::2]
    dense = np.ones((8, 8), np.float32)
    assert asked(gapped, dense, np.empty_like(dense)) == []


def test_a_batch_with_too_many_places_is_left_to_numpy(native):
    a = np.ones((gemm_launch.MAX_CALLS + 1, 2, 2), np.float32)
    assert asked(a, a, np.empty_like(a)) == []


def test_float64_goes_to_the_library_of_numpy(native):
    a = np.ones((64, 64))
    assert run(a, a, np.empty_like(a)).startswith("openblas")


def test_without_onednn_the_library_of_numpy_takes_the_product(native, monkeypatch):
    monkeypatch.setattr(onednn, "matmul", lambda *_, **__: None)
    a = np.ones((128, 128), np.float32)
    assert run(a, a, np.empty_like(a)).startswith("openblas")


def test_a_kernel_whose_library_is_not_the_fastest_is_not_chosen(native, monkeypatch):
    monkeypatch.setattr(tuning, "library_for", lambda *_: "openblas")
    a = np.ones((128, 128), np.float32)
    assert run(a, a, np.empty_like(a)) == "openblas.matmul"
    operands = (operand(a), operand(a)), (operand(a),)
    assert all(
        [kernel.plan({}, *operands) for kernel in NATIVE_MATMUL_KERNELS if "blas" in kernel.name]
    )


def test_integers_of_sixteen_bits_are_no_bfloat16(native):
    a = np.ones((8, 8), np.uint16)
    assert asked(a, a, np.empty_like(a)) == []
