"""Three checks that run before any other import of actorflow.

Most of it is made for Linux, and the rest for POSIX, so another system is named at once. The
top-level packages memory, compiler and actors have common names, which a file of the user may have
too; and a script that has the name of a module of Python's library hides that module.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

WINGS = ("memory", "compiler", "actors")


_WITH_EFFECTS = ("antigravity", "this")
"""Modules of Python's library that do something to be seen when they are imported."""


def check_system() -> None:
    """Say in a line what runs on another system than Linux. Raises ImportError on Windows."""
    system = str(sys.platform)  # a checker knows the value of the one that it runs on
    if system == "linux":
        return
    if system == "win32":
        raise ImportError(
            "actorflow runs on Linux and, with less, on other POSIX systems, and not on Windows:"
            " install it in WSL (wsl --install), where all of it runs"
        )
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:  # workers would say it again
        logging.getLogger("actorflow").warning(
            "actorflow is tested on Linux alone; on %s one process plans, simulates and trains,"
            " and ACTORFLOW_NATIVE=0 does without the C compiler; several ranks and GPUs need"
            " Linux",
            system,
        )


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
    """Make sure that each wing is the package beside this one.

    A file of that name beside the running script, that nothing has imported yet, is passed over:
    the name stands for actorflow's package in this process, and whoever wants anything else of it
    hears which file that hides. Raises ImportError naming the foreign file in all other cases.
    """
    home = Path(__file__).resolve().parents[1]
    for wing in WINGS:
        spec = importlib.util.find_spec(wing)
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        if any(Path(place).resolve() == home / wing for place in places[:1]):
            continue
        foreign = "nothing" if spec is None else (spec.origin or ", ".join(places))
        if wing not in sys.modules and _is_beside_script(foreign):
            _load_own(home, wing, foreign)
            continue
        raise ImportError(
            f"actorflow needs its own package {wing!r} at {home / wing}, but Python finds"
            f" {foreign}. Rename or move that file, or put {home} before its folder on sys.path"
        )


def _is_beside_script(file: str) -> bool:
    """Whether a module or package lies in the first folder of `sys.path`, that of the script."""
    path = Path(file)
    if not sys.path or not path.is_file():
        return False
    module = path.parent if path.name == "__init__.py" else path
    return module.resolve().parent == Path(sys.path[0]).resolve()


def _load_own(home: Path, wing: str, hidden: str) -> None:
    """Load the package beside this one under its name, although another file comes first."""
    file = home / wing / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        wing, file, submodule_search_locations=[str(file.parent)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"actorflow needs its own package {wing!r}, and {file} is none")
    module = sys.modules[wing] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def missing(name: str) -> NoReturn:
        # Python asks for the first of any module, and for the others before it loads them.
        if name.startswith("__") or importlib.util.find_spec(f"{wing}.{name}") is not None:
            raise AttributeError(f"module {wing!r} has no attribute {name!r}")
        raise ImportError(
            f"{wing!r} is a package of actorflow in this process and has no {name!r}; it hides"
            f" {hidden}: rename that file to import it"
        )

    module.__getattr__ = missing  # type: ignore[method-assign]  # PEP 562
    logging.getLogger("actorflow").info("%s is hidden by actorflow's package %r", hidden, wing)
