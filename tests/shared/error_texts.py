"""What errors say: the tables in tests/data/errors hold the whole texts, a table for a folder.

    with raises(CompileError):
        ...

expects an error of this type, and the type and text that the row of the test has. A row has the
name of a test, its cases of parameters, and for each the texts in the order of their first errors:

    actorflow/nn/test_nn.py::test_wrong_modules_are_errors
      [two]
      [no_dim]
        CompileError: test_nn.py:`nn.Embedding(2, -1)`: dim of Embedding must be 1 or more, got -1

`pytest --update-texts TESTS` writes the rows of the tests that pass; review the diff. A text that
is not in the row of its test is a failure, and so is a row whose text, test or case no longer
exists. `normalised` removes from a text what differs from run to run.
"""

from __future__ import annotations

import fcntl
import linecache
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "tests" / "data" / "errors"

Rows = dict[str, list[str]]
"""The texts that a test expects, by its name."""

_LINE = re.compile(r"([\w./-]+\.py):(\d+)")

_VARYING = (
    (re.escape(f"{ROOT}/"), ""),
    (
        rf"{re.escape(tempfile.gettempdir())}/(pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?)?[\w.-]+",
        "<tmp>",
    ),
    (rf"\bprocess {os.getpid()}\b( on {re.escape(socket.gethostname())}\b)?", "process <pid>"),
    (r"\b0x[0-9a-f]{6,}\b", "<address>"),
    (r"(?<=[\w>])#\d+\b", ""),  # the n-th op of a name in this process
    (r"\b(af_\w+?)_[0-9a-f]{20}\b", r"\1_<hash>"),  # a kernel is named by its text
    (r"(\nLast messages to the actor:)(\n  [A-Z]+ .*)+", r"\1 ..."),  # their order is the threads'
)
"""What differs from run to run, and what stands in a table for it."""


def normalised(text: str) -> str:
    """Return a text without what differs from run to run.

    A line of a file of ours stands as its source, because its number changes with each edit above
    it: "test_nn.py:7" becomes "test_nn.py:`layer = nn.Linear(2, 3)`".
    """
    for pattern, common in _VARYING:
        text = re.sub(pattern, common, text)
    return _LINE.sub(_source_line, text)


def _source_line(match: re.Match[str]) -> str:
    line = linecache.getline(match[1], int(match[2])).strip()
    return f"{match[1]}:`{line}`" if line else match[0]


class RunningTest:
    """The texts of the test that runs: those of its row, and those of its errors up to now."""

    def __init__(self, test: str, expected: list[str] | None) -> None:
        self.test = test
        self.expected = expected  # None: whatever comes is the row
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Compare a text with the row of the test, and fail the test where it is another one."""
        __tracebackhide__ = True
        if text in self.texts:
            return
        if self.expected is not None:
            rest = self.expected[len(self.texts) :]
            if text not in rest[:1]:
                row = f"\nthe row has\n{rest[0]}" if rest else "its row has no further text"
                pytest.fail(f"{self.test} raised\n{text}\n{row}\n{self.remedy()}")
        self.texts.append(text)

    def close(self) -> None:
        """Fail the test where its row has texts that did not come."""
        __tracebackhide__ = True
        if self.expected is not None and len(self.texts) < len(self.expected):
            rest = "\n".join(self.expected[len(self.texts) :])
            pytest.fail(f"the row of {self.test} has texts that did not come:\n{rest}")

    def remedy(self) -> str:
        """Return the command that writes the row."""
        return f"if that is meant: pytest --update-texts 'tests/{function_of(self.test)}'"


_running: list[RunningTest] = []


@contextmanager
def raises(kinds: type[BaseException] | tuple[type[BaseException], ...]) -> Iterator:
    """Expect an error of one of these types, and the text that the table has; yields its info."""
    __tracebackhide__ = True
    with pytest.raises(kinds) as caught:
        yield caught
    error = caught.value
    _running[-1].add(normalised(f"{type(error).__name__}: {error}"))


class ErrorTexts:
    """Plugin of pytest: gives each test its row, and finds rows of cases that are not there."""

    def __init__(self, is_update: bool) -> None:
        self._is_update = is_update
        self._rows = all_rows()
        self._new: Rows = {}
        self._stale: Rows = {}  # rows without a case, by their function

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config, items) -> None:
        if config.getoption("lf", False) or any("[" in argument for argument in config.args):
            return  # some cases of a function
        names = {_name(item) for item in items}
        functions = {function_of(name) for name in names}
        for name in self._rows.keys() - names:
            if function_of(name) in functions:
                self._stale.setdefault(function_of(name), []).append(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item) -> Iterator[None]:
        name = _name(item)
        test = RunningTest(name, None if self._is_update else self._rows.get(name, []))
        _running.append(test)
        try:
            result = yield
        finally:
            _running.pop()
        test.close()
        if not self._is_update and (stale := self._stale.get(function_of(name))):
            pytest.fail(f"rows of cases that are not there: {', '.join(stale)}; {test.remedy()}")
        self._new[name] = test.texts
        return result

    def pytest_sessionfinish(self) -> None:
        if self._is_update:
            gone = [name for stale in self._stale.values() for name in stale]
            update({**self._new, **{name: [] for name in [*gone, *rows_without_function()]}})


def function_of(name: str) -> str:
    """Return the name of a test without its case."""
    return name.partition("[")[0]


def all_rows() -> Rows:
    """Return the rows of all tables."""
    return {name: texts for path in TABLES.glob("*.txt") for name, texts in read(path).items()}


def rows_without_function() -> list[str]:
    """Return the rows whose test function or file does not exist."""
    functions: dict[str, str] = {}
    for name in all_rows():
        file = name.partition("::")[0]
        path = ROOT / "tests" / file
        functions.setdefault(file, path.read_text() if path.exists() else "")
    return [
        name
        for name in all_rows()
        if f"def {function_of(name).rpartition('::')[2]}(" not in functions[name.partition("::")[0]]
    ]


def update(changed: Rows) -> None:
    """Write rows into their tables; those without texts are removed."""
    tables: dict[Path, Rows] = {}
    for name, texts in changed.items():
        tables.setdefault(path_of(name), {})[name] = texts
    TABLES.mkdir(exist_ok=True)
    lock = os.open(TABLES, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of pytest-xdist write one after the other
        for path, rows in tables.items():
            before = read(path) if path.exists() else {}
            after = {name: texts for name, texts in {**before, **rows}.items() if texts}
            if after:
                path.write_text(written(after))
            else:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def path_of(name: str) -> Path:
    """Return the table that has the row of a test, by the folder of its file."""
    folders = Path(name.partition("::")[0]).parts[:-1]
    return TABLES / f"{'-'.join(folders[:2])}.txt"


def read(path: Path) -> Rows:
    """Return the rows of a table."""
    rows: Rows = {}
    function, names, texts = "", [], []
    for line in path.read_text().splitlines():
        if line.startswith(" " * 8):
            texts[-1] += f"\n{line[8:]}"
        elif line.startswith(" " * 4):
            texts.append(line[4:])
            rows.update(dict.fromkeys(names, texts))
        elif line:
            if texts:
                names, texts = [], []
            if line.startswith("  "):
                names = [*[name for name in names if name != function], function + line[2:]]
            else:
                function, names = line, [line]
    return rows


def written(rows: Rows) -> str:
    """Return a table as text, by the names of tests; cases with equal texts stand together."""
    functions: dict[str, dict[str, list[str]]] = {}
    for name in sorted(rows):
        function, bracket, case = name.partition("[")
        text = "\n".join([_indented(text) for text in rows[name]])
        cases = functions.setdefault(function, {}).setdefault(text, [])
        cases += [f"  {bracket}{case}"] if bracket else []
    return "\n".join(
        [
            "\n".join([function, *[line for text in texts for line in (*texts[text], text)], ""])
            for function, texts in functions.items()
        ]
    )


def _indented(text: str) -> str:
    return "    " + text.replace("\n", "\n        ")


def _name(item) -> str:
    return item.nodeid.removeprefix("tests/").replace("\n", "\\n")
