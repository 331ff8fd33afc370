"""The k-th call of the disk fails, for every k: earlier checkpoints stay, nothing half-written."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from disks import FaultFs, LogFs
from error_texts import raises

from actorflow.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointSpaceError,
    NoValidCheckpoint,
)
from actorflow.checkpoint.fs import Fs

RUN = Path("/disk/run")
CODES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES]
SPACE = {errno.ENOSPC, errno.EDQUOT}


class Around:
    """A file system that does what another one does, but for what a test overrides."""

    def __init__(self, fs):
        self.fs = fs

    def __getattr__(self, name):
        return getattr(self.fs, name)


def run_with_two(make_run, **limits):
    fs = LogFs(Path("/disk"), **limits)
    run = make_run(fs, RUN)
    with run.manager:
        run.save(1)
        run.save(2)
    return fs


def failure_of(call):
    """The checkpoint error of a call, None if it has none."""
    try:
        call()
    except CheckpointError as error:
        return error
    return None


def save_with_fault(make_run, fs, k, code, *, is_sticky=False):
    faulty = FaultFs(fs, k, code, is_sticky=is_sticky)
    run = make_run(faulty, RUN)

    def open_and_save():
        with run.manager:
            run.save(3)

    return faulty, failure_of(open_and_save)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_save_survives_the_failure_of_any_single_call(make_run, code):
    k = outcomes = 0
    while True:
        fs = run_with_two(make_run)
        faulty, error = save_with_fault(make_run, fs, k, code)
        if not faulty.has_failed:
            break
        assert fs.open_files == {}, faulty.calls[-1]
        assert not any(name.startswith(".tmp-") for name in fs.listdir(RUN)), faulty.calls[k]
        after = make_run(fs, RUN)
        for step in after.manager.steps():
            after.manager.verify(step)
        loaded = after.manager.latest()
        if error is None:
            after.assert_holds(3, loaded)
        else:
            outcomes += 1
            assert isinstance(error.__cause__, OSError)
            if faulty.calls[k] != "listdir":
                assert isinstance(error, CheckpointSpaceError) == (code in SPACE)
            assert str(RUN) in str(error)
            assert {1, 2} <= set(after.manager.steps())
        with after.manager:
            after.save(3)
            assert after.manager.steps() == (2, 3)
        k += 1
    assert k > 35
    assert outcomes > 20


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_stays_broken_gives_one_typed_error_and_keeps_what_it_had(make_run, code):
    k = 0
    while True:
        fs = run_with_two(make_run)
        faulty, error = save_with_fault(make_run, fs, k, code, is_sticky=True)
        if not faulty.has_failed:
            break
        fs.kill_processes()
        after = make_run(fs, RUN)
        assert 2 in after.manager.steps()
        after.assert_holds(after.manager.steps()[-1], after.manager.latest())
        assert error is not None or 3 in after.manager.steps()
        with after.manager:
            assert [n for n in fs.listdir(RUN) if not n.startswith("step-")] == [".lock"]
        k += 1
    assert k > 35


def test_replacing_a_step_survives_the_failure_of_any_single_call(make_run):
    k = 0
    while True:
        fs = run_with_two(make_run)
        faulty = FaultFs(fs, k, errno.EIO)
        run = make_run(faulty, RUN)
        try:
            with run.manager:
                run.save(2, run.groups(9), seed=8)
        except CheckpointError:
            pass
        if not faulty.has_failed:
            break
        assert make_run(fs, RUN).manager.steps() == (1, 2), faulty.calls[k]
        with make_run(fs, RUN).manager as manager:
            loaded = manager.latest()
            assert manager.steps() == (1, 2), faulty.calls[k]
            assert loaded.manifest.seed in (7, 8)
        k += 1
    assert k > 50


def test_a_disk_that_fills_at_any_byte_gives_an_error_with_path_need_and_free(make_run):
    class Boastful(LogFs):
        def free_bytes(self, path):
            return 1 << 40

    sizes = run_with_two(make_run).used_bytes()
    failures = 0
    for extra in range(0, sizes, 97):
        fs = Boastful(Path("/disk"), capacity_bytes=sizes + extra)
        run = make_run(fs, RUN)
        with run.manager:
            run.save(1)
            run.save(2)
            error = failure_of(lambda run=run: run.save(3))
            if error is not None:
                failures += 1
                assert isinstance(error, CheckpointSpaceError)
                assert error.path == RUN
                assert error.need_bytes > 0
                assert isinstance(error.__cause__, OSError)
                assert fs.listdir(RUN) == [".lock", "step-0000000001", "step-0000000002"]
                run.assert_holds(2, run.manager.latest())
            else:
                run.assert_holds(3, run.manager.latest())
    assert 10 < failures < sizes // 97


def test_a_disk_without_room_is_refused_before_anything_is_written(make_run):
    fs = LogFs(Path("/disk"), capacity_bytes=5_000)
    run = make_run(fs, RUN)
    with run.manager:
        written = len(fs.log)
        with raises(CheckpointSpaceError) as e:
            run.save(1)
        assert len(fs.log) == written
    assert e.value.free_bytes < e.value.need_bytes
    assert e.value.free_bytes == fs.free_bytes(RUN)


@pytest.mark.parametrize("num_tensors", [1, 40, 300])
def test_little_more_is_asked_for_than_a_checkpoint_takes(make_run, num_tensors):
    fs = LogFs(Path("/disk"), capacity_bytes=1 << 30)
    run = make_run(fs, RUN)
    groups = {"model": {f"w{i}": np.zeros(700) for i in range(num_tensors)}}
    with run.manager:
        run.save(1, groups)
        taken = sum(len(data) for data in fs.files().values())
        fs._capacity_bytes = taken
        with pytest.raises(CheckpointSpaceError) as raised:
            run.save(2, groups)
    assert taken <= raised.value.need_bytes <= 1.1 * taken + 16 * 1024


def test_a_full_device_of_the_system_gives_the_space_error(make_run, tmp_path):
    class Full(Fs):
        def create(self, path):
            path.touch()
            return os.open("/dev/full", os.O_WRONLY)

    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    good = make_run(None, tmp_path / "run")
    with good.manager:
        good.save(1)
    run = make_run(Full(), tmp_path / "run")
    with run.manager, pytest.raises(CheckpointSpaceError, match="no space") as raised:
        run.save(2)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "step-0000000001"]
    good.assert_holds(1, good.manager.latest())


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOENT])
def test_reading_survives_the_failure_of_any_single_call(make_run, code):
    fs = run_with_two(make_run)
    k = 0
    while True:
        faulty = FaultFs(fs, k, code)
        run = make_run(faulty, RUN)
        found = []
        error = failure_of(lambda run=run, found=found: found.append(run.manager.latest()))
        if error is not None:
            assert not isinstance(error, NoValidCheckpoint), "one of the two is always readable"
            assert isinstance(error.__cause__, OSError)
        elif found == [None]:
            assert code == errno.ENOENT
            assert faulty.calls[k] == "listdir"
        else:
            run.assert_holds(found[0].manifest.step, found[0])
            assert found[0].manifest.step == 2 or run.reports
        assert fs.open_files == {}
        if not faulty.has_failed:
            break
        k += 1
    assert k > 15


def test_a_bad_sector_is_damage_and_the_next_older_one_is_used(make_run):
    fs = run_with_two(make_run)

    class Scratched(Around):
        def open_read(self, directory, name):
            if directory.name.endswith("2") and name.startswith("optim"):
                raise OSError(errno.EIO, "Input/output error", str(directory / name))
            return fs.open_read(directory, name)

    run = make_run(Scratched(fs), RUN)
    run.assert_holds(1, run.manager.latest())
    assert "EIO (Input/output error) at /disk/run/step-0000000002/optim" in run.reports[0]


def test_want_of_descriptors_is_no_damage_and_skips_no_checkpoint(make_run):
    fs = run_with_two(make_run)

    class Exhausted(Around):
        def open_read(self, directory, name):
            raise OSError(errno.EMFILE, "Too many open files", str(directory))

    run = make_run(Exhausted(fs), RUN)
    with raises(CheckpointError) as raised:
        run.manager.latest()
    assert not isinstance(raised.value, CheckpointDamaged)


def test_old_checkpoints_that_cannot_be_removed_are_reported_and_the_save_counts(make_run):
    fs = run_with_two(make_run)

    class Stuck(Around):
        def rename(self, source, target):
            if target.name.startswith(".trash-"):
                raise OSError(errno.EACCES, "Permission denied", str(source))
            fs.rename(source, target)

    run = make_run(Stuck(fs), RUN)
    with run.manager:
        run.save(3)
    run.assert_holds(3, run.manager.latest())
    assert len(run.reports) == 1
    assert "step 3 is saved" in run.reports[0]
    assert "Permission denied" in run.reports[0]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_parent_that_may_not_be_read_matters_only_to_who_creates_in_it(make_run, is_there):
    fs = LogFs(Path("/disk"))
    if is_there:
        fs.mkdir(RUN)

    class Private(Around):
        def fsync_dir(self, path):
            if path == RUN.parent:
                raise OSError(errno.EACCES, "Permission denied", str(path))
            fs.fsync_dir(path)

    run = make_run(Private(fs), RUN)
    if is_there:
        with run.manager:
            run.save(1)
        run.assert_holds(1, run.manager.latest())
    else:
        for _ in range(2):
            with raises(CheckpointError):
                run.manager.open()
            assert fs.listdir(RUN.parent) == []


def test_an_interrupt_while_writing_removes_what_was_begun(make_run):
    fs = run_with_two(make_run)

    class Interrupted(Around):
        def write(self, fd, data):
            raise KeyboardInterrupt

    run = make_run(Interrupted(fs), RUN)
    with run.manager, pytest.raises(KeyboardInterrupt):
        run.save(3)
    assert fs.listdir(RUN) == [".lock", "step-0000000001", "step-0000000002"]
    assert fs.open_files == {}
