"""All states of the machine, counted by hand where they are few, and the same as the model's."""

from error_texts import raises

from actors.machine.machine import Ending
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, message
from actors.testing.promela import ModelCheckCase
from actors.testing.spin import RestorableMachine, StateSpace, reach
from compiler.contract.errors import InternalError


def pair(**options):
    edges = [Edge("r", 0, 1, 1, 1, options.pop("num_slots", 1))]
    return MachineTable.from_edges(["a", "b"], edges, sources=[0], **options)


def test_the_states_of_a_run_without_steps_can_be_counted_by_hand():
    """At rest; the end asked for and End under way; both ended."""
    assert reach(ModelCheckCase(pair(), 0)) == StateSpace(3, 1)


def test_the_states_of_one_step_can_be_counted_by_hand():
    """Without the step 3, as above. Before the end is asked for 5 more: a fires; READY is under
    way; b fires; FREE is under way; at rest. After it 8: a fires; READY and END are under way; b
    fires, END under way or received; FREE under way, END under way or received; a has ended, END
    under way; both have ended.
    """
    space = reach(ModelCheckCase(pair(), 1))
    assert space == StateSpace(3 + 5 + 8, 2)


def test_a_second_slot_lets_the_producer_run_ahead():
    assert (
        reach(ModelCheckCase(pair(num_slots=2), 4)).num_states
        > reach(ModelCheckCase(pair(), 4)).num_states
    )


def test_every_number_of_steps_is_an_end_of_its_own():
    for steps in range(5):
        assert reach(ModelCheckCase(pair(), steps)).num_ends == steps + 1


def test_an_exhausted_source_ends_alike_however_many_steps_were_permitted():
    for steps in range(4):
        ends = reach(ModelCheckCase(pair(), steps, is_exhausting=True)).num_ends
        assert ends == (steps + 1) + steps  # by the end of admission, or for want of data


def test_a_machine_goes_back_to_where_it_was():
    machine = RestorableMachine(pair())
    before = machine.snapshot()
    machine.admit(0, 2)
    machine.receive(message(Message.DONE, 0))
    machine.outbox.clear()
    assert machine.snapshot() != before
    machine.restore(before)
    assert machine.snapshot() == before
    assert machine.firing_index(0) == -1


def with_ending(**methods):
    """Return a type of machine in whose endings some methods are others."""
    ending = type("Faulty", (Ending,), methods)
    return type("Machine", (RestorableMachine,), {"ending_type": ending})


def test_a_state_in_which_nothing_can_happen_is_named():
    faulty = with_ending(end_if_home=lambda self, actor: None)
    with raises(InternalError):
        reach(ModelCheckCase(pair(), 1), faulty)


def test_a_state_that_breaks_an_invariant_is_found():
    faulty = with_ending(hand_back=lambda self, actor, code: None)
    edges = [Edge("r", 0, 2, 1, 1, 1), Edge("s", 1, 2, 1, 1, 1)]
    table = MachineTable.from_edges(["a", "b", "c"], edges, sources=[0, 1])
    with raises(InternalError):
        reach(ModelCheckCase(table, 1), faulty)
