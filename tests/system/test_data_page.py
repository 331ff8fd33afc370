"""The recipe with workers works as it stands, with either way to start them."""

import os
import re
import signal
from pathlib import Path

import pytest

from actorflow.checkpoint.manager import CheckpointManager

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
(RECIPE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def recipe(method, steps=200):
    code = RECIPE.replace('method="spawn"', f'method="{method}"')
    return code.replace("steps=200", f"steps={steps}")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_recipe_trains_and_a_resume_is_exact(run_python, tmp_path, method):
    def newest():
        loaded = CheckpointManager(tmp_path / "runs" / "workers").latest()
        return {name: array.tobytes() for name, array in loaded.tensors.items()}

    done = run_python(recipe(method))
    assert "after 200 steps" in done.stdout
    whole = newest()
    os.rename(tmp_path / "runs", tmp_path / "whole")
    run_python(recipe(method, 70))
    done = run_python(recipe(method))
    assert "resumed from the checkpoint of step 70" in done.stdout
    assert newest() == whole


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_interrupt_of_all_processes_stops_the_recipe_with_its_last_step_saved(
    start_python, tmp_path, method
):
    program = start_python(recipe(method, 10**9), start_new_session=True)
    program.until("step 1/")
    os.killpg(program.process.pid, signal.SIGINT)
    program.until("stopped by SIGINT after step")
    code, _, err = program.finish()
    assert code == 130, err
    assert CheckpointManager(tmp_path / "runs" / "workers").latest().manifest.step >= 1


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_recipe_that_is_killed_leaves_no_worker(start_python, method):
    program = start_python(recipe(method, 10**9))
    program.until("step 1/")
    program.process.kill()
    program.process.stdout.read()  # ends when the last process that has the pipe does
