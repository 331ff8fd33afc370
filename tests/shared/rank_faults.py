"""A training on launched ranks, of which one does something bad at a phase, and what is left of it.

`PHASES` and `FAULTS` are the matrix; `outcome` runs one cell of it.
"""

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launching import ENOUGH_S, launcher

STEPS, AT_STEP = 12, 7
WAIT_S = 8.0
"""ACTORFLOW_RANK_SECONDS of ranks that stand still; also what a first step may take at most."""
GRACE_S = 0.5

SCRIPT = """
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
from actorflow.checkpoint import fs
from actorflow.run.training_run import Run

def before(owner, name, here):
    really = getattr(owner, name)
    def stand_in(*given, **named):
        at(here)
        return really(*given, **named)
    setattr(owner, name, stand_in)

before(agreed_plan, "agreed_plan", "compile")
before(Run, "start", "meeting")
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
model, losses = Net(), {}
at("before")
train.fit(
    model, Data({"x": x, "y": x % 10}, batch=16), steps=STEPS, progress=False, on_step=on_step,
    checkpoint=folder, every=3,
)
at("after")
if rank == 0:
    state = {name: array.tobytes().hex() for name, array in sorted(model.state().items())}
    with open("told.json", "w") as file:
        json.dump({"losses": losses, "state": state}, file)
""".replace("AT_STEP", str(AT_STEP)).replace("STEPS", str(STEPS))

PHASES = ("import", "before", "compile", "meeting", "data", "step", "checkpoint", "last", "after")
"""Where it happens: in a script, around and inside `fit`; only rank 0 writes checkpoints."""
FAULTS = ("raise", "hang", "kill", "stop", "exit", "vanish")
"""`wait` besides is none: it goes on once there is a file `go`. `orphan` kills the launcher."""

NO_FAULTS: dict[int, tuple[int, str, str]] = {}


@dataclass(frozen=True)
class Outcome:
    """How a launch ended, and what it left behind."""

    code: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]


def outcome(folder: Path, faults, *words, n=2, wait_s=WAIT_S, restarts=0) -> Outcome:
    """Launch the training, with faults of ranks at phases; whatever it leaves is ended.

    `faults` has for some epochs who, at which phase, does what; `words` may have "zero".
    """
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = f"{folder}/{time.monotonic_ns()}"
    environ = {"TMPDIR": str(temporary), "FAULT_MARK": mark, "ACTORFLOW_RANK_SECONDS": str(wait_s)}
    before = set(os.listdir("/dev/shm"))
    with launcher(folder) as begin:
        since = time.monotonic()
        options = {"n": n, "grace": GRACE_S, "restarts": restarts}
        process = begin(SCRIPT, repr(faults), "run", *words, **options, **environ)
        try:
            out, err = process.communicate(timeout=60 + restarts * wait_s)
        except Exception:
            process.kill()
            out, err = process.communicate()
            err += "\nNEVER ENDED"
        if process.returncode == -signal.SIGKILL:  # the system ends the ranks, soon after it
            wait_for(marked(mark))
        seconds = time.monotonic() - since
    leftovers = what_is_left(mark, temporary, before)
    return Outcome(process.returncode, out, err, seconds, leftovers)


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
