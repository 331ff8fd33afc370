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
    of_folder = [name for name in TESTS if name.startswith("tests/compiler/")]
    assert chosen == [*SMOKE, "tests/system/test_whole.py", *of_folder]
    chosen, _ = tool.affected(["tests/shared/oracles.py"], TESTS, {})
    assert chosen == [*SMOKE, "tests/compiler/test_other.py"]


def test_pages_and_examples_bring_the_tests_of_pages():
    for name in ("README.md", "docs/tour.md", "examples/char_gpt.py"):
        assert tool.affected([name], TESTS, {})[0] == SMOKE + list(tool.PAGES)


def test_importers_come_while_they_fit_the_time_and_the_rest_is_counted():
    far = {f"tests/system/test_{i:02}.py": frozenset({"compiler.graph"}) for i in range(40)}
    seconds = dict.fromkeys(far, 8.0) | {"tests/system/test_00.py": 500.0}
    chosen, left = tool.affected(["compiler/graph.py"], far | TESTS, seconds)
    assert "tests/compiler/lowering/test_lower.py" in chosen
    # Three of 3 s, whose time is not known, and eleven of 8 s fit 100 s; one of 500 s hides none.
    assert len(chosen) == len(SMOKE) + 2 + 11
    assert set(chosen) | set(left) == {*far, *SMOKE} | {
        "tests/compiler/test_graph.py", "tests/compiler/lowering/test_lower.py",
    }  # fmt: skip


def test_what_many_tests_share_brings_no_more_than_fits_and_changed_tests_always_come():
    many = {f"tests/shared_by/test_{i:02}.py": frozenset({"oracles"}) for i in range(60)}
    seconds = dict.fromkeys(many, 5.0) | {"tests/system/test_whole.py": 300.0}
    for name in ("tests/shared/oracles.py", "tests/shared_by/conftest.py"):
        chosen, left = tool.affected([name], many, seconds)
        assert len(chosen) == len(SMOKE) + 19, name  # and 3 s of the smoke test
        assert len(left) == len(many) - 19
    changed = ["tests/system/test_whole.py", "tests/shared/oracles.py"]
    assert tool.affected(changed, many | TESTS, seconds)[0] == [*SMOKE, changed[0]]


def test_all_ways_to_import_are_seen():
    text = "import a.b\nfrom c import (\n    d,\n    e as f,\n)\n    from g.h import i  # noqa\n"
    assert {"a.b", "c", "c.d", "c.e", "g.h", "g.h.i"} <= tool.imported(text)


def test_every_file_named_here_is_there():
    root = FILE.parents[1]
    for name in (*tool.ALWAYS, *tool.PAGES):
        assert (root / name).is_file()
