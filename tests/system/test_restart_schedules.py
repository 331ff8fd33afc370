"""Launched ranks that fail at drawn phases and are started again: every bit is as undisturbed.

Here a few schedules, always the same, and more of them at night; ACTORFLOW_RESTART_SCHEDULES=0:300
takes other seeds, and prints how long each took.
"""

import functools
import json
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from random import Random

import pytest
from rank_faults import FAULTS, NO_FAULTS, PHASES, STEPS, AtRestart, outcome

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks of one host meet in its memory"),
]

GIVEN = [int(n) for n in os.environ.get("ACTORFLOW_RESTART_SCHEDULES", "").split(":") if n]
SEEDS = range(*GIVEN) if GIVEN else range(16)
RESTARTS = 5
WAIT_S = 10.0
"""ACTORFLOW_RANK_SECONDS: how long ranks wait for one that hangs or is stopped."""


CELLS = {
    "kill in a step, error in the next handshake": {
        1: (1, "step", "kill"), 2: (0, "meeting", "raise"),
    },
    "kill in a checkpoint": {1: (0, "checkpoint", "kill")},
    "kill before the first message, twice": {1: (1, "import", "kill"), 2: (1, "import", "kill")},
    "hang between two checkpoints": {1: (1, "voted", "hang")},
}  # fmt: skip
"""By epoch: who, at which phase, does what. Later epochs are undisturbed."""

UNTOLD = {("step", "raise"), ("step", "exit")}


@dataclass(frozen=True)
class Schedule:
    """The options of a job, and the faults of its first epochs.

    `frozen_s` is how long a launcher or an agent is stopped, `at_restart` what happens to one while
    the ranks are started again.
    """

    words: tuple[str, ...]
    faults: dict[int, tuple[int, str, str]]
    num_hosts: int = 1
    frozen_s: float = 1.0
    at_restart: AtRestart | None = None

    @staticmethod
    def drawn(seed):
        rng = Random(f"schedule {seed}")  # small numbers draw much alike
        num_hosts = rng.choice([1, 1, 2])
        # Another fault in each epoch, but for kills: the same one twice in a row ends the job.
        kinds = ["kill", "kill", *FAULTS, *["orphan", "freeze"] * num_hosts]
        faults = {}
        for epoch, fault in enumerate(rng.sample(kinds, rng.choice([1, 1, 1, 2, 2, 3])), 1):
            phase = rng.choice(PHASES)
            # Rank 0 alone gives a checkpoint its name.
            who = 0 if phase == "checkpoint" else rng.randrange(2)
            faults[epoch] = (who, phase, fault)
        at_restart = None
        if rng.random() < 0.4:
            number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
            delay_s = rng.choice([0.0, rng.random()])
            at_restart = AtRestart(rng.randrange(num_hosts), number, delay_s)
        words = rng.choice([(), ("zero",)])
        # 5 s are more than the time after which a host is lost.
        return Schedule(words, faults, num_hosts, rng.choice([1.0, 5.0]), at_restart)

    def is_cut(self):
        """Whether a launcher or an agent is killed."""
        is_killed = self.at_restart is not None and self.at_restart.signal == signal.SIGKILL
        return is_killed or "orphan" in [fault for _, _, fault in self.faults.values()]


def told(folder):
    """Return the final state in rank 0's words, and its losses, of which every repeat agrees."""
    losses = {}
    for line in (folder / "losses.log").read_text().splitlines():
        step, loss = line.split()
        assert losses.setdefault(int(step), loss) == loss, f"step {step} differs"
    return json.loads((folder / "told.json").read_text())["state"], losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that returns what is told of a training in which nothing happens."""

    @functools.cache
    def of(words):
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = outcome(folder, NO_FAULTS, *words)
        assert ended.code == 0, ended.err
        state, losses = told(folder)
        assert sorted(losses) == [*range(1, STEPS + 1)]
        return state, losses

    return of


def ends_as_undisturbed(folder, schedule, undisturbed):
    """Run a schedule to its end; return how it ended last, and the longest silence."""
    ended = outcome(
        folder, schedule.faults, *schedule.words, wait_s=WAIT_S, restarts=RESTARTS,
        num_hosts=schedule.num_hosts, frozen_s=schedule.frozen_s, at_restart=schedule.at_restart,
    )  # fmt: skip
    silent_s = ended.silent_s
    # A rank that is killed with its parent while it compiles leaves the compiler's folder.
    is_cut = schedule.is_cut()
    left = [one for one in ended.left if not (is_cut and one.startswith("temporary actorflow-"))]
    assert left == [], f"{schedule}\n{ended.err}"
    if ended.code == -signal.SIGKILL:  # of the launcher, which a person starts again
        for folder_left in (folder / "temporary").iterdir():
            shutil.rmtree(folder_left)
        options = {"wait_s": WAIT_S, "restarts": RESTARTS, "num_hosts": schedule.num_hosts}
        ended = outcome(folder, NO_FAULTS, *schedule.words, **options)
        assert ended.left == (), f"{schedule}\n{ended.err}"
        silent_s = max(silent_s, ended.silent_s)
    assert ended.code == 0, f"{schedule}\n{ended.err}"
    state, losses = told(folder)
    undisturbed_state, undisturbed_losses = undisturbed(schedule.words)
    assert state == undisturbed_state, schedule
    assert losses.items() <= undisturbed_losses.items(), schedule
    # A run that an on_step ends finishes steps that it is not called for any more.
    ends_in_on_step = [at for at in schedule.faults.values() if at[1:] in UNTOLD]
    assert ends_in_on_step or losses == undisturbed_losses, schedule
    return ended, silent_s


@pytest.mark.parametrize("cell", CELLS)
def test_a_job_that_is_started_again_computes_the_same_bits(tmp_path, undisturbed, cell):
    schedule = Schedule((), CELLS[cell])
    ended, _ = ends_as_undisturbed(tmp_path, schedule, undisturbed)
    lines = [line for line in ended.err.splitlines() if line.startswith("actorflow launch:")]
    restarts = [line for line in lines if re.match("actorflow launch: restart [0-9] of 5", line)]
    assert len(restarts) == len(schedule.faults)
    failures = [line for line in lines if re.match("actorflow launch: rank [01] ", line)]
    assert len(failures) == len(schedule.faults), "each is told once, and no consequence of it"
    assert lines[-1].endswith(
        f"the job has ended; its ranks were started {1 + len(restarts)} times"
    )


@pytest.mark.slow
def test_a_launcher_that_is_stopped_amid_a_save_costs_its_time_alone(tmp_path, undisturbed):
    faults = {1: (1, "voted", "freeze")}
    schedule = Schedule((), faults, frozen_s=WAIT_S + 1)
    ended, _ = ends_as_undisturbed(tmp_path, schedule, undisturbed)
    assert "restart" not in ended.err


def seeded(seed):
    """Return a seed as a parameter: of the nightly tier, and with MPI where it draws two hosts."""
    marks = [] if GIVEN else [pytest.mark.slow]
    if Schedule.drawn(seed).num_hosts > 1:
        marks.append(pytest.mark.extra("mpi"))
    return pytest.param(seed, marks=marks)


@pytest.mark.parametrize("seed", [seeded(seed) for seed in SEEDS])
def test_drawn_faults_change_no_bit(tmp_path, undisturbed, seed):
    schedule = Schedule.drawn(seed)
    since = time.monotonic()
    _, silent_s = ends_as_undisturbed(tmp_path, schedule, undisturbed)
    if GIVEN:
        took_s = time.monotonic() - since
        print(f"{seed}: {took_s:.1f} s, silent {silent_s:.1f} s at most, {schedule}", flush=True)


def test_a_fault_of_the_script_is_started_twice_and_no_third_time(tmp_path):
    faults = dict.fromkeys(range(1, 9), (1, "before", "raise"))
    ended = outcome(tmp_path, faults, restarts=RESTARTS)
    assert (ended.code, ended.left) == (1, ())
    assert ended.err.count("RuntimeError: boom in before") == 2
    assert ended.err.splitlines()[-1] == (
        "actorflow launch: no restart: the same fault ended two starts in a row, so it is one of"
        " the script or its data; the ranks were started 2 times"
    )
