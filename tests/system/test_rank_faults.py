"""Launched ranks of a training, one of which does something bad: told once, and nothing is left."""

import functools
import json
import mmap
import re
import tempfile
import time
from pathlib import Path

import pytest
from launching import end_of, launcher
from rank_faults import FAULTS, GRACE_S, NO_FAULTS, PHASES, SCRIPT, STEPS, abandoned, outcome

pytestmark = pytest.mark.no_gpu("ranks of one host meet in its memory")

CELLS = {
    (1, "before", "raise"): (1, "rank 1 of 2 failed:\n.*\nRuntimeError: boom in before"),
    (0, "compile", "hang"): (1, "rank 0 did not arrive within 8 s where rank 1 waits"),
    (1, "compile", "kill"): (137, "rank 1 was ended by SIGKILL"),
    (0, "meeting", "vanish"): (1, r"rank 0 ended without a word \(os._exit\?\)"),
    (0, "data", "exit"): (3, "rank 0 ended with exit status 3"),
    (1, "step", "stop"): (1, r"rank 1 was stopped \(SIGSTOP\) [0-9]+ s ago and has not continued"),
    (0, "step", "kill"): (137, "rank 0 was ended by SIGKILL"),
    (0, "checkpoint", "kill"): (137, "rank 0 was ended by SIGKILL"),
    (1, "last", "raise"): (1, "rank 1 of 2 failed:\n.*\nRuntimeError: boom in last"),
    (0, "after", "exit"): (3, "rank 0 ended with exit status 3"),
}
"""Who, at which phase, does what: the exit status and the last words."""

GOES_ON = {(1, "step", "stop"), (0, "step", "kill"), (0, "checkpoint", "kill")}
"""After which the same launch goes on from the newest checkpoint."""


SWITCHED = [
    (0, "data", "exit"),
    (0, "step", "kill"),
    (1, "step", "stop"),
    (0, "checkpoint", "kill"),
    (1, "last", "raise"),
]
"""Cells of a training in which plans take turns; what is said is the same."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that returns what rank 0 tells of a training in which nothing happens."""

    @functools.cache
    def told(*words):
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = outcome(folder, NO_FAULTS, *words)
        assert ended.code == 0, ended.err
        return json.loads((folder / "told.json").read_text())

    return told


def test_cells_name_phases_and_faults_there_are():
    assert {phase for _, phase, _ in CELLS} <= set(PHASES)
    assert {fault for _, _, fault in CELLS} <= set(FAULTS)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_a_fault_is_told_once_and_leaves_nothing_behind(tmp_path, undisturbed, cell):
    assert_told(tmp_path, undisturbed, cell)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("cell", SWITCHED, ids=lambda cell: "-".join(map(str, cell)))
def test_a_fault_while_plans_take_turns_is_told_as_with_one_plan(tmp_path, undisturbed, cell):
    assert_told(tmp_path, undisturbed, cell, "shapes")


def assert_told(tmp_path, undisturbed, cell, *words):
    ended = outcome(tmp_path, {1: cell}, *words)
    code, said = CELLS[cell]
    assert ended.code == code, ended.err
    assert re.search(f"^actorflow launch: {said}", ended.err, re.DOTALL | re.MULTILINE), ended.err
    assert ended.err.count("actorflow launch:") == 1
    assert not ended.left
    if cell in GOES_ON:
        again = outcome(tmp_path, NO_FAULTS, *words)
        assert again.code == 0, again.err
        told = json.loads((tmp_path / "told.json").read_text())
        assert told["state"] == undisturbed(*words)["state"]
        assert told["losses"].items() <= undisturbed(*words)["losses"].items()
        assert str(STEPS) in told["losses"]


def test_a_second_launch_on_one_run_directory_is_refused_and_the_first_goes_on(tmp_path):
    with launcher(tmp_path) as start:
        first = start(SCRIPT, repr({1: (1, "step", "wait")}), "run", grace=GRACE_S)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("run/step-*")):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        code, _, err = end_of(start(SCRIPT, repr(NO_FAULTS), "run", grace=GRACE_S))
        (tmp_path / "go").touch()
        assert end_of(first)[0] == 0
    assert code == 1
    assert re.search(r"/run is being written by process \d+ on .*: two runs cannot share", err), err
    assert err.count("actorflow launch:") == 1


def test_a_shared_file_counts_as_left_when_no_process_maps_it():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(8)
        name = Path(file.name).name
        with mmap.mmap(file.fileno(), 8):
            assert abandoned({name, "sem.that-is-gone"}) == []
        assert abandoned({name}) == [name]
