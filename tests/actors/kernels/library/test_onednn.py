import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

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


def arguments(text):
    """Return the named arguments of the one call of a module."""
    (call,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {entry.arg: ast.literal_eval(entry.value) for entry in call.keywords}


def test_the_parsed_declarations_are_those_that_cffi_parses(tmp_path):
    ffi = pytest.importorskip("cffi").FFI()
    folder = Path(onednn.__file__).parent
    ffi.cdef((folder / "onednn.h").read_text())
    ffi.set_source("onednn_calls", None)
    ffi.emit_python_code(str(tmp_path / "parsed.py"))
    ours = (folder / "onednn_calls.py").read_text()
    assert arguments(ours) == arguments((tmp_path / "parsed.py").read_text())


def test_memory_objects_may_outlive_the_handle_of_the_library(library):
    text = """
from actors.kernels.library import onednn
from compiler.contract.types import DType

matrix = onednn.Matrix(DType.FLOAT32, 24, 24, 24, 1)
kept = onednn.memory(onednn.matmul(matrix, matrix, matrix), onednn.SOURCE, 0)
onednn._state.library.calls = None
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


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


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_equal_copies_of_the_library_become_links_and_others_stay(tmp_path):
    contents = {"libdnnl.so": b"a" * 99, "libdnnl.so.3": b"a" * 99, "libdnnl.so.3.2": b"b" * 99}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "libdnnl.so.3"
    copies = [tmp_path / name for name in contents]
    for _ in range(2):
        onednn.share_bytes(path, [*copies, tmp_path / "gone"])
        assert files_of(tmp_path) == contents
        assert path.samefile(copies[0])
        assert not path.samefile(copies[2])


def test_copies_in_another_folder_and_where_a_link_has_no_room_stay(tmp_path):
    (tmp_path / "one").mkdir()
    path, near, far = tmp_path / "a.so", tmp_path / "b.so", tmp_path / "one" / "c.so"
    for file in (path, near, far):
        file.write_bytes(b"a")
    onednn.share_bytes(path, [far])
    assert not path.samefile(far)
    (tmp_path / f".{near.name}.{os.getpid()}").write_text("another's")
    onednn.share_bytes(path, [near])
    assert not path.samefile(near)
    assert near.read_bytes() == b"a"
