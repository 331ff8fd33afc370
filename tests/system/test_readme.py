"""The README tells the truth."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actorflow.cli.main import main
from actorflow.environment.settings import environment_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_environment_table_is_the_one_the_code_reads():
    assert environment_table() in README


def test_every_command_of_the_readme_has_help(capsys):
    for command in (
        "run",
        "launch",
        "plan",
        "pack",
        "simulate",
        "bench",
        "top",
        "ckpt",
        "ops",
        "doctor",
    ):
        assert f"actorflow {command}" in README
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
        assert command in capsys.readouterr().out


def test_the_folders_of_the_house_are_there():
    for room in ("actorflow", "actors", "compiler", "memory"):
        assert f"{room}/" in README
        assert (ROOT / room / "__init__.py").exists()


def demo_output():
    """Return what the demo prints of its plan with numpy kernels: the same on every machine."""
    environment = {**os.environ, "ACTORFLOW_NATIVE": "0"}
    demo = "examples/char_gpt.py"
    done = subprocess.run(
        [sys.executable, "-m", "actorflow", "plan", demo],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.host("the device is in the text")
def test_the_output_of_the_demo_is_what_the_demo_prints():
    _, _, section = README.partition("## Output of the demo\n")
    shown = section.partition("```\n")[2].partition("```")[0]
    # An edit of the demo that moves no line changes the plan's name for itself and nothing else.
    without_id = re.compile(r"^(plan '\w+') [0-9a-f]{12} ")
    assert without_id.sub(r"\1 ", shown) == without_id.sub(r"\1 ", demo_output())
