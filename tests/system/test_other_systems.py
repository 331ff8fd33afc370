"""What runs where `sys.platform` is another one, and what is Linux's alone is not there."""

import os
import subprocess
import sys

HEAD = """
import builtins, io, os, signal, select, sys, sysconfig
import msgpack, multiprocessing, numpy as np
sysconfig.get_config_vars()  # of the system that Python was built for
for name in ("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity",
             "posix_fallocate", "posix_fadvise", "eventfd", "copy_file_range", "fdatasync"):
    os.__dict__.pop(name, None)
select.__dict__.pop("epoll", None)
signal.__dict__.pop("pidfd_send_signal", None)
opened = io.open

def no_proc(file, *arguments, **named):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return opened(file, *arguments, **named)

io.open = builtins.open = no_proc
sys.platform = sys.argv.pop(1)
import actorflow as af
"""

TRAINS = """
from actorflow import nn
from actorflow.cli.main import main

@af.job(optimizer=af.optim.AdamW(0.01))
def train(model, batch):
    return af.square(model(batch.x)).mean()

def data():
    return af.data.ArraySource({"x": np.ones((16, 4), np.float32)}, batch=4)

folder = sys.argv[1]
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
first = train.fit(model, data(), steps=20, checkpoint=folder, every=10, progress=False)
second = train.fit(model, data(), steps=30, checkpoint=folder, progress=False)
assert (second.first_step, second.last_step) == (20, 30)
assert second.mean_loss < first.mean_loss
train.compile(model, data()).save(folder + "/plan")
assert main(["simulate", folder + "/plan", "--no-calibrate", "--steps", "3"]) == 0
print("all of it")
"""


def run_on(system, text, *arguments):
    environ = os.environ | {"ACTORFLOW_NATIVE": "0", "ACTORFLOW_CACHE": "off"}
    return subprocess.run(
        [sys.executable, "-c", HEAD + text, system, *arguments],
        capture_output=True, text=True, check=False, env=environ,
    )  # fmt: skip


def test_windows_is_told_in_a_line_where_it_runs():
    ended = run_on("win32", "")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ImportError: actorflow runs on Linux")
    assert "wsl --install" in last


def test_another_posix_is_told_what_runs_and_trains_plans_and_simulates(tmp_path):
    ended = run_on("darwin", TRAINS, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("all of it\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("actorflow is tested on Linux alone; on darwin one process plans")


def test_linux_is_told_nothing():
    ended = run_on("linux", "")
    assert (ended.returncode, ended.stderr) == (0, "")
