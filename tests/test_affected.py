import importlib.util
from pathlib import Path

FILE = Path(__file__).with_name("affected.py")
spec = importlib.util.spec_from_file_location("affected", FILE)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

SMOKE = list(tool.ALWAYS)
TESTS = {
    "tests/compiler/test_graph.py": frozenset({"compiler.graph"}),
    "tests/compiler/lowering/test_lower.py": frozenset(
        {"compiler.graph", "compiler.lowering.lower"}
    ),
    "tests/compiler/test_other.py": frozenset({"oracles"}),
    "tests/system/test_whole.py": frozenset({"compiler.lowering.lower"}),
}


def test_a_file_brings_the_test_of_its_name_and_those_that_import_it():
    chosen, left = tool.affected(["compiler/graph.py"], TESTS, {})
    assert chosen == [
        *SMOKE,
        "tests/compiler/test_graph.py",
        "tests/compiler/lowering/test_lower.py",
    ]
    assert left == []


def test_a_file_that_no_test_names_brings_its_neighbours():
    chosen, _ = tool.affected(["compiler/rows.py"], TESTS, {})
    assert chosen == SMOKE + [n for n in TESTS if n.startswith("tests/compiler/test_")]


def test_tests_bring_themselves_and_a_conftest_its_folder():
    changed = ["tests/system/test_whole.py", "tests/compiler/conftest.py", "tests/conftest.py"]
    chosen, _ = tool.affected(changed, TESTS, {})
    assert chosen == [*SMOKE, "tests/system/test_whole.py", "tests/compiler"]
    chosen, _ = tool.affected(["tests/shared/oracles.py"], TESTS, {})
    assert chosen == [*SMOKE, "tests/compiler/test_other.py"]


def test_pages_and_examples_bring_the_tests_of_pages():
    for name in ("README.md", "docs/tour.md", "examples/char_gpt.py"):
        assert tool.affected([name], TESTS, {})[0] == SMOKE + list(tool.PAGES)


def test_importers_come_while_they_fit_the_time_and_the_rest_is_counted():
    far = {f"tests/system/test_{i:02}.py": frozenset({"compiler.graph"}) for i in range(40)}
    chosen, left = tool.affected(["compiler/graph.py"], far | TESTS, dict.fromkeys(far, 8.0))
    assert "tests/compiler/lowering/test_lower.py" in chosen
    # Two of 3 s, whose time is not known, and nine of 8 s fit 80 s.
    assert len(chosen) == len(SMOKE) + 2 + 9
    assert set(chosen) | set(left) == {*far, *SMOKE} | {
        "tests/compiler/test_graph.py", "tests/compiler/lowering/test_lower.py",
    }  # fmt: skip


def test_all_ways_to_import_are_seen():
    text = "import a.b\nfrom c import (\n    d,\n    e as f,\n)\n    from g.h import i  # noqa\n"
    assert {"a.b", "c", "c.d", "c.e", "g.h", "g.h.i"} <= tool.imported(text)


def test_every_file_named_here_is_there():
    root = FILE.parents[1]
    for name in (*tool.ALWAYS, *tool.PAGES):
        assert (root / name).is_file()
