"""Programs that are changed between two calls, and what the calls do about it."""

import importlib.util
import logging
import sys
import textwrap

import numpy as np
import pytest

import actorflow as af
import actorflow.trace.traces

X = {"x": np.array([1.0, 2.0], np.float32)}

HEAD = """
import dataclasses, functools, itertools, random, threading
import numpy as np
import actorflow as af
from actorflow import nn

ONES, ZEROS = (("kind", "ones"),), (("kind", "zeros"),)

def ones(*shape):
    return nn.Parameter(shape or (2,), ONES)
"""


RUN = """
@af.job(train=False)
def run(model, batch):
    return model(batch.x)

model = Model()
"""


def text_of_model(returns, *, init="", above="", body="", bases="nn.Module", below="", text=""):
    """Return the text of a `Model` with a parameter `w`: what it returns, and what else there is.

    `init` follows in its `__init__`, `body` in its class; or the whole text is given.
    """
    return text or "\n".join([
        above, f"class Model({bases}):", "    def __init__(self):", "        self.w = ones()",
        textwrap.indent(init, " " * 8), textwrap.indent(body, " " * 4),
        "    def __call__(self, x):", f"        return {returns}", below, "",
    ])  # fmt: skip


@pytest.fixture
def model_text():
    return text_of_model


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that makes a module of source texts, as an import would.

    Without a job of its own it gets one that runs a `Model`: `run`, and a `model`.
    """

    def make(*texts):
        texts = [*texts, RUN] if "@af.job" not in "".join(texts) else texts
        path = tmp_path / "demo.py"
        path.write_text("".join([HEAD, *map(textwrap.dedent, texts)]))
        spec = importlib.util.spec_from_file_location("demo", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "demo", module)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture
def counted(monkeypatch):
    """Return a function that makes a list grow with each call of a function of a module."""

    def count(module, name):
        calls, real = [], getattr(module, name)

        def counting(*arguments):
            calls.append(1)
            return real(*arguments)

        monkeypatch.setattr(module, name, counting)
        return calls

    return count


@pytest.fixture
def traces(counted):
    """A list that grows with each trace."""
    return counted(sys.modules["actorflow.jobs.job"], "trace_job")  # af.job is a function


@pytest.fixture
def readings(counted):
    """A list that grows each time all that a trace may read is read."""
    return counted(actorflow.trace.traces, "read_job")


@pytest.fixture
def said(caplog):
    """Return a function that returns the lines of the log that a user sees."""

    def lines():
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    return lines


@pytest.fixture
def outputs():
    """Return a function that runs one step of a job and closes its plan."""

    def run(job, model):
        try:
            return job.step(model, X)["output"].tolist()
        finally:
            job.close(model)

    return run


@pytest.fixture
def change():
    """Return a function that runs a text inside a module."""

    def run(module, text):
        exec(compile(textwrap.dedent(text), "change.py", "exec"), vars(module))

    return run


@pytest.fixture
def changed(program, change, traces, readings, said, outputs):
    """Return a function that changes a program and holds the next step against a fresh job."""

    def check(returns, text, words, more=None):
        module = program(text_of_model(returns, **more or {}))
        job, model = module.run, module.model
        before = job.step(model, X)["output"].tolist()
        num_readings = len(readings)
        assert job.step(model, X)["output"].tolist() == before
        assert (len(traces), len(readings), said()) == (1, num_readings, [])
        try:
            change(module, text)
            got = job.step(model, X)["output"].tolist()
            (line,) = said()
            assert f"job 'run' recompiled because {words}" in line
            assert got == outputs(af.Job(job.function, job.options), model) != before
            counts = len(traces), len(readings)
            assert job.step(model, X)["output"].tolist() == got
            assert (len(traces), len(readings)) == counts
        finally:
            job.close(model)
            if hasattr(module, "undo"):
                module.undo()

    return check
