"""MPI's start by our own gather, without MPI: lines in, lines out."""

import os
import socket
import threading

import pytest
from error_texts import raises
from rank_threads import RankThreads

from actors.collectives import mpi, pmi
from compiler.contract.errors import DeviceError, PeerFailed


def test_what_ranks_put_all_get_after_the_barrier():
    threads = RankThreads(3)

    def do(rank):
        manager = pmi.ProcessManager(rank, 3, "job.7", threads.gather(rank))
        assert manager.answer("cmd=get_my_kvsname") == "cmd=my_kvsname rc=0 kvsname=job.7"
        key = f"card-{rank}"
        put = f"cmd=put kvsname=job.7 key={key} value=a=b value={rank} c"
        assert manager.answer(put) == "cmd=put_result rc=0 msg=success"
        assert "key_not_found" in manager.answer(f"cmd=get kvsname=job.7 key={key}")
        assert manager.answer("cmd=barrier_in") == "cmd=barrier_out rc=0"
        asked = [f"cmd=get kvsname=job.7 key=card-{other}" for other in range(3)]
        return [manager.answer(line).partition(" value=")[2] for line in asked]

    assert threads.run(do) == [[f"a=b value={rank} c" for rank in range(3)]] * 3


def test_each_rank_is_told_that_it_is_alone_on_its_host():
    manager = pmi.ProcessManager(0, 5, "job", None)
    assert manager.answer("cmd=get key=PMI_process_mapping").endswith(" value=(vector,(0,5,1))")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init pmi_version=1"),
        ("cmd=get_maxes", "cmd=maxes rc=0 kvsname_max=256"),
        ("cmd=get_appnum", "cmd=appnum rc=0 appnum=0"),
        ("cmd=finalize", "cmd=finalize_ack rc=0"),
        ("cmd=spawn nprocs=2", "cmd=spawn rc=-1 msg=unknown_command"),
        ("", "cmd=None rc=-1"),
    ],
)
def test_each_line_has_an_answer(line, answer):
    assert pmi.ProcessManager(0, 1, "job", None).answer(line).startswith(answer)


@pytest.mark.parametrize("row", [7, ("a",), (("key", 3),), (("key", "two\nlines"),)])
def test_what_is_no_pair_of_texts_is_refused(row):
    manager = pmi.ProcessManager(0, 2, "job", lambda name, value: [value, row])
    with pytest.raises(PeerFailed, match="rank 1 starts MPI with") as caught:
        manager.answer("cmd=barrier_in")
    assert caught.value.rank == 1


def asking(*lines):
    """Return an MPI_Init that says these lines, and notes the answers and its environment."""
    heard = []

    def init():
        heard.append({name: os.environ.get(name) for name in ("PMI_RANK", "PMI_ID", "FI_PROVIDER")})
        with socket.socket(fileno=os.dup(int(os.environ["PMI_FD"]))) as end:
            for line in lines:
                end.sendall(line.encode() + b"\n")
                heard.append(end.recv(1000).decode())
        return 0

    return heard, init


def test_a_start_is_answered_and_its_variables_do_not_stay(monkeypatch):
    monkeypatch.setenv("PMI_ID", "of srun")
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    heard, init = asking("cmd=get_appnum", "cmd=barrier_in")
    manager = pmi.ProcessManager(1, 2, "job", lambda name, value: [(), value])
    pmi.start(manager, 1, 2, init)
    assert heard == [
        {"PMI_RANK": "1", "PMI_ID": None, "FI_PROVIDER": "tcp"},
        "cmd=appnum rc=0 appnum=0\n",
        "cmd=barrier_out rc=0\n",
    ]
    assert os.environ["PMI_ID"] == "of srun"
    assert not {"PMI_FD", "PMI_RANK", "PMI_SIZE", "FI_PROVIDER"} & {*os.environ}


def test_the_network_that_a_user_names_stands(monkeypatch):
    monkeypatch.setenv("FI_PROVIDER", "verbs")
    heard, init = asking()
    pmi.start(pmi.ProcessManager(0, 1, "job", None), 0, 1, init)
    assert heard[0]["FI_PROVIDER"] == "verbs"


def test_a_rank_that_fails_meanwhile_ends_the_wait():
    def gather(name, value):
        raise PeerFailed(f"rank 1 did not come to {name}", rank=1)

    _, init = asking("cmd=barrier_in")
    with pytest.raises(PeerFailed, match="rank 1 did not come to start MPI"):
        pmi.start(pmi.ProcessManager(0, 2, "job", gather), 0, 2, init)
    assert "PMI_FD" not in os.environ


def test_a_start_that_fails_is_an_error():
    with raises(DeviceError):
        pmi.start(pmi.ProcessManager(0, 1, "job", None), 0, 1, lambda: 15)


def test_a_start_that_hangs_is_an_error_and_not_for_ever():
    go_on = threading.Event()
    try:
        with raises(DeviceError):
            manager = pmi.ProcessManager(0, 1, "job", None)
            pmi.start(manager, 0, 1, go_on.wait, most_silent_s=0.01)
    finally:
        go_on.set()


def test_without_mpi_all_ranks_name_the_extra(monkeypatch):
    def absent():
        raise DeviceError("mpi4py is not here; install the extra: pip install 'actorflow[mpi]'")

    monkeypatch.setattr(mpi, "load", absent)
    with raises(DeviceError):
        mpi.connect(1, 2, lambda name, value: [("0" * 16, ""), value])


def test_tags_are_counted_and_end():
    class World:
        COMM_WORLD = ERRORS_RETURN = TAG_UB = None

        def Set_errhandler(self, handler):  # MPI's name
            pass

        def Get_attr(self, key):  # MPI's name
            return 100

    World.COMM_WORLD = World()
    transport = mpi.MpiTransport(World)
    transport.claim_tags(7, 90)
    assert transport.next_tag == 97
    with raises(DeviceError):
        transport.claim_tags(97, 4)
