"""What type checkers know of the package: users' code passes, and mistakes in it do not."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from actorflow.tensor.tensor import METHODS, Tensor

pytest.importorskip("mypy", reason="needs mypy, of the extra [dev]")

ROOT = Path(__file__).resolve().parents[2]
USERS, MISTAKES = [f"tests/typing/{name}.py" for name in ("user_code", "mistakes")]
MARK = "  # refused"


@pytest.fixture(scope="module")
def errors():
    """The lines with errors of both files, by file: one run, which reads our code for both."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", USERS, MISTAKES]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    lines = {}
    for file, line, text in re.findall(r"^(.*?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        lines.setdefault(file, {})[int(line)] = text
    return lines


def test_code_as_users_write_it_has_the_types_that_it_states(errors):
    assert {file: found for file, found in errors.items() if file != MISTAKES} == {}


def test_each_mistake_is_refused_on_its_line(errors):
    text = (ROOT / MISTAKES).read_text().splitlines()
    expected = [number for number, line in enumerate(text, 1) if line.endswith(MARK)]
    assert sorted(errors[MISTAKES]) == expected


def test_checkers_are_told_of_every_method_of_a_tensor():
    source = (ROOT / "actorflow" / "tensor" / "tensor.py").read_text()
    block = source[source.index("class _Methods") : source.index("_Methods = object")]
    names = [name for name in METHODS if not name.startswith("__") and name not in vars(Tensor)]
    assert [name for name in names if not re.search(rf"\b{name}\b", block)] == []


def test_wheels_have_the_mark_that_the_packages_are_typed():
    """Types of `af.Plan` are those of another package: each needs the mark."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for wing in ("actorflow", "actors", "compiler", "memory"):
        assert "py.typed" in data["package-data"][wing]
        assert (ROOT / wing / "py.typed").exists()
