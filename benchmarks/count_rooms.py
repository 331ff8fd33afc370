"""Lines of each room of a checkout, and against another checkout whose rooms may differ.

    python benchmarks/count_rooms.py [--of DIR] [--against DIR]

Prints tables in markdown: all lines, and those of code, without blank lines, comments and
docstrings; then the comments of Python that are neither docstrings nor words to a tool, in percent
of the lines that are not blank; then the locals that are bare participles (PARTICIPLES), each once
for every function that assigns it. Python and C are counted. A room is a folder of the product,
down to what a reader looks up as one: see ROOMS.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("actorflow", "actors", "compiler", "memory")
ROOMS = (*PRODUCT, "tests", "benchmarks", "examples")
DEPTH = {"actors": 3, "compiler": 2, "actorflow": 2, "memory": 2, "tests": 2}
"""Folders deep that a room has sub-rooms; what lies deeper counts to the room above."""

ENDINGS = (".py", ".c", ".h")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
PARTICIPLES = re.compile(
    "found|made|given|held|told|seen|said|known|left|kept|asked|wanted|taken|shown|drawn|chosen|own|"
    "done|read|put|met"
)
_TO_TOOLS = re.compile(r"#\s*(noqa|type:|fmt:|pragma|pylint|!)")


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines: all, of code, of Python comments and not blank; and locals that are participles."""

    whole: int = 0
    code: int = 0
    comments: int = 0
    filled: int = 0
    participles: int = 0

    def __add__(self, other: Lines) -> Lines:
        return Lines(
            self.whole + other.whole,
            self.code + other.code,
            self.comments + other.comments,
            self.filled + other.filled,
            self.participles + other.participles,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=Path, default=ROOT)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    now = rooms_of(args.of)
    before = rooms_of(args.against) if args.against else None
    print("\n".join(table(now, before)))


def rooms_of(root: Path) -> dict[str, Lines]:
    """Return the lines of every room and sub-room, each with all that lies in it."""
    rooms: dict[str, Lines] = {}
    for path in files_of(root):
        counted = lines_of(path)
        folders = path.relative_to(root).parts[:-1]
        for depth in range(1, min(len(folders), DEPTH.get(folders[0], 1)) + 1):
            room = "/".join(folders[:depth])
            rooms[room] = rooms.get(room, Lines()) + counted
    product = [rooms[room] for room in PRODUCT if room in rooms]
    rooms["product"] = sum(product, Lines())
    return dict(sorted(rooms.items()))


def files_of(root: Path) -> Iterator[Path]:
    """Yield the files that count, in order."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            if path.suffix in ENDINGS and "__pycache__" not in path.parts:
                yield path


def lines_of(path: Path) -> Lines:
    """Count one file."""
    text = path.read_text(encoding="utf-8")
    return python_lines(text) if path.suffix == ".py" else c_lines(text)


def python_lines(text: str) -> Lines:
    """Count Python: a line with code and a comment counts as both."""
    lines = text.splitlines()
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    comments, alone = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not _TO_TOOLS.match(token.string):
                comments.add(token.start[0])
            if token.line.strip().startswith("#"):
                alone.add(token.start[0])
    blank = {n for n, line in enumerate(lines, 1) if not line.strip()}
    code = len(lines) - len(blank | docstrings | alone)
    filled = len(lines) - len(blank)
    return Lines(len(lines), code, len(comments), filled, len(participles(ast.parse(text))))


def participles(node: ast.AST, function: FunctionNode | None = None) -> set[tuple[int, str]]:
    """Return the locals that are bare participles: the function's line, and the name."""
    if isinstance(node, FunctionNode):
        function = node
    names: set[tuple[int, str]] = set()
    if function is not None and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names = {(function.lineno, node.id)} if PARTICIPLES.fullmatch(node.id) else names
    return names.union(*[participles(child, function) for child in ast.iter_child_nodes(node)])


def c_lines(text: str) -> Lines:
    """Count C: comments that begin a line are no code, and say nothing of Python's share."""
    whole = re.compile(r"^[ \t]*/\*.*?\*/[ \t]*$|^[ \t]*//[^\n]*$", re.DOTALL | re.MULTILINE)
    code = sum(1 for line in whole.sub("", text).splitlines() if line.strip())
    return Lines(len(text.splitlines()), code)


def table(now: dict[str, Lines], before: dict[str, Lines] | None) -> Iterator[str]:
    """Yield the lines of the table; a room that one side lacks has a dash there."""
    if before is None:
        yield "| room | lines | code | comments | participles |"
        yield "|---|---:|---:|---:|---:|"
        for room, counted in now.items():
            shares = f"{percent(counted):.1f} % | {counted.participles}"
            yield f"| {room} | {counted.whole:,} | {counted.code:,} | {shares} |"
        return
    names = ("lines before", "now", "change", "code before", "now", "change")
    yield (
        "| room | "
        + " | ".join((*names, "comments before", "now", "participles before", "now"))
        + " |"
    )
    yield "|---|" + "---:|" * 10
    for room in sorted({*now, *before}):
        old, new = before.get(room), now.get(room)
        cells = [room]
        for field in ("whole", "code"):
            counts = [getattr(side, field) if side else None for side in (old, new)]
            cells += ["-" if n is None else f"{n:,}" for n in counts]
            cells.append(f"{counts[1] - counts[0]:+,}" if None not in counts else "")
        cells += ["-" if side is None else f"{percent(side):.1f} %" for side in (old, new)]
        cells += ["-" if side is None else str(side.participles) for side in (old, new)]
        yield "| " + " | ".join(cells) + " |"


def percent(counted: Lines) -> float:
    """Return the share of comments in what is not blank."""
    return 100 * counted.comments / max(1, counted.filled)


if __name__ == "__main__":
    main()
