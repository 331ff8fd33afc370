"""Every example runs, says a figure and leaves a picture; with few steps, as a user starts it."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SCRIPTS = {
    "digits": ("--steps 3 --batch 16", r"accuracy on 1000 unseen pictures: [\d.]+%"),
}
"""Of each example what it is given, and what it says."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_what_came_of_it_and_draws_it(name, tmp_path, monkeypatch, capsys):
    options, figure = SCRIPTS[name]
    png = tmp_path / "made" / "seen.png"
    monkeypatch.setattr(sys, "argv", [name, *options.split(), "--png", str(png)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(figure, said), said
    assert png.read_bytes().startswith(b"\x89PNG")
    assert str(png) in said
