"""The page of errors: texts that tests expect, by room, each with the remedy that it states.

The tables of tests/data/errors have every text. Here is one text of each type and remedy; those
that state none are left out. A text may hold anything that a hostile file or name had in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

TABLES = Path(__file__).resolve().parents[2] / "tests" / "data" / "errors"
ROOMS = ("actorflow-*", "compiler-budget", "compiler-sbp")
LONGEST = 240

_TEXT = re.compile(r"^    (\w+): (.*(?:\n        .*)*)$", re.MULTILINE)
_TEST_LINE = re.compile(r"[\w/]*\btest_\w+\.py:(?:`[^`]*`|\d+)")
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[\d.]+")


def errors_page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Errors and their remedies",
        "",
        "This page is for users who look up an error. It has one text of each kind, by the room"
        " that raises it, and what the text itself says to do. Tests expect each of them word for"
        " word."
        " Values, names and lines are those of the tests; the search finds words of a text.",
    ]
    for table in sorted([path for name in ROOMS for path in TABLES.glob(f"{name}.txt")]):
        rows = [*remedies(table.read_text(encoding="utf-8"))]
        if rows:
            room = table.stem.replace("-", ".")
            lines += ["", f"## {room}", "", "| error | text | remedy |", "|---|---|---|"]
            lines += [
                f"| {kind} | {shown(text)} | {shown(remedy)} |" for kind, text, remedy in rows
            ]
    return "\n".join([*lines, ""])


def remedies(table: str) -> Iterator[tuple[str, str, str]]:
    """Yield type, text and remedy of one text of each type and remedy, in order."""
    known = set[tuple[str, str]]()
    for kind, whole in sorted(set(_TEXT.findall(table))):
        text, _, remedy = _TEST_LINE.sub("train.py:12", " ".join(whole.split())).rpartition("; ")
        key = kind, _VALUE.sub("", remedy)
        if text and key not in known and not remedy.startswith(("came ", "got ")):
            known.add(key)
            yield kind, text, remedy


def shown(text: str) -> str:
    """Return a text for a cell of a table, cut short, whose signs mean nothing to Markdown."""
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return re.sub(r"[^\w .,:;=()/-]", lambda match: f"&#{ord(match[0])};", cut).replace(
        "_", "&#95;"
    )
