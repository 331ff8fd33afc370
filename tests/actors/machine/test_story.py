import pytest
from error_texts import raises
from machines import done, flushed, settle

from actors.machine.columns import actor_history, addressee, describe
from actors.machine.errors import ProtocolError
from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, State, message


@pytest.fixture(scope="module")
def table():
    edges = [Edge("batch", 0, 1, 1, 1, 1), Edge("loss", 1, 2, 1, 1, 1)]
    return MachineTable.from_edges(["data", "step", "log"], edges, sources=[0])


@pytest.mark.parametrize(
    ("kind", "subject", "actor", "text"),
    [
        (Message.READY, 0, 1, "READY 'batch' data -> step"),
        (Message.END, 0, 1, "END 'batch' data -> step"),
        (Message.FREE, 0, 0, "FREE 'batch' step -> data"),
        (Message.RETURN, 1, 1, "RETURN 'loss' log -> step"),
        (Message.READY, 2, 0, "READY 'admission' outside -> data"),
        (Message.DONE, 2, 2, "DONE log"),
        (Message.EXHAUSTED, 0, 0, "EXHAUSTED data"),
    ],
)
def test_a_message_has_an_addressee_and_a_text(table, kind, subject, actor, text):
    assert addressee(table, message(kind, subject)) == actor
    assert describe(table, message(kind, subject)) == text


@pytest.mark.parametrize(
    "code",
    [
        -1,
        7,
        message(Message.FREE, 2),
        message(Message.READY, 3),
        message(Message.DONE, 3),
        message(Message.EXHAUSTED, 1),
    ],
)
def test_a_message_for_nobody_is_said_to_be_unknown(table, code):
    assert addressee(table, code) is None
    assert describe(table, code) == f"unknown message {code}"


def test_the_story_of_an_actor_holds_its_messages_and_its_neighbours_firings(table):
    codes = [
        message(Message.DONE, 0),
        message(Message.END, 1),
        message(Message.DONE, 1),
        message(Message.END, 0),
    ]
    assert actor_history(table, codes, 0, 9) == ("DONE data", "DONE step")
    assert actor_history(table, codes, 2, 9) == ("END 'loss' step -> log", "DONE step")
    assert actor_history(table, codes, 1, 2) == ("DONE step", "END 'batch' data -> step")


# -- what a machine remembers ----------------------------------------------------------------------


def test_a_refusal_tells_the_story_of_the_actor(pair):
    pair.admit(0, 1)
    done(pair, 0)
    done(pair, 1)
    with raises(ProtocolError):
        pair.receive(message(Message.DONE, 1))


def test_the_story_of_a_long_run_is_bounded(pair):
    pair.admit(0, 500)
    while pair.fireable:
        done(pair, pair.fireable[0])
    assert len(pair.story(1)) == 12


def test_the_last_messages_tell_what_every_firing_sent(pair):
    pair.admit(0, 1)
    done(pair, 0)
    done(pair, 1)
    pair.end_admission(0)
    settle(pair)
    assert pair.last_messages(9) == (
        "DONE data",
        "READY 'batch' data -> step",
        "DONE step",
        "FREE 'batch' step -> data",
        "END 'admission' outside -> data",
        "END 'batch' data -> step",
    )
    assert pair.last_messages(2) == pair.last_messages(9)[-2:]


def test_the_last_messages_tell_each_once_when_a_flush_notes_what_it_waits_for():
    machine = flushed(rate=1, num_slots=1)
    machine.admit(0, 1)
    machine.end_admission(0)
    settle(machine)
    for actor in (0, 1, 2, 1, 2):
        done(machine, actor)
    assert machine.is_finished
    told = machine.last_messages(1000)
    assert told.count("FREE 'staging' write -> snap") == 2
    assert told.count("READY 'staging' snap -> write") == 2
    assert told.count("FREE 'updated' snap -> step") == 1
    assert told[-4:] == (
        "READY 'staging' snap -> write",
        "END 'staging' snap -> write",
        "DONE write",
        "FREE 'staging' write -> snap",
    )


def test_a_firing_before_the_flush_sends_what_it_sent_while_the_flush_runs():
    machine = flushed(rate=1, num_slots=2)
    machine.admit(0, 1)
    done(machine, 0)
    done(machine, 1)
    machine.end_admission(0)
    settle(machine)
    done(machine, 2)
    assert machine.state(1) is State.FLUSHING
    assert "FREE 'updated' snap -> step" in machine.last_messages(1000)


def test_a_thousand_messages_of_a_long_run_are_remembered(pair):
    pair.admit(0, 5000)
    while pair.fireable:
        done(pair, pair.fireable[0])
    assert len(pair.last_messages(1000)) == 1000
    assert len(pair.last_messages(10**6)) < 10_000


def test_what_comes_back_at_the_end_of_a_run_is_told():
    edges = [Edge("r", 0, 2, 1, 1, 2), Edge("s", 1, 2, 1, 1, 2)]
    machine = Machine(MachineTable.from_edges(["a", "b", "join"], edges, sources=[0, 1]))
    machine.admit(0, 2)
    machine.end_admission(1)
    settle(machine)
    assert machine.state(2) is State.DRAINING
    done(machine, 0)
    machine.fireable.clear()
    machine.receive(message(Message.EXHAUSTED, 0))
    settle(machine)
    assert machine.last_messages(9)[-4:] == (
        "READY 'r' a -> join",
        "RETURN 'r' join -> a",
        "EXHAUSTED a",
        "END 'r' a -> join",
    )
    assert machine.story(2)[-3:] == ("READY 'r' a -> join", "EXHAUSTED a", "END 'r' a -> join")
    assert machine.story(0)[-2:] == ("RETURN 'r' join -> a", "EXHAUSTED a")
    assert machine.is_finished


def test_a_failure_is_told(pair):
    pair.admit(0, 1)
    pair.receive(message(Message.FAILED, 0))
    assert pair.story(0)[-1] == "FAILED data"
