"""The words for a launch that raised, whether or not its number is known."""

import pytest

from actors.loop.worker import Failure, explain, is_same_failure, place_of
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
