"""Processes as one job: what each finds, what is seen of it, and that all end together."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ENOUGH_S, end_of, insist, launcher
from process_ends import are_gone, tells_of

from actorflow.cli.main import main
from actorflow.distributed.messages import RankKeys
from actorflow.distributed.rank_process import (
    MOST_BYTES,
    MOST_LINES,
    OutputTail,
    split_cores,
    start_rank,
)

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, queue, signal, sys, threading
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.member import current_rank
from compiler.contract.errors import PeerFailed

member = current_rank()
phase, fault = [*sys.argv[1:], "", ""][:2]

def report(text):
    with open(os.environ["TELLS"], "a") as file:
        file.write(text + "\\n")

def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()

def boom():
    raise RuntimeError("boom in " + phase)

FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": boom, "hang": hang, "exit": lambda: sys.exit(3), "vanish": lambda: os._exit(0),
}

def act(at):
    if member.rank == 1 and phase == at:
        print("what rank 1 has to say")
        FAULTS[fault]()

act("start")
member.all_gather_object("plan", member.rank)
act("met")
told = queue.SimpleQueue()
run = DistributedRun(member, 0, obey=told.put, abort=told.put)
run.begin()
step = 0
while step < 20:
    news = told.get()
    if isinstance(news, Exception):
        raise news
    while step < news.steps:
        step += 1
        run.report_data_ready(step)
        if step == 9:
            act("run")
run.ended(step)
print("rank", member.rank, "is done")
"""


@pytest.fixture
def launched(tmp_path):
    """Return a function that starts `actorflow launch` on a script."""
    with launcher(tmp_path) as start:
        yield start


@pytest.fixture
def ended(launched):
    """Return a function that launches a script; it returns exit status, stdout and stderr."""
    return lambda *arguments, **options: end_of(launched(*arguments, **options))


def test_ranks_find_who_they_are_and_rank_0_is_heard(ended):
    script = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "ACTORFLOW_THREADS")
from actorflow.distributed.member import current_rank
member = current_rank()
own = (*[os.environ[n] for n in names], *sys.argv[1:], len(os.sched_getaffinity(0)))
rows = member.all_gather_object("rows", (own, int(os.environ["MASTER_PORT"])))
print(sorted({row[1] for row in rows}) == [rows[0][1]], "port" if rows[0][1] > 0 else "")
for row in rows:
    print(*row[0])
print("to stderr", member.rank, file=sys.stderr)
"""
    cores = sorted(os.sched_getaffinity(0))
    threads = max(1, len(cores) // 2)
    on = [len(part) for part in split_cores(cores, 2) or [cores, cores]]
    status, out, err = ended(script, "--own", "-n")
    assert (status, err) == (0, "to stderr 0\n")
    assert out.splitlines() == [
        "True port",
        f"0 2 0 127.0.0.1 {threads} --own -n {on[0]}",
        f"1 2 1 127.0.0.1 {threads} --own -n {on[1]}",
    ]
    status, out, _ = ended(script, n=1, ACTORFLOW_THREADS="7")
    assert status == 1  # alone: there is no member
    assert out == ""


ONE = "actorflow launch: rank 1 of 2 failed:\n"


KILLED = "actorflow launch: rank 1 was ended by SIGKILL\n"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("phase", "fault", "status", "said"),
    [
        *[(phase, "raise", 1, ONE) for phase in ("start", "met", "run")],
        *[(phase, "kill", 137, KILLED) for phase in ("start", "met", "run")],
        ("start", "exit", 3, "actorflow launch: rank 1 ended with exit status 3\n"),
        ("run", "vanish", 1, "actorflow launch: rank 1 ended without a word (os._exit?)\n"),
    ],
)
def test_a_rank_that_fails_at_any_phase_ends_the_job_with_one_error(
    ended, phase, fault, status, said
):
    code, out, err = ended(SCRIPT, phase, fault, grace=20)
    assert code == status
    assert out == ""  # rank 0 is not done, and does not tell it a second time
    printed, _, tail = err.rpartition("\n---\n")
    assert printed == "--- what rank 1 printed last:\nwhat rank 1 has to say"
    assert tail.startswith(said)
    if fault == "raise":
        assert tail.count("RuntimeError: boom in " + phase) == 1
        assert "script.py" in tail
    else:
        assert tail == said


@pytest.mark.thinned(2)
@pytest.mark.parametrize("fault", ["stop", "hang"])
def test_a_rank_that_stands_still_is_named_and_ended(ended, fault):
    code, out, err = ended(SCRIPT, "start", fault, grace=2, ACTORFLOW_RANK_SECONDS="8")
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("actorflow launch: rank 1 "), err
    assert "did not arrive within" in last or "was stopped (SIGSTOP) " in last
    assert ("rank 1 is here:" in err and ", in hang" in err) is (fault == "hang")


def test_a_rank_that_is_stopped_in_a_run_is_found_though_nobody_meets(ended):
    code, _, err = ended(SCRIPT, "run", "stop", ACTORFLOW_RANK_SECONDS="8")
    said = "actorflow launch: rank 1 was stopped (SIGSTOP) 8 s ago and has not continued"
    assert (code, err.splitlines()[-1]) == (1, said)


def test_ranks_that_end_well_end_with_nothing_said(ended):
    assert ended(SCRIPT) == (0, "rank 0 is done\n", "")


def test_a_process_that_fails_after_its_script_ended_well_is_not_passed_over(ended):
    script = """
import atexit, os
if os.environ["RANK"] == "1":
    atexit.register(os._exit, 7)
"""
    said = "actorflow launch: rank 1 ended with exit status 7, after its script had ended well\n"
    assert ended(script) == (7, "", said)


JOB = """
import numpy as np
import actorflow as af

@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
def train(model, batch):
    return (model(batch.x) @ batch.x).mean()

data = af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)
train.fit(af.nn.Linear(2, 1), data, steps=2)
"""


def test_an_error_of_a_job_is_shown_once_with_op_and_line(ended):
    code, out, err = ended(JOB, grace=20)
    assert (code, out) == (1, "")
    assert err.count("script.py:7: matmul(float32[4, 1], float32[4, 2])") == 1
    assert "Traceback" not in err


def test_an_error_on_purpose_is_its_message_and_a_second_writer_is_refused(ended, tmp_path):
    script = """
import sys, pathlib
from actorflow.checkpoint.fs import Fs
from actorflow.checkpoint.fs import WriterLock
from actorflow.distributed.member import current_rank
member = current_rank()
if member.rank == 0:
    lock = WriterLock(Fs(), pathlib.Path(sys.argv[1]))
    again = WriterLock(Fs(), pathlib.Path(sys.argv[1]))
member.all_gather_object("opened", None)
"""
    (tmp_path / "run").mkdir()
    code, out, err = ended(script, str(tmp_path / "run"), grace=20)
    assert (code, out) == (1, "")
    first, second = err.splitlines()
    assert first == "actorflow launch: rank 0 of 2 failed:"
    assert second.startswith("actorflow: ")
    assert "run" in second


STOPPED = (
    SCRIPT.split("told = queue")[0]
    + """
from actorflow.run.stopping import StopSignals
told = queue.SimpleQueue()
run = DistributedRun(member, 0, obey=told.put, abort=told.put)
run.begin()
with StopSignals(lambda n: run.ask_stop(signal.Signals(n).name)) as signals:
    report("ready")
    step, is_last = 0, False
    while not is_last:
        try:
            grant = told.get(timeout=0.1)  # or a signal would not be handled
        except queue.Empty:
            continue
        step, is_last = grant.steps, grant.is_last
        run.report_data_ready(step)
    run.ended(step)
lasts = member.all_gather_object("lasts", step)
print(len(set(lasts)), "last step", signal.Signals(signals.received[0]).name)
sys.exit(128 + signals.received[0])
"""
)


@pytest.fixture
def tells(tmp_path):
    """A named pipe in which ranks tell; a function that returns so many of their lines."""
    with tells_of(tmp_path / "tells") as lines:
        yield lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all_ranks_at_one_step(launched, tells, number):
    process = launched(STOPPED)
    assert tells(2) == ["ready", "ready"]
    process.send_signal(number)
    out, err = process.communicate(timeout=ENOUGH_S)
    assert (process.returncode, err) == (128 + number, "")
    assert out == f"1 last step {signal.Signals(number).name}\n"


WAITING = (
    SCRIPT.split('act("start")')[0]
    + """
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
import subprocess
child = subprocess.Popen(["sleep", "1000"])
report(f"{os.getpid()} {child.pid}")
threading.Event().wait()
"""
)


def test_ranks_end_with_their_launcher_when_it_is_killed(launched, tells):
    process = launched(WAITING)
    rows = [[int(word) for word in line.split()] for line in tells(2)]
    try:
        process.kill()
        assert are_gone([row[0] for row in rows])
    finally:
        for _, child in rows:
            os.kill(child, signal.SIGKILL)


def test_a_second_signal_ends_ranks_that_do_not_listen_with_all_that_they_started(launched, tells):
    process = launched(WAITING, "ignore")
    rows = [[int(word) for word in line.split()] for line in tells(2)]
    insist(process, signal.SIGTERM)
    _, err = process.communicate(timeout=ENOUGH_S)
    assert process.returncode != 0
    assert are_gone([pid for row in rows for pid in row]), err


def test_a_rank_that_fails_takes_along_who_does_not_listen(ended, tells, tmp_path):
    ending = "threading.Event().wait()\n"
    script = (
        WAITING.removesuffix(ending)
        + "member.all_gather_object('up', 0)\nmember.rank or hang()\nboom()\n"
    )
    code, _, err = ended(script)
    assert code == 1
    assert err.count("RuntimeError: boom") == 1
    assert are_gone([int(word) for line in tells(2) for word in line.split()])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", __file__], "-n: expected 1 to 256 ranks, came 0"),
        (
            ["-n", "2", "--grace", "-1", __file__],
            "--grace: expected 0 to 86,400 seconds, came -1.0",
        ),
        (
            ["-n", "2", "--grace", "inf", __file__],
            "--grace: expected 0 to 86,400 seconds, came inf",
        ),
        (["-n2", "nowhere.py"], "nowhere.py: no such script"),
        (["-n2", "--hosts", "0", __file__], "--hosts: expected 1 to 2 hosts for -n 2, came 0"),
        (["-n2", "--hosts", "3", __file__], "--hosts: expected 1 to 2 hosts for -n 2, came 3"),
        (
            ["-n2", "--host-timeout", "1", __file__],
            "--host-timeout: expected 3 to 86,400 seconds, came 1.0",
        ),
        (
            ["-n2", "--key-file", "key", __file__],
            "--key-file is for several hosts: give their number by --hosts, too",
        ),
        (["--make-key", "/nowhere/key"], "--make-key: /nowhere/key: No such file or directory"),
        ([__file__], "the following arguments are required: -n/--ranks"),
    ],
)
def test_bad_arguments_are_refused(arguments, said):
    own = [sys.executable, "-m", "actorflow", "launch", *arguments]
    done = subprocess.run(own, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode in (1, 2)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n4", "--hosts", "4:2"], "--hosts 4:2: expected MIN:MAX with MIN at most MAX; write"),
        (["-n4", "--hosts", "0:2"], "--hosts: expected 1 to 4 hosts for -n 4, came 0:2"),
        (["-n4", "--hosts", "2:"], "expected a number of hosts, or MIN:MAX such as 2:4, came '2:'"),
        (["-n4", "--hosts", "2:8"], "--hosts: expected 1 to 4 hosts for -n 4, came 2:8"),
        (["-n6", "--hosts", "2:4"], "-n 6: expected a multiple of 4 for --hosts 2:4, since all"),
        (["-n4", "--hosts", "4", "--host-grace", "3"], "--host-grace is for --hosts MIN:MAX"),
        (["-n4", "--hosts", "2:4", "--host-grace", "-1"], "--host-grace: expected 0 to 86,400"),
    ],
)
def test_bad_numbers_of_hosts_are_refused(arguments, said, capsys):
    assert main(["launch", *arguments, __file__]) == 1
    assert said in capsys.readouterr().err


def test_cores_are_divided_among_neighbours():
    assert split_cores([3, 0, 1, 2, 8], 2) == [(0, 1, 2), (3, 8)]
    assert split_cores([0, 1], 2) == [(0,), (1,)]
    assert split_cores([0, 1], 3) is None


def test_of_blank_lines_alone_nothing_is_shown():
    read_end, write_end = os.pipe()
    tail = OutputTail(read_end)
    os.write(write_end, b"\n \n\n")
    tail.drain()
    assert tail.text() == ""
    os.close(write_end)
    tail.close()


@pytest.mark.parametrize("count", [0, 3, MOST_LINES + 5, 200_000])
def test_of_what_a_rank_prints_the_last_is_kept(count):
    read_end, write_end = os.pipe()
    tail = OutputTail(read_end)
    sent = [f"line {number}" for number in range(count)]
    for start in range(0, count, 1000):
        os.write(write_end, "".join([line + "\n" for line in sent[start : start + 1000]]).encode())
        tail.drain()
    os.close(write_end)
    lines = tail.text().splitlines()
    assert len(tail.text()) <= MOST_BYTES + 100  # and the word on what is left out
    if count <= MOST_LINES:
        assert lines == sent
    else:
        assert lines[0].startswith("... (")
        assert lines[1:] == sent[-MOST_LINES:]
    assert not tail.read()
    tail.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_be_watched_is_ended_again(monkeypatch, tmp_path, rank):
    """There are no more descriptors: nobody would ever hear of its end."""
    started = []

    def none_left(pid):
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    (tmp_path / "script.py").write_text("import time; time.sleep(1000)")
    keys = RankKeys(rank, 2, "tcp://127.0.0.1:1", b"", b"", b"", 0.0, 1, "", rank, 2)
    with pytest.raises(OSError, match="Too many open files"):
        start_rank(keys, [str(tmp_path / "script.py")], os.environ, None)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


EPOCHS = """
import os, signal, sys, time
from actorflow.distributed.member import current_rank
member = current_rank()
epoch = int(os.environ["ACTORFLOW_EPOCH"])
values = member.all_gather_object("epochs", (epoch, member.epoch, os.getpid()))
if member.rank == 0:
    print(*[row[:2] for row in values], flush=True)
with open("pids", "a") as file:
    print(os.getpid(), file=file)
if epoch == 1 and member.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
member.all_gather_object("all live", None)
"""


def test_an_epoch_has_processes_and_an_agreement_of_its_own(ended, tmp_path):
    code, out, err = ended(EPOCHS, restarts=3, grace=20)
    assert (code, out) == (0, "(1, 1) (1, 1)\n(2, 2) (2, 2)\n")
    assert err.splitlines() == [
        KILLED.strip(),
        "actorflow launch: restart 1 of 3; fit continues from its newest checkpoint, a script"
        " without any from its beginning",
        "actorflow launch: the job has ended; its ranks were started 2 times",
    ]
    pids = (tmp_path / "pids").read_text().split()
    assert len(set(pids)) == 4
    assert are_gone([int(pid) for pid in pids])


def test_a_job_that_was_told_to_stop_is_not_started_again(launched, tells):
    process = launched(WAITING, restarts=3)
    tells(2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=ENOUGH_S)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")


def test_an_error_that_every_start_meets_is_met_once(ended):
    code, out, err = ended("from actorflow.settings nothing", restarts=3, grace=20)
    assert (code, out) == (1, "")
    assert err.count("SyntaxError") == 1
    assert err.splitlines()[-1] == (
        "actorflow launch: no restart: every start would meet this error; the ranks were started"
        " once"
    )


def test_an_option_that_means_nothing_is_refused(ended):
    code, _, err = ended("", restarts=-1)
    assert (code, err) == (1, "actorflow: --restarts: expected 0 to 10,000, came -1\n")
