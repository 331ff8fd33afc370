"""What the pages say of the code is so: what is generated from it, layers, rooms and paths."""

import re
import tomllib
from pathlib import Path

import pytest

from actors.machine.transitions import Message, state_diagram, transition_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "actors.md"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
FLOORS = ("actorflow", "actors", "compiler", "memory")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
NO_ROOMS = {"__main__", "top_level"}


def section(name):
    text = PAGE.read_text()
    _, _, rest = text.partition(f"<!-- {name} -->\n")
    return rest.partition("<!-- end -->")[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("state_diagram", lambda: f"```mermaid\n{state_diagram()}```\n"),
        ("transition_table", transition_table),
    ],
)
def test_the_page_on_actors_shows_the_protocol_that_the_machine_obeys(name, expected):
    assert section(name) == expected()


def test_the_page_on_actors_explains_every_message():
    text = PAGE.read_text()
    for kind in Message:
        assert f"| {kind.name} |" in text


def drawn_layers():
    """The lines of the picture by floor, without what is said beside them."""
    picture = re.search(r"## The layers.*?```\n(.*?)```", ARCHITECTURE, flags=re.DOTALL)[1]
    floors = re.split(r"^-+\n", picture, flags=re.MULTILINE)
    return {
        floor: [re.split(r"\s{3,}", line[9:].strip())[0] for line in text.splitlines()]
        for floor, text in zip(FLOORS, floors, strict=True)
    }


@pytest.mark.parametrize(
    "folder", ["actorflow", "actors", "actors.kernels", "compiler", "compiler.ops"]
)
def test_the_picture_has_the_layers_that_the_contracts_hold(folder):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in settings["contracts"] if c.get("containers") == [folder]]
    drawn = drawn_layers()[folder.partition(".")[0]]
    wanted = [layer for layer in layers if layer not in NO_ROOMS]
    assert [line for line in drawn if line in wanted] == wanted


def test_every_room_is_on_the_page_with_a_file_to_begin_with():
    rows = re.findall(r"^\| `([\w/]+)` \| .+ \| `(\w+\.py)` \|$", ARCHITECTURE, flags=re.MULTILINE)
    folders = [p.parent for floor in FLOORS for p in (ROOT / floor).rglob("__init__.py")]
    rooms = {folder.relative_to(ROOT).as_posix() for folder in folders}
    assert sorted(room for room, _ in rows) == sorted(rooms)
    assert [row for row in rows if not (ROOT / row[0] / row[1]).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_on_the_pages_are_there(page):
    roots = "|".join([*FLOORS, "tests", "benchmarks", "examples", "docs"])
    paths = re.findall(rf"(?<![\w/.-])((?:{roots})/[\w/*.-]*[\w*])", page.read_text())
    assert [path for path in paths if not [*ROOT.glob(path)]] == []
