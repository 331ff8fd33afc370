"""Every example runs, says a figure and leaves a picture; with few steps, as a user starts it."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

BITS = r"unseen text: \d\.\d\d bits per character"

SCRIPTS = {
    "bert_masked": ("--steps 1 --batch 2", r"[\d.]+% of what was masked is filled in right"),
    "dcgan": ("--steps 2 --batch 8", r"mean brightness of 64 drawn pictures: [\d.]+"),
    "digits --model resnet": ("--steps 2 --batch 4", r"accuracy of resnet .* [\d.]+%"),
    "digits --model vgg": ("--steps 2 --batch 4", r"accuracy of vgg .* [\d.]+%"),
    "digits --model vit": ("--steps 2 --batch 8", r"accuracy of vit .* [\d.]+%"),
    "digits": ("--steps 8 --batch 8", r"accuracy of lenet on 64 unseen pictures: [\d.]+%"),
    "dlrm_clicks --wide-deep": ("--steps 9 --rows 2000", r"an area under the curve of 0\.\d+"),
    "dlrm_clicks": ("--steps 9 --rows 2000", r"an area under the curve of 0\.\d+, where 0\.8"),
    "dqn_cartpole": ("--steps 70 --episodes 1", r"the pole stands for \d+ of 500 steps"),
    "segment": ("--steps 2 --batch 4", r"mean intersection over union .* [\d.]+%"),
    "ranks": ("--steps 2 --batch 4", r"loss of step 2 on stage=1 x data=1 x model=1: \d\.\d+"),
    "vae": ("--steps 3 --batch 16", r"bound on 48 unseen pictures: [\d.]+ nats"),
    "write_text": ("--steps 1 --batch 2 --length 2 --precision bf16", BITS),
    "write_text --model llama": ("--steps 1 --batch 2 --length 2", BITS),
    "write_text --model lstm": ("--steps 1 --batch 2 --length 2", BITS),
}
"""Of each example, by its name and what it is given besides, more options and what it says."""


@pytest.mark.parametrize("command", SCRIPTS)
def test_an_example_says_what_came_of_it_and_draws_it(command, tmp_path, monkeypatch, capsys):
    name, *chosen = command.split()
    options, figure = SCRIPTS[command]
    png = tmp_path / "made" / "seen.png"
    monkeypatch.setattr(sys, "argv", [name, *chosen, *options.split(), "--png", str(png)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(figure, said), said
    assert png.read_bytes().startswith(b"\x89PNG")
    assert str(png) in said


def test_every_script_is_run_here_and_every_file_is_told_of():
    page = (EXAMPLES / "README.md").read_text()
    run_here = {command.split()[0] for command in SCRIPTS} | {"char_gpt"}  # of test_tour.py
    for file in EXAMPLES.glob("*.py"):
        assert f"`{file.name}`" in page
        assert (file.stem in run_here) == ("__main__" in file.read_text()), file.name
    parts = {"__init__.py", "first_values.py"}
    for file in (EXAMPLES / "models").glob("*.py"):
        assert file.name in parts or f"`{file.name}`" in page, file.name
