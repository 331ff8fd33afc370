"""Steps that are asked for, and the window in which they may begin."""

import threading
from itertools import permutations
from queue import SimpleQueue

import pytest
from error_texts import raises
from machines import settle

from actors.device.host import HostDevice
from actors.loop.admission import Admission
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, message
from compiler.contract.plan_tables import ActorKind, RegisterKind

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


@pytest.fixture
def machine():
    """Two sources of which the first fires twice a step, and a sink that never holds them up."""
    edges = [Edge("left", 0, 2, 1, 2, 64), Edge("right", 1, 2, 1, 1, 64)]
    return Machine(MachineTable.from_edges(["left", "right", "join"], edges, sources=[0, 1]))


def begun(machine):
    """Let everything fire that may; return how many steps each source has begun."""
    settle(machine)
    while machine.fireable:
        machine.receive(message(Message.DONE, machine.fireable.popleft()))
        settle(machine)
    left, right = machine.firing_index(0) + 1, machine.firing_index(1) + 1
    return left / 2, right


def test_without_a_window_every_step_begins_that_is_asked_for(machine):
    admission = Admission(machine, None)
    admission.ask(3)
    assert begun(machine) == (3, 3)
    admission.ask(2)
    assert begun(machine) == (5, 5)
    assert not admission.is_over


def test_no_step_begins_beyond_the_window_or_unasked(machine):
    admission = Admission(machine, 2)
    admission.ask(5)
    assert begun(machine) == (2, 2)
    admission.grant(4, is_last=False)
    assert begun(machine) == (4, 4)
    admission.grant(9, is_last=False)
    assert begun(machine) == (5, 5)
    admission.ask(1)
    assert begun(machine) == (6, 6)


def test_a_window_of_nothing_holds_a_run_before_its_first_step(machine):
    admission = Admission(machine, 0)
    admission.ask(1)
    assert begun(machine) == (0, 0)


@pytest.mark.parametrize("order", [*permutations([1, 3, 3, 2])])
def test_grants_may_come_twice_late_and_in_any_order(machine, order):
    admission = Admission(machine, 0)
    admission.ask(10)
    for steps in order:
        admission.grant(steps, is_last=False)
    assert begun(machine) == (3, 3)


def test_a_run_whose_end_is_asked_for_ends_when_all_it_asked_for_is_granted(machine):
    admission = Admission(machine, 1)
    admission.ask(3)
    admission.end()
    assert begun(machine) == (1, 1)
    assert not admission.is_over
    admission.grant(3, is_last=False)
    assert begun(machine) == (3, 3)
    assert admission.is_over
    assert machine.is_finished


@pytest.mark.parametrize(("asked", "last", "done"), [(5, 3, 3), (1, 3, 3), (5, 0, 2)])
def test_after_the_last_grant_the_run_ends_there_or_where_it_is_already(machine, asked, last, done):
    admission = Admission(machine, 2)
    admission.ask(asked)
    before = begun(machine)
    admission.grant(last, is_last=True)
    admission.ask(5)
    assert begun(machine) == (done, done)
    assert max(before) <= done
    assert admission.is_over
    assert machine.is_finished
    admission.grant(9, is_last=False)
    admission.end()
    assert begun(machine) == (done, done)


def test_nothing_is_admitted_once_a_source_had_no_more_data(machine):
    admission = Admission(machine, 2)
    admission.ask(5)
    machine.fireable.remove(0)
    machine.receive(message(Message.EXHAUSTED, 0))
    admission.end_with(0)
    admission.grant(5, is_last=False)
    assert max(begun(machine)) <= 1
    assert admission.is_over


@pytest.mark.usefixtures("no_thread_is_left")
def test_a_run_goes_as_far_as_its_window_and_on_when_more_is_granted(pipeline, bodies):
    source, gate, seen = bodies.Counting(), bodies.Gate(), []

    def sink(tokens):
        seen.append(tokens[0]["x"][0])
        gate(tokens)

    bound, _ = pipeline(source, sink=sink)
    with Loop(bound, LoopOptions(window=1)) as loop:
        loop.admit(50)
        for granted in (1, 2, 5):
            loop.grant(granted)
            while len(seen) < granted:
                gate.wait_entered()
                gate.open()
            assert source.firing == granted
        loop.grant(7, is_last=True)
        gate.open(50)
        assert loop.wait(PATIENCE)
    assert seen == [*range(7)]


def test_a_grant_of_less_than_nothing_is_refused(pipeline):
    loop = Loop(pipeline()[0])
    with raises(ValueError):
        loop.grant(-1)
    loop.close()


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_as_many_batches_are_in_flight_as_the_plan_has_credits(
    plan_maker, fake_port, fake_kernel, bodies, num_in_flight
):
    make, gate, begun = plan_maker(), bodies.Gate(), SimpleQueue()
    batch, mid = make.edge("batch", 8), make.edge("mid", 8)
    fence = make.register("fence", RegisterKind.CONTROL, num_in_flight, size=0)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    for name, inputs, output in (("first", [batch, fence], mid), ("second", [mid], fence)):
        make.actor(
            name, ActorKind.COMPUTE, inputs=[(r, 1) for r in inputs], outputs=[(output, 1)],
            launches=[make.launch(name)], is_thread=True,
        )  # fmt: skip
    kernels = {
        "first": fake_kernel(lambda inputs, outputs: begun.put(None)),
        "second": fake_kernel(lambda inputs, outputs: gate(None)),
    }
    initial = {"fence": num_in_flight}
    ports = {"data": fake_port(bodies.Counting())}
    plan = make.plan()
    bound = load(plan, ports, (HostDevice(kernels),), table=MachineTable.of(plan, initial))
    with Loop(bound) as loop:
        loop.admit(8)
        gate.wait_entered()
        for _ in range(num_in_flight):
            begun.get(timeout=PATIENCE)
        taken = threading.Event()
        loop.call_soon_threadsafe(taken.set)
        assert taken.wait(PATIENCE)
        assert begun.empty()
        gate.permits.put("closed")
        loop.end()
        assert loop.wait(PATIENCE)
