"""Run directories that are one, or not, for all ranks."""

import os
from pathlib import Path

import pytest
from rank_threads import RankThreads

from actorflow.checkpoint.errors import CheckpointError
from actorflow.checkpoint.fs import Fs, is_leftover
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from actorflow.distributed.run_directory import check_one_directory


def on_ranks(directories, files=None):
    """Check the directories of some ranks; return what each raised."""
    threads = RankThreads(len(directories))

    def one(rank):
        group, fs = ProcessGroup(rank, threads.gather(rank)), (files or {}).get(rank, Fs())
        try:
            check_one_directory(fs, Path(directories[rank]), group)
        except CheckpointError as error:
            return error
        return None

    return threads.run(one)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_one_directory_under_several_names_is_one_and_nothing_is_left(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert on_ranks([run, tmp_path / "link" / "run", run]) == [None] * 3
    assert os.listdir(run) == []
    check_one_directory(Fs(), tmp_path / "none", SINGLE_PROCESS)


@pytest.mark.parametrize("is_there", [True, False])
def test_another_directory_is_refused_on_all_with_both_paths(run, tmp_path, is_there):
    if is_there:
        (tmp_path / "other").mkdir()
    errors = on_ranks([run, run, tmp_path / "other"])
    for error in errors:
        assert "rank 2 has another run directory than rank 0" in str(error)
        assert str(run) in str(error)
        assert str(tmp_path / "other") in str(error)
    assert os.listdir(run) == []


class ReadOnly(Fs):
    """A mount of one rank."""

    def create(self, path):
        raise OSError(30, "Read-only file system", str(path))


class Full(Fs):
    """A quota of one rank."""

    def write(self, fd, data):
        raise OSError(122, "Disk quota exceeded")


@pytest.mark.parametrize(("fs", "text"), [(ReadOnly(), "EROFS"), (Full(), "EDQUOT")])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_cannot_write_is_named_on_all(run, fs, text, rank):
    for error in on_ranks([run] * 3, {rank: fs}):
        assert str(error).startswith(f"rank {rank} cannot write in the run directory {run}: {text}")
    assert os.listdir(run) == []


def test_a_first_rank_that_cannot_write_says_so(run):
    group = ProcessGroup(0, lambda name, value: [value, value])
    with pytest.raises(CheckpointError, match=f"cannot write as rank 0 in {run}: EROFS"):
        check_one_directory(ReadOnly(), run, group)


def test_what_a_rank_left_that_was_killed_is_removed(run):
    (run / ("nonce-" + "a" * 32)).touch()
    assert is_leftover("nonce-" + "a" * 32)
    with CheckpointManager(run):
        assert os.listdir(run) == [".lock"]
