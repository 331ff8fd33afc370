"""The README tells the truth."""

from pathlib import Path

import pytest

from actorflow.cli import main
from actorflow.settings import environment_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_environment_table_is_the_one_the_code_reads():
    assert environment_table() in README


def test_every_command_of_the_readme_has_help(capsys):
    for command in ("run", "plan", "pack", "simulate", "bench", "top", "ckpt", "ops", "doctor"):
        assert f"actorflow {command}" in README
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
        assert command in capsys.readouterr().out


def test_the_folders_of_the_house_are_there():
    for room in ("actorflow", "actors", "compiler", "memory"):
        assert f"{room}/" in README
        assert (ROOT / room / "__init__.py").exists()
