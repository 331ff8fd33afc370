"""What cannot be compared is said once, with the line of the user."""

import gc
import inspect
from contextlib import contextmanager

import numpy as np
import pytest

import actorflow as af

X = {"x": np.array([1.0, 2.0], np.float32)}

# fmt: off
UNSURE = {
    "numpy's global generator": (
        "x * self.w * float(np.random.rand())",
        "draws random numbers from numpy's global generator"),
    "python's global generator": (
        "x * self.w * random.random()", "draws random numbers from Python's global generator"),
    "a generator of the user's": (
        "x * self.w * rng.random()", "draws random numbers from global 'rng' of demo",
        {"above": "rng = np.random.default_rng(0)"}),
    "an iterator": (
        "x * self.w * next(gen)",
        "reads global 'gen' of demo (generator), which cannot be compared",
        {"above": "gen = (float(i + 1) for i in itertools.count())"}),
    "a method in C with hidden state": (
        "x * self.w * float(self.count())",
        "reads attribute 'count.__self__' (count), which cannot be compared",
        {"init": "self.count = itertools.count(1).__next__"}),
    "values of one thread": (
        "x * self.w * local.by",
        "reads global 'local' of demo (_local), which cannot be compared",
        {"above": "local = threading.local()\nlocal.by = 2.0"}),
    "an open file": (
        "x * self.w * (len(file.readline()) + 1.0)",
        "reads global 'file' of demo (TextIOWrapper), which cannot be compared",
        {"above": "file = open(__file__)"}),
    "a function that is fetched by a text": (
        "globals()['hel' + 'per'](x * self.w)", "calls helper (",
        {"above": "def helper(x):\n    return x * 2.0"}),
    "a count that the trace itself changes": (
        "", "changes what it reads while it is traced (calls changed from 0 to 1)",
        {"text": "class Model(nn.Module):\n    def __init__(self):\n"
        "        self.w, self.calls = ones(), 0\n    def __call__(self, x):\n"
        "        self.calls += 1\n        return x * self.w * float(self.calls)"}),
}
# fmt: on


_TUPLE = """import collections, typing
Pair = collections.namedtuple('Pair', 'a b', defaults=(2.0,))
"""
_CLASS = """import dataclasses
@dataclasses.dataclass({})
class Size:
    n: float
    m: float = 1.0
"""

# fmt: off
SURE = {
    "a gradient": ("af.grad((x * self.w).sum(), self.w)", ""),
    "a named tuple": ("x * self.w * Pair(1.0).b", _TUPLE),
    "a changed named tuple": ("x * self.w * Pair(1.0)._replace(b=3.0).b", _TUPLE),
    "a named tuple of the job's own": (
        "x * self.w * collections.namedtuple('T', 'u v')(1.0, 2.0).v", _TUPLE),
    "a typed tuple of the job's own": (
        "x * self.w * typing.NamedTuple('T', [('u', float)])(3.0).u", _TUPLE),
    "a frozen dataclass": (
        "x * self.w * {Size(1.0): 2.0}[Size(1.0)]", _CLASS.format("frozen=True")),
    "an ordered dataclass": (
        "x * self.w * max(Size(1.0), Size(2.0)).n", _CLASS.format("order=True")),
    "a dataclass with slots": (
        "x * self.w * dataclasses.replace(Size(1.0), m=2.0).m", _CLASS.format("slots=True")),
}
# fmt: on


@pytest.mark.parametrize("name", SURE)
def test_what_a_library_generates_for_a_class_is_no_reason_to_warn(program, model_text, said, name):
    returns, above = SURE[name]
    module = program(model_text(returns, above=above))
    module.run.step(module.model, X)
    assert said() == []


@pytest.mark.parametrize("name", UNSURE)
def test_what_cannot_be_compared_is_said_once_with_the_users_line(
    program, model_text, traces, said, name
):
    returns, words, *more = UNSURE[name]
    module = program(model_text(returns, **dict(*more)))
    job, model = module.run, module.model
    first = job.step(model, X)["output"].tolist()
    num_traces = len(traces)
    assert [job.step(model, X)["output"].tolist() for _ in range(3)] == [first] * 3
    assert len(traces) == num_traces
    job.close(model)
    (line,) = said()
    assert f"job 'run' {words}" in line
    lines = inspect.getsource(module).splitlines()
    number = 1 + lines.index("@af.job(train=False)")
    assert f"demo.py:{number}: " in line
    spec = {"x": af.TensorType(af.DType.FLOAT32, (2,))}
    for _ in range(6):
        job.compile(model, spec)  # traces again, and never meets max_plans for it
    assert len(traces) > num_traces
    assert sum(words in w for w in said() if "recompiled" not in w) == 1
    if hasattr(module, "file"):
        module.file.close()


def test_a_step_runs_the_graph_that_a_line_says_was_traced_again(program, model_text, said):
    fetched = model_text("x * self.w * globals()['dr' + 'aw']()")
    module = program("made = [2.0]\n", "def draw():\n    return made[-1]\n", fetched)
    job, model = module.run, module.model
    model.notes = [0]
    assert job.step(model, X)["output"].tolist() == [2.0, 4.0]
    module.made.append(3.0)
    model.notes = [0]  # another object that says the same
    assert job.step(model, X)["output"].tolist() == [3.0, 6.0]
    job.close(model)
    assert sum("recompiled because" in line for line in said()) == 1


def test_what_is_never_named_by_the_code_is_not_said(program, model_text, outputs, said):
    unread = "self.lock, self.notes = threading.Lock(), iter([1])"
    module = program(model_text("x * self.w", init=unread))
    outputs(module.run, module.model)
    assert said() == []


def test_nothing_is_collected_while_calls_are_watched(program, model_text, monkeypatch):
    """A generator that the collector closes runs for that, and would count as called."""
    states = []

    @contextmanager
    def watched():
        states.append(gc.isenabled())
        yield {}
        states.append(gc.isenabled())

    monkeypatch.setattr("actorflow.trace.traces.record_calls", watched)
    module = program(model_text("x * self.w"))
    module.run.step(module.model, X)
    module.run.close(module.model)
    assert set(states) == {False}
    assert gc.isenabled()


def test_a_change_at_every_step_that_changes_nothing_is_named(program, model_text, said):
    module = program(model_text("x * self.w", init="self.seen = 0"))
    for step in range(6):
        module.model.seen = step
        module.run.step(module.model, X)
    module.run.close(module.model)
    (line,) = said()
    assert "traced repeatedly because seen changed from" in line
