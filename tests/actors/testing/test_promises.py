"""What a plan promises is played on its table; a table that breaks it names who does."""

from dataclasses import replace

import pytest
from error_texts import raises

from actors.machine.table import MachineTable
from actors.testing.dependencies import check_promises
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind, RegisterKind


@pytest.fixture
def plan(plan_maker):
    """data -> gradient -> update, which writes a variable; metrics hears of both."""
    make = plan_maker()
    batch, loss, grad = make.edge("batch", 2), make.edge("loss", 2, "y"), make.edge("grad", 1, "z")
    done = make.register("done", RegisterKind.CONTROL, 2)
    state = make.view(make.register("state", RegisterKind.VARIABLE))
    make.variables = [_Variable(state)]
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    make.actor("gradient", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(loss, 1), (grad, 1)])
    launches = [make.launch("update", [make.field_view(grad)], [state])]
    make.actor("update", ActorKind.COMPUTE, [(grad, 1)], [(done, 1)], launches)
    make.actor("metrics", ActorKind.SINK, inputs=[(loss, 1), (done, 1)])
    return make.plan()


class _Variable:
    def __init__(self, view):
        self.view = view
        self.role = "parameter"


def without(table, name):
    """The table without an edge."""
    kept = [i for i, edge in enumerate(table.edges) if edge.name != name]
    inputs = tuple([tuple([e for e in row if e in kept]) for row in table.inputs])
    outputs = tuple([tuple([e for e in row if e in kept]) for row in table.outputs])
    return replace(table, inputs=inputs, outputs=outputs)


def test_a_plan_that_keeps_its_promises_passes(plan):
    table = MachineTable.of(plan)
    check_promises(plan, table, table)


def test_a_sink_that_does_not_wait_for_the_update_is_named(plan):
    table = without(MachineTable.of(plan), "done")
    with raises(InternalError):
        check_promises(plan, table, table)


def test_credits_at_the_start_that_disagree_are_named(plan):
    table = MachineTable.of(plan)
    tokens = {"done": 1, "loss": 2}
    edges = tuple([replace(e, initial=tokens.get(e.name, 0)) for e in table.edges])
    table = replace(table, edges=edges)
    with raises(InternalError):
        check_promises(plan, table, table)
