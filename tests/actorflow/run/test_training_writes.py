"""What callbacks of the training write, and which checkpoint waits for it."""

import threading

import numpy as np
import pytest

from actorflow.run.callback_calls import CallbackCalls
from actorflow.run.stopping import Stopper
from actorflow.run.training_writes import TrainingWrites


class Trains:
    is_part_of_training = True
    is_on_every_rank = True

    def __init__(self, do=lambda step: None):
        self.do = do

    def on_step(self, step, metrics):
        self.do(step)

    def on_evaluation(self, step, means):
        self.do(step)


class Watches:
    def __init__(self, do):
        self.do = do

    def on_evaluation(self, step, means):
        self.do(step)


def value(number):
    return {"w": np.asarray(number)}


@pytest.fixture
def run():
    """Return what makes the calls of a run whose callback of the training writes each step."""

    def make(*others, together=1, rate=1):
        def write(step):
            writes.add(value(step))

        callbacks = [Trains(write), *others]
        writes = TrainingWrites(callbacks[:1], together, rate)
        return CallbackCalls(callbacks, Stopper(), writes), writes

    return make


def test_what_is_written_belongs_to_the_step_that_is_heard_of(run):
    calls, writes = run()
    for step in (1, 2):
        calls.step(step, {})
        assert writes.after(step, is_evaluated=False) == value(step)
    writes.add(value(9))  # by nobody who hears of a step
    assert writes.after(2, is_evaluated=False) == value(2)


def test_a_checkpoint_waits_for_both_calls_of_its_step(run):
    calls, writes = run()
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(writes.after(2, is_evaluated=True)))
    calls.step(1, {})
    calls.step(2, {})
    assert writes.after(2, is_evaluated=False) == value(2)  # where no evaluation was made
    waiting.start()
    assert not seen
    calls.evaluation(2, {})
    waiting.join()
    assert seen == [value(2)]


def test_who_waits_for_the_checkpoint_of_a_step_behind_them_is_not_waited_for(run):
    seen = []
    calls, writes = run(Watches(lambda step: seen.append(writes.after(step, is_evaluated=True))))
    calls.step(2, {})
    calls.evaluation(2, {})
    assert seen == [value(2)]


def test_steps_that_are_heard_of_together_are_those_of_the_last_one(run):
    calls, writes = run(together=4, rate=2)
    for step in range(1, 5):
        calls.step(step, {})
    assert writes.after(2, is_evaluated=False) == {}
    assert writes.after(4, is_evaluated=False) == value(4)


def test_only_what_a_snapshot_may_still_ask_for_is_kept(run):
    calls, writes = run(rate=4)
    for step in range(1, 11):
        calls.step(step, {})
    kept = [step for step in range(1, 11) if writes.after(step, is_evaluated=False)]
    assert kept == [8, 10]


def test_a_run_that_ends_waits_for_no_call(run):
    _, writes = run()
    writes.end()
    assert writes.after(1, is_evaluated=True) == {}


def test_ranks_are_at_one_step_on_the_thread_of_an_evaluation_alone():
    told = []

    def look(step):
        other = threading.Thread(target=lambda: told.append(writes.are_ranks_at_one_step))
        other.start()
        other.join()
        told.append(writes.are_ranks_at_one_step)

    callback = Trains(look)
    writes = TrainingWrites([callback], 1, 1)
    calls = CallbackCalls([callback], Stopper(), writes)
    calls.step(1, {})
    calls.evaluation(1, {})
    assert told == [False, False, False, True]
    assert not writes.are_ranks_at_one_step


def test_a_run_that_fails_has_no_checkpoint_of_a_step_that_nobody_heard_of(run):
    calls, writes = run()
    calls.step(1, {})
    answers = []
    thread = threading.Thread(target=lambda: answers.append(writes.after(2, is_evaluated=False)))
    thread.start()
    writes.end(is_failure=True)
    thread.join()
    assert answers == [None]
    assert writes.after(1, is_evaluated=False) == value(1)
