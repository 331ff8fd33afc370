"""Tiers and parts: nothing is left out, parts take equal time, and the longest comes first."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiers

FILE = Path(__file__).with_name("suite.py")
spec = importlib.util.spec_from_file_location("suite", FILE)
suite = sys.modules["suite"] = importlib.util.module_from_spec(spec)  # dataclasses look there
spec.loader.exec_module(suite)


@pytest.mark.parametrize("parts", [1, 3, 8, 17])
def test_every_file_of_every_configuration_is_in_one_part(parts):
    found = [
        (configuration.name, file)
        for part in range(1, parts + 1)
        for configuration, files in suite.shares(suite.NIGHTLY, part, parts)
        for file in files
    ]
    wanted = [(c.name, file) for c in suite.NIGHTLY for file in c.files()]
    assert found == wanted


def test_parts_take_equal_time_but_for_a_file_at_either_end():
    parts = 8
    lengths = {
        (c.name, file): tiers.known_seconds(c.name).get(file, tiers.UNKNOWN_SECONDS)
        for c in suite.NIGHTLY
        for file in c.files()
    }
    share = sum(lengths.values()) / parts
    for part in range(1, parts + 1):
        work = suite.shares(suite.NIGHTLY, part, parts)
        took = sum([lengths[c.name, file] for c, files in work for file in files])
        assert abs(took - share) <= max(lengths.values())


def test_merge_runs_each_file_once_and_jobs_natively():
    files = {c.name: set(c.files()) for c in suite.MERGE}
    assert not files["merge"] & files["merge-native"]
    assert sorted(files["merge"] | files["merge-native"]) == suite.NIGHTLY[0].files()
    assert all(file.startswith(suite.OF_JOBS) for file in files["merge-native"])
    others = {file for file in files["merge"] if file.startswith(suite.OF_JOBS)}
    assert all(file.startswith(suite.ABOUT_GRAPHS) for file in others)


def test_tests_that_wait_are_run_by_one_process_more_than_is_asked_for():
    waiting = next(c for c in suite.MERGE if c.is_waiting)
    assert [waiting.processes(jobs) for jobs in ("0", "1", "2", "16", "auto")] == [
        *("0", "1", "3", "17", "auto")
    ]
    assert suite.MERGE[0].processes("2") == "2"


def test_every_path_of_a_configuration_is_there():
    for configuration in (*suite.MERGE, *suite.NIGHTLY):
        for path in (*configuration.paths, *configuration.without, *suite.ABOUT_GRAPHS):
            assert (suite.ROOT / path).exists(), path


def item(name, *, is_slow=False, thinned=0):
    """Return what stands for a collected test: its file is `a.py`, or that before a `::`."""
    file, _, test = name.rpartition("::")
    marks = {"slow": SimpleNamespace(args=())} if is_slow else {}
    if thinned:
        marks["thinned"] = SimpleNamespace(args=(thinned,))
    return SimpleNamespace(nodeid=f"{file or 'a.py'}::{test}", get_closest_marker=marks.get)


CROSSED = """
    import pytest

    @pytest.mark.parametrize("seed", [7, 8, 9])
    @pytest.mark.parametrize("kind", ["a", "b"])
    def test_drawn(seed, kind): ...

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("rank", [{0}, {1}, {2}, {3}])
    @pytest.mark.parametrize("way", list("vwxyz"))
    def test_crossed(rank, way): ...

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize(("few", "many"), [(1, 10), (1, 20), (2, 20), (3, 30)])
    def test_paired(few, many): ...

    @pytest.fixture(params=[5, 6])
    def seed(request): ...

    def test_of_a_fixture(seed): ...

    @pytest.mark.slow
    def test_long(): ...

    def test_plain(): ...
"""


@pytest.fixture
def merged(tmp_path):
    """The tests of `CROSSED` that the tier runs, whatever order they are collected in."""
    (tmp_path / "test_crossed.py").write_text(textwrap.dedent(CROSSED))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--rootdir", str(tmp_path)]
    options = ["-c", str(suite.ROOT / "pyproject.toml"), "--confcutdir", str(suite.ROOT)]

    def collect(*more):
        done = subprocess.run(
            [*command, *options, "-p", "conftest_of_tiers", *more, str(tmp_path)],
            capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{suite.ROOT / 'tests' / 'shared'}"},
        )  # fmt: skip
        found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
        assert found, done.stdout + done.stderr
        return found

    (tmp_path / "conftest_of_tiers.py").write_text(
        "import tiers\ndef pytest_collection_modifyitems(items): items[:] = tiers.split(items)[0]\n"
    )
    return collect


def test_merge_runs_the_first_seed_diagonals_and_nothing_slow(merged):
    found = merged("-p", "no:randomly")
    assert [test for test in found if "crossed" not in test] == [
        "test_drawn[a-7]", "test_drawn[b-7]", "test_paired[1-10]", "test_paired[2-20]",
        "test_of_a_fixture[5]", "test_plain",
    ]  # fmt: skip
    crossed = [re.findall(r"\[(\w)-rank(\d)\]", test)[0] for test in found if "crossed" in test]
    assert len(crossed) == 7
    assert {way for way, _ in crossed} == set("vwxyz")
    assert {rank for _, rank in crossed} == set("0123")
    assert sorted(merged("-p", "randomly", "--randomly-seed=3")) == sorted(found)


def test_files_run_longest_first_and_tests_inside_as_they_were():
    items = [item("a.py::x"), item("c.py::x"), item("b.py::y"), item("b.py::x"), item("a.py::y")]
    order = tiers.by_files(items, {"a.py": 1.0, "b.py": 9.0})
    assert [test.nodeid for test in order] == [
        "b.py::y", "b.py::x", "c.py::x", "a.py::x", "a.py::y",
    ]  # fmt: skip


def test_what_was_measured_replaces_what_was_known_of_these_files_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "DURATIONS", tmp_path / "durations.json")
    tiers.keep({"numpy": {"a.py": 1.26, "b.py": 2.0}, "sim": {"a.py": 3.0}}, lambda file: True)
    tiers.keep({"numpy": {"b.py": 4.0, "c.py": 0.01}}, lambda file: file != "a.py")
    known = json.loads((tmp_path / "durations.json").read_text())
    assert known == {"numpy": {"b.py": 4.0, "c.py": 0.0}, "sim": {"a.py": 3.0}}
    assert tiers.known_seconds("numpy") == {"b.py": 4.0, "c.py": 0.0}
    assert tiers.known_seconds("native") == {}


def test_the_watch_adds_up_the_phases_of_a_files_tests(tmp_path):
    watch = tiers.Stopwatch(tmp_path / "deep" / "numpy.json")
    for name, seconds in (("a.py::x", 1.0), ("a.py::y", 2.0), ("b.py::x", 0.5)):
        watch.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=seconds))
    watch.pytest_sessionfinish()
    assert json.loads(watch.path.read_text()) == {"a.py": 3.0, "b.py": 0.5}
    another_part = tiers.Stopwatch(watch.path)
    another_part.pytest_runtest_logreport(SimpleNamespace(nodeid="c.py::x", duration=4.0))
    another_part.pytest_sessionfinish()
    assert json.loads(watch.path.read_text()) == {"a.py": 3.0, "b.py": 0.5, "c.py": 4.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nightly", "--part", "0/3"], "expected K/N with 1 <= K <= N, got '0/3'"),
        (["nightly", "--part", "4/3"], "expected K/N with 1 <= K <= N, got '4/3'"),
        (["nightly", "--part", "two"], "expected K/N with 1 <= K <= N, got 'two'"),
        (["nightly", "--only", "nmupy"], "--only: nmupy: not among numpy, native"),
    ],
)
def test_a_wrong_word_is_named(words, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["suite.py", *words])
    with pytest.raises(SystemExit) as left:
        suite.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_configuration_that_fails_does_not_stop_the_next_and_says_how_to_repeat_it(
    monkeypatch, capsys
):
    ran = []

    def run(configuration, files, jobs, more):
        ran.append(configuration.name)
        return configuration.name == "numpy"

    monkeypatch.setattr(suite, "run", run)
    work = [(c, ["tests/test_names.py"]) for c in suite.NIGHTLY[:2]]
    assert suite.run_all("nightly", work, " 3/8", "2", []) == 1
    assert ran == ["numpy", "native"]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "nightly 3/8: numpy failed;"
        " .venv/bin/python tests/suite.py nightly --part 3/8 --only numpy repeats it"
    ]


def test_a_process_that_crashes_fails_the_run_which_ends(tmp_path):
    for number in range(4):
        crash = "import ctypes; ctypes.string_at(0)" if number == 1 else "pass"
        lines = ["import pytest", "@pytest.mark.parametrize('n', range(4))", "def test(n):"]
        file = tmp_path / f"test_{number}.py"
        file.write_text("\n".join([*lines, f"    if n == 2: {crash}"]))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *suite.SIDE_BY_SIDE, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "crashed while running 'test_1.py::test[2]'" in done.stdout


def test_words_after_two_dashes_are_for_pytest(monkeypatch):
    ran = []
    monkeypatch.setattr(suite, "run", lambda *what: ran.append(what) or 0)
    words = ["merge", "--only", "merge-sim", "--jobs", "0", "--", "-x", "--randomly-seed=5"]
    monkeypatch.setattr("sys.argv", ["suite.py", *words])
    assert suite.main() == 0
    ((configuration, files, jobs, more),) = ran
    assert (configuration.name, jobs, more) == ("merge-sim", "0", ["-x", "--randomly-seed=5"])
    assert files == configuration.files()


def test_continuous_integration_runs_merge_and_the_part_that_commits_choose():
    text = (suite.ROOT / ".ci" / "run").read_text()
    assert "make test\n" in text
    assert "git rev-list --count HEAD" in text
    assert "make nightly PART=" in text
