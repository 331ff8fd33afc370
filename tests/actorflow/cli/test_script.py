"""What is shown of an error of a script that `actorflow run` or `plan` runs."""

import sys

import pytest

from actorflow.cli.main import main

HEAD = """
import numpy as np
import actorflow as af
from actorflow import nn

x = np.ones((8, 2), np.float32)

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return {loss}

def raising():
    raise ValueError("no more of it")

def batches():
    yield {{"x": x[:4]}}
    raising()

def go(data):
    train.fit(nn.Linear(2, 1), data, steps=5, progress=False)
"""
ARRAYS = 'go(af.data.ArraySource({"x": x}, batch=4, shuffle=False))\n'
GOOD = "model(batch.x).mean()"
BAD = "(model(batch.x) @ model(batch.x)).mean()"


@pytest.fixture
def failing(tmp_path, monkeypatch, capsys):
    """Run the command on a script and return what it says to stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["actorflow"])
    monkeypatch.chdir(tmp_path)

    def run(command, text):
        (tmp_path / "script.py").write_text(text)
        assert main([command, "script.py"]) == 1
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("command", ["run", "plan", "simulate"])
def test_an_error_of_ours_is_one_line_that_names_the_users(failing, command):
    said = failing(command, HEAD.format(loss=BAD) + ARRAYS)
    assert said.startswith("actorflow: script.py:10: matmul(float32[4, 1], float32[4, 1]): needs ")
    assert said.count("\n") == 1


def test_an_error_without_a_line_gets_the_one_that_led_to_it(failing):
    text = HEAD.format(loss=GOOD) + 'go(af.data.ArraySource({"x": x}, batch=9))\n'
    said = failing("run", text)
    assert said.count("\n") == 1
    assert said.endswith(f"(script.py:{text.count(chr(10))})\n")


def test_a_loss_that_is_nan_is_said_once_and_without_frames(failing):
    said = failing("run", HEAD.format(loss=GOOD) + "x[5] = np.nan\n" + ARRAYS)
    assert said.startswith("actorflow: loss is nan at step 2 (script.py:10); ")
    assert said.count("\n") == 1


def test_what_the_users_data_raises_is_shown_with_the_users_frames_alone(failing):
    spec = '{"x": af.TensorType("float32", (4, 2))}'
    text = HEAD.format(loss=GOOD) + f"go(af.data.from_iterable(batches, {spec}))\n"
    said = failing("run", text)
    lines = [line for line in said.splitlines() if line.startswith("  File")]
    assert [line.split(" in ")[1] for line in lines][-2:] == ["batches", "raising"]
    assert all('File "script.py"' in line for line in lines)
    assert "ValueError: no more of it" in said


@pytest.mark.parametrize("place", ["script", "job"])
def test_an_exception_of_the_script_has_its_own_frames_alone(failing, place):
    text = HEAD.format(loss=f"{GOOD} / (1 // 0)") + ARRAYS
    if place == "script":
        text = "def half():\n    return 1 // 0\n\nhalf()\n"
    said = failing("plan", text)
    files = {line.split(",")[0] for line in said.splitlines() if line.startswith("  File")}
    assert files == {'  File "script.py"'}
    assert said.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_all_frames_of_the_script_are_shown_with_the_log_level_debug(failing, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_LOG", "debug")
    said = failing("plan", HEAD.format(loss=BAD) + ARRAYS)
    assert "tensor.py" in said
    assert "runpy" not in said
    assert "needs equal inner extents" in said


def test_a_bug_of_ours_is_shown_with_our_frames(failing, monkeypatch):
    monkeypatch.setattr(sys.modules["actorflow.jobs.job"], "trace_job", int)
    said = failing("plan", HEAD.format(loss=GOOD) + ARRAYS)
    assert "job.py" in said
    assert "TypeError: int() takes at most 2 arguments" in said


def test_a_cycle_of_causes_is_walked_once(failing):
    text = (
        "import actorflow as af\nfrom compiler.contract.errors import CompileError\n"
        "first, second = ValueError('one'), CompileError('two')\n"
        "first.__cause__, second.__cause__ = second, first\nraise second\n"
    )
    assert failing("run", text) == "actorflow: two (script.py:5)\n"


def test_notes_on_an_error_follow_its_message(failing):
    text = "import actorflow as af\nerror = af.CompileError('no')\n"
    text += "error.add_note('but')\nraise error\n"
    assert failing("run", text) == "actorflow: no (script.py:4)\nbut\n"
