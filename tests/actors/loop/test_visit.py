"""Visits to a run: where they are made, where they wait, and what becomes of them at the end."""

import threading

import pytest
from error_texts import raises

from actors.device.host import HostDevice
from actors.loop.admission import QuiescentCallback, QuiescentCondition
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.machine.errors import ActorFailed
from compiler.contract.plan_tables import ActorKind, RegisterKind

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""

ANYTIME = QuiescentCondition(frozenset())


def visit(loop, rest, look=lambda: None):
    made = QuiescentCallback(rest, look)
    loop.run_when_quiescent(made)
    return made


def test_a_visit_to_a_run_that_waits_is_made_on_its_own_thread(pipeline):
    bound, _ = pipeline()
    seen = []
    with Loop(bound) as loop:
        assert visit(loop, ANYTIME, lambda: seen.append(threading.current_thread().name)).wait()
        loop.admit(3)
        assert visit(loop, ANYTIME, lambda: seen.append(threading.current_thread().name)).wait()
        loop.end()
        assert loop.wait(PATIENCE)
    assert seen == ["actorflow-dispatch"] * 2


def test_a_visit_before_the_start_is_made_before_the_first_firing(pipeline, bodies):
    order = []

    def compute(inputs, outputs):
        order.append("step")

    bound, _ = pipeline(compute=compute)
    loop = Loop(bound)
    waiting = visit(loop, ANYTIME, lambda: order.append("visit"))
    with loop:
        loop.admit(1)
        loop.end()
        assert loop.wait(PATIENCE)
    assert waiting.wait()
    assert order == ["visit", "step"]


def test_what_a_visitor_raises_is_his_and_the_run_goes_on(pipeline):
    bound, _ = pipeline()

    def stumble():
        raise KeyError("mine")

    with Loop(bound) as loop:
        with raises(KeyError):
            visit(loop, ANYTIME, stumble).wait()
        loop.admit(2)
        loop.end()
        assert loop.wait(PATIENCE)
        assert loop.failure is None


@pytest.mark.parametrize("how", ["end", "close", "never started", "fail"])
def test_a_visit_to_a_run_that_is_over_is_dismissed(pipeline, bodies, how):
    bound, _ = pipeline(compute=bodies.fail_at(0, ValueError()) if how == "fail" else bodies.copy)
    loop = Loop(bound)
    if how != "never started":
        loop.start()
    if how == "fail":
        loop.admit(1)
        with pytest.raises(ActorFailed):
            loop.wait(PATIENCE)
    elif how == "end":
        loop.end()
        assert loop.wait(PATIENCE)
    if how in ("close", "never started"):
        loop.close()
    assert not visit(loop, ANYTIME, lambda: pytest.fail("made")).wait()
    assert loop.is_idle
    loop.close()


def test_the_thread_that_runs_a_plan_is_told_that_it_cannot_wait_for_itself(pipeline):
    errors = []

    def compute(inputs, outputs):
        with pytest.raises(RuntimeError) as caught:
            visit(loop, ANYTIME)
        errors.append(str(caught.value))

    bound, _ = pipeline(compute=compute)
    with Loop(bound) as loop:
        loop.admit(1)
        loop.end()
        assert loop.wait(PATIENCE)
    assert ["would wait for itself" in error for error in errors] == [True]


def test_a_listener_of_a_run_that_fails_meanwhile_is_let_go(pipeline, bodies):
    """The run waits for its listener, and the listener for a visit that cannot be made."""
    outcome, listens, failed = [], threading.Event(), threading.Event()

    def sink(tokens):
        listens.set()
        assert failed.wait(PATIENCE)
        never = QuiescentCondition(
            frozenset(), (((1, 1), (2, 1)),)
        )  # the step is always ahead of the sink
        outcome.append(visit(loop, never).wait())

    def compute(inputs, outputs):
        if inputs[0][0] == 1:
            assert listens.wait(PATIENCE)
            failed.set()
            raise ValueError

    bound, _ = pipeline(compute=compute, sink=sink)
    with Loop(bound) as loop:
        loop.admit(5)
        with pytest.raises(ActorFailed):
            loop.wait(PATIENCE)
    assert outcome == [False]


@pytest.fixture
def two_updates(plan_maker, fake_port, fake_kernel, bodies):
    """data -> first -> second -> log, each on a thread of its own; both count into `done`.

    `first` may be a step ahead of `second`, unless they are fenced. Returns the bound plan, `done`,
    and the gate of second.
    """

    def build(sink=lambda tokens: None, *, is_fenced=False):
        make = plan_maker()
        again = [make.register("again", RegisterKind.CONTROL)] if is_fenced else []
        registers = [make.edge(name, 1) for name in ("batch", "middle", "loss")]
        views = [make.field_view(r) for r in registers]
        make.actor("data", ActorKind.SOURCE, outputs=[(registers[0], 1)])
        done, gate = [0, 0], bodies.Gate()
        for index, name in enumerate(["first", "second"]):
            make.actor(
                name, ActorKind.COMPUTE, is_thread=True,
                inputs=[(registers[index], 1), *[(r, 1) for r in again if index == 1]],
                outputs=[(registers[index + 1], 1), *[(r, 1) for r in again if index == 0]],
                launches=[make.launch(name, [views[index]], [views[index + 1]])],
            )  # fmt: skip
        make.actor("log", ActorKind.SINK, inputs=[(registers[2], 1)])

        def first(inputs, outputs):
            done[0] += 1

        def second(inputs, outputs):
            gate(None)
            done[1] += 1

        ports = {"data": fake_port(bodies.Counting()), "log": fake_port(sink)}
        kernels = {"first": fake_kernel(first), "second": fake_kernel(second)}
        return load(make.plan(), ports, (HostDevice(kernels),)), done, gate

    return build


BOTH = QuiescentCondition(frozenset({1, 2}), (((1, 1), (2, 1)),))


def test_a_visit_waits_until_all_that_update_have_done_so_equally_often(two_updates):
    bound, done, gate = two_updates()
    seen = []
    with Loop(bound) as loop:
        assert visit(loop, BOTH, lambda: seen.append(tuple(done))).wait()
        loop.admit(1)
        gate.wait_entered()
        waiting = visit(loop, BOTH, lambda: seen.append(tuple(done)))
        assert visit(loop, ANYTIME, lambda: seen.append(tuple(done))).wait()
        gate.open()
        assert waiting.wait()
        loop.end()
        assert loop.wait(PATIENCE)
    assert seen == [(0, 0), (1, 0), (1, 1)]


def test_rounds_of_several_firings_count_as_one_when_all_are_done(two_updates):
    bound, done, gate = two_updates()
    whole = QuiescentCondition(frozenset({1, 2}), (((1, 2), (2, 2)),))
    seen = []
    with Loop(bound) as loop:
        loop.admit(1)
        gate.wait_entered()
        gate.open()
        assert visit(loop, BOTH).wait()
        waiting = visit(loop, whole, lambda: seen.append(tuple(done)))
        loop.admit(1)
        gate.wait_entered()
        gate.open()
        assert waiting.wait()
        loop.end()
        assert loop.wait(PATIENCE)
    assert seen == [(2, 2)]


def test_a_visit_is_made_at_the_end_of_a_step_though_the_next_one_is_about_to_start(
    two_updates,
):
    bound, done, gate = two_updates(is_fenced=True)
    seen = []
    with Loop(bound) as loop:
        loop.admit(5)
        gate.wait_entered()
        waiting = visit(loop, BOTH, lambda: seen.append(tuple(done)))
        gate.open(5)
        assert waiting.wait()
        loop.end()
        assert loop.wait(PATIENCE)
    assert seen == [(1, 1)]


def test_a_listener_that_holds_its_slot_can_visit(two_updates):
    seen = []

    def sink(tokens):
        assert visit(loop, BOTH, lambda: seen.append(tuple(done))).wait()

    bound, done, gate = two_updates(sink)
    gate.open(1)
    with Loop(bound) as loop:
        loop.admit(1)
        loop.end()
        assert loop.wait(PATIENCE)
    assert seen == [(1, 1)]


def test_a_visit_after_so_many_rounds_waits_for_them_and_for_rest(pipeline, bodies):
    gate, made = bodies.Gate(), []

    def compute(inputs, outputs):
        gate(inputs)

    bound, _ = pipeline(compute=compute)
    with Loop(bound) as loop:
        loop.admit(2)
        gate.wait_entered()
        rest = QuiescentCondition(frozenset({1, 2}), (((1, 1),),), least=2, is_idle=True)
        asked = QuiescentCallback(rest, lambda: made.append(loop.statistics().actors[1].firings))
        loop.run_when_quiescent(asked)
        gate.open(1)
        gate.wait_entered()
        assert made == []
        gate.open(1)
        assert asked.wait()
        assert made == [2]
        loop.end()
        assert loop.wait(PATIENCE)
