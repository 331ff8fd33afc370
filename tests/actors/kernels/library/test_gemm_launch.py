"""What every library does but for its products, which `test_conformance` has."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from kernel_calls import GUARD, garbage

from actors.kernels.common import gemm
from actors.kernels.common.gemm import gemm_of, view_of_array
from actors.kernels.library import gemm_launch, onednn
from actors.kernels.library.gemm_launch import Epilogue, workspace_bytes
from actors.kernels.library.launch import NativeError
from actors.kernels.native.matmul import LIBRARIES
from compiler.contract.errors import InternalError
from compiler.contract.types import from_bits, to_bits

BY_NAME = {library.name: library for library in LIBRARIES}


def form(a, b, out):
    return gemm_of(*map(view_of_array, (a, b, out)))


def run(library, a, b, out, epilogue=None):
    """Run a product twice, with garbage in the scratch; returns its form."""
    found = form(a, b, out)
    size = workspace_bytes(library, found)
    if size is None:
        pytest.skip(f"{library.name} does not take this product")
    workspace, behind = garbage(size)
    arrays = (b, a, out) if found.is_swapped else (a, b, out)
    launch = gemm_launch.gemm_launch(library, found, arrays, workspace, epilogue)
    for _ in range(2):
        workspace[:] = 0xFF
        launch()
    assert (behind == GUARD).all(), "bytes behind the workspace were written"
    return found


@pytest.fixture(params=sorted(BY_NAME))
def library(request, native):
    return BY_NAME[request.param]


def test_infinities_and_nan_come_out_as_of_numpy(library):
    a, b = np.ones((512, 4), np.float32), np.ones((4, 4), np.float32)
    a[0, 1], a[1, 2], b[3, 3] = np.inf, np.nan, -np.inf
    out = np.empty((512, 4), np.float32)
    run(library, a, b, out)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize(
    "which", ["onednn", "onednn.rows", "onednn.packed", "onednn.packed.blocks", "c"]
)
def test_a_workspace_that_is_too_small_is_our_own_fault(native, which):
    a, b = np.ones((512, 32), np.float32), np.ones((32, 16), np.float32)
    out = np.empty((512, 16), np.float32)
    library, found = BY_NAME[which], form(a, b, out)
    if not workspace_bytes(library, found):
        pytest.skip("oneDNN is not installed, or takes no workspace for this on this machine")
    with pytest.raises(InternalError, match=r"needs \d+ bytes of workspace and got 0"):
        gemm_launch.gemm_launch(library, found, (a, b, out), None)


ROWS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)


@pytest.mark.parametrize("which", BY_NAME)
def test_an_epilogue_sees_every_row_once_when_it_is_done(native, which, monkeypatch):
    library = BY_NAME[which]
    monkeypatch.setattr(gemm, "CHUNK_FLOPS", 50_000)
    rng = np.random.default_rng(2)
    a, b = [rng.standard_normal((size, 32), np.float32) for size in (512, 32)]
    out = np.full((len(a), 32), np.nan, np.float32)
    seen = []

    def epilogue(arguments, begin, end, worker):
        seen.append((arguments, begin, end, worker, bool(np.isfinite(out[begin:end]).all())))

    callback = ROWS(epilogue)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    blocks = ((0, 48), (48, 400), (400, 512))
    own = () if library.cut.has_whole_rows else blocks
    run(library, a, b, out, Epilogue(address, 4711, (callback,), own))
    half = seen[: len(seen) // 2]
    rows = sorted(row for _, begin, end, _, _ in half for row in range(begin, end))
    assert rows == list(range(len(a)))
    assert all(ok for *_, ok in half)
    assert {arguments for arguments, *_ in seen} == {4711}
    assert {worker for *_, worker, _ in seen} <= {0, 1}
    assert not own or sorted((begin, end) for _, begin, end, _, _ in half) == list(own)


def test_an_epilogue_is_refused_for_tiles_without_blocks_and_for_batches(native):
    a, b = np.ones((2, 8, 8), np.float32), np.ones((2, 8, 8), np.float32)
    found = form(a, b, np.empty_like(a))
    one = replace(found, batch=())
    with raises(InternalError):
        gemm_launch.gemm_launch(BY_NAME["c"], found, (a, b, a), None, Epilogue(0, 0))
    with raises(InternalError):
        gemm_launch.gemm_launch(BY_NAME["openblas"], one, (a, b, a), None, Epilogue(0, 0))


def test_a_status_of_the_library_is_the_error_of_the_launch(native, monkeypatch):
    if not onednn.is_available():
        pytest.skip("oneDNN is not installed")
    execute = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, ctypes.c_int32,
                               ctypes.c_void_p)(lambda *_: 2)  # fmt: skip
    own = onednn.address_of

    def address_of(name):
        is_execute = name == "dnnl_primitive_execute"
        return ctypes.cast(execute, ctypes.c_void_p).value if is_execute else own(name)

    monkeypatch.setattr(onednn, "address_of", address_of)
    a = np.ones((8, 8), np.float32)
    with raises(NativeError):
        run(BY_NAME["onednn"], a, a, np.empty_like(a))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize(("columns", "depth"), [(1024, 784), (129, 1024), (300, 1001), (2, 40_000)])
def test_few_rows_meet_columns_of_any_length(native, dtype, rows, columns, depth):
    rng = np.random.default_rng(rows)
    a, b = (rng.normal(size=(n, depth)).astype(np.float32) for n in (rows, columns))
    given = (a, b) if dtype == "float32" else (to_bits(a), to_bits(b))
    if dtype == "bfloat16":
        a, b = map(from_bits, given)
    out = np.full((rows, columns), np.nan, np.float32)
    run(BY_NAME["c.columns"], given[0], given[1].T, out)
    exact, size = a.astype(np.float64) @ b.T.astype(np.float64), np.abs(a) @ np.abs(b.T)
    assert (np.abs(out - exact) <= 1e-5 * size).all()
    # Neither a row beside it nor the chunk that a column is in changes a bit of an element.
    one = np.full((1, columns), np.nan, np.float32)
    run(BY_NAME["c.columns"], given[0][-1:], given[1].T, one)
    np.testing.assert_array_equal(one[0], out[-1])


def test_few_rows_of_bfloat16_may_come_out_rounded(native):
    rng = np.random.default_rng(0)
    a, b = (to_bits(rng.normal(size=(n, 300)).astype(np.float32)) for n in (3, 200))
    whole, low = np.empty((3, 200), np.float32), np.empty((3, 200), np.uint16)
    run(BY_NAME["c.columns"], a, b.T, whole)
    run(BY_NAME["c.columns"], a, b.T, low)
    np.testing.assert_array_equal(low, to_bits(whole))


@pytest.mark.parametrize("low", [False, True], ids=["float32 out", "bfloat16 out"])
@pytest.mark.parametrize("turned", [(), ("a",), ("b",), ("a", "b")], ids=str)
@pytest.mark.parametrize(
    ("batch", "shape"),
    [((5, 2), (27, 64, 27)), ((), (1, 1, 1)), ((3,), (8, 40, 16)), ((), (9, 33, 50))],
)
def test_small_products_of_bfloat16_add_up_in_float32(native, batch, shape, turned, low):
    m, k, n = shape
    rng = np.random.default_rng(m)
    sides = {"a": (m, k), "b": (k, n)}
    given = {}
    for name, extents in sides.items():
        extents = extents[::-1] if name in turned else extents
        array = to_bits(rng.normal(size=(*batch, *extents)).astype(np.float32))
        given[name] = array.swapaxes(-1, -2) if name in turned else array
    a, b = [from_bits(given[name]).astype(np.float64) for name in sides]
    out = np.full((*batch, m, n), 77, np.uint16 if low else np.float32)
    run(BY_NAME["c"], given["a"], given["b"], out)
    exact, size = a @ b, np.abs(a) @ np.abs(b)
    got = from_bits(out) if low else out
    assert (np.abs(got - exact) <= 1e-5 * size + low * 2.0**-8 * np.abs(exact)).all()
