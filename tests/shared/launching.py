"""Scripts that are run as several ranks, by the command itself."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

ENOUGH_S = 100

STATED_LINK = {"ACTORFLOW_LINK": "1.25:30"}
"""Of hosts that are to measure nothing, and to print nothing of it."""

STAGED = """
import numpy as np
import actorflow as af
from actorflow import nn

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 4)

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(x))
        with af.stage(1):
            return self.down(h)

def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
arrays = {"x": x, "y": x[:, :4].argmax(1).astype(np.int32)}
"""
"""Of a script: a small model in two stages, its loss, and its data."""

SHAPES = """
class Shapes:
    # The batches of a source, of which every other one has half of its rows.
    def __init__(self, source):
        self.source, self.count = source, 0

    def spec(self):
        return self.source.spec()

    def specs(self):
        types = self.spec().items()
        halves = {n: af.TensorType(t.dtype, (t.shape[0] // 2, *t.shape[1:])) for n, t in types}
        return self.spec(), halves

    def __next__(self):
        batch = next(self.source)
        self.count += 1
        return {n: a[: len(a) // (1 + self.count % 2)] for n, a in batch.items()}

    def state(self):
        return {"source": self.source.state(), "count": self.count}

    def restore(self, state):
        self.source.restore(state["source"])
        self.count = state["count"]

    def fingerprint(self):
        return "halves of " + self.source.fingerprint()
"""
"""Of a script: a source of batches of two shapes, for which two plans take turns."""


@contextmanager
def launcher(folder):
    """Yield a function that starts `actorflow launch` on a script; all are killed at the end."""
    started = []

    def start(script, *arguments, n=2, grace=0.3, restarts=0, is_group=False, **environ):
        file = folder / "script.py"
        file.write_text(script)
        command = [sys.executable, "-m", "actorflow", "launch", "-n", str(n), "--grace", str(grace)]
        process = subprocess.Popen(
            [*command, "--restarts", str(restarts), str(file), *arguments],
            env={**os.environ, "TELLS": str(folder / "tells"), **environ},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
            start_new_session=is_group,
        )  # fmt: skip
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


def free_port():
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def host_launcher(folder):
    """Yield a function that starts `actorflow launch` as one of several hosts, all on this machine.

    All are killed at the end. The script and its key are in `folder`, the port is one for all.
    """
    started, port, key = [], free_port(), folder / "key"
    key.touch(mode=0o600)
    key.write_text("5a" * 32 + "\n")

    def start(index, script, *arguments, n=2, options=(), inside=(), name="script.py", **environ):
        file = folder / name
        file.write_text(script)
        given = {
            "--ranks": n, "--grace": 5, "--hosts": 2, "--host-index": index, "--key-file": key,
            "--coordinator": f"127.0.0.1:{port}", **dict(options),
        }  # fmt: skip
        words = [str(word) for pair in given.items() for word in pair]
        command = [sys.executable, "-m", "actorflow", "launch", *words, str(file), *arguments]
        process = subprocess.Popen(
            [*inside, *command],
            env={**os.environ, **STATED_LINK, "TELLS": str(folder / "tells"), **environ},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip
        started.append(process)
        return process

    start.port = port
    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


def insist(process, number):
    """Send a signal again and again until a process ends, as a person does who presses a key."""
    while True:
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return


def end_of(process):
    """Wait for a launcher; return its exit status, stdout and stderr."""
    out, err = process.communicate(timeout=ENOUGH_S)
    return process.returncode, out, err
