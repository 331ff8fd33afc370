"""Killed at any moment, a run continues bit-exact."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).resolve().parents[2]

JOB = textwrap.dedent(
    """
    import sys
    import numpy as np
    import actorflow as af
    from actorflow import nn

    class Model(nn.Module):
        def __init__(self):
            self.emb, self.pos = nn.Embedding(32, 16), nn.Embedding(8, 16)
            self.block = nn.TransformerBlock(16, heads=2, causal=True, dropout=0.2)
            self.head = nn.Linear(16, 32)

        def __call__(self, x):
            return self.head(self.block(self.emb(x) + self.pos.weight))

    @af.job(optimizer=af.optim.AdamW(af.optim.cosine(3e-3, steps=400)), seed=11)
    def train(model, batch):
        loss = af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())
        return {"loss": loss, "ids": batch.x.to("float64").sum(), "first": batch.y[0, 0]}

    run, steps = sys.argv[1], int(sys.argv[2])
    every = sys.argv[3] if len(sys.argv) > 3 else "3"
    log = open(run + ".log", "a", buffering=1)

    def write(step, metrics):
        log.write(f"{step} {metrics['loss'].hex()} {metrics['ids']} {metrics['first']}\\n")

    tokens = np.random.default_rng(5).integers(0, 32, 20_000)
    data = af.data.Tokens(tokens, seq=8, batch=4, seed=2)
    result = train.fit(Model(), data, steps=steps, checkpoint=run, every=every, progress=False,
                       on_step=write)
    print("DONE", result.first_step, result.last_step, flush=True)
    """
)


@pytest.fixture
def start(tmp_path):
    """Start the job on a run directory; the caller waits for it or kills it."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}

    def begin(run, steps, *more):
        return subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / run), str(steps), *more],
            env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return begin


def finish(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def hashes(directory):
    """Return step and content hashes of the newest checkpoint."""
    newest = max(directory.glob("step-*"))
    manifest = json.loads((newest / "manifest.json").read_text().splitlines()[0])
    return manifest["step"], sorted(
        (p["tensor"], p["offset"], p["xxh3_128"]) for p in manifest["pieces"]
    )


def steps_of(log):
    """Return {step: row}; a row that a kill cut in two is left out, every repeat must agree."""
    rows = {}
    for line in log.read_text().split("\n"):
        parts = line.split()
        if len(parts) != 4:
            continue
        step = int(parts[0])
        assert rows.setdefault(step, parts[1:]) == parts[1:], f"step {step} differs"
    return rows


@pytest.fixture
def num_kills(request):
    """Fifty on the kernels that users have, and a few on numpy's: the way to the disk is one."""
    is_native = request.config.getoption("--native")
    return tiers.size(50, merge=8) if is_native else tiers.size(12, merge=4)


def kill_somewhere(process, run, log, rng, most_steps):
    """Kill it inside a save, after some more steps, or while it starts; return the newest step."""
    begun = log.read_text().count("\n") if log.exists() else 0
    aim = rng.choice(["save", "steps", "steps", "start"])
    more_steps, start_s = rng.randint(1, most_steps), time.monotonic() + rng.random() * 0.5
    while process.poll() is None:
        if aim == "save" and any(run.glob(".tmp-*")):
            break
        if aim == "steps" and log.exists() and log.read_text().count("\n") >= begun + more_steps:
            break
        if aim == "start" and time.monotonic() > start_s:
            break
        time.sleep(0.0005)  # watches another process, whose progress is all that matters here
    acknowledged = newest_step(run)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return acknowledged


def newest_step(run):
    return max([0, *(int(p.name[5:]) for p in run.glob("step-*"))])


def test_kills_at_any_moment_change_nothing(start, tmp_path, num_kills):
    steps = 2000
    finish(start("straight", steps, "20"))
    run, log, rng = tmp_path / "killed", tmp_path / "killed.log", random.Random(7)
    for _ in range(num_kills):
        process = start("killed", steps, "3")
        acknowledged = kill_somewhere(process, run, log, rng, 600 // num_kills)
        assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
        assert newest_step(run) >= acknowledged
    assert 0 < newest_step(run) < steps
    out = finish(start("killed", steps, "20"))
    assert out.split()[2] == str(steps)
    assert hashes(run) == hashes(tmp_path / "straight")
    assert steps_of(log) == steps_of(tmp_path / "straight.log")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_checkpoints_it_and_sets_the_exit_code(
    start, tmp_path, signum, code
):
    finish(start("straight", 300))
    process = start("stopped", 300, "1h")
    log = tmp_path / "stopped.log"
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 20):
        time.sleep(0.005)  # waits for progress of another process, bounded by the test's timeout
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == code
    step, _ = hashes(tmp_path / "stopped")
    assert step == max(steps_of(log)) < 300
    finish(start("stopped", 300, "1h"))
    assert hashes(tmp_path / "stopped") == hashes(tmp_path / "straight")


def test_a_finished_run_restores_reports_and_returns(start, tmp_path):
    finish(start("run", 10))
    assert finish(start("run", 10)).split() == ["DONE", "10", "10"]
    assert len(steps_of(tmp_path / "run.log")) == 10


def test_more_steps_continue_a_finished_run(start, tmp_path):
    finish(start("whole", 20))
    finish(start("parts", 8))
    finish(start("parts", 20))
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")
