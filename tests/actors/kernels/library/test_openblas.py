"""numpy's own BLAS: its threads, which belong to the process, and what it says of itself."""

import os
import subprocess
import sys

import pytest

from actors.kernels.library import openblas
from actors.kernels.library.openblas import HOLDING_VARIABLES, BlasInfo, blas_without_variables

needs_openblas = pytest.mark.skipif(
    openblas.numpy_openblas() is None, reason="this numpy does not use OpenBLAS"
)


@pytest.fixture
def _as_found():
    """Begin with three threads that nobody told us of, and leave what was there."""
    openblas.use_threads(None)
    before = openblas.num_threads()
    openblas.use_threads(3)
    openblas._state.num_threads_before = None
    yield
    openblas.use_threads(before)
    openblas._state.num_threads_before = None


@needs_openblas
@pytest.mark.usefixtures("_as_found")
def test_every_call_tells_the_library_whatever_others_told_it_since():
    openblas.use_one_thread()
    assert openblas.num_threads() == 1
    assert openblas.use_threads(2)
    assert openblas.num_threads() == 2
    openblas.use_one_thread()
    assert openblas.num_threads() == 1


@needs_openblas
@pytest.mark.usefixtures("_as_found")
def test_none_gives_back_what_was_there_before_the_first_call():
    openblas.use_one_thread()
    openblas.use_threads(2)
    openblas.use_threads(None)
    assert openblas.num_threads() == 3


@needs_openblas
@pytest.mark.usefixtures("_as_found")
def test_what_the_user_set_after_it_was_given_back_stands():
    openblas.use_one_thread()
    openblas.use_threads(None)
    openblas.use_threads(2)
    openblas._state.num_threads_before = None  # as if the user had told the library
    openblas.use_threads(None)
    assert openblas.num_threads() == 2
    openblas.use_one_thread()
    openblas.use_threads(None)
    assert openblas.num_threads() == 2


@pytest.fixture
def without_openblas(monkeypatch):
    """A numpy whose library of products is another one."""
    monkeypatch.setattr(openblas, "numpy_openblas", lambda: None)


@pytest.mark.usefixtures("without_openblas")
def test_without_openblas_nothing_is_told():
    assert not openblas.use_threads(2)
    assert not openblas.use_threads(None)
    assert openblas.num_threads() is None


@needs_openblas
def test_the_loaded_library_tells_its_kernels_and_its_threads():
    said = openblas.loaded_blas()
    assert "openblas" in said.library
    assert said.core_name.isidentifier()
    assert said.num_threads == openblas.num_threads() >= 1


@needs_openblas
def test_a_child_without_the_variables_is_not_held_back():
    free = blas_without_variables({**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert free == blas_without_variables(
        {name: value for name, value in os.environ.items() if name not in HOLDING_VARIABLES}
    )
    assert free.library == openblas.loaded_blas().library


def test_the_child_gets_all_variables_but_those(monkeypatch):
    given = []

    def run(command, *, env, **options):
        given.append(env)
        return subprocess.CompletedProcess(command, 0, stdout=b"null\n")

    monkeypatch.setattr(subprocess, "run", run)
    blas_without_variables({"PATH": "/bin", **dict.fromkeys(HOLDING_VARIABLES, "1")})
    assert given == [{"PATH": "/bin"}]


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_a_child_that_fails_tells_nothing(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert blas_without_variables({}) is None


@pytest.mark.usefixtures("without_openblas")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_library_that_is_no_openblas_is_told_by_name(monkeypatch, tmp_path, is_there):
    library = tmp_path / "libmkl_rt.so"
    library.write_bytes(b"not a library")
    monkeypatch.setattr(openblas, "_candidates", lambda: [library] if is_there else [])
    said = BlasInfo("libmkl_rt.so", None, None) if is_there else None
    assert openblas.loaded_blas() == said


def test_the_program_prints_what_the_child_reads(capsys):
    assert openblas.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert (printed == "null\n") == (openblas.loaded_blas() is None)
