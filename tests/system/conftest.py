import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.compile.targets import HostTarget
from compiler.contract.placement import AxisLinks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_plan_cache(tmp_path, monkeypatch, built_kernels):
    """Every test has plans of its own; the native kernels in its cache are those of all tests."""
    cache = tmp_path / "plan-cache"
    cache.mkdir()
    (cache / "native").symlink_to(built_kernels, target_is_directory=True)
    monkeypatch.setenv("ACTORFLOW_CACHE", str(cache))
    monkeypatch.setenv("ACTORFLOW_VERIFY", "1")


@pytest.fixture
def numpys_kernels(monkeypatch):
    """Run numpy's kernels in every mode, so that every op of the graph is a launch of its own."""
    monkeypatch.setenv("ACTORFLOW_NATIVE", "0")


class MLP(nn.Module):
    def __init__(self, width=16, classes=5, dropout=0.0):
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, classes)
        self.drop = nn.Dropout(dropout)

    def __call__(self, x):
        return self.down(self.drop(af.relu(self.up(x))))


@pytest.fixture
def mlp():
    return MLP


@pytest.fixture
def classification():
    """Rows of 8 floats with a learnable class: the argmax of a fixed projection."""

    def make(batch=16, samples=320, seed=0):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(samples, 8)).astype(np.float32)
        y = (x @ rng.normal(size=(8, 5))).argmax(1).astype(np.int32)
        return af.data.ArraySource({"x": x, "y": y}, batch=batch, seed=seed)

    return make


@pytest.fixture
def classify():
    """A fresh training job."""

    def make(**options):
        settings = {"optimizer": af.optim.AdamW(1e-2), **options}

        @af.job(**settings)
        def train(model, batch):
            return af.cross_entropy(model(batch.x), batch.y)

        return train

    return make


@pytest.fixture
def run_python(tmp_path):
    """Run a program in a process of its own, in `tmp_path`; return the finished process."""

    def run(code, *arguments, check=True, **env):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(code))
        environment = {**os.environ, **env}
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run


class Program:
    """A program in a process of its own, of which the test reads lines and to which it sends."""

    def __init__(self, script, arguments, folder, env, options):
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=folder,
            env={**os.environ, **env},
            **{
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )

    def until(self, word):
        """Read lines up to one with this word in it, and return that line."""
        for line in self.process.stdout:
            if word in line:
                return line.strip()
        raise AssertionError(f"no line says {word!r}\n{self.process.stderr.read()}")

    def finish(self):
        """Wait for its end; return (exit code, the rest of its output, its errors)."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


PATIENCE = 60
"""Seconds after which a test gives up on a process; reached only when it fails."""


@pytest.fixture
def start_python(tmp_path):
    """Start a program in a process of its own, in `tmp_path`; it is killed with the test."""
    started = []

    def start(code, *arguments, env=None, **options):
        script = tmp_path / f"program{len(started)}.py"
        script.write_text(textwrap.dedent(code))
        program = Program(script, arguments, tmp_path, env or {}, options)
        started.append(program.process)
        return program

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was still to be sent
                    pipe.close()


@pytest.fixture(params=["native", "numpy", "cuda"])
def options(request, monkeypatch):
    """Options of a job on native kernels, on numpy's, and on an emulated GPU."""
    if request.param == "native":
        request.getfixturevalue("native")
    elif request.param == "numpy":
        monkeypatch.setenv("ACTORFLOW_NATIVE", "0")
    else:
        request.getfixturevalue("native_toolchain")
        monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
        return {"device": "cuda", "gpu": "h200"}
    return {"device": "host"}


@pytest.fixture
def computed():
    """A function (function of a batch, options of a job, **batch) -> arrays by name."""

    def run(function, options, **batch):
        job = af.job(lambda model, b: function(b), train=False, **options)
        return {name: np.asarray(y) for name, y in job.step(nn.Module(), batch).items()}

    return run


@pytest.fixture
def many_chains(monkeypatch):
    """Plan as if threads met at once, so that small models are cut into many chains."""
    monkeypatch.setattr(HostTarget, "message_ns", 100.0)


@pytest.fixture
def many_buckets(monkeypatch):
    """Plan as if messages between ranks took no time, so that small gradients are many buckets."""
    monkeypatch.setattr(AxisLinks, "least_bytes", lambda link, parts: 0.0)
