"""How a run fails and ends, through the real loop with fake kernels and ports; gates, no sleeps.

Where an order of messages matters that threads would have to meet by luck, the dispatcher is driven
by hand, without its thread.
"""

import threading

import pytest
from error_texts import raises

from actors.device.host import HostDevice
from actors.loop.dispatch import Dispatcher, LoopOptions
from actors.loop.failure import Failure
from actors.loop.inbox import COMMAND
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.machine.errors import ActorFailed, SourceExhausted
from actors.machine.machine import Machine
from actors.machine.protocol import DeviceFailure
from actors.machine.transitions import Message, State, message
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


def run_failing(bound):
    with Loop(bound) as loop:
        loop.admit(50)
        with pytest.raises(ActorFailed) as caught:
            loop.wait(PATIENCE)
        with pytest.raises(ActorFailed):
            loop.wait(PATIENCE)
        return caught.value


def test_a_failing_launch_is_named_with_op_scope_line_and_firing(pipeline, bodies):
    error = ZeroDivisionError("no")
    failed = run_failing(pipeline(compute=bodies.fail_at(3, error))[0])
    assert failed.__cause__ is error
    assert error.__traceback__ is not None
    assert (failed.actor, failed.op, failed.scope) == ("step", "op_compute", "scope.compute")
    assert (failed.source, failed.firing) == ("train.py:4", 3)
    first, *rest = str(failed).splitlines()
    assert first == (
        "actor 'step' failed in firing 3: launch 2 of 3, op 'op_compute' in 'scope.compute'"
        " (train.py:4) raised ZeroDivisionError: no"
    )
    assert rest[0] == "Last messages to the actor:"
    assert "  DONE step" in rest


@pytest.mark.parametrize(("name", "line"), [("data", "train.py:1"), ("log", "train.py:2")])
def test_a_failing_port_is_named_with_the_line_of_its_first_field(pipeline, name, line, bodies):
    body = bodies.fail_at(2, OSError("disk"))
    bound, _ = pipeline(**{"data": {"source": body}, "log": {"sink": body}}[name])
    failed = run_failing(bound)
    assert (failed.actor, failed.firing, failed.source) == (name, 2, line)
    assert f"its {failed.op} port ({line}) raised OSError: disk" in str(failed)


def test_an_exhausted_sink_or_launch_is_a_failure(pipeline, bodies):
    assert run_failing(pipeline(compute=bodies.fail_at(0, SourceExhausted()))[0]).actor == "step"
    assert run_failing(pipeline(sink=bodies.fail_at(0, SourceExhausted()))[0]).actor == "log"


@pytest.mark.parametrize("where", ["source", "compute", "sink"])
def test_what_is_no_exception_travels_too(pipeline, where, bodies):
    failed = run_failing(pipeline(**{where: bodies.fail_at(1, KeyboardInterrupt())})[0])
    assert isinstance(failed.__cause__, KeyboardInterrupt)


def test_a_failure_lets_a_running_sink_finish_and_starts_nothing_more(pipeline, bodies):
    gate, source = bodies.Gate(), bodies.Counting()
    finished = []

    def sink(tokens):
        gate(tokens)
        finished.append(tokens[0]["x"][0])

    def compute(inputs, outputs):
        bodies.copy(inputs, outputs)
        if inputs[0][0] == 1:
            gate.wait_entered()
            raise ValueError

    bound, ports = pipeline(source, compute, sink)
    with Loop(bound) as loop:
        loop.admit(50)
        assert not loop.wait(0)
        gate.open()
        with raises(ActorFailed):
            loop.wait(PATIENCE)
        assert finished == [0]
        assert ports["data"].num_closed == 1
        assert source.firing <= 4


def test_a_failure_releases_a_source_that_waits_for_data(pipeline, bodies):
    gate = bodies.Gate()
    gate.open(2)
    bound, _ = pipeline(gate, compute=bodies.fail_at(1, ValueError("bad batch")))
    assert run_failing(bound).actor == "step"


def test_the_first_failure_wins(pipeline):
    first = threading.Event()
    count = iter(range(9))

    def source(tokens):
        if next(count) == 1:
            first.wait(PATIENCE)
            raise OSError("second")

    def compute(inputs, outputs):
        raise ValueError("first")

    bound, ports = pipeline(source, compute)
    ports["data"].close = first.set
    assert str(run_failing(bound).__cause__) == "first"


def test_a_port_that_cannot_be_bound_for_the_flush_fails_its_actor(pipeline, bodies):
    bound, ports = pipeline(num_slots=3, rate=2, is_flushed=True)
    ports["log"].bind = bodies.fail_at(0, TypeError("no tokens"))
    failed = run_failing_at_end(bound)
    assert (failed.actor, str(failed.__cause__)) == ("log", "no tokens")


def run_failing_at_end(bound):
    with Loop(bound) as loop:
        loop.admit(3)
        loop.end()
        with pytest.raises(ActorFailed) as caught:
            loop.wait(PATIENCE)
        return caught.value


def test_a_plan_that_cannot_go_on_raises_instead_of_hanging(deadlocked):
    with Loop(deadlocked) as loop:
        loop.admit(3)
        loop.end()
        with raises(InternalError):
            loop.wait(PATIENCE)


# -- driven by hand --------------------------------------------------------------------------------


def by_hand(bound):
    return Dispatcher(bound, LoopOptions(clock=lambda: 0))


def take(dispatcher, kind, actor):
    """Let the dispatcher take the end of a firing that a worker ran."""
    dispatcher.workers.running.add(actor)
    dispatcher.take(message(kind, actor))


def run_to_the_end(dispatcher):
    """Deliver everything and end every firing that was started."""
    machine = dispatcher.machine
    while machine.outbox or machine.fireable or machine.detached:
        while machine.outbox:
            machine.receive(machine.outbox.pop(0))
        for started in (machine.fireable, machine.detached):
            while started:
                machine.receive(message(Message.DONE, started.popleft()))
    machine.validate()


@pytest.fixture
def uneven(plan_maker, fake_port):
    """Two sources of which the first fires three times a step, and a sink; driven by hand."""
    make = plan_maker()
    left, right = make.edge("left", 6, "left"), make.edge("right", 1, "right")
    make.actor("short", ActorKind.SOURCE, outputs=[(left, 1)], is_thread=False)
    make.actor("long", ActorKind.SOURCE, outputs=[(right, 1)], is_thread=False)
    make.actor("join", ActorKind.SINK, inputs=[(left, 3), (right, 1)], is_thread=False)
    ports = {name: fake_port() for name in ("short", "long", "join")}
    return by_hand(load(make.plan(), ports, (HostDevice({}),)))


def exhaust_after(dispatcher, firings):
    """Admit five steps, and let the first source end in its firing of that number."""
    dispatcher.admission.ask(5)
    dispatcher.machine.fireable.remove(0)
    for _ in range(firings):
        dispatcher.receive(message(Message.DONE, 0))
        dispatcher.machine.fireable.remove(0)
    dispatcher.receive(message(Message.EXHAUSTED, 0))


@pytest.mark.parametrize(("firings", "steps"), [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_a_step_that_was_begun_by_the_source_that_ends_is_begun_by_the_others_too(
    uneven, firings, steps
):
    exhaust_after(uneven, firings)
    run_to_the_end(uneven)
    assert uneven.machine.is_finished
    assert uneven.machine.firing_index(1) + 1 == steps
    assert uneven.machine.firing_index(2) + 1 == firings // 3


def test_steps_admitted_after_a_source_has_ended_change_nothing(uneven):
    exhaust_after(uneven, 4)
    uneven.admission.ask(3)
    run_to_the_end(uneven)
    assert uneven.machine.firing_index(1) + 1 == 2


def test_once_a_source_has_ended_a_run_that_stands_still_is_told(uneven):
    exhaust_after(uneven, 4)
    with raises(InternalError):
        uneven.check_progress()


def test_a_run_that_waits_is_stuck_only_at_its_end_with_nothing_under_way(pipeline):
    dispatcher = by_hand(pipeline()[0])
    dispatcher.check_progress()
    dispatcher.admission.end()
    dispatcher.workers.running.add(0)
    dispatcher.check_progress()
    dispatcher.workers.running.clear()
    dispatcher.inbox.call_soon_threadsafe(lambda: None)
    dispatcher.check_progress()
    dispatcher.take(dispatcher.inbox.get())
    with raises(InternalError):
        dispatcher.check_progress()


def test_a_halt_drops_all_that_was_started_and_has_not_begun(pipeline):
    dispatcher = by_hand(pipeline()[0])
    dispatcher.admission.ask(1)
    machine = dispatcher.machine
    machine.fireable.append(1)
    machine.flushing.append(2)
    worker = next(iter(dispatcher.workers))
    worker.put((0, ()))
    dispatcher.workers.running.add(0)
    dispatcher.halt()
    assert machine.is_halted
    assert [*machine.fireable, *machine.detached, *machine.flushing] == []
    assert not dispatcher.workers.running
    assert worker.drop() == ()


def test_a_flushed_firing_that_has_not_begun_is_dropped_when_another_fails(
    plan_maker, fake_port, bodies
):
    make = plan_maker()
    batch = make.edge("batch", 3)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], is_thread=False)
    make.actor("log", ActorKind.SINK, inputs=[(batch, 3)], is_thread=False, is_flushed=True)
    make.actor("bad", ActorKind.SINK, inputs=[(batch, 1)], is_thread=False)
    flushed = []
    ports = {
        "data": fake_port(),
        "log": fake_port(flushed.append),
        "bad": fake_port(bodies.fail_at(0, OSError("full"))),
    }
    with Loop(load(make.plan(), ports, (HostDevice({}),))) as loop:
        loop.call_soon_threadsafe(lambda: (loop.admit(1), loop.end()))
        with raises(ActorFailed):
            loop.wait(PATIENCE)
        assert loop.examine().states[1] is State.FLUSHING
    assert flushed == []


def test_what_fails_while_the_run_is_closed_is_no_failure(pipeline):
    dispatcher = by_hand(pipeline()[0])
    dispatcher.admission.ask(1)
    dispatcher.outcome.is_closing = True
    dispatcher.outcome.report(Failure(0, 0, 0, OSError("closed")))
    take(dispatcher, Message.FAILED, 0)
    assert dispatcher.outcome.failure is None
    assert dispatcher.machine.is_halted


def test_a_launch_that_close_breaks_is_no_failure(pipeline, bodies):
    entered, closed = threading.Event(), threading.Event()

    def compute(inputs, outputs):
        entered.set()
        closed.wait(PATIENCE)
        raise OSError("connection closed")

    bound, ports = pipeline(bodies.Counting(), compute)
    ports["log"].close = closed.set
    with Loop(bound) as loop:
        loop.admit(1)
        assert entered.wait(PATIENCE)
        loop.close()
        assert loop.wait(PATIENCE) is False


def test_a_command_is_there_before_the_dispatcher_is_told_of_it(pipeline):
    inbox, seen = by_hand(pipeline()[0]).inbox, []
    inbox.post = lambda code: seen.append((code, inbox.take_command()()))
    inbox.call_soon_threadsafe(lambda: seen.append("run"))
    assert seen == ["run", (COMMAND, None)]


def test_a_machine_that_does_not_add_up_at_the_end_fails_the_run(pipeline, monkeypatch):
    def validate(machine):
        raise InternalError("a slot is gone")

    monkeypatch.setattr(Machine, "validate", validate)
    with Loop(pipeline()[0]) as loop:
        loop.end()
        with raises(InternalError):
            loop.wait(PATIENCE)


class Late:
    """A bound plan whose device tells of a failure only when the run waits for it."""

    def __init__(self, bound):
        self.bound = bound

    def __getattr__(self, name):
        return getattr(self.bound, name)

    def synchronize(self):
        raise DeviceFailure("out of order", actor=1, firing=0, launch=1) from OSError("fault")


def test_a_run_ends_only_when_its_device_has_and_names_the_launch_that_failed_there(pipeline):
    with Loop(Late(pipeline()[0])) as loop:
        loop.admit(1)
        loop.end()
        with raises(ActorFailed):
            loop.wait(PATIENCE)
        assert loop.examine().is_halted


def test_whatever_aborts_a_run_closes_its_sources(pipeline):
    bound, ports = pipeline()
    dispatcher, error = by_hand(bound), RuntimeError("no device")
    dispatcher.abort(error)
    dispatcher.abort(RuntimeError("another"))
    assert dispatcher.outcome.failure is error
    assert dispatcher.machine.is_halted
    assert (ports["data"].num_closed, ports["log"].num_closed) == (1, 0)
