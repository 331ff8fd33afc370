"""What cannot be compared is said once, with the line of the user."""

import inspect

import numpy as np
import pytest

import actorflow as af

X = {"x": np.array([1.0, 2.0], np.float32)}

PLAIN = """
class Model(nn.Module):
    def __init__(self):
        self.w = ones()
    def __call__(self, x):
        return x * self.w * {factor}
"""

UNSURE = {
    "numpy's global generator": (
        PLAIN.format(factor="float(np.random.rand())"),
        "draws random numbers from numpy's global generator",
    ),
    "python's global generator": (
        PLAIN.format(factor="random.random()"),
        "draws random numbers from Python's global generator",
    ),
    "a generator of the user's": (
        "rng = np.random.default_rng(0)\n" + PLAIN.format(factor="rng.random()"),
        "draws random numbers from global 'rng' of demo",
    ),
    "an iterator": (
        "gen = (float(i + 1) for i in itertools.count())\n" + PLAIN.format(factor="next(gen)"),
        "reads global 'gen' of demo (generator), which cannot be compared",
    ),
    "a method in C with hidden state": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.count = ones(), itertools.count(1).__next__\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * float(self.count())\n",
        "reads attribute 'count.__self__' (count), which cannot be compared",
    ),
    "values of one thread": (
        "local = threading.local()\nlocal.by = 2.0\n" + PLAIN.format(factor="local.by"),
        "reads global 'local' of demo (_local), which cannot be compared",
    ),
    "an open file": (
        "file = open(__file__)\n" + PLAIN.format(factor="(len(file.readline()) + 1.0)"),
        "reads global 'file' of demo (TextIOWrapper), which cannot be compared",
    ),
    "a function that is fetched by a text": (
        "def helper(x):\n    return x * 2.0\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return globals()['hel' + 'per'](x * self.w)\n",
        "calls helper (",
    ),
    "a count that the trace itself changes": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.calls = ones(), 0\n"
        "    def __call__(self, x):\n"
        "        self.calls += 1\n"
        "        return x * self.w * float(self.calls)\n",
        "changes what it reads while it is traced (calls changed from 0 to 1)",
    ),
}


@pytest.mark.parametrize("name", UNSURE)
def test_what_cannot_be_compared_is_said_once_with_the_users_line(program, traces, said, name):
    source, words = UNSURE[name]
    module = program(source)
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


def test_a_step_runs_the_graph_that_a_line_says_was_traced_again(program, said):
    fetched = PLAIN.format(factor="globals()['dr' + 'aw']()")
    module = program("made = [2.0]\n", "def draw():\n    return made[-1]\n", fetched)
    job, model = module.run, module.model
    model.notes = [0]
    assert job.step(model, X)["output"].tolist() == [2.0, 4.0]
    module.made.append(3.0)
    model.notes = [0]  # another object that says the same
    assert job.step(model, X)["output"].tolist() == [3.0, 6.0]
    job.close(model)
    assert sum("recompiled because" in line for line in said()) == 1


def test_what_is_never_named_by_the_code_is_not_said(program, outputs, said):
    module = program(
        """
        class Model(nn.Module):
            def __init__(self):
                self.w, self.lock, self.notes = ones(), threading.Lock(), iter([1])
            def __call__(self, x):
                return x * self.w
        """,
    )
    outputs(module.run, module.model)
    assert said() == []


def test_a_change_at_every_step_that_changes_nothing_is_named(program, said):
    module = program(
        """
        class Model(nn.Module):
            def __init__(self):
                self.w, self.seen = ones(), 0
            def __call__(self, x):
                return x * self.w
        """,
    )
    for step in range(6):
        module.model.seen = step
        module.run.step(module.model, X)
    module.run.close(module.model)
    (line,) = said()
    assert "traced again and again because seen changed from" in line
