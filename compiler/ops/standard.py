"""Import this module to register every op that ships with the compiler.

All files of this folder are imported. A third party's op needs none here: its own file registers
it when it is imported.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import compiler.ops

FAMILIES = tuple(
    [
        import_module(f"compiler.ops.{name}")
        for name in sorted([found.name for found in iter_modules(compiler.ops.__path__)])
        if name != "standard"
    ]
)
"""The files of the folder, imported."""
