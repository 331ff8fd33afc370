"""Every example runs, says a figure and leaves a picture; with few steps, as a user starts it."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SCRIPTS = {
    "bert_masked": ("--steps 2 --batch 2", r"[\d.]+% of what was masked is filled in right"),
    "digits": ("--steps 3 --batch 16", r"accuracy on 1000 unseen pictures: [\d.]+%"),
    "dlrm_clicks": ("--steps 9 --rows 2000", r"an area under the curve of 0\.\d+, where 0\.8"),
    "dlrm_clicks --wide-deep": ("--steps 9 --rows 2000", r"an area under the curve of 0\.\d+"),
    "dqn_cartpole": ("--steps 150 --episodes 1", r"the pole stands for \d+ of 500 steps"),
    "gpt2_text": ("--steps 2 --batch 2 --length 2", r"unseen text: \d\.\d\d bits per character"),
    "llama_text": ("--steps 2 --batch 2 --length 2", r"unseen text: \d\.\d\d bits per character"),
}
"""Of each example, by its name and what it is given besides, more options and what it says."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_what_came_of_it_and_draws_it(name, tmp_path, monkeypatch, capsys):
    options, figure = SCRIPTS[name]
    png = tmp_path / "made" / "seen.png"
    script, *more = name.split()
    monkeypatch.setattr(sys, "argv", [script, *more, *options.split(), "--png", str(png)])
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(figure, said), said
    assert png.read_bytes().startswith(b"\x89PNG")
    assert str(png) in said
