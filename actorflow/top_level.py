"""Two checks that run before any other import of actorflow.

The top-level packages memory, compiler and actors have common names, which a file of the user may
have too; and a script that has the name of a module of Python's library hides that module.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

WINGS = ("memory", "compiler", "actors")


_WITH_EFFECTS = ("antigravity", "this")
"""Modules of Python's library that do something to be seen when they are imported."""


def keep_library_module() -> None:
    """Load the module of Python's library that the running script is called like, if there is one.

    A script called bisect.py hides Python's own `bisect`, which tempfile and numpy need: a later
    `import bisect` would run the script a second time. Loaded now, from where it belongs, the name
    stands for Python's module whoever asks for it; the script itself is `__main__`.
    """
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    name = script.stem
    is_hiding = name in sys.stdlib_module_names and name not in (*sys.modules, *_WITH_EFFECTS)
    if not is_hiding or not sys.path or Path(sys.path[0]).resolve() != script.parent.resolve():
        return
    folder = sys.path.pop(0)
    try:
        with suppress(ImportError):  # one of another system, or of a Python built without it
            import_module(name)
    finally:
        sys.path.insert(0, folder)


def check_top_level_packages() -> None:
    """Raise ImportError naming the foreign file when a wing resolves to another package."""
    home = Path(__file__).resolve().parents[1]
    for wing in WINGS:
        spec = importlib.util.find_spec(wing)
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        if any(Path(place).resolve() == home / wing for place in places[:1]):
            continue
        foreign = "nothing" if spec is None else (spec.origin or ", ".join(places))
        raise ImportError(
            f"actorflow needs its own package {wing!r} at {home / wing}, but Python finds"
            f" {foreign}. Rename or move that file, or put {home} before its folder on sys.path"
        )
