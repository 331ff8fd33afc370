"""The page of rooms is what the command draws, and the boxes on it have no circle."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def draw():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import draw_rooms

        yield draw_rooms
    sys.modules.pop("draw_rooms", None)


def test_the_page_is_what_the_command_draws(draw, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draw_rooms.py", "--check"])
    assert draw.main() == 0, "draw it again: python docs/draw_rooms.py"


def test_a_page_that_is_not_true_is_drawn_again(draw, monkeypatch, tmp_path):
    page = tmp_path / "rooms.md"
    page.write_text(f"Before.\n{draw._BEGIN}old\n{draw._END}\nAfter.\n")
    monkeypatch.setattr(draw, "PAGE", page)
    monkeypatch.setattr(draw, "page", lambda: "new\n")
    monkeypatch.setattr(sys, "argv", ["draw_rooms.py", "--check"])
    assert draw.main() == 1
    monkeypatch.setattr(sys, "argv", ["draw_rooms.py"])
    assert draw.main() == 0
    assert page.read_text() == f"Before.\n{draw._BEGIN}new\n{draw._END}\nAfter.\n"


def test_no_two_boxes_know_one_another_in_a_circle(draw):
    files = draw.modules()
    now, _ = draw.knowledge(files)
    members = draw.boxes_of(files, now)
    assert sorted([m for found in members.values() for m in found]) == sorted(files)
    box = {module: name for name, found in members.items() for module in found}
    beyond = draw.reach(draw.arrows(now, box))
    assert [name for name in members if name in beyond[name]] == []


def test_a_room_that_is_left_and_entered_again_is_drawn_in_two_layers(draw):
    files = {name: draw.ROOT / f"{name.replace('.', '/')}.py" for name in ("a.x", "a.y", "b.z")}
    members = draw.boxes_of(files, {"a.x": set(), "b.z": {"a.x"}, "a.y": {"b.z"}})
    assert members == {"a 1": ["a.x"], "b 1": ["b.z"], "a 2": ["a.y"]}


def test_modules_that_import_one_another_are_named(draw):
    with pytest.raises(ValueError, match="modules import one another: a > b > a"):
        draw.in_order({"a": {"b"}, "b": {"a"}})


def test_imports_for_types_and_in_functions_are_told_apart(draw):
    text = """
import a
if TYPE_CHECKING:
    from b import Name
def f():
    from c import d
class C:
    import e
"""
    known = dict.fromkeys(("a", "b", "c", "c.d", "e"))
    found = set(draw.imports_of(ast.parse(text), known))
    assert found == {("a", True), ("b", False), ("c.d", False), ("e", True)}
