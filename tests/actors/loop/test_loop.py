"""The real loop with fake kernels and ports; gates instead of sleeps."""

import gc
import logging
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from error_texts import raises

from actors.device.host import HostDevice
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.loop.timeline import Timeline
from actors.machine.errors import ActorFailed, SourceExhausted
from compiler.contract.errors import ActorflowError, InternalError
from compiler.contract.plan_tables import ActorKind

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


def firings(loop):
    return tuple(actor.firings for actor in loop.statistics().actors)


def run(bound, steps, **options):
    with Loop(bound, LoopOptions(**options)) as loop:
        if steps:
            loop.admit(steps)
        loop.end()
        assert loop.wait(PATIENCE)
        return loop


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 7, 50])
def test_every_batch_arrives_once_and_in_order(pipeline, steps, num_slots):
    seen = []
    bound, _ = pipeline(sink=lambda tokens: seen.append(tokens[0]["x"][0]), num_slots=num_slots)
    loop = run(bound, steps)
    assert seen == list(range(steps))
    assert firings(loop) == (steps, steps, steps)


def test_each_host_actor_runs_on_its_own_thread_and_compute_on_the_dispatcher(pipeline):
    names = {}

    def note(actor):
        names[actor] = threading.current_thread().name

    run(
        pipeline(
            source=lambda tokens: note("data"),
            compute=lambda inputs, outputs: note("step"),
            sink=lambda tokens: note("log"),
        )[0],
        2,
    )
    assert names == {"data": "actorflow-data", "step": "actorflow-dispatch", "log": "actorflow-log"}


def test_steps_may_be_admitted_while_the_plan_runs(pipeline):
    arrived = SimpleQueue()
    bound, _ = pipeline(sink=lambda tokens: arrived.put(tokens[0]["x"][0]))
    with Loop(bound) as loop:
        for step in range(5):
            loop.admit(1)
            assert arrived.get(timeout=PATIENCE) == step
        loop.end()
        assert loop.wait(PATIENCE)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_blocked_sink_holds_the_source_back_at_full_slots(pipeline, num_slots, bodies):
    gate, source = bodies.Gate(), bodies.Counting()
    produced = SimpleQueue()

    def produce(tokens):
        source(tokens)
        produced.put(None)

    bound, _ = pipeline(produce, sink=gate, num_slots=num_slots)
    with Loop(bound) as loop:
        loop.admit(100)
        gate.wait_entered()
        for _ in range(2 * num_slots):
            produced.get(timeout=PATIENCE)
        # Slots of loss are full, one of them in the sink's hands; slots of batch are full.
        barrier = threading.Event()
        loop.call_soon_threadsafe(barrier.set)
        assert barrier.wait(PATIENCE)
        assert source.firing == 2 * num_slots
        gate.open()
        produced.get(timeout=PATIENCE)
        assert source.firing == 2 * num_slots + 1
        gate.permits.put("closed")
        loop.end()
        assert loop.wait(PATIENCE)
    assert source.firing == 100


def test_an_exhausted_source_ends_the_run_cleanly(pipeline, bodies):
    seen = []
    bound, _ = pipeline(bodies.Counting(4), sink=lambda tokens: seen.append(tokens[0]["x"][0]))
    with Loop(bound) as loop:
        loop.admit(1000)
        assert loop.wait(PATIENCE)
        loop.admit(5)
        assert firings(loop) == (4, 4, 4)
    assert seen == [0, 1, 2, 3]


def test_the_other_source_stops_where_the_exhausted_one_did(plan_maker, fake_port, bodies):
    make = plan_maker()
    left, right = make.edge("left", 2, "left"), make.edge("right", 2, "right")
    make.actor("short", ActorKind.SOURCE, outputs=[(left, 1)])
    make.actor("long", ActorKind.SOURCE, outputs=[(right, 2)], is_thread=False)
    make.actor("join", ActorKind.SINK, inputs=[(left, 1), (right, 1)])

    ports = {
        "short": fake_port(bodies.fail_at(6, SourceExhausted())),
        "long": fake_port(),
        "join": fake_port(),
    }
    with Loop(load(make.plan(), ports, (HostDevice({}),))) as loop:
        loop.admit(10**12)
        loop.end()
        assert loop.wait(PATIENCE)
        assert firings(loop)[0] == 6
        assert firings(loop)[2] == 6
        assert 3 <= firings(loop)[1] <= 5


def test_an_inline_source_may_be_exhausted_too(plan_maker, fake_port, bodies):
    make = plan_maker()
    batch = make.edge("batch", 2)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)], is_thread=False)
    make.actor("log", ActorKind.SINK, inputs=[(batch, 1)], is_thread=False)
    ports = {"data": fake_port(bodies.Counting(3)), "log": fake_port()}
    assert firings(run(load(make.plan(), ports, (HostDevice({}),)), 9)) == (3, 3)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_flushed_sink_gets_the_rest_at_the_end(pipeline, steps):
    seen = []
    bound, _ = pipeline(
        sink=lambda tokens: seen.append([t["x"][0] for t in tokens]),
        num_slots=3, rate=2, is_flushed=True,
    )  # fmt: skip
    run(bound, steps)
    whole = [[2 * i, 2 * i + 1] for i in range(steps // 2)]
    assert seen == [*whole, [steps - 1] if steps % 2 else []]


def test_a_flushed_copy_takes_a_last_snapshot(snapshots):
    bound, saved = snapshots(is_flushed=True)
    run(bound, 8)
    assert saved == [2, 5, 7]


# -- life and death --------------------------------------------------------------------------------


@pytest.fixture
def let_go(join_threads):
    """Return a function that opens a gate, and waits for the threads that a loop left behind it."""

    def open_and_join(gate):
        gate.open()
        join_threads()

    return open_and_join


def test_close_releases_a_source_that_waits_for_data(pipeline, bodies):
    gate, said = bodies.Gate(), []
    bound, _ = pipeline(gate)
    loop = Loop(bound, LoopOptions(report=said.append))
    loop.start()
    loop.admit(1)
    gate.wait_entered()
    loop.close()
    assert loop.wait(PATIENCE) is False
    assert said == []


def test_close_does_not_take_a_sources_complaint_for_a_failure(pipeline):
    entered, closed = threading.Event(), threading.Event()

    def source(tokens):
        entered.set()
        closed.wait(PATIENCE)
        raise OSError("connection closed")

    bound, ports = pipeline(source)
    ports["data"].close = closed.set
    with Loop(bound) as loop:
        loop.admit(1)
        assert entered.wait(PATIENCE)
        loop.close()
        assert loop.wait(PATIENCE) is False


@pytest.mark.parametrize("is_started", [False, True])
def test_close_is_idempotent_closes_every_port_once_and_lets_the_arena_go(
    pipeline, arenas, is_started
):
    bound, ports = pipeline()
    arena = arenas.of(ports)
    loop = Loop(bound)
    if is_started:
        loop.start()
    loop.close()
    loop.close()
    assert [port.num_closed for port in ports.values()] == [1, 1]
    assert loop.wait(0) is False
    with raises(RuntimeError):
        loop.start()
    with raises(RuntimeError):
        loop.admit(1)
    bound.release()
    gc.collect()
    assert arena() is None


def test_close_after_the_end_keeps_the_result(pipeline):
    loop = run(pipeline()[0], 3)
    assert loop.wait(0) is True


def test_close_passes_on_what_a_port_raises_after_all_threads_ended(pipeline, bodies):
    bound, ports = pipeline()
    ports["log"].close = bodies.fail_at(0, OSError("flush failed"))
    loop = Loop(bound)
    loop.start()
    with pytest.raises(OSError, match="flush failed"):
        loop.close()
    assert ports["data"].num_closed == 1


def test_close_names_a_sink_that_does_not_let_its_thread_go(pipeline, bodies, let_go):
    gate = bodies.Gate()
    bound, ports = pipeline(sink=gate)
    ports["log"].close = lambda: None
    loop = Loop(bound, LoopOptions(join_timeout_s=0.0))
    loop.start()
    loop.admit(1)
    gate.wait_entered()
    with raises(ActorflowError):
        loop.close()
    let_go(gate)


def test_a_bound_plan_can_run_again_in_a_new_loop(pipeline):
    seen = []
    bound, _ = pipeline(sink=lambda tokens: seen.append(tokens[0]["x"][0]))
    run(bound, 3)
    run(bound, 2)
    assert seen == [0, 1, 2, 3, 4]


def test_the_hook_runs_once_before_wait_returns_and_may_close_the_loop(pipeline):
    calls = []

    def finish():
        calls.append(threading.current_thread().name)
        loop.close()

    loop = Loop(pipeline()[0], LoopOptions(on_finished=finish))
    loop.start()
    loop.end()
    assert loop.wait(PATIENCE)
    assert calls == ["actorflow-dispatch"]
    loop.threads()[0].join(PATIENCE)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_failure_is_told_while_a_sink_still_waits_for_something(pipeline, is_own):
    told, is_released, error = [], threading.Event(), ValueError("step")

    def compute(*arguments):
        if is_own:
            raise error
        loop.abort(error)

    def sink(*arguments):
        assert is_released.wait(PATIENCE)

    def release(failure):
        told.append(failure)
        is_released.set()

    computed = iter([lambda *a: None, compute])
    bound, _ = pipeline(compute=lambda *a: next(computed)(*a), sink=sink)
    with Loop(bound, LoopOptions(on_failure=release)) as loop:
        loop.admit(5)
        with pytest.raises((ActorFailed, ValueError)):
            loop.wait(PATIENCE)
        loop.abort(RuntimeError("later"))
    assert told == [loop.failure]
    assert error in (told[0], told[0].__cause__)


def test_what_the_hook_raises_fails_the_run(pipeline, bodies):
    bound, _ = pipeline()
    with Loop(bound, LoopOptions(on_finished=bodies.fail_at(0, ValueError("hook")))) as loop:
        loop.end()
        with pytest.raises(ValueError, match="hook"):
            loop.wait(PATIENCE)


def test_fewer_than_one_step_is_refused_and_wait_gives_up_after_its_timeout(pipeline):
    with Loop(pipeline()[0]) as loop:
        with raises(ValueError):
            loop.admit(0)
        assert loop.wait(0) is False


def test_timeline_and_statistics_hold_every_firing(pipeline):
    ticks = iter(range(1, 100_000))
    timeline = Timeline(64)
    bound, _ = pipeline()
    loop = run(bound, 5, timeline=timeline, clock=lambda: next(ticks))
    rows = timeline.rows()
    assert sorted(row[:2] for row in rows) == [(a, f) for a in range(3) for f in range(5)]
    assert all(start < end for _, _, start, end in rows)
    statistics = loop.statistics()
    for actor, kept in enumerate(statistics.actors):
        assert kept.busy_ns == sum(e - s for a, _, s, e in rows if a == actor)
    assert statistics.elapsed_ns == loop.statistics().elapsed_ns >= max(row[3] for row in rows)


def test_the_dispatchers_thread_is_prepared_once_before_its_first_launch(pipeline):
    seen = []
    bound, _ = pipeline(compute=lambda inputs, outputs: seen.append("launch"))
    run(bound, 2, prepare_thread=lambda: seen.append(threading.current_thread().name))
    assert seen == ["actorflow-dispatch", "launch", "launch"]


def test_what_the_preparation_raises_fails_the_run_before_any_launch(pipeline):
    def refuse():
        raise RuntimeError("no such device")

    launched = []
    bound, _ = pipeline(compute=lambda inputs, outputs: launched.append(1))
    with Loop(bound, LoopOptions(prepare_thread=refuse)) as loop:
        loop.admit(1)
        loop.end()
        with pytest.raises(RuntimeError, match="no such device"):
            loop.wait(PATIENCE)
    assert not launched


# -- sources that block and cannot be closed -------------------------------------------------------

LEFT_BEHIND = "the data source 'data' is still blocked in its __next__; its thread is abandoned"


@pytest.fixture
def deaf(pipeline, bodies, let_go):
    """Start a loop whose source blocks in its second firing, deaf to close; then `where` fails."""
    gate = bodies.Gate()
    gate.open()

    def build(where, *, wake=lambda tokens: None, **options):
        firings = iter(range(9))

        def source(tokens):
            gate(tokens)
            if next(firings) == 1:
                wake(tokens)

        def fail(*_):
            gate.wait_entered()
            gate.wait_entered()
            raise ValueError("no")

        bound, ports = pipeline(source, **{where: fail})
        ports["data"].close = lambda: None
        loop = Loop(bound, LoopOptions(source_timeout_s=0.0, **options))
        loop.start()
        loop.admit(9)
        return loop, bound

    yield SimpleNamespace(start=build, wake_up=lambda: let_go(gate))
    let_go(gate)


@pytest.mark.parametrize("where", ["compute", "sink"])
def test_a_failure_is_shown_while_a_source_blocks_that_cannot_be_closed(deaf, where):
    said, finished = [], []
    loop, _ = deaf.start(where, report=said.append, on_finished=lambda: finished.append(1))
    with raises(ActorFailed):
        loop.wait(PATIENCE)
    assert (said, finished) == ([], [1])
    loop.close()
    assert said == [LEFT_BEHIND]


@pytest.mark.parametrize("late", [None, OSError("late"), SourceExhausted()])
def test_what_a_source_left_behind_brings_after_the_release_is_ignored(deaf, late):
    written, said = [], []

    def wake(tokens):
        tokens[0]["x"][:] = 7
        written.append(tokens[0]["x"].tolist())
        if late is not None:
            raise late

    loop, bound = deaf.start("sink", wake=wake, report=said.append)
    with pytest.raises(ActorFailed) as before:
        loop.wait(PATIENCE)
    loop.close()
    bound.release()
    deaf.wake_up()
    assert written == [[7.0, 7.0]]
    with pytest.raises(ActorFailed) as after:
        loop.wait(0)
    assert after.value is before.value
    assert firings(loop)[0] == 2
    assert said == [LEFT_BEHIND]


def test_close_without_a_failure_warns_in_the_log_of_a_source_left_behind(
    pipeline, bodies, caplog, let_go
):
    gate = bodies.Gate()
    bound, ports = pipeline(gate)
    ports["data"].close = lambda: None
    with Loop(bound, LoopOptions(source_timeout_s=0.0)) as loop:
        loop.admit(1)
        gate.wait_entered()
    assert loop.wait(0) is False
    assert caplog.record_tuples == [("actorflow", logging.WARNING, LEFT_BEHIND)]
    let_go(gate)


def test_a_clean_end_waits_for_the_batch_that_is_being_fetched(pipeline, bodies):
    gate, seen = bodies.Gate(), []
    bound, _ = pipeline(gate, sink=lambda tokens: seen.append(1))
    with Loop(bound) as loop:
        loop.admit(1)
        gate.wait_entered()
        loop.end()
        taken = threading.Event()
        loop.call_soon_threadsafe(taken.set)
        assert taken.wait(PATIENCE)
        assert loop.wait(0) is False
        gate.open()
        assert loop.wait(PATIENCE) is True
    assert seen == [1]


# -- who keeps the arena ---------------------------------------------------------------------------


@pytest.mark.parametrize("actor", [0, 1, 2])
def test_a_kept_failure_and_a_kept_loop_do_not_keep_the_arena(pipeline, arenas, actor):
    bound, ports = pipeline()
    arenas.refuse_at(bound, [actor], ports["log"].bound[0][0]["x"])
    arena = arenas.of(ports)
    with Loop(bound) as loop:
        loop.admit(9)
        with pytest.raises(ActorFailed) as caught:
            loop.wait(PATIENCE)
    assert arena() is not None
    bound.release()
    gc.collect()
    assert isinstance(caught.value.__cause__, TypeError)
    assert arena() is None


def test_a_kept_error_of_our_own_does_not_keep_the_arena(pipeline, arenas, bodies):
    explode = bodies.fail_at(0, InternalError("a bug"))
    bound, ports = pipeline(sink=lambda tokens: loop.call_soon_threadsafe(explode))
    arena = arenas.of(ports)
    with Loop(bound) as loop:
        loop.admit(1)
        with pytest.raises(InternalError, match="a bug") as caught:
            loop.wait(PATIENCE)
    bound.release()
    gc.collect()
    assert caught.value.__traceback__ is not None
    assert arena() is None
