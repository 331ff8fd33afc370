"""Lines of each room of a checkout, and against another checkout whose rooms may differ.

    python benchmarks/count_rooms.py [--of DIR] [--against DIR]
    python benchmarks/count_rooms.py --tests [--of DIR]

Prints tables in markdown: all lines, and those of code, without blank lines, comments and
docstrings; then the comments of Python that are neither docstrings nor words to a tool, in percent
of the lines that are not blank; then the locals that are bare participles (PARTICIPLES), each once
for every function that assigns it. Python and C are counted. A room is a folder of the product,
down to what a reader looks up as one: see ROOMS.

With `--tests` prints where tests use private names of the product, or patch it: see Bindings.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
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
    parser.add_argument("--tests", action="store_true", help="print what binds tests, file by file")
    args = parser.parse_args()
    if args.tests:
        print("\n".join(listed(structure_in_tests(args.of))))
        return
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


TESTED = (*PRODUCT, "benchmarks")
"""What tests are of."""

_PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
_OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
_PATCHING = {"setattr", "setitem", "delattr", "delitem", "object", "dict"}


@dataclass(frozen=True, slots=True)
class Bindings:
    """Where a file of tests names the structure of what it tests: a move or a rename breaks it.

    Both are "line: text". `private_uses` are attributes and imports with one leading underscore
    that the product defines and the file does not; `patches` are calls that put something in the
    place of a name of the product.
    """

    private_uses: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()


def structure_in_tests(root: Path) -> dict[str, Bindings]:
    """Return the bindings of each file of tests that has any, by its path below `root`."""
    product = [path for wing in TESTED for path in (root / wing).rglob("*.py")]
    private = {name for path in product for name in _PRIVATE.findall(path.read_text("utf-8"))}
    bindings = {}
    for path in sorted((root / "tests").rglob("*.py")):
        counted = bindings_of(path.read_text(encoding="utf-8"), private)
        if counted.private_uses or counted.patches:
            bindings[str(path.relative_to(root))] = counted
    return bindings


def listed(bindings: Mapping[str, Bindings]) -> Iterator[str]:
    """Yield the sums, then every file with what it uses and what it patches, most first."""
    uses, patches = [
        sum([len(getattr(counted, kind)) for counted in bindings.values()])
        for kind in ("private_uses", "patches")
    ]
    yield f"{uses} uses of private names, {patches} patches"
    for file, counted in sorted(
        bindings.items(), key=lambda row: -len(row[1].private_uses) - len(row[1].patches)
    ):
        yield f"{file}: {len(counted.private_uses)} uses, {len(counted.patches)} patches"
        yield from [f"    use   {text}" for text in counted.private_uses]
        yield from [f"    patch {text}" for text in counted.patches]


def bindings_of(text: str, private: Set[str]) -> Bindings:
    """Return the bindings of one text; `private` are the private names that the product has."""
    if not _PRIVATE.search(text) and "patch" not in text:
        return Bindings()
    tree = ast.parse(text)
    nodes = [*ast.walk(tree)]
    foreign, tested = _imports(nodes)
    own = _private_names(nodes)
    untested = foreign | {
        target.id
        for line in tree.body
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    uses, patches = [], []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and _is_tested(node.module):
            names = [a.name for a in node.names if _is_private(a.name)]
            uses += [f"{node.lineno}: import {name}" for name in names]
        elif isinstance(node, ast.Attribute) and node.attr in private - own - _OF_NAMED_TUPLES:
            if _root(node) not in foreign:
                uses.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and _is_patch(node, untested, tested):
            patches.append(f"{node.lineno}: {', '.join(map(ast.unparse, node.args[:2]))}")
    return Bindings(tuple(uses), tuple(patches))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _OF_NAMED_TUPLES


def _private_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the private names that a test defines, for itself or as attributes of its `self`."""
    names = set()
    for node in nodes:
        if isinstance(node, FunctionNode | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if _root(node) == "self" else set()
    return {name for name in names if _is_private(name)}


def _imports(nodes: Sequence[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names of a file that stand for modules of others, and for what is tested."""
    foreign, tested = set(), set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                (tested if _is_tested(alias.name) else foreign).add(name)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name for alias in node.names}
            (tested if _is_tested(node.module) else foreign).update(names)
    return foreign, tested


def _is_tested(module: str | None) -> bool:
    # `gpu` is imported from benchmarks/gpu, whose scripts run without the package around them.
    return (module or "").partition(".")[0] in (*TESTED, "gpu")


def _root(node: ast.AST) -> str:
    """Return the name with which a chain of attributes, calls and indices begins, or ""."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_patch(call: ast.Call, untested: Collection[str], tested: Collection[str]) -> bool:
    """Return whether a call patches what is tested: a module, a class, or an object of the test.

    `untested` are the names of other modules, and of constants of the test.
    """
    function = call.func
    is_patching = (
        isinstance(function, ast.Attribute)
        and function.attr in _PATCHING
        and "patch" in _root(function).lower()
    )
    if not is_patching or not call.args:
        return False
    target = call.args[0]
    if isinstance(target, ast.Constant):
        return _is_tested(str(target.value))
    return _root(target) in tested or _root(target) not in untested


if __name__ == "__main__":
    main()
