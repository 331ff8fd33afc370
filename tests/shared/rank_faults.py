"""A training on launched ranks, of which one does something bad at a phase, and what is left of it.

`PHASES` and `FAULTS` are the matrix; `outcome` runs one cell of it, on one host or on two, which
are processes of the launcher on this machine.
"""

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launching import ENOUGH_S, SHAPES, host_launcher, launcher

STEPS, AT_STEP = 12, 7
WAIT_S = 8.0
"""ACTORFLOW_RANK_SECONDS of ranks that stand still; also what a first step may take at most."""
GRACE_S = 0.5
HOST_TIMEOUT_S = 3.0

SCRIPT = (
    """
import os, signal, sys, threading, time
rank, folder = int(os.environ["RANK"]), sys.argv[2]
# By epoch: who, at which phase, does what.
faults = eval(sys.argv[1])
who, phase, fault = faults.get(int(os.environ["ACTORFLOW_EPOCH"]), (0, "none", "none"))

def boom():
    raise RuntimeError("boom in " + phase)

def wait():
    while not os.path.exists("go"):
        time.sleep(0.01)

FAULTS = {
    "none": lambda: None, "wait": wait, "raise": boom, "hang": lambda: time.sleep(1000),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: sys.exit(3), "vanish": lambda: os._exit(0),
    "orphan": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getppid(), signal.SIGSTOP),
}

def at(here):
    if rank == who and phase == here:
        FAULTS[fault]()

at("import")
import json
import numpy as np
import actorflow as af
from actorflow import nn
from actorflow.distributed import agreed_plan
from actorflow.distributed.sharded_save import SaveVotes
from actorflow.checkpoint import fs
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.run.training_run import Run

def before(owner, name, here, number=1):
    really, calls = getattr(owner, name), []
    def stand_in(*given, **named):
        calls.append(1)
        if len(calls) == number:
            at(here)
        return really(*given, **named)
    setattr(owner, name, stand_in)

before(agreed_plan, "agreed_plan", "compile")
before(Run, "start", "meeting")
# Of the second checkpoint, so that there is one to go on from.
before(CheckpointManager, "write", "write", 2)
before(SaveVotes, "wait_votes" if rank == 0 else "wait_ended", "voted", 2)
before(fs.Fs, "rename", "checkpoint")

class Data(af.data.ArraySource):
    batches = 0
    def next_rows_into(self, *given):
        self.batches += 1
        if self.batches == AT_STEP:
            at("data")
        return super().next_rows_into(*given)

class Net(nn.Module):
    def __init__(self):
        self.table, self.down = nn.Embedding(32, 16), nn.Linear(16, 10)

    def __call__(self, x):
        return self.down(af.relu(self.table(x)))

SHAPES

@af.job(optimizer=af.optim.SGD(0.1, momentum=0.9), mesh=af.Mesh(data=2), zero="zero" in sys.argv)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

def on_step(step, metrics):
    losses[step] = float(metrics["loss"])
    if rank == 0:
        with open("losses.log", "a") as file:
            file.write(f"{step} {losses[step].hex()}\\n")
    if step == AT_STEP:
        at("step")
    if step == STEPS:
        at("last")

rng = np.random.default_rng(0)
x = rng.integers(0, 32, 256)
model, losses, data = Net(), {}, Data({"x": x, "y": x % 10}, batch=16)
at("before")
train.fit(
    model, Shapes(data) if "shapes" in sys.argv else data, steps=STEPS, progress=False,
    on_step=on_step, checkpoint=folder, every=3,
)
at("after")
if rank == 0:
    state = {name: array.tobytes().hex() for name, array in sorted(model.state().items())}
    with open("told.json", "w") as file:
        json.dump({"losses": losses, "state": state}, file)
""".replace("AT_STEP", str(AT_STEP))
    .replace("STEPS", str(STEPS))
    .replace("SHAPES", SHAPES)
)

PHASES = (
    "import", "before", "compile", "meeting", "data", "step", "write", "voted", "checkpoint",
    "last", "after",
)  # fmt: skip
"""Where it happens: in a script, around and inside `fit`; before a rank writes its pieces of a
checkpoint, once it has voted, and at the rename, which only rank 0 makes."""
FAULTS = ("raise", "hang", "kill", "stop", "exit", "vanish")
"""`wait` besides is none: it goes on once there is a file `go`. `orphan` kills the parent of the
rank, which is the launcher or the agent of its host, and `freeze` stops it for a while."""

NO_FAULTS: dict[int, tuple[int, str, str]] = {}


@dataclass(frozen=True)
class Outcome:
    """How a launch ended, and what it left behind.

    `silent_s` is the longest time in which no rank told of a step and no host said anything.
    """

    code: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]
    silent_s: float = 0.0


@dataclass(frozen=True)
class AtRestart:
    """What happens to a host `delay_s` after the launcher has said that it starts all ranks again.

    `signal` goes to the launcher, host 0, or to the agent of host 1; SIGSTOP is a freeze.
    """

    host: int
    signal: int
    delay_s: float


def outcome(
    folder: Path,
    faults,
    *words,
    wait_s=WAIT_S,
    restarts=0,
    num_hosts=1,
    frozen_s=1.0,
    at_restart: AtRestart | None = None,
) -> Outcome:
    """Launch the training, with faults of ranks at phases; whatever it leaves is ended.

    `faults` has for some epochs who, at which phase, does what; `words` may have "zero", and
    "shapes" for batches of two shapes. A host that is stopped goes on after `frozen_s`.
    """
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = f"{folder}/{time.monotonic_ns()}"
    environ = {
        # As many threads of a rank, and so the same bits, however many ranks a host has.
        "TMPDIR": str(temporary), "FAULT_MARK": mark, "ACTORFLOW_RANK_SECONDS": str(wait_s),
        "ACTORFLOW_THREADS": "1",
    }  # fmt: skip
    before = set(os.listdir("/dev/shm"))
    since = time.monotonic()
    arguments = (SCRIPT, repr(faults), "run", *words)
    with _starter(folder, arguments, num_hosts, restarts, environ) as start:
        job = _WatchedJob(start, folder / "losses.log", frozen_s, at_restart)
        job.run(num_hosts, since + 60 + restarts * wait_s)
        if job.code == -signal.SIGKILL:  # the system ends the ranks, soon after it
            wait_for(marked(mark))
        seconds = time.monotonic() - since
    leftovers = what_is_left(mark, temporary, before)
    assert not job.is_overdue, job.err
    return Outcome(job.code, job.out, job.err, seconds, leftovers, job.silent_s)


@contextmanager
def _starter(folder, arguments, num_hosts, restarts, environ):
    """Yield what starts the process of a host."""
    if num_hosts == 1:
        with launcher(folder) as begin:
            yield lambda host: begin(*arguments, grace=GRACE_S, restarts=restarts, **environ)
        return
    options = {"--grace": GRACE_S, "--restarts": restarts, "--host-timeout": HOST_TIMEOUT_S}
    with host_launcher(folder) as begin:
        yield lambda host: begin(host, *arguments, options=options, **environ)


@dataclass
class _WatchedJob:
    """The hosts of a job, as a scheduler sees them that starts each command again which failed.

    The launcher is not started again: without it there is no job.
    """

    start: Callable[[int], subprocess.Popen]
    losses: Path
    frozen_s: float
    at_restart: AtRestart | None
    out: str = ""
    err: str = ""
    silent_s: float = 0.0
    is_overdue: bool = False
    _hosts: list[subprocess.Popen] = field(default_factory=list)
    _frozen: dict[int, float] = field(default_factory=dict)
    _due_s: float | None = None
    _told: tuple[int, int] = (0, 0)
    _told_s: float = 0.0

    @property
    def code(self) -> int:
        return self._hosts[0].returncode

    def run(self, num_hosts: int, deadline_s: float) -> None:
        """Start all hosts, and watch them until the launcher has ended."""
        self._hosts = [self.start(host) for host in reversed(range(num_hosts))][::-1]
        self._told_s = time.monotonic()
        first = self._hosts[0]
        os.set_blocking(first.stderr.fileno(), False)
        while first.poll() is None:
            select.select([first.stderr], [], [], 0.05)
            self._read(first)
            now_s = time.monotonic()
            self._judge(now_s)
            if now_s > deadline_s or "still runs, " in self.err:
                # A rank that is the last to run may work: a person ends the job.
                first.kill()
                first.wait()
                self.is_overdue = now_s > deadline_s
        self._read(first)
        self.out = first.stdout.read()
        for other in self._hosts[1:]:
            self._end(other)

    def _read(self, first: subprocess.Popen) -> None:
        if select.select([first.stderr], [], [], 0)[0]:
            self.err += os.read(first.stderr.fileno(), 1 << 20).decode()

    def _judge(self, now_s: float) -> None:
        told = (len(self.err), self.losses.stat().st_size if self.losses.exists() else 0)
        if told != self._told:
            self._told, self._told_s = told, now_s
        self.silent_s = max(self.silent_s, now_s - self._told_s)
        if self.at_restart is not None and self._due_s is None and _restarts(self.err):
            self._due_s = now_s + self.at_restart.delay_s
        if self.at_restart is not None and self._due_s is not None and now_s >= self._due_s:
            self._hosts[self.at_restart.host].send_signal(self.at_restart.signal)
            self.at_restart = None
        for host, process in enumerate(self._hosts):
            if not _is_stopped(process):
                self._frozen.pop(process.pid, None)
            elif now_s >= self._frozen.setdefault(process.pid, now_s) + self.frozen_s:
                process.send_signal(signal.SIGCONT)
            if host and process.poll():
                self.err += "".join([f"host {host}: {line}" for line in process.stderr])
                process.communicate()
                self._hosts[host] = self.start(host)

    def _end(self, other: subprocess.Popen) -> None:
        """Wait for another host; end one that came too late and waits for a launcher."""
        other.send_signal(signal.SIGCONT)
        try:
            other.wait(HOST_TIMEOUT_S + 2 * GRACE_S)
        except subprocess.TimeoutExpired:
            other.terminate()
        self.err += "".join([f"host: {line}" for line in other.communicate()[1].splitlines(True)])


def _restarts(text: str) -> bool:
    return re.search("^actorflow launch: restart [0-9]", text, re.MULTILINE) is not None


def _is_stopped(process: subprocess.Popen) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def what_is_left(mark: str, temporary: Path, shared: set[str]) -> tuple[str, ...]:
    """Return temporary files, mappings and marked processes that a launch left; end the latter.

    `mark` is in the environment of its processes, `shared` what was in /dev/shm before it.
    """
    leftovers = [f"temporary {name}" for name in sorted(os.listdir(temporary))]
    leftovers += [f"shm {name}" for name in abandoned(set(os.listdir("/dev/shm")) - shared)]
    for pid in marked(mark):
        with suppress(OSError):
            leftovers.append("process " + Path(f"/proc/{pid}/cmdline").read_text())
            os.kill(pid, signal.SIGKILL)
    return tuple(leftovers)


def marked(mark: str) -> list[int]:
    """Return the processes that have a text in their environment."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    pids.append(int(entry))
    return pids


def wait_for(pids: list[int]) -> None:
    """Wait until processes have ended, whoever's children they are; at most `ENOUGH_S` each."""
    for pid in pids:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            select.select([fd], [], [], ENOUGH_S)
            os.close(fd)


def abandoned(names: set[str]) -> list[str]:
    """Return which files of /dev/shm no process maps: others belong to tests that run beside this.

    Files are compared by inode: a semaphore is mapped before it has its name.
    """
    inodes = {}
    for name in names:
        with suppress(OSError):  # its owner has just removed it
            inodes[name] = os.stat(f"/dev/shm/{name}").st_ino
    mapped = set()
    for entry in os.listdir("/proc") if inodes else ():
        if entry.isdigit():
            with suppress(OSError):
                for line in Path(f"/proc/{entry}/maps").read_text().splitlines():
                    if "/dev/shm/" in line:
                        mapped.add(int(line.split()[4]))
    return sorted(
        name
        for name, inode in inodes.items()
        if inode not in mapped and os.path.exists(f"/dev/shm/{name}")
    )
