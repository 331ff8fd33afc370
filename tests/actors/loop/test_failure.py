"""The words for a launch that raised, whether or not its number is known."""

import pytest

from actors.loop.failure import (
    Failure,
    RunOutcome,
    explain,
    is_same_failure,
    place_of,
    root_failure,
)
from actors.machine.protocol import DeviceFailure
from compiler.contract.errors import PeerFailed
from compiler.contract.plan_tables import ActorKind


@pytest.fixture
def plan(plan_maker):
    make = plan_maker()
    batch = make.edge("batch")
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    launches = [make.launch(name) for name in ("norm", "gemm", "norm", "gelu", "add", "sum")]
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], launches=launches)
    return make.plan()


def test_a_known_launch_is_told_with_its_number_op_scope_and_line(plan):
    assert str(place_of(plan, 1, 1)) == ("launch 2 of 6, op 'op_gemm' in 'scope.gemm' (train.py:3)")


def test_an_unknown_launch_is_told_with_the_first_ops_and_lines_that_it_can_be(plan):
    failed = explain(plan, Failure(1, 7, None, OSError("fault")), ())
    assert str(failed) == (
        "actor 'step' failed in firing 7: one of its 6 launches (ops op_norm, op_gemm, op_gelu,"
        " op_add, ...) (train.py:2, train.py:3, train.py:4, train.py:5, ...) raised OSError: fault"
    )
    assert (failed.actor, failed.firing, failed.launch) == ("step", 7, None)
    assert failed.op.startswith("op_norm, op_gemm")
    assert failed.scope == ""


@pytest.mark.parametrize("launch", [0, None])
def test_a_port_is_told_as_itself_whatever_its_launch(plan, launch):
    assert str(place_of(plan, 0, launch)) == "its source port (train.py:1)"


def test_a_failure_is_told_by_one_of_the_same_launch_and_by_no_other(plan):
    def failed(actor, firing, launch):
        return explain(plan, Failure(actor, firing, launch, IndexError("id 9")), ())

    told = failed(1, 7, 2)
    assert is_same_failure(failed(1, 7, 2), told)
    others = [failed(1, 7, 3), failed(1, 8, 2), failed(0, 7, 2), failed(1, 7, None)]
    assert not any([is_same_failure(other, told) for other in others])
    assert not is_same_failure(failed(1, 7, None), failed(1, 7, None))
    assert not is_same_failure(told, IndexError("id 9"))


def test_launches_of_one_module_are_told_with_its_path(plan_maker):
    make = plan_maker()
    batch = make.edge("batch")
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    launches = [make.launch(name) for name in ("norm", "norm")]
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], launches=launches)
    assert place_of(make.plan(), 1, None).scope == "scope.norm"


@pytest.mark.parametrize("launch", [6, 7])
def test_a_launch_that_the_plan_does_not_have_is_told_as_the_chain(plan, launch):
    assert place_of(plan, 1, launch).what == "its chain"


@pytest.mark.parametrize("count", [0, 4])
def test_all_ops_of_a_short_chain_are_told(plan_maker, count):
    make = plan_maker()
    batch = make.edge("batch")
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    launches = [make.launch(f"l{i}") for i in range(count)]
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], launches=launches)
    ops = ", ".join([f"op_l{i}" for i in range(count)])
    words = f"one of its {count} launches (ops {ops})" if count else "its chain"
    assert place_of(make.plan(), 1, None).what == words


def test_the_failure_of_a_device_is_that_of_the_launch_that_it_names():
    found = DeviceFailure("out of order", actor=1, firing=3, launch=2)
    assert root_failure(Failure(0, 5, None, found)) == Failure(1, 3, 2, found)
    found.__cause__ = cause = OSError("fault")
    assert root_failure(Failure(0, 5, None, found)) == Failure(1, 3, 2, cause)
    assert root_failure(Failure(0, 5, 1, cause)) == Failure(0, 5, 1, cause)


# -- what failures make of a run -------------------------------------------------------------------


@pytest.fixture
def outcome(plan):
    return RunOutcome(plan, frozenset({0}))


def test_the_first_failure_is_told_with_its_story_and_the_others_on_it(outcome):
    outcome.fail_by(Failure(1, 2, 3, OSError("first")), ("DONE step",))
    first = outcome.failure
    assert str(first).endswith("raised OSError: first\nLast messages to the actor:\n  DONE step")
    outcome.fail_by(Failure(1, 2, 3, OSError("the same launch")), ())
    outcome.fail_by(Failure(0, 4, 0, OSError("a closed port")), ())
    outcome.fail_by(Failure(1, 3, 0, OSError("another")), ("DONE step",))
    outcome.fail_by(Failure(1, 3, 0, PeerFailed("this rank ended")), ())
    outcome.fail(RuntimeError("from outside"))
    outcome.note_closing((ValueError("no such file"),))
    assert outcome.failure is first
    also, closing = first.__notes__
    assert also.startswith("at the same time actor 'step' failed in firing 3")
    assert also.endswith("raised OSError: another")
    assert closing == "closing a source then raised ValueError('no such file')"


@pytest.mark.parametrize("flag", ["is_closing", "is_cut"])
def test_what_a_launch_raises_in_a_run_that_is_ended_is_no_failure(outcome, flag):
    setattr(outcome, flag, True)
    outcome.fail_by(Failure(1, 2, 3, OSError("closed")), ())
    outcome.note_closing((ValueError("closed"),))
    assert outcome.failure is None


def test_a_failure_is_kept_by_its_actor_until_its_message_comes_or_nobody_asks(outcome):
    failures = [Failure(actor, 0, 0, OSError(f"{actor}")) for actor in (0, 1)]
    for failure in failures:
        outcome.report(failure)
    assert outcome.take_reported(1) is failures[1]
    outcome.forget_reported()
    with pytest.raises(KeyError):
        outcome.take_reported(0)
