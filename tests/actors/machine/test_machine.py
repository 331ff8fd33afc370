"""The machine's rule, its end, and its refusals, by hand; random orders are in test_explore."""

from random import Random

import pytest
from error_texts import raises
from machines import done, flushed, settle

from actors.machine.errors import ProtocolError
from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, State, message
from compiler.contract.errors import InternalError


def state_of(machine):
    columns, fixed = machine.columns, ("limit", "owner", "table", "wiring")
    names = [name for name in columns.__slots__ if name not in fixed]
    return [repr(getattr(columns, name)) for name in names] + [repr(machine.start_causes)]


def test_nothing_fires_before_it_is_admitted(pair):
    assert not pair.fireable
    pair.admit(0, 1)
    assert list(pair.fireable) == [0]
    assert pair.state(0) is State.FIRING


def test_a_producer_runs_ahead_until_its_slots_are_full(pair):
    pair.admit(0, 5)
    done(pair, 0)
    assert list(pair.fireable) == [0, 1]
    done(pair, 0)
    assert list(pair.fireable) == [1]
    assert pair.waits_for(0) == ("1 more slots of 'batch'",)
    done(pair, 1)
    assert list(pair.fireable) == [1, 0]


def test_firings_are_numbered_from_zero(pair):
    assert pair.firing_index(0) == -1
    pair.admit(0, 2)
    assert pair.firing_index(0) == 0
    done(pair, 0)
    assert pair.firing_index(0) == 1


def test_a_register_is_free_when_every_consumer_has_freed_it():
    edges = [Edge("r", 0, 1, 1, 1, 1), Edge("r", 0, 2, 1, 1, 1)]
    machine = Machine(MachineTable.from_edges(["a", "b", "c"], edges, sources=[0]))
    machine.admit(0, 2)
    done(machine, 0)
    assert list(machine.fireable) == [1, 2]
    done(machine, 1)
    assert list(machine.fireable) == [2]
    done(machine, 2)
    assert list(machine.fireable) == [0]


def test_rates_gather_and_scatter_tokens():
    edges = [Edge("micro", 0, 1, 1, 3, 3), Edge("part", 1, 2, 2, 1, 2)]
    machine = Machine(MachineTable.from_edges(["a", "b", "c"], edges, sources=[0]))
    machine.admit(0, 3)
    for _ in range(2):
        done(machine, 0)
        assert 1 not in machine.fireable
    done(machine, 0)
    assert list(machine.fireable) == [1]
    done(machine, 1)
    done(machine, 2)
    assert list(machine.fireable) == [2]
    done(machine, 2)
    assert machine.firing_index(2) == 1


def test_detached_actors_are_named_apart():
    table = MachineTable.from_edges(
        ["data", "step"], [Edge("batch", 0, 1, 1, 1, 1)], sources=[0], detached=[0]
    )
    machine = Machine(table)
    machine.admit(0, 1)
    assert (list(machine.detached), list(machine.fireable)) == ([0], [])


def test_end_flows_behind_the_last_token_and_brings_every_slot_home(pair):
    pair.admit(0, 1)
    pair.end_admission(0)
    done(pair, 0)
    assert pair.state(0) is State.DRAINING
    assert not pair.is_finished
    done(pair, 1)
    assert pair.state(0) is State.ENDED
    assert pair.is_finished


def test_a_run_without_steps_ends_at_once(pair):
    pair.end_admission(0)
    settle(pair)
    assert pair.is_finished


def test_ending_admission_twice_is_allowed_and_admitting_after_it_is_not(pair):
    pair.end_admission(0)
    pair.end_admission(0)
    settle(pair)
    pair.admit(0, 1)
    assert not pair.fireable


def test_admitting_after_the_end_of_admission_raises(pair):
    pair.admit(0, 1)
    pair.end_admission(0)
    with raises(ProtocolError):
        pair.admit(0, 1)


def test_admitting_to_no_firing_raises(pair):
    with raises(ProtocolError):
        pair.admit(0, 0)


def credits_table(num_slots=3, initial=0, rate=3):
    """data -> step -> save, where save is due after every `rate` steps."""
    edges = [Edge("batch", 0, 1, 1, 1, 1), Edge("due", 1, 2, 1, rate, num_slots, initial)]
    return MachineTable.from_edges(["data", "step", "save"], edges, sources=[0])


@pytest.mark.parametrize("resumed_at", range(7))
def test_a_resumed_run_is_due_at_the_same_steps_as_one_that_never_stopped(resumed_at):
    machine = Machine(credits_table(initial=resumed_at % 3))
    due = []
    for step in range(resumed_at, 12):
        machine.admit(0, 1)
        done(machine, 0)
        done(machine, 1)
        if machine.fireable:
            due.append(step + 1)
            done(machine, 2)
    assert due == [step for step in (3, 6, 9, 12) if step > resumed_at]
    machine.end_admission(0)
    settle(machine)
    assert machine.is_finished


def test_initial_tokens_take_slots_from_the_producer():
    machine = Machine(credits_table(initial=3))
    assert list(machine.fireable) == [2]
    machine.admit(0, 2)
    done(machine, 0)
    assert machine.waits_for(1) == ("1 more slots of 'due'",)
    done(machine, 2)
    assert list(machine.fireable) == [1]


def test_an_actor_with_all_it_needs_in_initial_tokens_starts_with_the_machine():
    machine = Machine(credits_table(num_slots=4, initial=4))
    assert (list(machine.fireable), machine.firing_index(2)) == ([2], 0)
    machine.validate()
    machine.end_admission(0)
    settle(machine)
    done(machine, 2)
    assert machine.is_finished


def test_a_source_with_inputs_is_driven_by_them_and_cannot_be_exhausted():
    edges = [Edge("tick", 0, 1, 1, 2, 2), Edge("batch", 1, 2, 1, 1, 1)]
    machine = Machine(MachineTable.from_edges(["clock", "data", "step"], edges, sources=[0, 1]))
    with raises(ProtocolError):
        machine.admit(1, 1)
    machine.admit(0, 2)
    machine.end_admission(0)
    done(machine, 0)
    done(machine, 0)
    assert list(machine.fireable) == [1]
    with pytest.raises(ProtocolError):
        machine.receive(message(Message.EXHAUSTED, 1))
    done(machine, 1)
    done(machine, 2)
    assert machine.is_finished


def test_the_cause_of_a_firing_is_what_was_missing_last(pair):
    pair.admit(0, 4)
    done(pair, 0)
    done(pair, 0)
    done(pair, 1)
    done(pair, 1)
    assert pair.causes(0) == (
        ("input", "admission", 1),
        ("register", "batch", 1),
        ("self", "", 1),
    )
    assert pair.causes(1) == (("input", "batch", 1), ("self", "", 1))


def test_every_firing_but_a_flushed_one_has_one_cause(make_random):
    rng = Random(5)
    for _ in range(50):
        machine = Machine(make_random(rng))
        table = machine.table
        born = [machine.firing_index(a) + 1 for a in range(table.num_actors)]
        for source in table.sources:
            machine.admit(source, 6 * table.firings_per_step[source])
            machine.end_admission(source)
        settle(machine)
        while started := machine.fireable or machine.detached or machine.flushing:
            done(machine, started[0])
        assert machine.is_finished
        for actor in range(table.num_actors):
            caused = sum(count for _, _, count in machine.causes(actor))
            flushed = bool(machine.flush_tokens(actor))
            assert machine.firing_index(actor) + 1 == caused + born[actor] + flushed


def test_admission_can_be_cut_to_a_limit(pair):
    pair.admit(0, 9)
    pair.end_admission(0, limit=2)
    while pair.fireable:
        done(pair, pair.fireable[0])
    assert pair.is_finished
    assert pair.firing_index(0) == 1


def test_a_limit_lowers_an_admission_that_has_already_ended(pair):
    pair.admit(0, 9)
    pair.end_admission(0)
    done(pair, 0)
    done(pair, 0)
    pair.end_admission(0, limit=1)
    settle(pair)
    while pair.fireable:
        done(pair, pair.fireable[0])
    assert pair.is_finished
    assert pair.firing_index(1) == 1


def test_only_a_source_can_be_admitted(pair):
    with raises(ProtocolError):
        pair.admit(1, 1)


def test_an_exhausted_source_takes_its_slots_back_and_ends(pair):
    pair.admit(0, 9)
    done(pair, 0)
    done(pair, 1)
    pair.fireable.clear()
    pair.receive(message(Message.EXHAUSTED, 0))
    settle(pair)
    assert pair.is_finished
    assert pair.firing_index(0) == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_a_flushed_actor_fires_once_more_with_what_is_left(steps):
    machine = flushed()
    if steps:
        machine.admit(0, steps)
    machine.end_admission(0)
    settle(machine)
    while machine.fireable or machine.flushing:
        done(machine, (machine.fireable or machine.flushing)[0])
    assert machine.is_finished
    assert machine.firing_index(1) == steps // 3
    assert machine.firing_index(2) == steps // 3
    assert machine.flush_tokens(1) == (steps % 3,)


def test_the_last_firing_of_a_flushed_actor_waits_for_its_output_slot():
    machine = flushed(rate=1, num_slots=1)
    machine.admit(0, 1)
    machine.end_admission(0)
    settle(machine)
    done(machine, 0)
    done(machine, 1)
    assert machine.state(1) is State.CLOSING
    done(machine, 2)
    assert machine.state(1) is State.FLUSHING
    assert list(machine.flushing) == [1]


def test_tokens_that_no_firing_will_read_are_handed_back():
    machine = Machine(MachineTable.from_edges(["a", "b"], [Edge("r", 0, 1, 1, 3, 3)], sources=[0]))
    machine.admit(0, 2)
    machine.end_admission(0)
    while machine.fireable:
        done(machine, machine.fireable[0])
    assert machine.is_finished
    assert machine.firing_index(1) == -1


def test_a_failure_halts_the_machine_and_lets_what_runs_finish(pair):
    pair.admit(0, 5)
    done(pair, 0)
    pair.receive(message(Message.FAILED, 1))
    assert pair.is_halted
    assert not pair.is_quiescent
    pair.receive(message(Message.DONE, 0))
    assert not pair.is_quiescent, "messages are under way"
    settle(pair)
    assert pair.is_quiescent
    assert not pair.is_finished
    assert (pair.state(0), pair.state(1)) == (State.WAITING, State.FAILED)


ILLEGAL = [
    ("DONE of an actor that waits", message(Message.DONE, 1)),
    ("FAILED of an actor that waits", message(Message.FAILED, 1)),
    ("EXHAUSTED of an actor that is no source", message(Message.EXHAUSTED, 1)),
    ("a slot too many", message(Message.FREE, 0)),
    ("a slot of admission", message(Message.FREE, 1)),
    ("the return of a slot of admission", message(Message.RETURN, 1)),
    ("READY of the edge before the first", message(Message.READY, -1)),
    ("FREE of the edge before the first", message(Message.FREE, -1)),
    ("DONE of the actor before the first", message(Message.DONE, -1)),
    ("an unknown kind", 7),
    ("an unknown edge", message(Message.READY, 5)),
    ("an unknown actor", message(Message.DONE, 1 << 20)),
]


@pytest.mark.parametrize("code", [c for _, c in ILLEGAL], ids=[n for n, _ in ILLEGAL])
def test_an_illegal_message_raises_and_changes_nothing(pair, code):
    before = state_of(pair)
    with pytest.raises(ProtocolError):
        pair.receive(code)
    assert state_of(pair) == before


def test_a_second_end_on_an_edge_is_illegal(pair):
    pair.admit(0, 1)
    done(pair, 0)
    pair.receive(message(Message.END, 0))
    before = state_of(pair)
    with raises(ProtocolError):
        pair.receive(message(Message.END, 0))
    assert state_of(pair) == before


def test_a_stall_names_who_waits_for_what(pair):
    pair.admit(0, 2)
    done(pair, 0)
    done(pair, 0)
    assert "'data' waits for 1 more tokens of 'admission', 1 more slots of 'batch'" in pair.stall()
    assert pair.stall().endswith("'step' waits for the end of its firing")


def test_an_actor_that_drains_lacks_the_slots_that_are_not_home_and_no_others():
    edges = [Edge("r", 0, 1, 1, 1, 1), Edge("r", 0, 2, 1, 1, 1)]
    machine = Machine(MachineTable.from_edges(["a", "b", "c"], edges, sources=[0]))
    machine.admit(0, 1)
    machine.end_admission(0)
    for actor in (0, 1):
        done(machine, actor)
    assert machine.missing_messages(0) == (message(Message.FREE, 1),)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m: m.columns.level.__setitem__(1, 5),
        lambda m: m.columns.level.__setitem__(0, -2),
        lambda m: m.columns.level.__setitem__(1, -2),
        lambda m: m.columns.unmet.__setitem__(1, 0),
        lambda m: setattr(m.columns, "num_open", 1),
        lambda m: m.outbox.append(message(Message.FREE, 0)),
    ],
)
def test_validate_finds_what_does_not_add_up(break_it):
    table = MachineTable.from_edges(["data", "step"], [Edge("batch", 0, 1, 1, 1, 2)], sources=[0])
    machine = Machine(table)
    machine.validate()
    break_it(machine)
    with raises(InternalError):
        machine.validate()


def test_a_slot_too_many_is_refused_where_slots_have_come_back_one_by_one():
    machine = Machine(MachineTable.from_edges(["a", "b"], [Edge("r", 0, 1, 3, 3, 3)], sources=[0]))
    machine.admit(0, 2)
    machine.fireable.clear()
    machine.receive(message(Message.DONE, 0))
    machine.receive(message(Message.RETURN, 0))
    before = state_of(machine)
    with raises(ProtocolError):
        machine.receive(message(Message.FREE, 0))
    assert state_of(machine) == before


# -- after a halt ----------------------------------------------------------------------------------


def halted_before_the_end(flushed):
    """A machine that was halted while the End of its source was on its way."""
    edges = [Edge("r", 0, 1, 1, 2, 3)]
    machine = Machine(
        MachineTable.from_edges(["a", "b"], edges, sources=[0], flushed=[1] if flushed else [])
    )
    machine.admit(0, 1)
    machine.end_admission(0)
    machine.fireable.clear()
    machine.receive(message(Message.DONE, 0))
    machine.halt()
    return machine


@pytest.mark.parametrize("flushed", [False, True])
def test_the_last_end_closes_nobody_after_a_halt(flushed):
    machine = halted_before_the_end(flushed)
    settle(machine)
    assert machine.state(1) is State.WAITING
    assert not machine.flushing
    assert machine.is_quiescent


def test_a_flushed_actor_that_waits_for_a_slot_does_not_start_after_a_halt():
    machine = flushed(rate=1, num_slots=1)
    machine.admit(0, 1)
    machine.end_admission(0)
    settle(machine)
    done(machine, 0)
    done(machine, 1)
    assert machine.state(1) is State.CLOSING
    machine.halt()
    done(machine, 2)
    assert machine.state(1) is State.CLOSING
    assert not machine.flushing


def test_halting_twice_is_halting_once(pair):
    pair.admit(0, 1)
    pair.halt()
    pair.halt()
    done(pair, 0)
    assert pair.is_quiescent


# -- what a machine tells --------------------------------------------------------------------------


def test_a_draining_actor_lacks_the_slots_that_are_not_home(pair):
    pair.admit(0, 1)
    pair.end_admission(0)
    done(pair, 0)
    assert pair.state(0) is State.DRAINING
    assert pair.missing_messages(0) == (message(Message.FREE, 0),)
    done(pair, 1)
    assert pair.missing_messages(0) == ()


def test_a_waiting_actor_lacks_tokens_and_slots(pair):
    pair.admit(0, 2)
    done(pair, 0)
    done(pair, 0)
    assert pair.missing_messages(0) == (message(Message.READY, 1), message(Message.FREE, 0))
    done(pair, 1)
    assert pair.missing_messages(0) == (message(Message.READY, 1),)


@pytest.mark.parametrize("actor", [-1, 1, 2])
def test_nobody_but_a_source_is_admitted_or_ended(pair, actor):
    for ask in (lambda: pair.admit(actor, 1), lambda: pair.end_admission(actor)):
        with raises(ProtocolError):
            ask()


def test_of_messages_delivered_together_those_after_an_illegal_one_are_not_taken(pair):
    before = state_of(pair)
    with raises(ProtocolError):
        pair.deliver([message(Message.FREE, 0), message(Message.READY, 0)])
    assert state_of(pair) == before
