"""Regions on every target, chunk by chunk, against float64: losses over a vocabulary, layers."""

from __future__ import annotations

import numpy as np
import pytest
from error_texts import raises
from kernel_targets import TARGETS, Target, same_bits
from library_products import skip_without
from wide_regions import (
    BF16,
    CASES,
    F32,
    F64,
    dtypes_of,
    expected,
    hidden_region,
    loss_operands,
    loss_region,
)

KERNELS = {"numpy": "numpy.region", "c": "c.chunked", "cuda": "cuda.region"}
TOLERANCE = {F32: 2e-5, F64: 1e-12, BF16: 2e-2}


@pytest.fixture(params=TARGETS)
def run(request):
    """Return a function that runs a region on a target."""
    fixture = {"c": "native", "cuda": "native_toolchain"}.get(request.param)
    target = Target(request.param, request.getfixturevalue(fixture) if fixture else None)

    def call(region, dtypes, arrays, **options):
        is_low = dtypes[0] is BF16
        if is_low and target.name == "c":
            skip_without("onednn.rows", BF16)
        upcast = ".upcast" if is_low and target.name == "numpy" else ""
        kernel = target.all[KERNELS[target.name] + upcast]
        return target.run(kernel, {"region": region}, dtypes, arrays, region.outputs, **options)[0]

    return call


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}x{c[2]}x{c[3]}-{c[4]}-{c[6]}")
def test_a_region_has_the_results_of_all_its_rows_at_once(run, case):
    dtype, rows, columns, width, _, _, has_bias = case
    region, wanted = loss_region(*case)
    arrays = loss_operands(dtype, rows, columns, width, has_bias)
    got = run(region, dtypes_of(dtype, len(arrays)), arrays)
    want, own = expected(dtype, arrays), TOLERANCE[dtype]
    for key, array in zip(wanted, got, strict=True):
        np.testing.assert_allclose(array, want[key], rtol=own, atol=own, err_msg=key)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_no_order_of_threads_and_blocks_changes_a_bit(run, dtype):
    arrays = loss_operands(dtype, 90, 700, 24, False)
    region, _ = loss_region(dtype, 90, 700, 24, 32, ("losses", "dx", "dw"))
    given = region, dtypes_of(dtype, len(arrays)), arrays
    same_bits(run(*given, other=True), run(*given))


def test_a_bad_label_is_named_with_its_place_among_all_rows(run):
    region, _ = loss_region(F32, 20, 17, 4, 6, ("losses", "dx"))
    arrays = loss_operands(F32, 20, 17, 4, False)
    arrays[3][14] = 17
    with raises(IndexError):
        run(region, dtypes_of(F32, 5), arrays)


def test_a_hidden_layer_is_a_region_as_well(run):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((70, 30)).astype(np.float32)[::2, 3:21]
    first = rng.standard_normal((18, 200)).astype(np.float32) / 4
    second = rng.standard_normal((200, 18)).astype(np.float32)
    (got,) = run(hidden_region(35, 200, 18, 16), [F32] * 3, [x, first, second])
    wide = np.tanh(x.astype(np.float64) @ first)
    np.testing.assert_allclose(got, wide @ second, rtol=2e-5, atol=2e-5)
