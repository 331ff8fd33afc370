import pytest
from error_texts import raises

from actors.machine.table import OUTSIDE, Edge, MachineTable
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind, RegisterKind


def table_of(num_actors, edges, sources=(0,), **options):
    names = [f"a{i}" for i in range(num_actors)]
    edges = [Edge(f"r{i}", *edge) for i, edge in enumerate(edges)]
    return MachineTable.from_edges(names, edges, sources=sources, **options)


def test_repetitions_solve_the_balance_equations_in_least_integers():
    table = table_of(3, [(0, 1, 2, 3, 4), (1, 2, 1, 2, 2)])
    assert table.repetitions == (3, 2, 1)


def test_a_step_is_the_least_number_of_firings_of_all_sources():
    table = table_of(3, [(0, 2, 1, 2, 2), (1, 2, 1, 1, 1)], sources=[0, 1])
    assert table.firings_per_step == (2, 1, 0)


def test_a_slow_consumer_does_not_make_a_step_longer():
    table = table_of(2, [(0, 1, 1, 100, 100)])
    assert table.repetitions == (100, 1)
    assert table.firings_per_step == (1, 0)


def test_unconnected_parts_have_steps_of_their_own():
    table = table_of(4, [(0, 1, 1, 3, 3), (2, 3, 2, 1, 2)], sources=[0, 2])
    assert table.firings_per_step == (1, 0, 1, 0)


def test_every_source_gets_one_admission_edge_from_outside():
    table = table_of(3, [(0, 2, 1, 1, 1), (1, 2, 1, 1, 1)], sources=[0, 1])
    assert table.sources == (0, 1)
    assert [table.edges[e].producer for e in table.admission[:2]] == [OUTSIDE, OUTSIDE]
    assert table.all_inputs(0) == (table.admission[0],)
    assert table.inputs[2] == (0, 1)


@pytest.mark.parametrize(
    ("num_actors", "edges", "options"),
    [
        (2, [(0, 1, 2, 3, 3)], {}),
        (2, [(0, 1, 0, 1, 1)], {}),
        (2, [], {}),
        (2, [(0, 1, 1, 1, 1)], {"flushed": [0]}),
        (2, [(0, 1, 1, 1, 1), (0, 1, 2, 1, 2)], {}),
        (3, [(1, 2, 1, 1, 1), (2, 1, 1, 1, 1)], {}),
    ],
)
def test_a_graph_that_cannot_run_is_refused_by_name(num_actors, edges, options):
    with raises(InternalError):
        table_of(num_actors, edges, **options)


def test_the_table_of_a_plan_has_one_edge_per_register_and_consumer(plan_maker):
    make = plan_maker()
    batch = make.edge("batch", 2)
    done = make.register("done", RegisterKind.CONTROL, 3)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(done, 1)])
    make.actor("watch", ActorKind.SINK, inputs=[(batch, 1)])
    make.actor("save", ActorKind.SINK, inputs=[(done, 3)], is_flushed=True)
    table = MachineTable.of(make.plan())
    assert table.edges == (
        Edge("batch", 0, 1, 1, 1, 2),
        Edge("batch", 0, 2, 1, 1, 2),
        Edge("done", 1, 3, 1, 3, 3),
        Edge("admission", OUTSIDE, 0, 1, 1, 0),
    )
    assert table.is_detached == (True, False, True, True)
    assert table.is_flushed == (False, False, False, True)


def control_plan(make, num_slots=3):
    batch = make.edge("batch")
    done = make.register("done", RegisterKind.CONTROL, num_slots)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(done, 1)])
    make.actor("save", ActorKind.SINK, inputs=[(done, 3)])
    return make.plan()


def test_a_control_register_can_start_with_tokens(plan_maker):
    plan = control_plan(plan_maker())
    assert MachineTable.of(plan, {"done": 2}).edges[1] == Edge("done", 1, 2, 1, 3, 3, 2)
    assert MachineTable.of(plan, {"done": 0}) == MachineTable.of(plan)


@pytest.mark.parametrize("initial", [{"dine": 1}, {"batch": 1}, {"done": 4}, {"done": -1}])
def test_initial_tokens_that_cannot_be_are_refused_by_name(plan_maker, initial):
    with raises(InternalError):
        MachineTable.of(control_plan(plan_maker()), initial)


def test_initial_tokens_that_never_make_up_a_firing_need_slots_of_their_own():
    edge = (0, 1, 2, 2, 2, 1)
    with raises(InternalError):
        table_of(2, [edge])
    assert table_of(2, [(0, 1, 2, 2, 3, 1)]).repetitions == (1, 1)


def test_a_source_with_inputs_has_no_admission_and_no_share_of_a_step():
    table = table_of(3, [(0, 1, 2, 1, 2), (1, 2, 1, 1, 1)], sources=[0, 1])
    assert table.sources == (0,)
    assert table.admission == (2, None, None)
    assert table.firings_per_step == (1, 0, 0)
    assert table.repetitions == (1, 2, 2)


def test_sources_that_feed_only_one_another_are_refused():
    with raises(InternalError):
        table_of(2, [(0, 1, 1, 1, 1), (1, 0, 1, 1, 1)], sources=[0, 1])


def test_a_port_on_state_or_on_an_unproduced_register_is_refused(plan_maker):
    make = plan_maker()
    weight = make.register("weight", RegisterKind.VARIABLE)
    make.actor("step", ActorKind.COMPUTE, inputs=[(weight, 1)])
    with raises(InternalError):
        MachineTable.of(make.plan())
    make = plan_maker()
    make.actor("step", ActorKind.COMPUTE, inputs=[(make.edge("batch"), 1)])
    with raises(InternalError):
        MachineTable.of(make.plan())
