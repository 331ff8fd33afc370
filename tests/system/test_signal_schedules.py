"""Signals to a job of ranks at drawn moments: the last finished step is saved, nothing is left.

Here some of them, always the same; ACTORFLOW_SIGNAL_SCHEDULES=0:300 takes other seeds, and prints
how long each took from its signal to its end.
"""

import os
import select
import signal
import time
from dataclasses import dataclass
from random import Random

import pytest
from launching import ENOUGH_S, STAGED, launcher
from rank_faults import what_is_left

from actorflow.checkpoint.manager import CheckpointManager

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]

GIVEN = [int(n) for n in os.environ.get("ACTORFLOW_SIGNAL_SCHEDULES", "").split(":") if n]
SEEDS = range(*GIVEN) if GIVEN else range(20)

AT_STEP = 5

SCRIPT = f"""
import os, sys, time
moment = sys.argv[1]

def at(word):
    if word == moment:
        with open(os.environ["TELLS"], "w") as file:
            print(os.getpid(), file=file)

at("start")
{STAGED}
from actorflow.checkpoint import fs

class Seen(af.data.ArraySource):
    def next_rows_into(self, *rows, **more):
        at("evaluation")
        return super().next_rows_into(*rows, **more)

class Blocking(af.data.ArraySource):
    count = 0

    def next_rows_into(self, *rows, **more):
        self.count += 1
        if self.count == {AT_STEP} + 1 and moment == "source" and os.environ["RANK"] == "1":
            at("source")
            time.sleep(10_000)
        return super().next_rows_into(*rows, **more)

rename = fs.Fs.rename

def renamed(*given):
    at("save")
    return rename(*given)

fs.Fs.rename = renamed
mesh, zero = af.Mesh(**eval(sys.argv[2])), "zero" in sys.argv
train = af.job(loss, optimizer=af.optim.SGD(0.1), mesh=mesh, zero=zero)
score = af.job(lambda m, b: dict(loss=loss(m, b)), train=False, mesh=mesh)
watched = af.Evaluation(score, Seen(arrays, batch=12), every=3, batches=2)

def on_step(step, metrics):
    if step == {AT_STEP}:
        at("step")

at("before")
train.fit(Net(), Blocking(arrays, batch=12, seed=3), steps=1_000_000, checkpoint="run",
          every=4 if moment == "save" else 100_000, progress=False, on_step=on_step,
          evaluation=watched if moment == "evaluation" else None)
"""

LEAST = {"start": 0, "before": 0, "step": AT_STEP, "save": 4, "evaluation": 3, "source": AT_STEP}
"""Steps that are finished at each moment."""


@dataclass(frozen=True)
class Schedule:
    """What is trained, when signals come, which ones, to whom, and how often."""

    mesh: str
    moment: str
    name: str
    to: str
    times: int

    @staticmethod
    def drawn(seed):
        rng = Random(f"schedule {seed}")  # small numbers draw much alike
        return Schedule(
            rng.choice(["dict(data=2)", "dict(stage=2)", "dict(data=2) zero"]),
            rng.choice([*LEAST]),
            rng.choice(["SIGTERM", "SIGINT", "SIGHUP"]),
            rng.choice(["launcher", "rank", "group", "all"]),
            rng.choice([1, 1, 2]),
        )


def sent(schedule, process, rank):
    """Send the signals of a schedule: to the launcher, the rank that told, both, or their group."""
    number = signal.Signals[schedule.name]
    for _ in range(schedule.times):
        if schedule.to in ("launcher", "all"):
            process.send_signal(number)
        if schedule.to in ("rank", "all"):
            os.kill(rank, number)
        if schedule.to == "group":
            os.killpg(process.pid, number)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_is_told_to_stop_ends_at_its_last_step(tmp_path, seed):
    schedule = Schedule.drawn(seed)
    os.mkfifo(tmp_path / "tells")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {"TMPDIR": str(temporary), "MARK": str(tmp_path), "ACTORFLOW_RANK_SECONDS": "90"}
    shared = set(os.listdir("/dev/shm"))
    with launcher(tmp_path) as begin, open(os.open(tmp_path / "tells", os.O_RDWR)) as tells:
        words = (schedule.moment, *schedule.mesh.split())
        process = begin(SCRIPT, *words, grace=5, is_group=schedule.to == "group", **environ)
        while not select.select([tells], [], [], 1)[0]:
            assert process.poll() is None, process.communicate()[1]
        rank = int(tells.readline())
        since = time.monotonic()
        sent(schedule, process, rank)
        _, err = process.communicate(timeout=ENOUGH_S)
    if GIVEN:
        print(f"{seed}: {time.monotonic() - since:.2f} s, {schedule}")
    assert process.returncode == 128 + signal.Signals[schedule.name], f"{schedule}\n{err}"
    if least := LEAST[schedule.moment]:
        latest = CheckpointManager(tmp_path / "run").latest()
        assert latest.manifest.step >= least, f"{schedule}\n{err}"
    assert what_is_left(environ["MARK"], temporary, shared) == (), schedule
