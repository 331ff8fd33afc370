"""How a run fails, through the real loop with fake kernels and ports; gates instead of sleeps."""

import threading

import pytest

from actors.errors import ActorFailed, SourceExhausted
from actors.load import load
from actors.loop import Loop
from compiler.errors import InternalError
from compiler.plan import ActorKind

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
        with pytest.raises(ActorFailed, match="firing 1"):
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


def test_a_plan_that_cannot_go_on_raises_instead_of_hanging(plan_maker, fake_port):
    make = plan_maker()
    direct, fast = make.edge("direct"), make.edge("fast", 3, "y")
    gathered = make.edge("gathered", 3)
    make.actor("a", ActorKind.SOURCE, outputs=[(direct, 1), (fast, 1)])
    make.actor("b", ActorKind.COMPUTE, inputs=[(fast, 3)], outputs=[(gathered, 3)])
    make.actor("c", ActorKind.COMPUTE, inputs=[(direct, 1), (gathered, 1)])
    with Loop(load(make.plan(), {"a": fake_port()}, {})) as loop:
        loop.admit(3)
        loop.end()
        with pytest.raises(InternalError, match="'b' waits for 2 more tokens of 'fast'"):
            loop.wait(PATIENCE)
