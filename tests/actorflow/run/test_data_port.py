"""The data port alone: how a stream of batches ends."""

import threading

import numpy as np
import pytest

from actorflow.callbacks.protocol import StopTraining
from actorflow.run.ports import DataPort, FedSteps, ReadFields
from actors.machine.errors import SourceExhausted
from compiler.contract.types import DType, TensorType

TYPES = {"x": TensorType(DType.FLOAT32, (2,))}


class Source:
    """Gives what `answer` says for batch 1, 2, ...: an array, or an exception to raise."""

    def __init__(self, answer):
        self.answer, self.number = answer, 0

    def spec(self):
        return TYPES

    def state(self):
        return {"number": self.number}

    def __next__(self):
        self.number += 1
        came = self.answer(self.number)
        if isinstance(came, BaseException):
            raise came
        return {"x": came}


class Port:
    """A port with one slot; `fetch` fires it once."""

    def __init__(self, answer, batches_per_step=1):
        self.ends = []
        self.port = DataPort(
            Source(answer),
            ReadFields(TYPES, {"x": "train.py:1"}),
            FedSteps(0, None, batches_per_step),
            lambda: self.ends.append(1),
        )
        self.slot = {"x": np.zeros(2, np.float32)}
        self.fetch = self.port.bind((self.slot,))


def ones(number):
    return np.full(2, number, np.float32)


@pytest.mark.parametrize(
    ("error", "failure", "stopped_by"),
    [
        (StopIteration(), None, ""),
        (OSError("gone"), OSError, ""),
        (StopTraining("enough"), None, "StopTraining in the data source (enough)"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
    ids=repr,
)
def test_what_a_source_raises_ends_the_stream_after_the_batches_before_it(
    error, failure, stopped_by
):
    port = Port(lambda number: ones(number) if number < 3 else error)
    port.fetch()
    port.fetch()
    with pytest.raises(SourceExhausted):
        port.fetch()
    assert port.port.num_steps == 2
    assert port.slot["x"].tolist() == [2, 2]
    assert type(port.port.failure) is (failure or type(None))
    assert port.port.stopped_by == stopped_by
    assert port.ends == [1]


def test_a_stop_lets_a_step_that_has_begun_have_all_its_batches():
    port = Port(ones, batches_per_step=3)
    port.fetch()
    port.port.stop()
    port.fetch()
    port.fetch()
    with pytest.raises(SourceExhausted):
        port.fetch()
    assert (port.port.num_steps, port.port.unused_text) == (1, "")


@pytest.mark.parametrize("late", [ones(7), OSError("late"), StopIteration()], ids=repr)
def test_nothing_of_a_fetch_that_was_given_up_counts(late):
    inside, may_go = threading.Event(), threading.Event()

    def answer(number):
        if number == 2:
            inside.set()
            assert may_go.wait(60)
            return late
        return ones(number)

    port, raised = Port(answer, batches_per_step=2), []
    port.fetch()

    def fire():
        with pytest.raises(SourceExhausted) as caught:
            port.fetch()
        raised.append(caught.value)

    thread = threading.Thread(target=fire)
    thread.start()
    assert inside.wait(60)
    assert port.port.abandon()
    assert port.ends == [1]
    may_go.set()
    thread.join(60)
    assert len(raised) == 1
    assert port.ends == [1], "whoever gave it up has said so"
    assert port.slot["x"].tolist() == [1, 1], "its slot may be another's by now"
    assert (port.port.failure, port.port.unused_text, port.port.num_steps) == (None, "", 0)


def test_a_source_is_given_up_for_good():
    port = Port(ones)
    port.fetch()
    assert not port.port.abandon()
    with pytest.raises(SourceExhausted):
        port.fetch()
    assert port.ends == [1]
    assert port.port.num_steps == 1


def test_a_port_that_is_held_begins_no_step_until_it_goes_on():
    port = Port(ones, batches_per_step=2)
    port.fetch()
    assert port.port.hold() == 1
    port.fetch()  # the step has begun
    is_past = threading.Event()
    thread = threading.Thread(target=lambda: (port.fetch(), is_past.set()))
    thread.start()
    assert not is_past.wait(0.05)
    assert port.port.hold() == 1
    assert port.port.go_on(2)
    thread.join()
    assert is_past.is_set()
    port.fetch()
    with pytest.raises(SourceExhausted):
        port.fetch()
    assert (port.port.num_steps, port.ends) == (2, [1])


def test_a_port_that_went_on_is_not_held_again():
    """The others may have answered before the patience of this rank ends."""
    port = Port(ones)
    assert port.port.hold() == 0
    assert port.port.go_on(2)
    assert port.port.hold() == 0
    port.fetch()
    port.fetch()
    with pytest.raises(SourceExhausted):
        port.fetch()
    assert (port.port.num_steps, port.ends) == (2, [1])


def test_a_batch_that_comes_after_the_last_step_was_said_is_dropped():
    port = Port(ones)
    port.fetch()
    assert port.port.hold() == 1
    raised = []

    def fetch():
        with pytest.raises(SourceExhausted):
            port.fetch()
        raised.append(True)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert not port.port.go_on(1)
    thread.join()
    assert raised
    assert (port.port.num_steps, port.ends) == (1, [1])


@pytest.mark.parametrize("answers", ["late", "with an error"])
def test_a_port_that_gave_up_its_data_feeds_nothing_and_tells_no_end_until_it_is_closed(answers):
    is_asked, may_answer, raised = threading.Event(), threading.Event(), []

    def answer(number):
        if number < 4:
            return ones(number)
        is_asked.set()
        may_answer.wait(60)
        return ones(number) if answers == "late" else OSError("gone")

    def fetch():
        with pytest.raises(SourceExhausted):
            port.fetch()
        raised.append(True)

    port = Port(answer, batches_per_step=2)
    for _ in range(3):
        port.fetch()
    assert port.port.hold() == 2
    assert not port.port.is_awaited  # nobody has said yet how far it goes
    thread = threading.Thread(target=fetch)
    thread.start()
    assert is_asked.wait(60)
    assert port.port.go_on(2)
    assert port.port.is_awaited
    assert port.port.give_up_data() == 1
    may_answer.set()
    thread.join(0.05)
    assert not raised
    port.port.close()
    thread.join()
    assert raised
    assert (port.port.give_up_data(), port.ends, port.port.failure) == (1, [], None)


def test_a_port_that_gave_up_its_data_while_it_is_held_feeds_nothing():
    port = Port(ones)
    port.fetch()
    port.port.hold()
    raised = []

    def fetch():
        with pytest.raises(SourceExhausted):
            port.fetch()
        raised.append(True)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert port.port.give_up_data() == 1
    port.port.close()
    thread.join()
    assert raised
    assert (port.port.num_steps, port.ends) == (1, [])
