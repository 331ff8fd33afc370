"""A source that blocks in user code while its run is to end: the run ends without it."""

import threading

import pytest

from actors.loop.dispatch import LoopOptions
from actors.loop.loop import Loop

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


def blocking(port, gate):
    """Make a port's firings wait at a gate; a firing that was given up raises when it wakes."""
    is_inside, is_given_up = threading.Event(), threading.Event()
    body = port.body

    def fire(tokens):
        if is_given_up.is_set():
            return body(tokens)
        is_inside.set()
        gate(tokens)
        is_inside.clear()
        if is_given_up.is_set():
            raise OSError("too late")
        return body(tokens)

    def give_up():
        is_given_up.set()
        return is_inside.is_set()

    port.body, port.abandon, port.close = fire, give_up, lambda: None
    return port


def test_a_source_that_is_given_up_ends_the_run_as_if_it_had_no_more_data(
    pipeline, bodies, join_threads
):
    seen, gate = [], bodies.Gate()
    bound, ports = pipeline(bodies.Counting(), sink=lambda tokens: seen.append(tokens[0]["x"][0]))
    blocking(ports["data"], gate)
    loop = Loop(bound, LoopOptions(source_timeout_s=0.0, report=(said := []).append))
    loop.start()
    loop.admit(9)
    gate.open(2)
    for _ in range(3):
        gate.wait_entered()
    loop.give_up_sources()
    loop.give_up_sources()
    assert loop.wait(PATIENCE)
    assert seen == [0, 1]
    loop.close()
    (told,) = said
    assert "'data' is still blocked in its __next__" in told
    gate.open()
    join_threads()


def test_what_a_source_that_was_given_up_still_brings_is_ignored(pipeline, bodies):
    seen, gate, held = [], bodies.Gate(), bodies.Gate()

    def sink(tokens):
        held(tokens)
        seen.append(tokens[0]["x"][0])

    bound, ports = pipeline(bodies.Counting(), sink=sink)
    blocking(ports["data"], gate)
    with Loop(bound) as loop:
        loop.admit(9)
        gate.open()
        gate.wait_entered()
        gate.wait_entered()
        held.wait_entered()
        loop.give_up_sources()
        is_done = threading.Event()
        loop.call_soon_threadsafe(is_done.set)
        assert is_done.wait(PATIENCE)
        gate.open()  # its thread raises now, and the run goes on
        held.open()
        assert loop.wait(PATIENCE)
    assert seen == [0]


def test_a_source_without_a_way_to_give_it_up_is_waited_for(pipeline, bodies):
    gate = bodies.Gate()
    bound, _ = pipeline(gate)
    with Loop(bound) as loop:
        loop.admit(1)
        loop.end()
        gate.wait_entered()
        loop.give_up_sources()
        gate.open()
        assert loop.wait(PATIENCE)
        assert loop.statistics().actors[0].firings == 1


def test_a_sink_that_is_given_up_is_handed_nothing_more_and_the_run_ends(
    pipeline, bodies, join_threads
):
    seen, gate = [], bodies.Gate()

    def sink(tokens):
        seen.append(tokens[0]["x"][0])

    bound, ports = pipeline(bodies.Counting(), sink=sink)
    blocking(ports["log"], gate)
    ports["log"].body, told = skipping(ports["log"]), []
    loop = Loop(bound, LoopOptions(report=told.append))
    loop.start()
    loop.admit(4)
    loop.end()
    gate.open(1)
    for _ in range(2):
        gate.wait_entered()
    loop.give_up_sources()  # which it has none of to give up
    loop.give_up_sinks()
    assert loop.wait(PATIENCE)
    assert seen == [0]
    loop.close()
    assert told == ["the listener 'log' has not returned; its thread is abandoned"]
    gate.open()
    join_threads()


def skipping(port):
    """Return the body of a port whose firings do nothing once it was given up."""
    fire, is_given_up, give_up = port.body, [], port.abandon

    def skip(tokens):
        if not is_given_up:
            fire(tokens)

    def note():
        is_given_up.append(True)
        return give_up()

    port.abandon = note
    return skip


def test_a_run_that_is_cut_ends_with_what_runs_and_is_no_failure(pipeline, bodies):
    gate, seen = bodies.Gate(), []

    def compute(inputs, outputs):
        seen.append(inputs[0][0])
        gate(inputs)
        raise OSError("woken")

    bound, _ = pipeline(bodies.Counting(), compute=compute)
    with Loop(bound) as loop:
        loop.admit(5)
        gate.wait_entered()
        loop.expect_cut()
        loop.cut()
        gate.open()
        assert not loop.wait(PATIENCE)
        assert loop.is_cut
        assert loop.failure is None
    assert seen == [0]


def test_what_fails_where_a_cut_is_expected_ends_the_run_without_a_failure(pipeline, bodies):
    def compute(inputs, outputs):
        gate(inputs)
        raise OSError("woken by another rank")

    gate = bodies.Gate()
    bound, _ = pipeline(compute=compute)
    with Loop(bound) as loop:
        loop.admit(1)
        gate.wait_entered()
        loop.expect_cut()
        gate.open()
        assert not loop.wait(PATIENCE)
        loop.cut()
        assert loop.failure is None
