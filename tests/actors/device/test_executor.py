"""An executor gives the host's numbers at every pace of the device, and says what failed."""

from dataclasses import replace
from random import Random

import pytest
from error_texts import raises

from actors.device.executor import EventRing, EventWaiter
from actors.machine.protocol import DeviceFailure, DeviceFault
from actors.race.waits import EventWait
from actors.testing.simulated import LateSchedule
from compiler.contract.errors import InternalError
from compiler.contract.placement import Device, DeviceKind


@pytest.mark.parametrize("block", range(4))
def test_every_pace_of_the_device_gives_the_numbers_of_the_host(block, graphs, make_random):
    for seed in range(block * 500, block * 500 + 500):
        assert graphs.is_equal_for(seed, make_random), f"seed {seed} gives other numbers"


def test_slots_of_a_consumer_that_ended_early_are_waited_for_as_far_as_it_came(graphs):
    table, admitted = graphs.early_end()
    executor = graphs.make_executor(table, graphs.late(Random(0)))
    assert [w.actor for w in executor.waits.all[2]] == [3, 4]
    assert [w.actor for w in executor.waits.needed[2]] == [4]
    assert all([graphs.is_equal(table, admitted, Random(seed)) for seed in range(200)])


def test_streams_of_several_devices_wait_for_one_another(graphs, make_random):
    for seed in range(400):
        assert graphs.is_equal_for(seed, make_random, num_devices=2 + seed % 2), f"seed {seed}"


def test_a_device_of_another_kind_is_waited_for_by_the_host(graphs, make_random):
    """As if one were CUDA's: its streams must never be given events of the other."""
    for seed in range(100):
        rng = Random(seed)
        table, admitted = graphs.random_case(rng, make_random)
        devices = graphs.late(rng) + graphs.late(rng)
        devices[1].device = Device(DeviceKind.CUDA)
        executor = graphs.make_executor(table, devices)
        assert graphs.drive(executor, admitted, rng) == graphs.run_on_host(table, admitted)


def test_an_actor_that_needs_no_device_runs_its_own_chain(graphs):
    executor = graphs.make_executor(graphs.ping_pong(), graphs.late(Random(0)))
    chain = (lambda: None, lambda: None)
    assert executor.bind_chain(0, chain) == chain
    data, *_ = executor.bind(0, (chain,))
    assert data is not chain  # it waits for the slots that `first` frees
    table = graphs.ping_pong()
    on_host = replace(table, streams=tuple([graphs.HOST + s for s in range(3)]))
    executor = graphs.make_executor(on_host, [])
    assert all([executor.bind(actor, (chain,))[0] is chain for actor in range(3)])


def test_a_chain_of_the_host_that_waits_still_says_which_launch_is_on(graphs):
    class Joined:
        num_launches, running = 3, 2

        def __call__(self):
            raise Broken("no luck")

    executor = graphs.make_executor(graphs.ping_pong(), graphs.late(Random(0), eagerness=0.0))
    (gated, last) = executor.bind(0, ((Joined(), max),))[0]
    assert (gated.num_launches, gated.running, last) == (3, 0, max)  # not the last firing's
    with pytest.raises(Broken):
        gated()
    assert gated.running == 2


# -- how far ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_ahead", [1, 2, 3])
def test_a_device_that_does_nothing_unasked_is_fed_so_many_steps_and_no_more(max_ahead, graphs):
    most = [0, 0, 0]
    device = graphs.late(Random(1), eagerness=0.0)
    executor = graphs.make_executor(graphs.ping_pong(num_slots=8), device, max_ahead)

    def look(actor):
        most[:] = [max(n, executor.num_unfinished(a)) for a, n in enumerate(most)]

    graphs.drive(executor, {0: 30}, Random(3), look=look)
    assert most == [0, max_ahead, max_ahead]
    assert [executor.num_unfinished(a) for a in range(3)] == [0, 0, 0]


def test_no_graph_at_any_pace_is_further_ahead_than_its_windows(graphs, make_random):
    most = 0
    for seed in range(150):
        rng = Random(seed)
        table, admitted = graphs.random_case(rng, make_random)
        executor = graphs.make_executor(table, graphs.late(rng), rng.randint(1, 3))
        windows = [throttle.window for throttle in executor.waits.throttles] or [
            0
        ] * table.num_actors

        def look(actor, executor=executor, windows=windows):
            nonlocal most
            assert executor.num_unfinished(actor) <= windows[actor]
            most = max(most, executor.num_unfinished(actor))

        graphs.drive(executor, admitted, rng, look=look)
    assert most >= 3


def test_less_than_one_step_ahead_is_refused(graphs):
    with raises(ValueError):
        graphs.make_executor(graphs.ping_pong(), graphs.late(Random(0)), 0)


# -- failures ------------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.fixture
def breaking(graphs):
    """Bodies of which one launch raises, where it is executed: (actor, firing, launch)."""

    class Breaking(graphs.Bodies):
        def __init__(self, table, *place):
            super().__init__(table)
            self.place = place

        def chain(self, actor, counts=None):
            def watched(number, launch):
                def body():
                    if (actor, self.firings[actor], number) == self.place:
                        raise Broken("no luck")
                    launch()

                return body

            launches = super().chain(actor, counts)
            return tuple([watched(number, launch) for number, launch in enumerate(launches)])

    return Breaking


@pytest.mark.parametrize("seed", range(60))
def test_a_launch_that_fails_on_the_device_is_named_wherever_it_is_found(seed, graphs, breaking):
    rng = Random(seed)
    table = graphs.ping_pong(num_slots=3)
    actor, firing, launch = rng.choice([1, 2]), rng.randint(0, 9), rng.randint(0, 4)
    executor = graphs.make_executor(table, graphs.late(rng), rng.randint(1, 3))
    with pytest.raises(DeviceFailure) as caught:
        graphs.drive(executor, {0: 10}, rng, bodies=breaking(table, actor, firing, launch))
    error = caught.value
    assert (error.actor, error.firing, error.launch) == (actor, firing, launch)
    assert isinstance(error.__cause__, Broken)
    assert str(error) == (
        f"launch {launch + 1} of 5 of actor {table.names[actor]!r} failed on the device in firing"
        f" {firing}: no luck"
    )


def test_a_launch_of_the_host_that_fails_stays_what_it_is(graphs, breaking):
    table = graphs.ping_pong()
    executor = graphs.make_executor(table, graphs.late(Random(0)))
    with pytest.raises(Broken):
        graphs.drive(executor, {0: 5}, Random(0), bodies=breaking(table, 0, 3, 0))


def test_a_launch_that_cannot_be_enqueued_is_named(graphs):
    class Refusing(LateSchedule):
        def make_stream(self, device, name):
            stream = super().make_stream(device, name)
            enqueue, calls = stream.enqueue, iter(range(1000))

            def refuse(launch):
                if next(calls) == 7:
                    raise Broken("too many threads per block")
                enqueue(launch)

            stream.enqueue = refuse
            return stream

    devices = graphs.late(Random(0), schedule_type=Refusing)
    executor = graphs.make_executor(graphs.ping_pong(), devices)
    with raises(DeviceFailure) as caught:
        graphs.drive(executor, {0: 10}, Random(0))
    assert (caught.value.firing, caught.value.launch) == (1, 2)
    assert isinstance(caught.value.__cause__, Broken)


def test_a_fault_of_which_the_device_cannot_tell_the_place_comes_with_the_suspects(graphs):
    class Dead(LateSchedule):
        def synchronize(self, device):
            raise DeviceFault("an illegal memory access")

    devices = graphs.late(Random(0), schedule_type=Dead, eagerness=0.0)
    executor = graphs.make_executor(graphs.ping_pong(), devices)
    with pytest.raises(DeviceFault, match="illegal memory access") as caught:
        graphs.drive(executor, {0: 2}, Random(0))
    assert caught.value.__notes__ == [
        "enqueued and not ended: 'first' firings 0 to 1; 'second' firings 0 to 1"
    ]


# -- the end of a run, by hand -------------------------------------------------------------------


class Event:
    is_done = False


def gate_on(firings, *, is_input):
    """A gate of one wait for the firing before, on an actor that enqueued some firings."""
    ring = EventRing("maker", tuple([Event() for _ in range(4)]))
    for firing in range(firings):
        ring.firings[firing % 4] = firing
    ring.count = firings
    waited = []
    wait = EventWait(0, 1, -1, 1, 0, is_input=is_input)
    return EventWaiter((wait,), (wait,), (ring,), [-1], (waited.append,)), ring, waited


def test_a_token_that_was_never_enqueued_is_refused_and_a_slot_is_not():
    gate, _, _ = gate_on(2, is_input=True)
    with raises(InternalError):
        gate.wait_for_inputs(3)
    gate, ring, waited = gate_on(2, is_input=False)
    gate.wait_for_inputs(3)
    assert waited == [ring.events[1]]


def test_what_was_waited_for_at_the_end_is_not_waited_for_again():
    gate, ring, waited = gate_on(2, is_input=False)
    gate.wait_at_end(2, gate.every)
    gate.wait_at_end(2, gate.every)
    gate.wait_for_inputs(1)
    assert waited == [ring.events[1]]
    assert gate.known == [1]


def test_unfinished_firings_are_no_more_than_there_were_or_than_events():
    for firings, expected in ((0, 0), (3, 3), (9, 4)):
        assert gate_on(firings, is_input=True)[1].num_unfinished == expected


def test_a_fault_that_comes_up_while_a_launch_is_enqueued_is_not_lost(graphs):
    executor = graphs.make_executor(graphs.ping_pong(num_slots=2), graphs.late(Random(0)))

    def refuse():
        raise DeviceFault("an earlier launch failed")

    (fire,) = executor.bind(1, ((refuse,),))[0]
    with raises(DeviceFault):
        fire()
