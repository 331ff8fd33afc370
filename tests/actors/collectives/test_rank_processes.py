import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rank_process

ROOT = Path(rank_process.__file__).resolve().parents[2]


class Processes:
    """Ranks as processes, driven line by line; what they say is waited for, never slept for."""

    def __init__(self, count, size, deadline_s, cache, hosts=""):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, rank_process.__file__]
        pipe = subprocess.PIPE
        self.ranks = [
            subprocess.Popen(
                [*command, *map(str, (rank, count, size, deadline_s, cache, hosts))],
                stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environ,
            )
            for rank in range(count)
        ]  # fmt: skip

    def heard(self, rank):
        kind, _, value = self.ranks[rank].stdout.readline().partition(" ")
        return kind, ast.literal_eval(value)

    def tell(self, value, *ranks):
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].stdin.write(f"{value!r}\n")
            self.ranks[rank].stdin.flush()

    def agree(self):
        everyone = range(len(self.ranks))
        said = [self.heard(rank) for rank in everyone]
        while said[0][0] == "gather":
            assert {(kind, name) for kind, (name, _) in said} == {("gather", said[0][1][0])}
            self.tell([value for _, (_, value) in said])
            said = [self.heard(rank) for rank in everyone]
        assert [kind for kind, _ in said] == ["ready"] * len(self.ranks)

    def close(self):
        for process in self.ranks:
            process.kill()
            process.communicate()


@pytest.fixture(params=[100, 100_000], ids=["aside", "in place"])
def processes(request, native_toolchain):
    found = []

    def start(count, deadline_s, hosts=""):
        found.append(Processes(count, request.param, deadline_s, native_toolchain.folder, hosts))
        found[0].agree()
        return found[0]

    yield start
    for started in found:
        started.close()


def test_processes_meet(processes):
    ranks = processes(3, 60)
    for value in range(5):
        ranks.tell(value)
        assert [ranks.heard(rank) for rank in range(3)] == [("met", [3.0 * value + 3])] * 3


def test_who_is_killed_is_named_long_before_the_deadline(processes):
    ranks = processes(3, 3600)
    ranks.tell(0)
    assert [ranks.heard(rank)[0] for rank in range(3)] == ["met"] * 3
    ranks.ranks[1].kill()
    ranks.ranks[1].wait()
    ranks.tell(0, 0, 2)
    said = [ranks.heard(rank) for rank in (0, 2)]
    assert ("failed", 1) in [(kind, rank) for kind, (rank, _) in said]
    assert all(["the process of rank 1 has ended" in text for _, (_, text) in said])


def test_who_is_stopped_is_named_at_the_deadline_and_hears_of_it_when_it_goes_on(processes):
    ranks = processes(2, 0.3)
    ranks.ranks[1].send_signal(signal.SIGSTOP)
    ranks.tell(0)
    kind, (rank, text) = ranks.heard(0)
    assert (kind, rank) == ("failed", 1)
    assert "rank 1 did not arrive within 0.3 s where rank 0 waits: all_reduce 0 of" in text
    ranks.ranks[1].send_signal(signal.SIGCONT)
    kind, (rank, text) = ranks.heard(1)
    assert (kind, rank) == ("failed", 1)
    assert "rank 0 aborted the run: rank 1 did not arrive" in text


@pytest.mark.extra("mpi")
def test_processes_on_several_hosts_meet_by_mpi(processes):
    ranks = processes(4, 60, "aabc")
    for value in range(3):
        ranks.tell(value)
        assert [ranks.heard(rank) for rank in range(4)] == [("met", [4.0 * value + 6])] * 4
    for process in ranks.ranks:
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        files = [line for line in maps if "mpich_shm_" in line]
        assert files  # of which none has a name any more, so that none outlives its rank
        assert all([line.endswith(" (deleted)") for line in files])


@pytest.mark.extra("mpi")
def test_who_is_killed_on_another_host_is_named(processes):
    ranks = processes(2, 2, "ab")
    ranks.tell(0)
    assert [ranks.heard(rank)[0] for rank in range(2)] == ["met"] * 2
    ranks.ranks[1].kill()
    ranks.ranks[1].wait()
    ranks.tell(0, 0)
    kind, (rank, _) = ranks.heard(0)
    assert (kind, rank) == ("failed", 1)
