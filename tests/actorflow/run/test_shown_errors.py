"""What Python prints of an error of a script that it runs itself."""

import os
import pickle
import subprocess
import sys
import textwrap
from operator import methodcaller

import pytest

import actorflow as af

HEAD = """
import numpy as np
import actorflow as af
from actorflow import nn

class Net(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(2, 1)

    def __call__(self, x):
        return self.layer({x})

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()

def go():
    data = af.data.ArraySource({{"x": np.ones((8, 2), np.float32)}}, batch=4)
    train.fit(Net(), data, steps={steps}, progress=False)

"""


@pytest.fixture
def said(tmp_path):
    """Run a script as `python script.py` and return its traceback, for a home of its own."""

    def run(tail="go()\n", x="x", steps=1, **environ):
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(HEAD).format(x=x, steps=steps) + tail)
        ended = subprocess.run(
            [sys.executable, file], capture_output=True, text=True, check=False, cwd=tmp_path,
            env=os.environ | {"ACTORFLOW_NATIVE": "0"} | environ,
        )  # fmt: skip
        assert ended.returncode == 1
        return ended.stderr

    return run


def functions(text):
    """Return the functions of the frames that a traceback has."""
    return [row.rpartition(" in ")[2] for row in text.splitlines() if row.startswith("  File")]


def test_a_mistake_is_shown_with_the_users_frames_and_the_public_name(said):
    text = said(x="af.cat([x, x], 1)")
    assert functions(text) == ["<module>", "go", "train", "__call__"]
    assert text.splitlines()[-1].startswith("actorflow.CompileError: script.py:11: ")
    assert len(text.splitlines()) < 20


def test_all_frames_are_shown_where_the_environment_asks(said):
    text = said(x="af.cat([x, x], 1)", ACTORFLOW_TRACEBACK="full")
    assert functions(text)[:2] == ["<module>", "go"]
    assert len(functions(text)) > 8


def test_an_exception_of_the_users_has_the_users_frames(said):
    text = said(x="x / (1 // 0)")
    assert functions(text) == ["<module>", "go", "train", "__call__"]
    assert text.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_the_cause_of_an_error_of_the_users_has_the_users_frames(said):
    tail = (
        "try:\n    go()\nexcept af.CompileError as error:\n    raise OSError('mine') from error\n"
    )
    text = said(tail, x="af.cat([x, x], 1)")
    cause, _, error = text.partition("The above exception was the direct cause")
    assert functions(cause) == ["<module>", "go", "train", "__call__"]
    assert functions(error) == ["<module>"]


def test_what_the_data_raises_has_the_users_frames(said):
    tail = (
        "def batches():\n    yield {'x': np.ones((4, 2), np.float32)}\n    raise OSError('gone')\n"
    )
    fit = "train.fit(Net(), af.data.from_iterable(batches), steps=2, progress=False)\n"
    assert functions(said(tail + fit)) == ["<module>", "batches"]


def test_a_loss_that_is_nan_is_said_once(said):
    text = said(x="x * float('nan')")
    assert functions(text) == ["<module>", "go"]
    assert text.count("loss is nan at step 1") == 1
    assert text.splitlines()[-1].startswith("actorflow.NonFiniteLoss: ")


def test_a_wrong_call_has_the_users_frames(said):
    text = said("train.fit(3)\n")
    assert functions(text) == ["<module>"]
    assert text.splitlines()[-1].startswith("TypeError: fit() ")


def test_a_bug_of_ours_is_shown_whole(said):
    text = said("import actorflow.jobs.job as job\njob.trace_job = int\ngo()\n")
    assert "job.py" in text
    assert "TypeError" in text


def test_an_internal_error_is_shown_whole(said):
    broken = "def raising(*arguments):\n    raise af.InternalError('no')\n"
    text = said(f"{broken}import actorflow.jobs.job as job\njob.trace_job = raising\ngo()\n")
    assert "job.py" in text
    assert "actorflow.InternalError: no (this is a bug in actorflow" in text


def test_a_script_without_a_frame_of_ours_is_shown_as_python_shows_it(said):
    text = said("def half():\n    return 1 // 0\nhalf()\n")
    assert functions(text) == ["<module>", "half"]
    assert text.startswith("Traceback (most recent call last):\n")


def test_a_hook_of_the_users_gets_the_exception_with_all_frames(said):
    hook = (
        "import sys, traceback as t\n"
        "sys.excepthook = lambda *error: sys.stderr.write(str(len(t.extract_tb(error[2]))))\n"
    )
    assert int(said(f"{hook}go()\n", x="af.cat([x, x], 1)")) > 8


def test_ipython_gets_the_users_frames():
    def mistaken():
        af.Mesh(data=-7)

    with pytest.raises(af.CompileError) as caught:
        mistaken()
    render = methodcaller("_render_traceback_")
    lines = render(caught.value)
    assert [line for line in lines if line.startswith("  File")][-1].endswith("in mistaken")
    assert lines[-1].startswith("actorflow.CompileError: ")
    with pytest.raises(NotImplementedError):
        render(af.InternalError("no"))


ERRORS = [
    name
    for name in af.__all__
    if isinstance(getattr(af, name), type) and issubclass(getattr(af, name), BaseException)
]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_has_the_name_that_users_catch_it_by(name):
    kind = getattr(af, name)
    assert (kind.__module__, kind.__qualname__) == ("actorflow", name)
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_an_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(af.CompileError("no")))
    assert (type(error), error.args) == (af.CompileError, ("no",))
