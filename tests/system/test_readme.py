"""The README and the page of commands tell the truth."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actorflow.cli.main import EXAMPLES, main
from actorflow.environment.settings import environment_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "command_line.md").read_text()


def test_the_environment_table_is_the_one_the_code_reads():
    assert environment_table() in COMMANDS


@pytest.mark.parametrize("command", sorted(EXAMPLES))
def test_the_page_of_commands_has_each_command_with_help(command, capsys):
    words = command.split()
    assert f"`actorflow {words[0]}" in COMMANDS
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*words, "--help"])
    assert command in capsys.readouterr().out


def test_the_readme_is_read_in_one_go():
    assert README.count("\n") <= 200


def test_the_folders_of_the_house_are_there():
    for room in ("actorflow", "actors", "compiler", "memory"):
        assert f"{room}/" in README
        assert (ROOT / room / "__init__.py").exists()


def demo_output(folder):
    """Return what the demo prints before its first step, with numpy kernels."""
    environment = {**os.environ, "ACTORFLOW_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "examples/char_gpt.py", "--steps", "1", "--checkpoint", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.partition("step 1/1")[0]


@pytest.mark.host("the device is in the text")
def test_the_output_of_the_demo_is_what_the_demo_prints(tmp_path):
    _, _, section = README.partition("## Output of the demo\n")
    shown = section.partition("```\n")[2].partition("```")[0]
    assert shown == demo_output(tmp_path / "run")
