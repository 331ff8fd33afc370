"""The simulated device keeps the order that streams and events give, and no other."""

import threading
from collections import defaultdict
from itertools import combinations
from random import Random

import pytest
from error_texts import raises

from actors.machine.protocol import DeviceFault
from actors.testing.simulated import LateSchedule, OperationKind, SimulatedDevice
from compiler.contract.errors import InternalError


def random_program(rng):
    """A host's calls: ("launch", stream, name), ("record" | "wait", stream, event), ..."""
    program = []
    for number in range(rng.randint(4, 12)):
        stream = rng.randrange(3)
        kind = rng.choice(["launch", "launch", "record", "wait", "synchronize"])
        if kind == "synchronize" and rng.random() < 0.7:
            kind = "launch"
        program.append((kind, stream, number if kind == "launch" else rng.randrange(2)))
    return program


def orders_of(program):
    """Vector clocks (Fidge 1988): the pairs of launches of which the first must come first.

    The host's own waits order what it calls afterwards. Shares nothing with the device.
    """
    clocks = [frozenset() for _ in range(3)]
    events = {}
    host = frozenset()
    orders = set()
    for kind, stream, number in program:
        clocks[stream] |= host
        if kind == "launch":
            orders |= {(earlier, number) for earlier in clocks[stream]}
            clocks[stream] |= {number}
        elif kind == "record":
            events[number] = clocks[stream]
        elif kind == "wait":
            clocks[stream] |= events.get(number, frozenset())
        else:
            host |= events.get(number, frozenset())
    return orders


def execute(program, seed):
    device, ran = SimulatedDevice(LateSchedule(Random(seed))), []
    streams = [device.make_stream(str(number)) for number in range(3)]
    events = [device.make_event() for _ in range(2)]
    for kind, stream, number in program:
        if kind == "launch":
            streams[stream].enqueue(lambda number=number: ran.append(number))
        elif kind == "record":
            streams[stream].record(events[number])
        elif kind == "wait":
            streams[stream].wait(events[number])
        else:
            events[number].synchronize()
    device.synchronize()
    return ran


def test_launches_run_in_an_order_that_streams_and_events_allow_and_in_every_such_order():
    for seed in range(60):
        program = random_program(Random(seed))
        orders = orders_of(program)
        names = sorted([number for kind, _, number in program if kind == "launch"])
        seen = defaultdict(set)
        for pace in range(60):
            ran = execute(program, pace)
            assert sorted(ran) == names
            for first, second in combinations(ran, 2):
                assert (second, first) not in orders, f"program {seed}, pace {pace}"
                seen[min(first, second), max(first, second)].add(first < second)
        for (first, second), directions in seen.items():
            if (first, second) not in orders:
                assert directions == {True, False}, f"{first} and {second} of program {seed}"


def test_a_seed_replays_a_run():
    program = [("launch", number % 3, number) for number in range(30)]
    assert execute(program, 5) == execute(program, 5)
    assert len({tuple(execute(program, pace)) for pace in range(20)}) == 20


@pytest.fixture
def lazy():
    """A device that executes nothing unasked."""
    return SimulatedDevice(LateSchedule(Random(0), eagerness=0.0))


def test_nothing_is_executed_before_somebody_waits_or_asks(lazy):
    ran = []
    stream, event = lazy.make_stream("s"), lazy.make_event()
    for number in range(5):
        stream.enqueue(lambda number=number: ran.append(number))
    stream.record(event)
    assert ran == []
    assert not event.is_done
    lazy._schedule._step("")
    assert ran == [0]
    event.synchronize()
    assert ran == [0, 1, 2, 3, 4]
    assert event.is_done


def test_an_event_that_was_never_recorded_holds_nobody(lazy):
    ran = []
    stream, event = lazy.make_stream("s"), lazy.make_event()
    assert event.is_done
    event.synchronize()
    stream.wait(event)
    stream.enqueue(lambda: ran.append(1))
    lazy.synchronize()
    assert ran == [1]


def test_a_wait_keeps_the_record_that_was_the_latest_when_it_was_put_on_the_stream(lazy):
    ran = []
    first, second, event = lazy.make_stream("first"), lazy.make_stream("second"), lazy.make_event()
    first.record(event)
    second.wait(event)
    second.enqueue(lambda: ran.append("second"))
    done = lazy.make_event()
    second.record(done)
    blocker = lazy.make_event()
    second.record(blocker)
    first.wait(blocker)
    first.record(event)
    done.synchronize()
    assert ran == ["second"]
    assert not event.is_done


def test_a_launch_that_raises_is_a_fault_from_then_on_and_hangs_nobody(lazy):
    ran, error = [], ValueError("no luck")

    def fail():
        raise error

    first, second, event = lazy.make_stream("first"), lazy.make_stream("second"), lazy.make_event()
    first.enqueue(lambda: ran.append("before"))
    first.enqueue(fail)
    first.enqueue(lambda: ran.append("after"))
    first.record(event)
    second.wait(event)
    second.enqueue(lambda: ran.append("elsewhere"))
    for wait in (event.synchronize, lazy.synchronize, event.synchronize):
        with raises(DeviceFault) as caught:
            wait()
        assert (caught.value.stream, caught.value.launch) == (first, 1)
        assert caught.value.__cause__ is error
    assert ran == ["before"]
    for call in (lambda: first.enqueue(fail), lambda: first.record(event)):
        with pytest.raises(DeviceFault):
            call()


def test_what_can_never_come_is_said_with_the_heads_of_the_queues(lazy):
    stream, event = lazy.make_stream("copy"), lazy.make_event()
    stream.record(event)
    stream.queue.clear()
    stream.wait(event)
    stream.enqueue(lambda: None)
    with raises(InternalError):
        lazy.synchronize()
    stream.queue.clear()
    with raises(InternalError):
        event.synchronize()


def test_an_event_of_another_device_is_refused(lazy):
    with raises(InternalError):
        lazy.make_stream("s").wait(object())


@pytest.mark.parametrize("eagerness", [-0.1, 1.0])
def test_an_eagerness_that_would_never_stop_is_refused(eagerness):
    with raises(ValueError):
        LateSchedule(Random(0), eagerness=eagerness)


def test_threads_that_feed_streams_of_their_own_see_each_stream_in_order():
    device, ran = SimulatedDevice(LateSchedule(Random(3))), [[] for _ in range(4)]
    streams = [device.make_stream(str(number)) for number in range(4)]
    events = [device.make_event() for _ in range(4)]

    def feed(number):
        for value in range(200):
            streams[number].wait(events[(number + 1) % 4])
            streams[number].enqueue(lambda value=value: ran[number].append(value))
            streams[number].record(events[number])
            if value % 7 == 0:
                events[number].synchronize()
                assert ran[number] == list(range(value + 1))

    threads = [threading.Thread(target=feed, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.synchronize()
    assert ran == [list(range(200))] * 4


@pytest.mark.parametrize("seed", range(6))
def test_a_launch_that_blocks_holds_its_own_stream_and_no_other(seed):
    schedule = LateSchedule(Random(seed))
    device, ran, peer_has_come = SimulatedDevice(schedule), [], threading.Event()
    comm, compute = device.make_stream("comm"), device.make_stream("compute")

    def meet():
        assert peer_has_come.wait(60)
        ran.append("met")

    schedule.put(comm, OperationKind.BLOCKING, launch=meet)
    comm.enqueue(lambda: ran.append("behind"))
    met = device.make_event()
    comm.record(met)
    compute.enqueue(lambda: (ran.append("beside"), peer_has_come.set()))
    compute.wait(met)
    compute.enqueue(lambda: ran.append("after"))
    device.synchronize()
    assert ran == ["beside", "met", "behind", "after"]


def test_what_a_blocked_launch_waits_for_may_be_put_by_another_thread():
    schedule = LateSchedule(Random(0), eagerness=0.0)
    device, peer_has_come, waits = SimulatedDevice(schedule), threading.Event(), threading.Event()
    comm, compute = device.make_stream("comm"), device.make_stream("compute")

    def meet():
        waits.set()
        assert peer_has_come.wait(60)

    schedule.put(comm, OperationKind.BLOCKING, launch=meet)
    host = threading.Thread(target=device.synchronize)
    host.start()
    assert waits.wait(60)
    compute.enqueue(peer_has_come.set)
    host.join(60)
    assert not host.is_alive()


def test_a_blocking_launch_that_raises_is_a_fault_as_any_other():
    schedule = LateSchedule(Random(0))
    device = SimulatedDevice(schedule)

    def fail():
        raise ValueError("no memory of this kind")

    schedule.put(device.make_stream("comm"), OperationKind.BLOCKING, launch=fail)
    with pytest.raises(DeviceFault, match="launch 0 on stream 'comm' raised ValueError: no memory"):
        device.synchronize()
