"""Where NVIDIA's libraries lie: in packages of Python, in a toolkit, else where the loader looks.

The loader itself finds none of the packages, and a library that looks for another by name looks
there, or in the folder of packages of its own environment. One that is loaded is found by its name,
wherever it lies: so whoever needs several loads them in order.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

_OF_PACKAGES = ("cu13/lib", "cudnn/lib")
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
_USUAL_TOOLKIT = "/usr/local/cuda"


def find_library(name: str) -> str:
    """Return the path of a library ("libcublasLt.so.13"); its name for the loader, if not here."""
    return str(next(iter(places_of(name)), name))


def places_of(name: str) -> list[Path]:
    """Return every file of a library that is known of, those of packages first."""
    return [folder / name for folder in _folders() if (folder / name).exists()]


def _folders() -> Iterator[Path]:
    found = importlib.util.find_spec("nvidia")
    # One for each environment that has some of the packages.
    for root in (found.submodule_search_locations or ()) if found is not None else ():
        for folder in _OF_PACKAGES:
            yield Path(root) / folder
    for toolkit in (*[os.environ.get(name) for name in _TOOLKITS], _USUAL_TOOLKIT):
        if toolkit:
            yield Path(toolkit) / "lib64"
