"""The BLAS that numpy carries: its products, called from our own chunks, and what holds it back.

numpy's wheel has OpenBLAS with decorated names (scipy_cblas_sgemm64_: 64-bit integers); a build
against the system's library has plain ones. Our pool calls it from several threads at once, each
for its own chunk, so it is told to use one thread: two pools would fight for the cores.

OpenBLAS chooses its kernels when it is loaded, by the processor or by the variable
OPENBLAS_CORETYPE. A value exported long ago, for another machine, silently halves every matrix
product; only the loaded library knows. Run as a program, this file prints what it says as JSON, so
that `doctor` can ask a child process that does not have the variables. It imports nothing of ours:
the child must not depend on the rest.

State of the module, and why: the number of threads belongs to the process, and the library keeps no
other, so what it was before we changed it is remembered here for whoever wants it back.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

HOLDING_VARIABLES = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_L2_SIZE",
)
"""Variables that change how fast OpenBLAS is, read when it is loaded."""

_CHILD_TIMEOUT_S = 30

_AFFIXES = (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", ""))
"""How builds of OpenBLAS decorate names: before and after. 64_ stands for 64-bit integers."""

_FUNCTIONS = (
    "cblas_sgemm",
    "cblas_dgemm",
    "openblas_set_num_threads",
    "openblas_get_num_threads",
    "openblas_get_corename",
)

_MARKS = ("openblas", "libblas", "libblis", "libmkl_rt", "libcblas")


@dataclass(frozen=True, slots=True)
class Blas:
    """Addresses in a loaded OpenBLAS; `integer_bits` is the width of its extents."""

    library: str
    integer_bits: int
    sgemm: int
    dgemm: int
    set_num_threads: int
    get_num_threads: int
    get_core_name: int


@dataclass(frozen=True, slots=True)
class BlasInfo:
    """What a BLAS says of itself; fields are None where it is no OpenBLAS and does not say.

    `core_name` is the processor whose kernels are in use ("SkylakeX"), `num_threads` how many
    threads a call may use.
    """

    library: str
    core_name: str | None
    num_threads: int | None


@dataclass(slots=True)
class _OpenblasState:
    num_threads_before: int | None = None


_state = _OpenblasState()


@cache
def numpy_openblas() -> Blas | None:
    """Return the products of numpy's BLAS; None where it is no OpenBLAS that we can call."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(str(path))  # numpy has it loaded: this is a second handle
        except OSError:
            continue
        blas = _asked(path.name, library)
        if blas is not None:
            return blas
    return None


def loaded_blas() -> BlasInfo | None:
    """Return the BLAS that numpy has loaded in this process, or None if it is not recognised."""
    blas = numpy_openblas()
    if blas is not None:
        c_name = ctypes.CFUNCTYPE(ctypes.c_char_p)(blas.get_core_name)()
        core_name = None if c_name is None else c_name.decode("ascii", "replace").strip()
        return BlasInfo(blas.library, core_name, _num_threads(blas))
    candidates = [path for path in _candidates() if path.exists()]
    return BlasInfo(candidates[0].name, None, None) if candidates else None


def blas_without_variables(environ: Mapping[str, str]) -> BlasInfo | None:
    """Return the BLAS of a child process that has none of `HOLDING_VARIABLES`; None if that fails.

    Takes some 0.2 s: the child imports numpy.
    """
    clean = {name: value for name, value in environ.items() if name not in HOLDING_VARIABLES}
    try:
        # -P: this folder must not come before the standard library on the child's path.
        run = subprocess.run(
            [sys.executable, "-P", __file__],
            env=clean,
            capture_output=True,
            timeout=_CHILD_TIMEOUT_S,
            check=True,
        )
        answer = json.loads(run.stdout)
        return None if answer is None else BlasInfo(**answer)
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def use_threads(count: int | None) -> bool:
    """Set the library's threads per call, for the whole process; return whether it was set.

    None restores the number from before the first call. Without such a call, or once it is
    restored, the number that the user has set stays.
    """
    blas = numpy_openblas()
    if blas is None:
        return False
    if count is None:
        count, _state.num_threads_before = _state.num_threads_before, None
    # Only the first time: later calls would remember our own number.
    elif _state.num_threads_before is None:
        _state.num_threads_before = _num_threads(blas)
    if count is not None:
        # By address: the decorated names differ between builds.
        ctypes.CFUNCTYPE(None, ctypes.c_int)(blas.set_num_threads)(count)
    return True


def use_one_thread() -> None:
    """Let the library use one thread per call from now on, in the whole process."""
    use_threads(1)


def num_threads() -> int | None:
    """Return how many threads a call of the library may use; None where there is no library."""
    blas = numpy_openblas()
    return None if blas is None else _num_threads(blas)


def _num_threads(blas: Blas) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(blas.get_num_threads)())


def _candidates() -> list[Path]:
    """Return the libraries that may be numpy's BLAS: its own first, then those of the process."""
    package = Path(np.__file__).parent
    folders = (package.parent / "numpy.libs", package / ".dylibs")
    bundled = [path for folder in folders for path in sorted(folder.glob("*openblas*"))]
    return [*bundled, *_mapped()]


def _mapped() -> list[Path]:
    """Return the BLAS libraries mapped into this process; empty where /proc does not exist."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = sorted({Path(line[line.index("/") :]) for line in lines if "/" in line})
    return [
        path
        for path in paths
        if path.name.startswith("lib") and any([mark in path.name for mark in _MARKS])
    ]


def _asked(name: str, library: ctypes.CDLL) -> Blas | None:
    for prefix, suffix in _AFFIXES:
        addresses = [_address(library, f"{prefix}{function}{suffix}") for function in _FUNCTIONS]
        # All of one decoration: a mix would call functions of two libraries.
        if all(addresses):
            return Blas(name, 64 if suffix else 32, *addresses)
    return None


def _address(library: ctypes.CDLL, name: str) -> int:
    function = getattr(library, name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def main() -> int:
    """Print the loaded BLAS as one line of JSON."""
    blas = loaded_blas()
    sys.stdout.write(json.dumps(None if blas is None else asdict(blas)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
