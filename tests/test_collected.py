import importlib.util
from collections import Counter
from pathlib import Path

spec = importlib.util.spec_from_file_location("collected", Path(__file__).with_name("collected.py"))
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

LISTING = """tests/compiler/test_graph.py::test_a
tests/compiler/sbp/test_cut.py::test_b[a/b::c]
tests/memory/test_order.py::test_a

3 tests collected in 0.1s
"""


def ids(text=LISTING, run=""):
    return tool.ids(text.splitlines(), run)


def test_a_test_is_known_by_the_name_of_its_file_and_its_own_id():
    assert ids() == {
        "test_graph.py::test_a": 1, "test_cut.py::test_b[a/b::c]": 1, "test_order.py::test_a": 1,
    }  # fmt: skip


def test_a_moved_test_is_there_and_a_lost_or_renamed_one_is_missing():
    moved = ids(LISTING.replace("tests/compiler/", "tests/compiler/graph/"))
    assert tool.missing(ids(), moved) == []
    lost = moved - Counter(["test_order.py::test_a"])
    assert tool.missing(ids(), lost) == ["test_order.py::test_a"]
    renamed = ids(LISTING.replace("test_graph.py::test_a", "test_graph.py::test_c"))
    assert tool.missing(ids(), renamed) == ["test_graph.py::test_a"]


def test_of_two_equal_names_in_two_folders_a_lost_one_is_missing():
    twice = Counter({"test_ways.py::test_a": 2})
    assert tool.missing(twice, Counter({"test_ways.py::test_a": 1})) == ["test_ways.py::test_a"]


def test_a_test_of_two_runs_is_two():
    both = ids(run="numpy") + ids(run="native")
    assert tool.missing(both, ids(run="numpy")) == [
        "native test_cut.py::test_b[a/b::c]",
        "native test_graph.py::test_a",
        "native test_order.py::test_a",
    ]
