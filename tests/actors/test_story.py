import pytest

from actors.story import addressee, describe, tell
from actors.table import Edge, MachineTable
from actors.transitions import Message, message


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
    assert tell(table, codes, 0, 9) == ("DONE data", "DONE step")
    assert tell(table, codes, 2, 9) == ("END 'loss' step -> log", "DONE step")
    assert tell(table, codes, 1, 2) == ("DONE step", "END 'batch' data -> step")
