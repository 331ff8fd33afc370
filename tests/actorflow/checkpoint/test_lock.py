import os
import shutil

import numpy as np
import pytest
from disks import LogFs
from error_texts import raises

from actorflow.checkpoint.errors import CheckpointError, CheckpointLocked, CheckpointLockLost
from actorflow.checkpoint.fs import Fs, WriterLock, WriterTerm, step_name, tmp_name
from actorflow.checkpoint.manager import CheckpointManager, SavedFacts
from actorflow.checkpoint.shard import TensorEntry


def tree(path):
    return sorted((str(p.relative_to(path)), p.stat().st_size) for p in path.rglob("*"))


def move_away(directory):
    directory.rename(directory.with_name("elsewhere"))


def remove(directory):
    shutil.rmtree(directory)


def replace(directory):
    move_away(directory)
    shutil.copytree(directory.with_name("elsewhere"), directory)


def put_a_file_there(directory):
    move_away(directory)
    directory.write_text("")


def remove_the_lock(directory):
    (directory / ".lock").unlink()


def replace_the_lock(directory):
    old = directory / ".old"
    (directory / ".lock").rename(old)
    (directory / ".lock").touch()


LOSSES = [
    move_away,
    remove,
    replace,
    put_a_file_there,
    remove_the_lock,
    replace_the_lock,
]


@pytest.mark.parametrize("lose", LOSSES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_directory_or_lock_lost_meanwhile_is_noticed_and_nothing_is_written(real_run, lose):
    with real_run.manager:
        real_run.save(1)
        lose(real_run.directory)
        before = tree(real_run.directory.parent)
        with raises(CheckpointLockLost) as raised:
            real_run.save(2)
        assert raised.value.directory == real_run.directory
        assert tree(real_run.directory.parent) == before


@pytest.mark.parametrize("call", ["mkdir", "create", "write", "fsync", "rename"])
@pytest.mark.parametrize("lose", [move_away, remove, replace, remove_the_lock, replace_the_lock])
def test_what_is_lost_in_the_middle_of_a_save_is_noticed_as_such(make_run, tmp_path, lose, call):
    class Losing(Fs):
        is_armed = False

    def losing(self, *arguments):
        if self.is_armed:
            self.is_armed = False
            lose(run.directory)
        return getattr(Fs, call)(self, *arguments)

    setattr(Losing, call, losing)
    fs = Losing()
    run = make_run(fs, tmp_path / "run")
    with run.manager:
        run.save(1)
        fs.is_armed = True
        if call == "rename" and lose not in (move_away, remove):
            return  # too late to notice: the last moment to ask is right before it
        with pytest.raises(CheckpointLockLost):
            run.save(2)
    assert not list(tmp_path.glob("run/.tmp-*"))
    assert not (tmp_path / "run" / "step-0000000002").exists()


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_lock_that_is_gone_with_its_directory_was_not_removed(make_run, tmp_path, looks):
    class Moving(Fs):
        left = -1

        def stat(self, path):
            found = super().stat(path)
            self.left -= 1
            if self.left == 0:
                move_away(run.directory)
                run.directory.mkdir()
            return found

    fs = Moving()
    run = make_run(fs, tmp_path / "run")
    with run.manager:
        run.save(1)
        fs.left = looks
        with raises(CheckpointLockLost):
            run.save(2)


def test_a_directory_put_back_is_written_again(real_run):
    with real_run.manager:
        real_run.save(1)
        elsewhere = real_run.directory.with_name("elsewhere")
        real_run.directory.rename(elsewhere)
        with pytest.raises(CheckpointLockLost):
            real_run.save(2)
        elsewhere.rename(real_run.directory)
        real_run.save(2)
    real_run.assert_holds(2, real_run.manager.latest())


def test_a_run_that_took_the_place_of_a_moved_one_is_left_alone(real_run, make_run):
    other = make_run(None, real_run.directory)
    with real_run.manager:
        real_run.save(1)
        real_run.directory.rename(real_run.directory.with_name("elsewhere"))
        with other.manager:
            other.save(5)
            with pytest.raises(CheckpointLockLost):
                real_run.save(2)
            assert other.manager.steps() == (5,)
            other.save(6)


def test_a_lock_replaced_while_it_is_taken_is_given_up(tmp_path):
    class Replacing(Fs):
        def lock(self, path, owner):
            fd = super().lock(path, owner)
            path.unlink()
            path.touch()
            self.taken = fd
            return fd

    fs = Replacing()
    with raises(CheckpointLockLost):
        WriterLock(fs, tmp_path)
    with raises(OSError):
        os.fstat(fs.taken)


def test_a_released_lock_can_be_taken_by_another(tmp_path):
    lock = WriterLock(Fs(), tmp_path)
    with raises(CheckpointLocked):
        WriterLock(Fs(), tmp_path)
    lock.release()
    lock.release()
    WriterLock(Fs(), tmp_path).release()


def test_a_system_that_cannot_say_is_an_error_of_ours(make_run, tmp_path):
    class Forbidding(Fs):
        is_forbidding = False

        def stat(self, path):
            if self.is_forbidding:
                raise PermissionError(13, "Permission denied", str(path))
            return super().stat(path)

    fs = Forbidding()
    run = make_run(fs, tmp_path)
    with run.manager:
        fs.is_forbidding = True
        with raises(CheckpointError):
            run.save(1)


# Epochs: a writer whose host was cut off may stand still, and go on later.


TENSOR = TensorEntry("w", "float32", (2,))
FACTS = SavedFacts(7, "plan", {}, {"batches": 1}, "data")


def begun(manager, step):
    """Begin a checkpoint and write it; return what its commit takes."""
    draft = manager.draft(step, FACTS, (TENSOR,))
    manager.begin(draft, 0)
    return draft, (manager.write(step, draft.attempt, {"model": {"w": np.ones(2, "f4")}}, {}),)


@pytest.mark.parametrize("is_released", [False, True], ids=["held", "released_by_the_server"])
def test_a_writer_of_a_later_epoch_takes_the_lock_and_what_the_earlier_one_has_begun(
    tmp_path, is_released
):
    """The server of a network disk releases the lock of a machine that stands still."""
    fs = LogFs(tmp_path) if is_released else Fs()
    stale, later, again, other = [
        CheckpointManager(tmp_path / "run", fs=fs, term=WriterTerm(*term))
        for term in (("5a", 1), ("5a", 2), ("5a", 1), ("77", 3))
    ]
    stale.open()
    asked = begun(stale, 5)
    if is_released:
        fs.forget_locks()
    with later:
        assert (stale.is_writer(), later.is_writer()) == (False, True)
        with pytest.raises(CheckpointLockLost):
            stale.commit(*asked)
        assert later.steps() == ()
        later.commit(*begun(later, 5))
        assert later.steps() == (5,)
        for manager in (again, other):
            with pytest.raises(CheckpointLocked):
                manager.open()
    stale.close()


def test_what_an_earlier_writer_has_begun_gets_no_final_name_while_it_is_removed(tmp_path):
    """The earlier one has asked for its lock already, and stands still before the rename."""
    tried = []

    class Interrupted(Fs):
        def unlink(self, path):
            if path.parent.name.startswith(".t") and not tried:
                with pytest.raises(FileNotFoundError) as raised:
                    os.rename(begun_path, tmp_path / step_name(5))
                tried.append(raised.value)
            super().unlink(path)

    stale = CheckpointManager(tmp_path, term=WriterTerm("5a", 1)).open()
    draft, _ = begun(stale, 5)
    begun_path = tmp_path / tmp_name(5, draft.attempt)
    with CheckpointManager(tmp_path, fs=Interrupted(), term=WriterTerm("5a", 2)) as later:
        assert tried
        assert later.steps() == ()
    stale.close()
