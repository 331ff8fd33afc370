import importlib.metadata

import pytest
from error_texts import raises

from actors.kernels.library import onednn
from actors.kernels.library.onednn import LibraryError, Matrix
from compiler.contract.types import DType


@pytest.fixture
def library():
    if not onednn.is_available():
        pytest.skip("oneDNN is not installed")
    return onednn


@pytest.fixture
def missing(monkeypatch):
    """A process in which the package is not installed."""

    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setattr(onednn, "_state", onednn._OnednnState())


def dense(dtype, rows, columns):
    return Matrix(dtype, rows, columns, columns, 1)


def test_equal_products_share_one_primitive(library):
    shape = [dense(DType.FLOAT32, 24, 24)] * 3
    first, second = library.matmul(*shape), library.matmul(*shape)
    assert first is second
    assert "ref" not in first.name


def test_a_type_that_the_library_does_not_multiply_is_refused(library):
    assert library.matmul(*[dense(DType.FLOAT64, 8, 8)] * 3) is None


def test_extents_that_do_not_fit_are_refused(library):
    a, b = dense(DType.FLOAT32, 8, 9), dense(DType.FLOAT32, 8, 8)
    assert library.matmul(a, b, b) is None


def test_making_a_primitive_leaves_the_threads_of_the_caller_alone(library):
    calls = library._library().calls
    before = calls.omp_get_max_threads()
    calls.omp_set_num_threads(3)
    try:
        library.matmul(*[dense(DType.FLOAT32, 11, 11)] * 3)
        assert calls.omp_get_max_threads() == 3
    finally:
        calls.omp_set_num_threads(before)


def test_the_fingerprint_names_version_and_instructions(library):
    assert library.fingerprint().startswith("onednn-3.")


def test_without_the_package_nothing_is_taken_and_a_plan_that_needs_it_is_told_the_mend(missing):
    assert not onednn.is_available()
    assert onednn.fingerprint() == ""
    assert onednn.matmul(*[dense(DType.FLOAT32, 8, 8)] * 3) is None
    with raises(LibraryError):
        onednn.stream()
