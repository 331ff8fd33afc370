import numpy as np
import pytest
from error_texts import raises

from actorflow.checkpoint.errors import CheckpointError, CheckpointUnfit, NoValidCheckpoint
from actorflow.checkpoint.manifest import Expected
from compiler.contract.errors import CompileError

TENSORS = {"w": "float32[3, 2]", "m": "float32[3, 2]", "step": "int64[]"}
EXPECTED = Expected(TENSORS, frozenset({"skipped"}), "step")


def groups(step, /, **changes):
    tensors = {
        "w": np.full((3, 2), step, np.float32),
        "m": np.zeros((3, 2), np.float32),
        "step": np.array(step),
    }
    tensors |= changes
    return {"model": {name: a for name, a in tensors.items() if a is not None}}


OTHERS = {
    "none at all": {"w": None, "m": None, "step": None},
    "one missing": {"m": None},
    "one too many": {"v": np.zeros(3)},
    "another name": {"m": None, "n": np.zeros((3, 2), np.float32)},
    "another shape": {"w": np.zeros((2, 3), np.float32)},
    "another rank": {"w": np.zeros(6, np.float32)},
    "another dtype": {"w": np.zeros((3, 2), np.float64)},
    "the counter of another step": {"step": np.array(7)},
}


def test_what_is_expected_is_loaded_with_or_without_what_is_optional(memory_run):
    memory_run.save(1, groups(1))
    assert memory_run.manager.latest(EXPECTED).manifest.step == 1
    memory_run.save(2, groups(2, skipped=np.array(5)))
    loaded = memory_run.manager.latest(EXPECTED)
    assert loaded.manifest.step == 2
    assert loaded.tensors["skipped"] == 5
    assert memory_run.reports == []


@pytest.mark.parametrize("changes", OTHERS.values(), ids=list(OTHERS))
def test_one_that_is_not_as_expected_gives_way_to_the_one_before(memory_run, changes):
    memory_run.save(1, groups(1))
    memory_run.save(2, groups(2, **changes))
    assert memory_run.manager.latest(EXPECTED).manifest.step == 1
    (report,) = memory_run.reports
    assert report.startswith("the checkpoint of step 2 does not fit this job: ")
    memory_run.save(2, groups(2))
    assert memory_run.manager.latest(EXPECTED).manifest.step == 2


@pytest.mark.parametrize("changes", OTHERS.values(), ids=list(OTHERS))
def test_where_none_is_as_expected_the_newest_says_what_differs(memory_run, changes):
    for step in (1, 2):
        memory_run.save(step, groups(step, **changes))
    with raises(CheckpointUnfit):
        memory_run.manager.latest(EXPECTED)
    assert issubclass(CheckpointUnfit, CompileError)
    assert issubclass(CheckpointUnfit, CheckpointError)


def test_damage_and_unfitness_are_listed_together(real_run):
    with real_run.manager:
        real_run.save(1, groups(1))
        real_run.save(2, groups(2, m=None))
    (real_run.directory / "step-0000000001" / "manifest.json").write_text("{}")
    with raises(NoValidCheckpoint):
        real_run.manager.latest(EXPECTED)


def test_no_tensor_of_an_unfit_checkpoint_is_opened(make_run, memory_run):
    memory_run.save(1, groups(1, w=np.zeros((2, 3), np.float32)))

    class Watching:
        opened = ()

        def __getattr__(self, name):
            return getattr(memory_run.fs, name)

        def open_read(self, directory, name):
            self.opened = (*self.opened, name)
            return memory_run.fs.open_read(directory, name)

    fs = Watching()
    with pytest.raises(CheckpointUnfit):
        make_run(fs, memory_run.directory).manager.latest(EXPECTED)
    assert fs.opened == ("manifest.json",)


def test_many_names_are_cut_short(memory_run):
    memory_run.save(1, {"model": {f"{i}" * 500: np.zeros(1) for i in range(30)}})
    with raises(CheckpointUnfit):
        memory_run.manager.latest(EXPECTED)
