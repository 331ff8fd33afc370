"""Which BLAS numpy uses, and with which kernels: asked of the library itself.

OpenBLAS chooses its kernels when it is loaded, by the processor or by the variable
OPENBLAS_CORETYPE. A value exported long ago, for another machine, silently halves every matrix
product; only the loaded library knows. Run as a program, this file prints the answer as JSON, so
that `doctor` can ask a child process that does not have the variables. It imports nothing of ours:
the child must not depend on the rest.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class BlasInfo:
    """What the library says of itself; fields are None where it does not say.

    `core_name` is the processor whose kernels are in use ("SkylakeX"), `num_threads` how many
    threads a call may use.
    """

    library: str
    core_name: str | None
    config: str | None
    num_threads: int | None


def loaded_blas() -> BlasInfo | None:
    """Return the BLAS that numpy has loaded in this process, or None if it is not recognised."""
    candidates = [*_bundled_libraries(), *_mapped_libraries()]
    for path in candidates:
        found = _asked(path)
        if found is not None:
            return found
    others = [path for path in candidates if path.exists()]
    return BlasInfo(others[0].name, None, None, None) if others else None


def blas_without_variables(environ: Mapping[str, str]) -> BlasInfo | None:
    """Return the BLAS of a child process that has none of `HOLDING_VARIABLES`; None if that fails.

    Takes some 0.2 s: the child imports numpy.
    """
    clean = {name: value for name, value in environ.items() if name not in HOLDING_VARIABLES}
    try:
        # -P: this folder must not come before the standard library on the child's path.
        ended = subprocess.run(
            [sys.executable, "-P", __file__],
            env=clean,
            capture_output=True,
            timeout=_CHILD_TIMEOUT_S,
            check=True,
        )
        answer = json.loads(ended.stdout)
        return None if answer is None else BlasInfo(**answer)
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def _bundled_libraries() -> list[Path]:
    """Return the libraries that a numpy wheel carries: Linux and Windows, then macOS."""
    package = Path(np.__file__).parent
    folders = (package.parent / "numpy.libs", package / ".dylibs")
    return [path for folder in folders for path in sorted(folder.glob("*openblas*"))]


def _mapped_libraries() -> list[Path]:
    """Return the BLAS libraries mapped into this process; empty where /proc does not exist."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {Path(line[line.index("/") :]) for line in lines if "/" in line}
    marks = ("openblas", "libblas", "libblis", "libmkl_rt", "libcblas")
    libraries = [path for path in paths if path.name.startswith("lib")]
    return sorted([path for path in libraries if any([mark in path.name for mark in marks])])


def _asked(path: Path) -> BlasInfo | None:
    try:
        library = ctypes.CDLL(str(path))  # already loaded by numpy: this is a second handle to it
    except OSError:
        return None
    for prefix, suffix in _AFFIXES:
        if hasattr(library, f"{prefix}openblas_get_corename{suffix}"):
            return BlasInfo(
                path.name,
                _text(library, f"{prefix}openblas_get_corename{suffix}"),
                _text(library, f"{prefix}openblas_get_config{suffix}"),
                _number(library, f"{prefix}openblas_get_num_threads{suffix}"),
            )
    return None


def _text(library: ctypes.CDLL, name: str) -> str | None:
    function = getattr(library, name, None)
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    function.argtypes = ()
    answer = function()
    return None if answer is None else str(answer.decode("ascii", "replace")).strip()


def _number(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    if function is None:
        return None
    function.restype = ctypes.c_int
    function.argtypes = ()
    return int(function())


def main() -> int:
    """Print the loaded BLAS as one line of JSON."""
    found = loaded_blas()
    sys.stdout.write(json.dumps(None if found is None else asdict(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
