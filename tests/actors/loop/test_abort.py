"""A run that is ended from outside with an error, in whatever state it is."""

from dataclasses import replace
from random import Random

import pytest
from error_texts import raises

from actors.loop.admission import QuiescentCallback, QuiescentCondition
from actors.loop.dispatch import Dispatcher, LoopOptions
from actors.loop.loop import Loop
from actors.machine.errors import ActorFailed
from actors.machine.machine import Machine
from actors.machine.transitions import Message, message
from actors.testing.oracle import Command, EventOrder, make_scenario, play

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


class RankLost(Exception):
    """What a coordinator would say."""


def events_of(dispatcher):
    """End the firings of three steps one by one, without threads; yield after every event."""
    machine = dispatcher.machine
    dispatcher.admission.ask(3)
    yield
    dispatcher.admission.end()
    yield
    while machine.outbox or machine.fireable or machine.detached or machine.flushing:
        while machine.outbox:
            machine.receive(machine.outbox.pop(0))
            yield
        for started in (machine.fireable, machine.detached, machine.flushing):
            if started:
                machine.receive(message(Message.DONE, started.popleft()))
                yield


@pytest.mark.parametrize("options", [{}, {"rate": 2, "is_flushed": True}])
def test_after_every_event_of_a_run_an_abort_lets_nothing_more_begin(pipeline, options):
    total = len([*events_of(Dispatcher(pipeline(num_slots=3, **options)[0], LoopOptions()))])
    assert total > 20
    for moment in range(total):
        bound, ports = pipeline(num_slots=3, **options)
        dispatcher, error = Dispatcher(bound, LoopOptions()), RankLost(moment)
        events = events_of(dispatcher)
        for _ in range(moment):
            next(events)
        is_over = dispatcher.machine.is_finished
        begun = [dispatcher.machine.firing_index(a) for a in range(3)]
        dispatcher.abort_unless_over(error)
        dispatcher.abort_unless_over(RankLost("again"))
        for _ in events:
            pass
        assert dispatcher.machine.is_halted != is_over
        assert dispatcher.outcome.failure is (None if is_over else error)
        assert [dispatcher.machine.firing_index(a) for a in range(3)] == begun
        assert ports["data"].num_closed == (not is_over)
        dispatcher.machine.validate()


@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_of_events_a_machine_that_is_halted_begins_nothing(seed):
    rng = Random(seed)
    scenario = make_scenario(rng)
    at = rng.randint(0, len(scenario.commands))
    commands = [*scenario.commands]
    commands.insert(at, Command(EventOrder.HALT))
    machine = Machine(scenario.table)
    scenario = replace(scenario, commands=tuple(commands))
    play(scenario, machine, rng, is_checked=True)  # its oracle counts what began since
    assert machine.is_halted


def aborted(loop, error):
    with pytest.raises(RankLost) as caught:
        loop.wait(PATIENCE)
    assert caught.value is error
    assert loop.failure is error


@pytest.mark.parametrize("where", ["source", "compute", "sink"])
@pytest.mark.parametrize("firing", [0, 1, 4])
def test_any_thread_of_a_run_may_abort_it(pipeline, bodies, where, firing):
    error, count = RankLost(), iter(range(1000))

    def abort(*arguments):
        if next(count) == firing:
            loop.abort(error)
            loop.abort(RankLost("again"))
        if where == "source":
            arguments[0][0]["x"][:] = 1

    finished = []
    bound, ports = pipeline(**{where: abort})
    loop = Loop(bound, LoopOptions(on_finished=lambda: finished.append(loop.failure)))
    with loop:
        loop.admit(1000)
        aborted(loop, error)
    assert finished == [error]
    assert next(count) < 20
    assert ports["data"].num_closed == 1


def test_a_run_that_waits_is_aborted_from_outside(pipeline):
    error = RankLost()
    with Loop(pipeline()[0]) as loop:
        loop.abort(error)
        aborted(loop, error)
        loop.abort(RankLost("again"))
    assert loop.failure is error


def test_a_visitor_may_abort_the_run_and_those_who_wait_are_sent_away(pipeline):
    error = RankLost()
    with Loop(pipeline()[0]) as loop:
        visit = QuiescentCallback(QuiescentCondition(frozenset()), lambda: loop.abort(error))
        never = QuiescentCallback(
            QuiescentCondition(frozenset(), (((0, 1), (1, 1)),)), lambda: pytest.fail("made")
        )
        loop.run_when_quiescent(visit)
        assert visit.wait()
        aborted(loop, error)
        loop.run_when_quiescent(never)
        assert not never.wait()


def test_a_run_aborted_before_its_start_fires_nothing(pipeline, bodies):
    error, source = RankLost(), bodies.Counting()
    loop = Loop(pipeline(source)[0])
    loop.admit(5)
    loop.abort(error)
    with loop:
        aborted(loop, error)
    assert source.firing == 0


def test_what_runs_on_another_thread_is_waited_for_but_no_source(pipeline, bodies, join_threads):
    source, sink, error, ended = bodies.Gate(), bodies.Gate(), RankLost(), []

    def hear(tokens):
        sink(tokens)
        ended.append(1)

    source.open()
    bound, ports = pipeline(source, sink=hear)
    ports["data"].close = lambda: None  # deaf: it blocks on in its second firing
    loop = Loop(bound, LoopOptions(source_timeout_s=0.0, report=lambda text: None))
    loop.start()
    loop.admit(5)
    sink.wait_entered()
    source.wait_entered(), source.wait_entered()
    loop.abort(error)
    assert not loop.wait(0)
    sink.open()
    aborted(loop, error)
    assert ended == [1]
    loop.close()
    source.open()
    join_threads()


@pytest.mark.parametrize("how", ["end", "close", "never started"])
def test_a_run_that_is_over_is_not_aborted(pipeline, how):
    loop = Loop(pipeline()[0])
    if how != "never started":
        loop.start()
    if how == "end":
        loop.admit(2)
        loop.end()
        assert loop.wait(PATIENCE)
    else:
        loop.close()
    loop.abort(RankLost())
    assert loop.wait(0) is (how == "end")
    assert loop.failure is None
    loop.close()


def test_the_error_of_a_launch_that_came_first_stays(pipeline, bodies):
    with Loop(pipeline(compute=bodies.fail_at(0, ValueError("mine")))[0]) as loop:
        loop.admit(1)
        with raises(ActorFailed):
            loop.wait(PATIENCE)
        loop.abort(RankLost())
        with raises(ActorFailed):
            loop.wait(0)


def test_a_forked_child_cannot_abort_the_run_of_its_parent(pipeline, child_says):
    loop = Loop(pipeline()[0])
    assert child_says(lambda: loop.abort(RankLost())).startswith("ForkedRun: plan ")
    loop.close()
