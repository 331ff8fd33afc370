import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from safetensors.numpy import load_file

from actorflow.checkpoint import manager as manager_module
from actorflow.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointLocked,
    NoValidCheckpoint,
)
from actorflow.checkpoint.fs import Fs
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.checkpoint.manifest import decode, encode
from actorflow.checkpoint.shard import plan_shards

ATTEMPT = "0" * 32


def names(run):
    return run.fs.listdir(run.directory)


def test_a_saved_state_comes_back_with_all_it_needs_to_go_on(real_run):
    with real_run.manager as manager:
        path = real_run.save(500, data_state={"kind": "tokens", "batches": 500})
        assert path == real_run.directory / "step-0000000500"
        loaded = manager.latest()
    real_run.assert_holds(500, loaded)
    manifest = loaded.manifest
    assert manifest.seed == 7
    assert manifest.plan_hash == "plan"
    assert manifest.config == {"lr": 1e-3}
    assert manifest.data_state == {"kind": "tokens", "batches": 500}
    assert manifest.data_fingerprint == "data"
    assert manifest.versions["numpy"] == np.__version__
    assert not manifest.has_nan
    assert real_run.reports == []


def test_the_files_are_plain_safetensors_one_or_more_per_group(real_run):
    with real_run.manager:
        path = real_run.save(1)
    assert sorted(os.listdir(path)) == [
        "manifest.json",
        "model-00001.safetensors",
        "optim-00001.safetensors",
    ]
    for group, tensors in real_run.groups(1).items():
        found = load_file(path / f"{group}-00001.safetensors")
        assert {k: v.tobytes() for k, v in found.items()} == {
            k: v.tobytes() for k, v in tensors.items()
        }
    assert json.loads((path / "manifest.json").read_text().splitlines()[0])["step"] == 1


def test_large_groups_are_spread_over_several_shards(memory_run, monkeypatch):
    monkeypatch.setattr(manager_module, "plan_shards", lambda groups: plan_shards(groups, 1500))
    memory_run.save(1)
    assert names(memory_run)[1:] == ["step-0000000001"]
    shards = memory_run.fs.listdir(memory_run.directory / "step-0000000001")
    assert shards == ["manifest.json", *(f"{n}.safetensors" for n in (
        "model-00001", "model-00002", "optim-00001"))]  # fmt: skip
    memory_run.assert_holds(1, memory_run.manager.latest())


def test_a_state_without_tensors_and_a_source_without_state_are_kept(memory_run):
    memory_run.save(1, {"model": {}, "optim": {}}, data_state=None)
    loaded = memory_run.manager.latest()
    assert loaded.tensors == {}
    assert loaded.manifest.data_state is None


def test_nan_is_flagged(memory_run):
    memory_run.save(1, {"model": {"a": np.zeros(3), "w": np.array([1.0, np.nan])}})
    assert memory_run.manager.verify(1).has_nan
    assert [row.has_nan for row in memory_run.manager.describe()] == [True]


@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_the_last_ones_are_kept(make_run, memory_run, keep_last):
    memory_run.manager.close()
    run = make_run(memory_run.fs, memory_run.directory, keep_last)
    with run.manager:
        for step in range(1, 8):
            run.save(step)
            assert run.manager.steps() == tuple(range(max(1, step + 1 - keep_last), step + 1))
    assert all(name == ".lock" or name.startswith("step-") for name in names(run))


def nan_groups(run, step):
    groups = run.groups(step)
    groups["model"]["w"][0, 0] = np.nan
    return groups


def test_the_newest_without_nan_is_never_pushed_out(memory_run):
    for step in (1, 2, 3):
        memory_run.save(step)
    for step in (4, 5, 6, 7):
        memory_run.save(step, nan_groups(memory_run, step))
    assert memory_run.manager.steps() == (3, 6, 7)
    assert memory_run.manager.newest_sound(7) == 3
    memory_run.save(8)
    assert memory_run.manager.steps() == (7, 8)
    assert memory_run.manager.newest_sound(7) is None


def test_where_all_hold_nan_the_last_ones_are_kept(memory_run):
    for step in range(1, 6):
        memory_run.save(step, nan_groups(memory_run, step))
    assert memory_run.manager.steps() == (4, 5)


def test_one_whose_manifest_is_damaged_is_not_taken_for_one_without_nan(real_run):
    with real_run.manager:
        real_run.save(1)
        real_run.save(2)
        (real_run.directory / "step-0000000002" / "manifest.json").write_text("{}")
        for step in (3, 4, 5):
            real_run.save(step, nan_groups(real_run, step))
        assert real_run.manager.steps() == (1, 4, 5)


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, None, True])
def test_at_least_one_is_kept(tmp_path, keep_last):
    with raises(CheckpointError):
        CheckpointManager(tmp_path, keep_last=keep_last)


def test_a_step_saved_again_with_the_same_state_is_kept_as_it_is(memory_run):
    memory_run.save(1)
    before = memory_run.manager.verify(1)
    log = len(memory_run.fs.log)
    memory_run.save(1)
    assert memory_run.manager.verify(1).attempt == before.attempt
    assert len(memory_run.fs.log) == log + 1, "nothing but the sync of the run directory"


@pytest.mark.parametrize(
    "change",
    [{"seed": 8}, {"data_state": {"batches": 2}}, {"data_fingerprint": "x"}],
    ids=str,
)
def test_a_step_saved_again_with_other_facts_is_replaced(memory_run, change):
    memory_run.save(1)
    memory_run.save(1, **change)
    manifest = memory_run.manager.verify(1)
    assert {key: getattr(manifest, key) for key in change} == change
    assert names(memory_run) == [".lock", "step-0000000001"]


def test_a_step_saved_again_with_other_tensors_is_replaced(memory_run):
    memory_run.save(1)
    changed = memory_run.groups(1)
    changed["optim"]["w.m"][3] += 1
    memory_run.save(1, changed)
    loaded = memory_run.manager.latest()
    np.testing.assert_array_equal(loaded.tensors["w.m"], changed["optim"]["w.m"])
    assert names(memory_run) == [".lock", "step-0000000001"]
    assert memory_run.reports == ["replacing the checkpoint of step 1, which has another state"]


def test_a_second_manager_in_the_same_process_is_refused(real_run):
    second = CheckpointManager(real_run.directory)
    with real_run.manager:
        with raises(CheckpointLocked) as raised:
            second.open()
        assert raised.value.directory == real_run.directory
        with pytest.raises(CheckpointLocked):
            real_run.manager.open()
        real_run.save(1)
    with second:
        assert second.steps() == (1,)


HOLDER = """
import sys
from actorflow.checkpoint.manager import CheckpointManager
with CheckpointManager(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_writer_in_another_process_is_refused_until_that_one_dies(real_run):
    real_run.directory.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(real_run.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(CheckpointLocked, match=f"process {process.pid} on ") as raised:
            real_run.manager.open()
        assert str(real_run.directory) in str(raised.value)
        assert real_run.manager.latest() is None, "reading needs no lock"
        process.kill()
    with real_run.manager:
        real_run.save(1)


def test_a_lock_refused_leaves_the_other_writers_work_alone(real_run):
    with real_run.manager:
        tmp = real_run.directory / f".tmp-0000000001-{ATTEMPT}"
        tmp.mkdir()
        with pytest.raises(CheckpointLocked):
            CheckpointManager(real_run.directory).open()
        assert tmp.exists()


def test_writing_needs_an_open_manager(tmp_path, make_run):
    run = make_run(None, tmp_path / "run")
    with raises(CheckpointError):
        run.save(1)
    run.manager.close()
    assert not run.directory.exists()


def test_reading_creates_nothing_and_changes_nothing(real_run):
    with real_run.manager:
        real_run.save(1)
        real_run.save(2)
    (real_run.directory / ".lock").unlink()
    (real_run.directory / f".tmp-0000000003-{ATTEMPT}").mkdir()

    def snapshot():
        return sorted(
            (str(p), p.stat().st_mtime_ns, p.stat().st_ino)
            for p in [real_run.directory, *real_run.directory.rglob("*")]
        )

    before = snapshot()
    reader = CheckpointManager(real_run.directory)
    reader.latest()
    reader.verify(1)
    reader.load(2)
    reader.describe()
    with pytest.raises(CheckpointDamaged):
        reader.verify(99)
    assert snapshot() == before


def test_reading_where_there_is_nothing_finds_nothing(tmp_path):
    reader = CheckpointManager(tmp_path / "none" / "here")
    assert reader.latest() is None
    assert reader.steps() == ()
    assert reader.describe() == ()
    assert os.listdir(tmp_path) == []


def test_a_fresh_directory_has_no_latest(real_run):
    with real_run.manager as manager:
        assert manager.latest() is None


def test_opening_removes_what_a_crash_left_and_nothing_else(real_run):
    with real_run.manager:
        real_run.save(1)
    kept = [
        "metrics.jsonl",
        ".tmp-notes",
        ".trash-step-1",
        f".tmp-1-{ATTEMPT}",
        ".tmp-0000000001-x",
    ]
    for name in kept:
        (real_run.directory / name).mkdir()
    for name in (f".tmp-0000000002-{ATTEMPT}", f".trash-step-0000000001-{ATTEMPT}"):
        (real_run.directory / name / "deep").mkdir(parents=True)
        (real_run.directory / name / "deep" / "file").write_text("x")
    with real_run.manager:
        found = sorted(os.listdir(real_run.directory))
    assert found == sorted([*kept, ".lock", "step-0000000001"])


def test_a_version_set_aside_by_a_killed_writer_is_put_back(real_run):
    with real_run.manager:
        real_run.save(1)
    aside = real_run.directory / f".aside-step-0000000001-{ATTEMPT}"
    (real_run.directory / "step-0000000001").rename(aside)
    with raises(NoValidCheckpoint):
        real_run.manager.latest()
    with real_run.manager:
        real_run.assert_holds(1, real_run.manager.latest())
    assert not aside.exists()


def test_a_version_set_aside_and_replaced_is_removed(real_run):
    with real_run.manager:
        real_run.save(1)
        aside = real_run.directory / f".aside-step-0000000001-{ATTEMPT}"
        aside.mkdir()
    with real_run.manager:
        assert not aside.exists()
        real_run.assert_holds(1, real_run.manager.latest())


class CountingFs(Fs):
    """Counts the bytes that are read."""

    def __init__(self):
        self.num_bytes = 0

    def readinto(self, fd, buffer):
        came = super().readinto(fd, buffer)
        self.num_bytes += came
        return came


def with_tensors(manifest, change):
    """Every tensor changed, each of one piece."""
    tensors = {t.name: change(t) for t in manifest.tensors}
    pieces = [
        replace(p, offset=(0,) * len(tensors[p.tensor].shape), extents=tensors[p.tensor].shape)
        for p in manifest.pieces
    ]
    return replace(manifest, tensors=tuple(tensors.values()), pieces=tuple(pieces))


def a_huge_tensor(manifest):
    return with_tensors(manifest, lambda t: replace(t, shape=(1 << 34,), dtype="float64"))


def a_tensor_of_another_type(manifest):
    others = {"float64": "uint64"}
    return with_tensors(manifest, lambda t: replace(t, dtype=others.get(t.dtype, t.dtype)))


def tensors_of_other_values(manifest):
    return replace(manifest, pieces=tuple([replace(p, xxh3_128="0" * 32) for p in manifest.pieces]))


def a_tensor_more(manifest):
    (entry,) = [t for t in manifest.tensors if t.name == "b"]
    (piece,) = [p for p in manifest.pieces if p.tensor == "b"]
    more = replace(entry, name="c", shape=(1 << 34,))
    box = replace(piece, tensor="c", extents=more.shape)
    return replace(manifest, tensors=(*manifest.tensors, more), pieces=(*manifest.pieces, box))


def a_file_more(manifest):
    file = replace(manifest.files[0], name="more-00001.safetensors")
    more = replace(manifest.tensors[0], name="more", shape=(1 << 34,))
    box = replace(
        manifest.pieces[0], tensor="more", file=file.name, offset=(0,), extents=more.shape
    )
    return replace(
        manifest,
        files=(*manifest.files, file),
        tensors=(*manifest.tensors, more),
        pieces=(*manifest.pieces, box),
    )


def another_position(manifest):
    return replace(manifest, data_state={"batches": 99})


@pytest.mark.parametrize(
    "change",
    [a_huge_tensor, a_tensor_of_another_type, tensors_of_other_values, a_tensor_more, a_file_more,
     another_position],
)  # fmt: skip
def test_a_checkpoint_that_says_something_else_is_replaced_without_reading_it(
    tmp_path, make_run, change
):
    """Hashes prove no author: a manifest may claim what it likes, under a hash of its own."""
    run = make_run(CountingFs(), tmp_path / "run")
    with run.manager:
        folder = run.save(1)
        manifest = change(decode((folder / "manifest.json").read_bytes()))
        sizes = {file.name: spec.size_bytes() for file, spec in manifest.shards()}
        files = tuple([replace(f, size_bytes=sizes[f.name]) for f in manifest.files])
        (folder / "manifest.json").write_bytes(encode(replace(manifest, files=files)))
        for name, size_bytes in sizes.items():
            with open(folder / name, "ab") as file:
                file.truncate(size_bytes)  # of holes: 128 GiB take no room
        run.fs.num_bytes = 0
        run.save(1)
        assert run.fs.num_bytes < 20_000
        assert run.reports == ["replacing the checkpoint of step 1, which has another state"]
        run.assert_holds(1, run.manager.latest())


def test_a_version_that_cannot_be_removed_does_not_keep_the_others(tmp_path, make_run):
    class Stuck(Fs):
        def rename(self, source, target):
            if source.name == "step-0000000001":
                raise PermissionError(errno.EPERM, "not permitted", str(source))
            super().rename(source, target)

    run = make_run(Stuck(), tmp_path / "run", keep_last=1)
    with run.manager:
        for step in range(1, 6):
            run.save(step)
        assert run.manager.steps() == (1, 5)
        assert len(run.reports) == 4
        assert all("older checkpoints cannot be removed: " in text for text in run.reports)


def test_what_an_earlier_collection_left_is_removed_by_a_later_one(tmp_path, make_run):
    class Stuck(Fs):
        is_stuck = True

        def rmdir(self, path):
            if self.is_stuck:
                raise PermissionError(errno.EPERM, "not permitted", str(path))
            super().rmdir(path)

    run = make_run(Stuck(), tmp_path / "run", keep_last=1)
    with run.manager:
        for step in range(1, 5):
            run.save(step)
        assert len(run.manager.hidden()) == 3
        assert len(run.reports) == 3
        run.fs.is_stuck = False
        run.save(5)
        assert run.manager.hidden() == ()
        assert len(run.reports) == 3


def test_missing_parents_are_created(tmp_path):
    with CheckpointManager(tmp_path / "a" / "b" / "c") as manager:
        assert manager.directory.is_dir()


def test_a_relative_directory_and_a_link_mean_the_place_they_lead_to(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager("link/run")
    monkeypatch.chdir("/")
    with manager:
        assert manager.directory == (tmp_path / "real" / "run").resolve()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with raises(CheckpointError):
            CheckpointManager(path).open()
    with raises(CheckpointError):
        CheckpointManager(tmp_path / "file").steps()


@pytest.mark.parametrize("step", [-1, 10**10, 1.0, "1", None, True])
def test_a_step_that_is_no_count_is_refused(memory_run, step):
    with raises(CheckpointError):
        memory_run.save(step, {})


def test_arguments_that_cannot_be_stored_are_refused_before_the_disk_is_touched(memory_run):
    log = len(memory_run.fs.log)
    for change in [
        {"groups": {"model": {"w": [1.0]}}},
        {"data_state": {"n": np.int64(1)}},
        {"config": {"f": print}},
        {"seed": -1},
    ]:
        with raises(CheckpointError):
            memory_run.save(1, **change)
    assert len(memory_run.fs.log) == log


def test_a_listing_gives_size_and_problems_without_reading_the_tensors(real_run):
    with real_run.manager:
        real_run.save(1)
        real_run.save(2)
    (real_run.directory / "step-0000000001" / "manifest.json").write_text("{}")
    damaged, good = real_run.manager.describe()
    assert (damaged.step, good.step) == (1, 2)
    assert "manifest.json" in damaged.problem
    assert good.problem == ""
    assert good.num_tensors == 3
    files = [p for p in good.path.iterdir() if p.suffix == ".safetensors"]
    assert good.size_bytes == sum(p.stat().st_size for p in files)
    assert good.modified_ns == (good.path / "manifest.json").stat().st_mtime_ns


def test_a_reader_whose_checkpoint_is_collected_meanwhile_takes_the_newer_one(memory_run, make_run):
    memory_run.save(1)

    class Racing:
        is_first = True

        def __getattr__(self, name):
            return getattr(memory_run.fs, name)

        def open_read(self, directory, name):
            if self.is_first:
                self.is_first = False
                memory_run.save(2)
                memory_run.save(3)
            return memory_run.fs.open_read(directory, name)

    reader = make_run(Racing(), memory_run.directory)
    memory_run.assert_holds(3, reader.manager.latest())
    assert reader.reports == []


def test_by_default_reports_are_warnings(real_run):
    with real_run.manager:
        real_run.save(1)
        real_run.save(2)
    (real_run.directory / "step-0000000002" / "manifest.json").write_text("{}")
    with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
        loaded = CheckpointManager(real_run.directory).latest()
    assert loaded.manifest.step == 1


def test_a_forked_child_does_not_save_in_its_parents_place(real_run, child_says):
    with real_run.manager:
        said = child_says(lambda: real_run.save(1))
    assert said.startswith("CheckpointLockLost: ")
    assert f"this process was forked from the writer, process {os.getpid()}" in said
