"""The model's text: every cell of the table is in it, and a small piece of it by heart."""

import shutil
import subprocess
from textwrap import dedent

import pytest

from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import TRANSITIONS, Message, Reaction, State, Transition
from actors.testing.promela import Bug, ModelCheckCase, model


@pytest.fixture
def study(make_chain):
    return ModelCheckCase(make_chain(2), 1)


def cells_of(text):
    """The (state, message, reaction) of every cell that a model names, in order."""
    lines = [line for line in text.splitlines() if "/* " in line and " -> " in line]
    rows = [line.partition("/* ")[2].removesuffix(" */") for line in lines]
    return [tuple(row.replace(":", "").split()) for row in rows]


def test_every_cell_of_the_table_is_in_the_model(make_chain):
    study = ModelCheckCase(make_chain(3), 1, is_exhausting=True, failing=(0, 1, 2))
    cells = {
        (state.name, kind.name, cell.reaction.name)
        for state, row in TRANSITIONS.items()
        for kind, cell in row.items()
    }
    assert set(cells_of(model(study))) == cells


@pytest.mark.parametrize("reaction", Reaction)
def test_whoever_changes_a_cell_changes_the_model(study, reaction):
    row = dict(TRANSITIONS[State.WAITING])
    row[Message.READY] = Transition(reaction, (State.ENDED,))
    text = model(study, {**TRANSITIONS, State.WAITING: row})
    changed = {cell for cell in cells_of(text) if cell[:2] == ("WAITING", "READY")}
    assert changed == {("WAITING", "READY", reaction.name)}
    assert (text != model(study)) == (
        TRANSITIONS[State.WAITING][Message.READY] != row[Message.READY]
    )


def test_the_reaction_to_a_message_reads_like_the_table(study):
    text = model(study)
    start = text.index("nempty(to0)")
    piece = dedent(" " * 8 + text[start : text.index("        :: state[1] == S_FIRING", start)])
    assert piece.rstrip() == (
        "nempty(to0) ->\n"
        "to0?m;\n"
        "if\n"
        ":: m == READY ->\n"
        "    moving[0] = moving[0] - 1;\n"
        "    if\n"
        "    :: state[1] == S_WAITING ->   /* WAITING READY: COUNT */\n"
        "        ready[0] = ready[0] + 1;\n"
        "        assert(ready[0] <= 1);\n"
        "        fire_1();\n"
        "        assert(state[1] == S_WAITING || state[1] == S_FIRING);\n"
        "        c_code { reach(0, 0, now.state[1]); };"
    )


def test_a_firing_takes_what_the_rates_say():
    table = MachineTable.from_edges(["a", "b"], [Edge("r", 0, 1, 2, 3, 4)], sources=[0])
    text = model(ModelCheckCase(table, 1))
    fire = text[text.index("inline fire_1()") : text.index("inline check()")]
    assert ":: state[1] == S_WAITING && !halted && ready[0] >= 3 ->" in fire
    assert "ready[0] = ready[0] - 3;" in fire
    assert "assert(ready[0] + free[0] + held[0] + busy[0] + moving[0] == 4);" in text
    assert "assert(fired[1] == (0 + 2 * fired[0]) / 3 + 0);" in text


def test_a_bug_changes_what_is_sent_and_nothing_else(study):
    sound = model(study).splitlines()
    lost = model(study, bug=Bug(lost=Message.FREE)).splitlines()
    doubled = model(study, bug=Bug(doubled=Message.FREE)).splitlines()
    assert [line for line in sound if line not in lost] == ["    from0!FREE;"]
    assert doubled.count("    from0!FREE;") == 2


def test_spin_accepts_every_sort_of_study(make_chain, tmp_path):
    if shutil.which("spin") is None:
        pytest.skip("spin is not installed")
    studies = [
        ModelCheckCase(make_chain(2), 2),
        ModelCheckCase(make_chain(3), 2, is_exhausting=True, is_limited=True, failing=(0, 2)),
        ModelCheckCase(make_chain(3, flushed=[1]), 2, failing=(1,)),
    ]
    for number, study in enumerate(studies):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.pml").write_text(model(study))
        done = subprocess.run(
            ["spin", "-a", "model.pml"], cwd=folder, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "")
