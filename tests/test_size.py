"""What keeps the house small: lines of a module, of a function, and of every room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("actorflow", "actors", "compiler", "memory")

MODULE_LINES = 650
FUNCTION_LINES = 80
PARAMETERS = 8

TORCH_SIGNATURES = (
    "actorflow/functional/convolution.py:transposed",
    "actorflow/functional/sequence.py:scaled_dot_product_attention",
    "actorflow/nn/attention.py:__call__",
    "actorflow/nn/attention.py:__init__",
    "actorflow/nn/layers.py:__init__",
    "actorflow/nn/transformer.py:__call__",
    "actorflow/nn/transformer.py:__init__",
    "actorflow/optim/plateau.py:__init__",
)
"""Functions with more parameters, because users call them as torch's."""

BUDGET = {
    "actorflow": 64_400,
    "actors": 50_600,
    "compiler": 34_100,
    "memory": 4_150,
    "tests": 126_500,
    "benchmarks": 19_900,
}
"""Lines of Python, C and CUDA of a floor. They only fall; a commit that raises one says why."""

SLACK = 500
"""Lines that a budget may lie above its floor, so that what was saved stays saved."""


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


def test_no_module_is_longer_than_a_reader_takes_in():
    counts = modules(*BUDGET)
    assert {file: lines for file, lines in counts.items() if lines > MODULE_LINES} == {}


@pytest.mark.parametrize("room", PRODUCT)
def test_no_function_is_longer_than_a_screen_or_two(room):
    files = [file for file in modules(room) if file.endswith(".py")]
    counts = {name: lines for file in files for name, lines in functions(file)}
    assert {name: lines for name, lines in counts.items() if lines > FUNCTION_LINES} == {}


def num_parameters(function):
    """Return how many arguments a function takes, without itself."""
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")])


def test_no_function_takes_more_arguments_than_a_reader_tells_apart():
    """What belongs together is one value: a record of settings, of a run, of a place."""
    found = [
        f"{file}:{node.name}"
        for file in modules(*PRODUCT)
        if file.endswith(".py")
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if num_parameters(node) > PARAMETERS
    ]
    assert sorted(set(found)) == sorted(TORCH_SIGNATURES)


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_stays_in_its_budget(room):
    total = sum(modules(room).values())
    assert total <= BUDGET[room], f"{room} has {total:,} lines; see BUDGET"


@pytest.mark.parametrize("room", BUDGET)
def test_a_budget_falls_with_its_room(room):
    total = sum(modules(room).values())
    assert BUDGET[room] - total <= SLACK, f"{room} has {total:,} lines: lower its BUDGET"
