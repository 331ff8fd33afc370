import os
import subprocess
import sys

import pytest

from actorflow.compile import blas
from actorflow.compile.blas import HOLDING_VARIABLES, BlasInfo, blas_without_variables, loaded_blas

OPENBLAS = loaded_blas()
needs_openblas = pytest.mark.skipif(
    OPENBLAS is None or OPENBLAS.core_name is None, reason="this numpy does not use OpenBLAS"
)


@needs_openblas
def test_the_loaded_library_tells_kernels_threads_and_configuration():
    found = loaded_blas()
    assert "openblas" in found.library
    assert found.core_name.isidentifier()
    assert found.num_threads >= 1
    assert "OpenBLAS" in found.config


@needs_openblas
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_the_library_is_one_that_this_process_has_mapped():
    assert any(path.name == OPENBLAS.library for path in blas._mapped_libraries())


@needs_openblas
def test_a_child_without_the_variables_is_not_held_back():
    free = blas_without_variables({**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert free == blas_without_variables(
        {name: value for name, value in os.environ.items() if name not in HOLDING_VARIABLES}
    )
    assert free.library == OPENBLAS.library


def test_the_child_gets_all_variables_but_those(monkeypatch):
    given = []

    def run(command, *, env, **options):
        given.append(env)
        return subprocess.CompletedProcess(command, 0, stdout=b"null\n")

    monkeypatch.setattr(blas.subprocess, "run", run)
    blas_without_variables({"PATH": "/bin", **dict.fromkeys(HOLDING_VARIABLES, "1")})
    assert given == [{"PATH": "/bin"}]


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_a_child_that_fails_tells_nothing(monkeypatch, executable):
    monkeypatch.setattr(blas.sys, "executable", executable)
    assert blas_without_variables({}) is None


def test_without_any_library_nothing_is_told(monkeypatch):
    monkeypatch.setattr(blas, "_bundled_libraries", list)
    monkeypatch.setattr(blas, "_mapped_libraries", list)
    assert loaded_blas() is None


def test_a_library_that_is_no_openblas_is_told_by_name(monkeypatch, tmp_path):
    library = tmp_path / "libmkl_rt.so"
    library.write_bytes(b"not a library")
    monkeypatch.setattr(blas, "_bundled_libraries", list)
    monkeypatch.setattr(blas, "_mapped_libraries", lambda: [library])
    assert loaded_blas() == BlasInfo("libmkl_rt.so", None, None, None)


def test_the_program_prints_what_the_child_reads(capsys):
    assert blas.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert (printed == "null\n") == (OPENBLAS is None)
