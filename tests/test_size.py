"""What keeps the house small: lines of a module, of a function, and of every room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("actorflow", "actors", "compiler", "memory")

MODULE_LINES = {"tests": 500, "benchmarks": 500} | dict.fromkeys(PRODUCT, 400)
FUNCTION_LINES = 80

BUDGET = {
    "actorflow": 33_500,
    "actors": 43_000,
    "compiler": 32_500,
    "memory": 3_800,
    "tests": 92_000,
    "benchmarks": 13_000,
}
"""Lines of Python, C and CUDA of a room. Raise one with a reason in the commit, or mend it."""

LONGER = {
    "compiler/pipeline/pipeline.py": "all passes in one list, and what runs them",
    "compiler/verify/versions.py": "one play of all chains, whose state every part of it reads",
    "actors/kernels/native/attention.c": "one text for the C compiler",
    "benchmarks/mutate_launches.py": "one mutant after another",
}
"""Modules, and functions as `file:name`, that may be longer, and why."""


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def modules(*rooms):
    """Return the files of Python, C and CUDA in some rooms, with their lines."""
    found = [p for room in rooms for p in (ROOT / room).rglob("*") if "__pycache__" not in p.parts]
    return {
        str(p.relative_to(ROOT)): lines_of(p)
        for p in sorted(found)
        if p.suffix in (".py", ".c", ".cuh", ".h")
    }


def functions(file):
    """Yield the functions and methods of a Python file with their lines, decorators left out."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def limit_of(name):
    """Return how many lines a module, or a function as `file:name`, may have."""
    return FUNCTION_LINES if ":" in name else MODULE_LINES[name.partition("/")[0]]


def test_no_module_is_longer_than_a_reader_takes_in():
    counts = modules(*MODULE_LINES)
    longer = {file: n for file, n in counts.items() if n > limit_of(file) and file not in LONGER}
    assert longer == {}


@pytest.mark.parametrize("room", PRODUCT)
def test_no_function_is_longer_than_a_screen_or_two(room):
    files = [file for file in modules(room) if file.endswith(".py")]
    counts = {name: n for file in files for name, n in functions(file)}
    longer = {name: n for name, n in counts.items() if n > FUNCTION_LINES and name not in LONGER}
    assert longer == {}


def test_an_exception_that_is_none_any_more_is_taken_off_the_list():
    counts = modules(*MODULE_LINES)
    for file in {entry.partition(":")[0] for entry in LONGER} & {*counts}:
        counts |= dict(functions(file) if file.endswith(".py") else ())
    assert [name for name in LONGER if counts.get(name, 0) <= limit_of(name)] == []


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_stays_in_its_budget(room):
    total = sum(modules(room).values())
    assert total <= BUDGET[room], f"{room} has {total:,} lines; see BUDGET"
