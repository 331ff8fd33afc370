"""The notebooks, scripts in the percent format of jupytext, run cell after cell."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
SAID = {
    "first_run": (r"accuracy': (0\.9|1\.0)", r"of unseen rows: .*'accuracy': 0\.9"),
    "memory_budget": ("smallest budget found feasible", "the same bits: True"),
    "pipeline_and_resume": (
        "the fifth batch again: True",
        "went on after step 25",
        "the same weights: True",
    ),
}


def cells(name):
    """Return the cells of code of a notebook, as jupytext reads them."""
    text = (FOLDER / f"{name}.py").read_text()
    begin, *parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    assert begin == ""
    kinds, bodies = parts[::2], parts[1::2]
    words = [body for kind, body in zip(kinds, bodies, strict=True) if kind == " [markdown]"]
    assert all(line.startswith("#") for body in words for line in body.split("\n") if line)
    return [body for kind, body in zip(kinds, bodies, strict=True) if kind == ""]


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SAID}


@pytest.mark.host("the budgets are those of the host's kernels")
@pytest.mark.parametrize("name", SAID)
def test_the_cells_of_a_notebook_run_in_order_and_say_what_they_should(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"notebook_{name}"}
    for number, cell in enumerate(cells(name)):
        exec(compile(cell, f"{name}.py, cell {number}", "exec"), namespace)
    said = capsys.readouterr().out
    for pattern in SAID[name]:
        assert re.search(pattern, said), said


@pytest.mark.parametrize("name", SAID)
def test_a_notebook_is_read_in_one_go(name):
    assert (FOLDER / f"{name}.py").read_text().count("\n") <= 60
