"""The family of plans, and what is read from spin; spin itself runs on the smallest plans."""

import re
import shutil

import pytest
from error_texts import raises

from actors.machine.table import Edge
from actors.machine.transitions import CHANGES, Message, State
from actors.testing import spin
from actors.testing.spin import (
    FAMILY,
    FAULTS,
    ProtocolFault,
    StateSpace,
    Verdict,
    main,
    missing_tools,
    prove,
)
from compiler.contract.errors import ActorflowError

OUTPUT = """\
reached 0 0 1
reached 1 4 0
State-vector 48 byte, depth reached 37, errors: 0
      266 states, stored
      577 states, matched
      843 transitions (= stored+matched)
"""

needs_spin = pytest.mark.skipif(bool(missing_tools()), reason=missing_tools())


def test_links_are_read_as_edges():
    table = spin.table_of("0>1:2/3*4+1 1>2,3*2")
    assert table.edges[:3] == (
        Edge("r0", 0, 1, 2, 3, 4, 1),
        Edge("r1", 1, 2, 1, 1, 2),
        Edge("r1", 1, 3, 1, 1, 2),
    )
    with raises(ValueError):
        spin.table_of("0-1")


def test_the_family_has_up_to_five_actors_and_one_to_three_slots():
    assert max(study.table.num_actors for study in FAMILY.values()) == 5
    assert {re.search(r"(\d) slots", name)[1] for name in FAMILY if "slots" in name} == set("123")
    assert any(any(study.table.is_flushed) for study in FAMILY.values())
    assert any(edge.initial for study in FAMILY.values() for edge in study.table.edges)


def test_every_fault_is_one_change_of_a_plan_of_the_family():
    for fault in FAULTS:
        assert fault.study in FAMILY
        assert fault != ProtocolFault(fault.name, fault.study)


def test_what_spin_prints_is_read():
    verdict = spin.verdict_of("pair", OUTPUT, 1.5)
    changes = {
        (State.WAITING, Message.READY, State.FIRING),
        (State.FIRING, Message.DONE, State.WAITING),
    }
    assert verdict == Verdict("pair", 266, 843, 37, 1.5, "", frozenset(changes))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("pan:1: invalid end state (at depth 41)\n" + OUTPUT, "invalid end state (at depth 41)"),
        (OUTPUT.replace("errors: 0", "errors: 2"), "2 errors"),
        ("error: max search depth too small\n" + OUTPUT, "the search is deeper than 1000000"),
    ],
)
def test_whatever_is_no_proof_is_an_error(text, error):
    assert spin.verdict_of("pair", text, 1.5).error == error


def test_output_without_a_result_is_refused():
    with raises(ActorflowError):
        spin.verdict_of("pair", "Segmentation fault", 1.5)


def test_without_spin_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert main([]) == 2
    assert "apt install spin gcc" in capsys.readouterr().err


@pytest.fixture
def fake(monkeypatch):
    """Verdicts without spin: by name of plan or fault, else a proof that enters every cell."""
    errors = {fault.name: "assertion violated" for fault in FAULTS}
    changes = [frozenset(CHANGES)]

    def check(name, text, folder):
        return Verdict(name, 10**9, 1, 1, 0.1, errors.get(name, ""), changes[0])

    monkeypatch.setattr(spin, "check", check)
    monkeypatch.setattr(spin, "missing_tools", lambda: "")
    return errors, changes


def test_the_command_succeeds_when_all_is_proved_and_every_fault_found(fake, capsys):
    assert main(["--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert f"{len(FAMILY)} plans" in out
    assert f"50 of 50 changes of state happen; 0 fail; {len(FAULTS)} faults, 0 survive" in out


def test_the_command_fails_with_a_plan_that_does(fake, capsys):
    fake[0]["two parts"] = "invalid end state"
    assert main(["--processes", "1"]) == 1
    assert "FAILS: invalid end state" in capsys.readouterr().out


def test_the_command_fails_when_a_fault_survives(fake, capsys):
    del fake[0][FAULTS[0].name]
    assert main(["--processes", "1"]) == 1
    assert "SURVIVES" in capsys.readouterr().out


def test_the_command_fails_when_a_cell_of_the_table_is_never_entered(fake):
    fake[1][0] = frozenset(CHANGES[1:])
    assert main(["--processes", "1"]) == 1


@needs_spin
def test_model_and_machine_have_the_same_states_on_small_plans(tmp_path):
    for name in ("pair, 2 slots", "flushed after a failure", "credits for a firing at birth"):
        verdict = prove(tmp_path, name)
        assert verdict.error == ""
        assert verdict.num_machine_states == verdict.num_states > 400


@needs_spin
def test_a_model_that_differs_from_the_machine_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(spin, "reach", lambda _: StateSpace(200, 13))
    assert "the machine has 200 states, the model 213" in prove(tmp_path, "pair, 1 slots").error


@needs_spin
def test_a_seeded_fault_is_found(tmp_path):
    assert "assertion violated" in spin.find_fault(tmp_path, FAULTS[1]).error


@needs_spin
def test_a_model_that_spin_does_not_accept_is_an_error(tmp_path):
    with raises(ActorflowError):
        spin.check("nonsense", "no model", tmp_path / "x")
