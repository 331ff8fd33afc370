"""Mutants of a text, what a list argues away, and the command on a few mutants of the runtime."""

import ast
import subprocess
import sys

import pytest

from actors.testing.mutate import ARGUED, ROOT, SUBJECTS, argued, mutants_of

SOURCE = '''
"""A text."""

class Box:
    """It holds."""

    def steps(self, count: int = 3) -> int:
        """Round up."""
        self.seen = True
        if count <= 0 and not self.full:
            raise ValueError("none")
        self.note(count)
        self.post(count)
        return -(-count // 4)
'''

CHANGES = [
    "drop `self.seen = True`",
    "drop `if count <= 0 and (not self.full):`",
    "drop `self.note(count)`",
    "drop `self.post(count)`",
    "swap `self.note(count)` and `self.post(count)`",
    "drop `return -(-count // 4)`",
    "`True` -> `False` in `self.seen = True`",
    "drop `raise ValueError('none')`",
    "not `count <= 0 and (not self.full)`",
    "`count <= 0 and (not self.full)` -> `count <= 0` in `if count <= 0 and (not self.full):`",
    "`count <= 0 and (not self.full)` -> `not self.full` in `if count <= 0 and (not self.full):`",
    "`count <= 0 and (not self.full)` -> `count <= 0 or not self.full`",
    "`not self.full` -> `self.full` in `count <= 0 and (not self.full)`",
    "`count <= 0` -> `count < 0`",
    "`0` -> `1` in `count <= 0`",
    "`-(-count // 4)` -> `count // 4` in `return -(-count // 4)`",
    "`-count // 4` -> `-count * 4`",
    "`4` -> `5` in `-count // 4`",
]


def test_every_place_is_broken_once_and_named():
    mutants = list(mutants_of(SOURCE))
    assert [mutant.change for mutant in mutants] == CHANGES
    assert {mutant.function for mutant in mutants} == {"Box.steps"}
    texts = {mutant.source for mutant in mutants}
    assert len(texts) == len(CHANGES)
    assert ast.unparse(ast.parse(SOURCE)) not in {ast.unparse(ast.parse(t)) for t in texts}


def test_equal_changes_of_one_function_are_numbered():
    text = "def f(a, b):\n    a.stop()\n    b.go()\n    a.stop()\n"
    keys = [mutant.key for mutant in mutants_of(text)]
    assert keys.count("f: drop `a.stop()`") == 1
    assert keys.count("f: drop `a.stop()` #1") == 1


def test_an_argument_belongs_to_the_mutant_above_it():
    assert argued("# why\na: f: drop `x`\n  It is\n  logged.\n\nb: g: not `y`\n  Same.\n") == {
        "a: f: drop `x`": "It is logged.",
        "b: g: not `y`": "Same.",
    }


def test_what_is_argued_away_exists_and_has_an_argument():
    reasons = argued(ARGUED.read_text())
    keys = {
        f"{name}: {mutant.key}"
        for name, subject in SUBJECTS.items()
        for mutant in mutants_of(subject.path.read_text())
    }
    assert [name for name in reasons if name not in keys] == []
    assert all(reasons.values())


def mutate(*arguments):
    command = [sys.executable, "-m", "actors.testing.mutate", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("file", "function"),
    [("machine", "Ending.close"), pytest.param("failure", "fail_by", marks=pytest.mark.slow)],
)
def test_the_tests_of_the_runtime_notice_its_mutants(file, function):
    done = mutate(file, "--function", function, "--limit", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 survive;" in done.stdout
