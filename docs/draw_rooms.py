"""Draw who knows whom in the house, from the imports of its modules, into docs/rooms.md.

    python docs/draw_rooms.py [--check]

A room is a folder. Its modules are drawn as one box, or as several, one above the other, where
something outside lies between them: `compiler 1` has the words that all of the compiler use, and
`compiler 2` what is made of them. So the boxes have no circle, as modules have none when they are
imported. An arrow means that a module of one box is imported by one of the other; arrows that
follow from others are left out. Dotted are the imports for types alone and those inside of
functions, which may go in circles. `--check` draws nothing and fails where the page is another one.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rooms.md"
FLOORS = ("actorflow", "actors", "compiler", "memory")
_BEGIN, _END = "<!-- rooms -->\n", "<!-- end -->"

Graph = dict[str, set[str]]
"""By name, what it knows."""


def modules() -> dict[str, Path]:
    """Return the files of all modules by name, in order."""
    found: dict[str, Path] = {}
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(tree: ast.AST, known: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """Yield the modules of the house that a module imports, and whether while it is imported."""
    todo: list[tuple[ast.AST, bool]] = [(tree, True)]
    while todo:
        node, is_now = todo.pop()
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inside]
        yield from [(name, is_now) for name in names if name in known]
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        is_now &= not (is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        todo += [(child, is_now) for child in ast.iter_child_nodes(node)]


def knowledge(files: dict[str, Path]) -> tuple[Graph, Graph]:
    """Return what each module imports when it is imported, and what for types or in functions."""
    now: Graph = {name: set() for name in files}
    later: Graph = {name: set() for name in files}
    for name, path in files.items():
        for other, is_now in imports_of(ast.parse(path.read_bytes()), files):
            if other != name:
                (now if is_now else later)[name].add(other)
    return now, later


def in_order(graph: Graph) -> list[str]:
    """Return the modules, each after all that it knows. Raises ValueError naming a circle."""
    order: dict[str, None] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " > ".join([*path[path.index(name) :], name])
            raise ValueError(f"modules import one another: {circle}")
        if name not in order:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            order[name] = None

    for name in sorted(graph):
        visit(name, ())
    return list(order)


def boxes_of(files: dict[str, Path], now: Graph) -> dict[str, list[str]]:
    """Return the boxes with their modules: of a room as few as this order lets have no circle."""
    names: list[str] = []
    members: dict[str, list[str]] = {}
    box: dict[str, str] = {}
    below: Graph = {}
    for module in in_order(now):
        room = "/".join(files[module].relative_to(ROOT).parent.parts)
        needs = {box[other] for other in now[module]}
        own = [name for name in names if name.rpartition(" ")[0] == room]
        fits = [b for b in own if not any([b in below[need] for need in needs])]
        if fits:
            place = fits[0]
        else:
            place = f"{room} {len(own) + 1}"
            names.append(place)
            members[place], below[place] = [], set()
        members[place].append(module)
        box[module] = place
        new = set().union(*[below[need] | {need} for need in needs]) - {place}
        for name in names:
            if name == place or place in below[name]:
                below[name] |= new
    return members


def arrows(graph: Graph, box: dict[str, str]) -> Graph:
    """Return what boxes know of one another."""
    found: Graph = {name: set() for name in box.values()}
    for module, others in graph.items():
        found[box[module]] |= {box[other] for other in others} - {box[module]}
    return found


def reach(graph: Graph) -> Graph:
    """Return all that each name leads to; there are no circles."""
    found: Graph = {}

    def visit(name: str) -> set[str]:
        if name not in found:
            found[name] = set().union(graph[name], *[visit(other) for other in graph[name]])
        return found[name]

    for name in graph:
        visit(name)
    return found


def drawing(floor: str, solid: Graph, dotted: Graph) -> list[str]:
    """Return the diagram of one floor in mermaid."""
    here = sorted([name for name in solid if name.split(" ")[0].split("/")[0] == floor])
    number = {name: f"{floor}{index}" for index, name in enumerate(here)}
    single = [n for n in here if f"{n.rpartition(' ')[0]} 2" not in number]
    label = {n: n.rpartition(" ")[0] if n in single else n for n in here}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {number[name]}["{label[name]}"]' for name in here]
    beyond = reach(solid)
    for name in here:
        inside = sorted([other for other in solid[name] if other in number])
        implied = set().union(*[beyond[other] for other in inside])
        lines += [f"    {number[name]} --> {number[o]}" for o in inside if o not in implied]
        late = sorted([o for o in dotted[name] - solid[name] - beyond[name] if o in number])
        lines += [f"    {number[name]} -.-> {number[o]}" for o in late]
    return [*lines, "```", ""]


def page() -> str:
    """Return what stands in the page between its marks."""
    files = modules()
    now, later = knowledge(files)
    members = boxes_of(files, now)
    box = {module: name for name, found in members.items() for module in found}
    solid, dotted = arrows(now, box), arrows(later, box)
    lines: list[str] = []
    for floor in FLOORS:
        lines += [f"### {floor}", "", *drawing(floor, solid, dotted)]
        for name in sorted(members):
            room = name.rpartition(" ")[0]
            if room.split("/")[0] == floor and f"{room} 2" in members:
                modules_ = ", ".join(sorted([m.rpartition(".")[2] for m in members[name]]))
                lines += [f"- {name}: {modules_}"]
        lines += [""]
    return "\n".join(lines)


def main() -> int:
    """Draw, or compare what would be drawn; return 1 where it is another drawing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(_BEGIN)
    drawn = f"{head}{_BEGIN}{page()}{_END}{rest.partition(_END)[2]}"
    if options.check:
        return drawn != text
    PAGE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
