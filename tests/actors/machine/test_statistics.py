import threading
from collections import Counter
from itertools import count

import pytest

from actors.device.host import HostDevice
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.machine.history import ActorStatistics, Statistics, StreamStatistics, Waits
from actors.machine.transitions import State
from compiler.contract.plan_tables import ActorKind

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


def waits_of(actor):
    return {str(wait): wait.count for wait in actor.waits}


@pytest.mark.parametrize("num_slots", [1, 3])
def test_every_firing_is_counted_with_its_launches_and_with_one_cause(pipeline, num_slots):
    bound, _ = pipeline(num_slots=num_slots)
    with Loop(bound) as loop:
        loop.admit(40)
        loop.end()
        assert loop.wait(PATIENCE)
        statistics = loop.statistics()
    assert [actor.name for actor in statistics.actors] == ["data", "step", "log"]
    assert [actor.firings for actor in statistics.actors] == [40, 40, 40]
    assert [actor.launches for actor in statistics.actors] == [40, 120, 40]
    for actor in statistics.actors:
        assert sum(wait.count for wait in actor.waits) == 40
    possible = {
        "data": {"input admission", "register batch", "self"},
        "step": {"input batch", "register loss", "self"},
        "log": {"input loss", "self"},
    }
    for actor in statistics.actors:
        assert set(waits_of(actor)) <= possible[actor.name]


def test_a_slow_sink_shows_as_back_pressure_all_the_way_up(pipeline, bodies):
    gate = bodies.Gate()
    bound, _ = pipeline(sink=gate, num_slots=1)
    with Loop(bound) as loop:
        loop.admit(20)
        loop.end()
        for _ in range(20):
            gate.wait_entered()
            # Only when everything above the sink has come to a stop does it go on.
            taken = threading.Event()
            while [a for a in (0, 2) if loop.examine().states[a] is State.FIRING] != [2]:
                loop.call_soon_threadsafe(taken.set)
                assert taken.wait(PATIENCE)
                taken.clear()
            gate.open()
        assert loop.wait(PATIENCE)
        by_name = {actor.name: waits_of(actor) for actor in loop.statistics().actors}
    # The first two fill the slots.
    assert by_name["step"]["register loss"] >= 18
    assert by_name["data"]["register batch"] >= 18


def test_time_is_kept_by_actor_and_by_stream(pipeline):
    ticks = iter(range(1, 10**9))
    bound, _ = pipeline()
    with Loop(bound, LoopOptions(clock=lambda: next(ticks))) as loop:
        loop.admit(10)
        loop.end()
        assert loop.wait(PATIENCE)
        statistics = loop.statistics()
    by_stream = Counter()
    for actor in statistics.actors:
        by_stream[actor.stream] += actor.busy_ns
        assert actor.busy_ns >= actor.firings
    assert {stream.name: stream.busy_ns for stream in statistics.streams} == by_stream
    assert sum([actor.firings for actor in statistics.actors]) == 30


def test_statistics_may_be_asked_for_before_during_and_after_a_run(pipeline, bodies):
    gate = bodies.Gate()
    loop = Loop(pipeline(sink=gate)[0])
    assert loop.statistics().elapsed_ns == 0
    with loop:
        loop.admit(3)
        gate.wait_entered()
        during = loop.statistics()
        gate.permits.put("closed")
        loop.end()
        assert loop.wait(PATIENCE)
    after = loop.statistics()
    assert during.actors[2].firings == 1
    assert after.actors[2].firings == 3
    assert 0 < during.elapsed_ns < after.elapsed_ns
    assert loop.statistics() == after


@pytest.mark.parametrize("fetch_ns", [10, 0])
def test_what_a_stream_waits_for_its_source_is_told_from_what_it_computes(
    plan_maker, fake_port, fetch_ns
):
    now, loops = [0], []

    def fetch(tokens):
        taken = threading.Event()
        loops[0].call_soon_threadsafe(taken.set)  # after that the dispatcher has nothing to do
        assert taken.wait(PATIENCE)
        now[0] += fetch_ns

    def step(tokens):
        now[0] += 3

    make = plan_maker()
    batch = make.edge("batch", 1)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    make.actor("step", ActorKind.SINK, inputs=[(batch, 1)], is_thread=False)
    ports = {"data": fake_port(fetch), "step": fake_port(step)}
    bound = load(make.plan(), ports, [HostDevice({})])
    loops.append(Loop(bound, LoopOptions(clock=lambda: now[0])))
    loops[0].admit(100)
    loops[0].end()
    with loops[0] as loop:
        assert loop.wait(PATIENCE)
        statistics = loop.statistics()
    # Less where the clock moved before the dispatcher looked at it: here time stands still else.
    assert min(1, fetch_ns) <= statistics.source_wait_ns <= 100 * fetch_ns
    assert statistics.elapsed_ns == 100 * (fetch_ns + 3)
    assert statistics.source_wait() == statistics.source_wait_ns / statistics.elapsed_ns


def test_a_share_of_waiting_is_since_an_earlier_record_or_not_known():
    records = [Statistics(elapsed, (), (), waited) for elapsed, waited in ((0, 0), (100, 40))]
    assert [one.source_wait() for one in records] == [0.0, 0.4]
    assert Statistics(200, (), (), 130).source_wait(records[1]) == 0.9
    assert Statistics(200, (), ()).source_wait(records[1]) is None


def record(elapsed_ns, busy_ns, firings=4):
    actor = ActorStatistics("step", "compute", firings, busy_ns, 12, (Waits("input", "batch", 3),))
    stream = StreamStatistics("compute", busy_ns, 2)
    return Statistics(elapsed_ns, (actor,), (stream,))


def test_the_busy_share_is_of_the_whole_run_or_since_an_earlier_record():
    assert record(100, 40).busy_share(0) == 0.4
    assert record(200, 130).busy_share(0, since=record(100, 40)) == 0.9
    assert record(0, 0).busy_share(0) == 0.0
    assert record(100, 40).busy_share(0, since=record(100, 40)) == 0.0


def test_the_mean_of_a_firing_is_its_time_by_its_count():
    assert record(100, 40).actors[0].ns_per_firing == 10.0
    assert record(100, 0, firings=0).actors[0].ns_per_firing == 0.0


def test_a_plan_on_one_thread_that_was_admitted_before_its_start_is_timed_from_there(
    plan_maker, fake_port, bodies
):
    make = plan_maker()
    batch = make.edge("batch")
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], is_thread=False)
    make.actor("log", ActorKind.SINK, inputs=[(batch, 1)], is_thread=False)
    ports = {"data": fake_port(bodies.Counting()), "log": fake_port()}
    ticks = count()
    bound = load(make.plan(), ports, (HostDevice({}),))
    loop = Loop(bound, LoopOptions(clock=lambda: next(ticks)))
    loop.admit(2)
    loop.end()
    with loop:
        assert loop.wait(PATIENCE)
    assert [actor.busy_ns for actor in loop.statistics().actors] == [2, 2]
