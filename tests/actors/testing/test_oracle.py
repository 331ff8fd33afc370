"""The oracle itself: what it expects by hand, and that it objects to what it must."""

from random import Random

import pytest
from error_texts import raises

from actors.machine.errors import ProtocolError
from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, kind_of, message
from actors.testing.oracle import (
    Command,
    EventOrder,
    OracleError,
    Scenario,
    StampedSlots,
    expected_run,
)


def scenario_of(*, flushed=(), commands=(), ends=None, fails=None, initial=0):
    edges = [Edge("r", 0, 1, 1, 2, 3, initial)]
    table = MachineTable.from_edges(["a", "b"], edges, sources=[0], flushed=flushed)
    return Scenario(table, (Command(EventOrder.ADMIT, 0, 5), *commands), ends or {}, fails)


@pytest.mark.parametrize(
    ("options", "ends", "firings", "left"),
    [
        ({}, {}, [5, 2], 1),
        ({"initial": 1}, {}, [5, 3], 0),
        ({"flushed": [1]}, {}, [5, 2], 1),
        ({}, {0: 3}, [3, 1], 1),
        ({"initial": 3}, {0: 0}, [0, 1], 1),
    ],
)
def test_firings_and_the_rest_follow_from_the_graph(options, ends, firings, left):
    table = scenario_of(**options).table
    assert expected_run(table, {0: 5}, ends) == (firings, [{}, {0: left}])


@pytest.fixture
def memory():
    scenario = scenario_of()
    machine = Machine(scenario.table)
    memory = StampedSlots(scenario, machine)
    memory.command(scenario.commands[0])
    return memory


def fire(memory, actor, firing):
    memory.started(actor, firing)
    assert memory.finished(actor, firing) is Message.DONE


def test_tokens_are_read_in_the_order_in_which_they_are_written(memory):
    for firing in range(3):
        fire(memory, 0, firing)
    fire(memory, 1, 0)


def test_reading_what_was_not_written_is_found(memory):
    fire(memory, 0, 0)
    with raises(OracleError):
        memory.started(1, 0)


def test_a_slot_that_changes_while_it_is_read_is_found_at_the_end_of_the_reader(memory):
    for firing in range(3):
        fire(memory, 0, firing)
    memory.started(1, 0)
    memory.slots[0][0] = -1
    with raises(OracleError):
        memory.finished(1, 0)


def test_writing_over_a_token_that_nobody_has_read_yet_is_found_at_once(memory):
    for firing in range(3):
        fire(memory, 0, firing)
    with raises(OracleError):
        memory.started(0, 3)


class Gullible:
    """A machine that takes every message."""

    def __init__(self, machine):
        self.machine = machine
        self.taken = []

    def receive(self, code):
        self.taken.append(code)

    def __getattr__(self, name):
        return getattr(self.machine, name)


def test_the_oracle_forges_only_what_must_be_refused_and_minds_when_it_is_taken():
    scenario = scenario_of()
    forged = set()
    for seed in range(200):
        machine = Gullible(Machine(scenario.table))
        memory = StampedSlots(scenario, machine, Random(seed), forged_share=1.0)
        with raises(OracleError):
            for _ in range(100):
                memory.arrives(message(Message.READY, 1))
        forged.update(machine.taken)
        with pytest.raises(ProtocolError):
            machine.machine.receive(machine.taken[-1])
    assert {kind_of(code) for code in forged} >= set(Message) - {Message.END, Message.READY}


def test_a_firing_out_of_order_and_one_too_many_are_found(memory):
    with raises(OracleError):
        memory.started(0, 1)
    for firing in range(3):
        fire(memory, 0, firing)
    fire(memory, 1, 0)
    for firing in range(3, 5):
        fire(memory, 0, firing)
    with raises(OracleError):
        memory.started(0, 5)


def test_a_limit_lowers_what_is_expected_but_not_below_what_has_begun(memory):
    memory.command(Command(EventOrder.END, 0, 3))
    assert memory.expected == [3, 1]
    memory.command(Command(EventOrder.END, 0, 0))
    assert memory.expected == [1, 0]


def test_a_run_that_stops_short_is_found(memory):
    with raises(OracleError):
        memory.check_end()
    memory.machine.receive(Message.DONE)
    memory.machine.outbox.clear()
    memory.machine.fireable.clear()
    with raises(OracleError):
        memory.check_end()
    memory.command(Command(EventOrder.HALT))
    memory.machine.receive(Message.DONE)
    memory.machine.outbox.clear()
    memory.check_end()


def test_a_stall_is_told_with_who_waits_for_what():
    scenario = scenario_of()
    memory = StampedSlots(scenario, Machine(scenario.table))
    with raises(OracleError):
        memory.check_end()


def test_a_halt_that_nobody_asked_for_is_found(memory):
    memory.machine.halt()
    memory.machine.receive(Message.DONE)
    memory.machine.outbox.clear()
    with raises(OracleError):
        memory.check_end()
