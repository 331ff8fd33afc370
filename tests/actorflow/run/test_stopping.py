import threading
from queue import Queue, SimpleQueue

import pytest

from actorflow.callbacks.protocol import StopTraining
from actorflow.run.stopping import Stopper, drain_outputs


class Run:
    """A run that is over when its source is given up, or when it is told so."""

    def __init__(self, stopper=None, *, error=None, stopped_by=""):
        self.stopper, self.error, self.stopped_by = stopper, error, stopped_by
        self.calls = SimpleQueue()
        self.is_inherited = self.is_over = False
        self.loop = self

    def stop(self, reason=""):
        self.calls.put("stop")

    def give_up_sources(self):
        self.calls.put("give up")
        if self.stopper is not None:
            self.stopper.over()

    def ports_at(self):
        return {"data": "train.py:41 in __next__", "metrics": "report.py:7 in step"}

    def wait(self):
        if self.error is not None:
            raise self.error

    def called(self):
        return [self.calls.get_nowait() for _ in range(self.calls.qsize())]


def watched_by(stopper):
    run = Run(stopper)
    stopper.watch(run)
    return stopper, run


@pytest.fixture
def watched():
    return watched_by(Stopper())


def test_a_run_that_nobody_asks_to_stop_is_attended_in_silence(watched):
    stopper, run = watched
    stopper.over()
    stopper.attend(pytest.fail)
    assert run.called() == []
    assert stopper.reasons == []


def test_who_asks_is_told_once_with_what_the_run_waits_for():
    stopper, run = watched_by(Stopper(patience_s=0.0))
    said = []
    stopper.ask("SIGTERM")
    stopper.ask("on_step raised KeyError")
    stopper.attend(said.append)
    assert said == [
        "SIGTERM: stopping after the step that is under way; waiting for the data source"
        " (train.py:41 in __next__), for a data source at most 0.0 s; SIGTERM again quits at once,"
        " 1 s later or more"
    ]
    assert run.called() == ["stop", "stop", "give up"]
    assert stopper.reasons == ["SIGTERM", "on_step raised KeyError"]


def test_a_callback_that_is_running_is_waited_for_by_name(watched):
    stopper, _ = watched
    said, is_in, may_go = [], threading.Event(), threading.Event()

    def on_step(step, results):
        is_in.set()
        may_go.wait(60)

    def call():
        stopper.call("on_step", on_step, 3, {})
        stopper.over()

    thread = threading.Thread(target=call)
    thread.start()
    assert is_in.wait(60)
    stopper.ask("SIGINT")
    stopper.attend(lambda text: (said.append(text), may_go.set()))
    thread.join(60)
    assert "on_step (report.py:7 in step)" in said[0]


def test_what_is_asked_before_there_is_a_run_stops_it_at_its_beginning():
    stopper, run = Stopper(), Run()
    stopper.ask("SIGINT")
    stopper.watch(run)
    assert run.called() == ["stop"]


def test_a_run_can_ask_from_inside(watched):
    stopper, run = watched
    run.ask("its evaluation failed")
    assert stopper.reasons == ["its evaluation failed"]
    assert run.called() == ["stop"]


def test_what_ends_a_run_is_raised_and_a_callbacks_error_before_all():
    error = ValueError("of the run")
    stopper = Stopper()
    stopper.watch(Run(error=error))
    with pytest.raises(ValueError, match="of the run"):
        stopper.wait()
    first = KeyError("of the callback")

    def fail(step, results):
        raise first

    stopper.call("on_step", fail, 5, {})
    with pytest.raises(KeyError) as caught:
        stopper.wait()
    assert caught.value is first
    assert first.__notes__ == [
        "raised by on_step after step 5",
        "after that the run failed: ValueError('of the run')",
    ]


def test_a_callback_that_failed_is_not_called_again_and_no_other_is():
    stopper, told = Stopper(), []

    def fail(step, results):
        told.append(step)
        raise KeyError

    stopper.call("on_step", fail, 1, {})
    stopper.call("on_step", fail, 2, {})
    stopper.call("on_result", fail, 2, {})
    assert told == [1]


def test_stop_training_is_no_failure_wherever_it_comes_from():
    stopper = Stopper()
    stopper.watch(Run(stopped_by="StopTraining in the data source"))

    def stop(step, results):
        raise StopTraining("low enough")

    stopper.call("on_result", stop, 5, {})
    stopper.call("on_result", stop, 10, {})
    stopper.wait()
    assert stopper.failure is None
    assert stopper.reasons == ["StopTraining in on_result (low enough)"] * 2 + [
        "StopTraining in the data source"
    ]


def test_outputs_are_drained_to_their_end_and_may_be_once_more():
    outputs, run = Queue(), Run()
    for item in ({"loss": 1.0}, {"loss": 2.0}, None):
        outputs.put(item)
    drain_outputs(run, outputs, "left")
    run.is_over = True
    drain_outputs(run, outputs, "left")
    assert run.called() == ["stop"]


def test_a_source_that_blocks_is_given_up_once_while_outputs_are_drained():
    outputs, run = Queue(), Run()
    give_up = run.give_up_sources

    def give_up_and_end():
        give_up()
        outputs.put({"loss": 1.0})
        outputs.put(None)

    run.give_up_sources = give_up_and_end
    drain_outputs(run, outputs, "left", patience_s=0.0)
    assert run.called() == ["stop", "give up"]


def test_an_inherited_run_is_not_waited_for():
    run = Run()
    run.is_inherited = True
    drain_outputs(run, Queue(), "left")
    assert run.called() == []


def test_a_run_that_ends_late_is_asked_to_end_without_functions_of_the_user():
    stopper, run = watched_by(Stopper(patience_s=0.0, late_s=0.01))
    run.give_up_sources = lambda: None
    is_in, may_go, late = threading.Event(), threading.Event(), []

    def on_step(step, results):
        is_in.set()
        may_go.wait(60)

    def give_up_users(*, are_callbacks_late):
        late.append(are_callbacks_late)
        if not is_in.is_set():
            thread.start()
            is_in.wait(60)
        if are_callbacks_late:
            may_go.set()
            stopper.over()

    run.give_up_users = give_up_users
    thread = threading.Thread(target=lambda: stopper.call("on_step", on_step, 3, {}))
    stopper.ask("SIGTERM")
    stopper.attend(lambda text: None)
    thread.join(60)
    assert (late[0], late[-1]) == (False, True)
