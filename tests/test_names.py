"""One class name stands for one thing, and a module never has the name of what it exports."""

import ast
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import actorflow as af

HOUSE = Path(__file__).resolve().parents[1]
WINGS = ("actorflow", "actors", "compiler", "memory")

SHARED_NAMES = 0
"""Names that stand for several classes still. It may only fall."""


def classes():
    """Return the files of every class by its name, whether private or not."""
    found = defaultdict(list)
    for wing in WINGS:
        for path in sorted((HOUSE / wing).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ClassDef):
                    found[node.name.lstrip("_")].append(str(path.relative_to(HOUSE)))
    return found


def test_one_class_name_stands_for_one_thing():
    shared = {name: files for name, files in classes().items() if len(files) > 1}
    listing = "\n".join([f"{name}: {', '.join(files)}" for name, files in sorted(shared.items())])
    assert len(shared) <= SHARED_NAMES, (
        f"{len(shared)} class names stand for several things, rename what is new:\n{listing}"
    )


def test_no_module_hides_what_it_exports():
    """`import actorflow.job` would put the module where the function stands."""
    names = [name for name in af.__all__ if not isinstance(getattr(af, name), type(af))]
    assert [name for name in names if find_spec(f"actorflow.{name}") is not None] == []
