"""Several streams, each a thread that runs the chains of its actors; gates instead of sleeps.

`join` is on a stream that would run on the dispatcher's thread if it were the only one to compute.
"""

import dataclasses
import gc
import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
from error_texts import raises

from actors.device.host import HostDevice
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.loop.timeline import Timeline
from actors.loop.worker import FiringTimes, ThreadActivity, Worker, WorkerCallbacks
from actors.machine.errors import ActorFailed
from actors.machine.transitions import Message, State, message
from compiler.contract.errors import ActorflowError
from compiler.contract.plan_tables import ActorKind

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""

STREAMS = {
    "data": "actorflow-data",
    "first": "actorflow-first",
    "second": "actorflow-first",
    "other": "actorflow-other",
    "join": "actorflow-join",
    "log": "actorflow-log",
}
"""The thread that each actor of `fork` runs on."""


def add_one(inputs, outputs):
    outputs[0][:] = inputs[0] + 1


def double(inputs, outputs):
    outputs[0][:] = inputs[0] * 2


def add(inputs, outputs):
    outputs[0][:] = inputs[0] + inputs[1]


@pytest.fixture
def fork(plan_maker, fake_port, fake_kernel, bodies):
    """data -> (first -> second | other) -> join -> log; first and second share a stream.

    The sink receives (x + 1) * 2 + (x + 1) = 3 x + 3 for x = 0, 1, 2, ...
    """

    def build(num_slots=2, **instead):
        make = plan_maker()
        names = ("x", "mid", "left", "right", "loss")
        x, mid, left, right, loss = [make.edge(name, num_slots) for name in names]
        at = make.field_view
        make.actor("data", ActorKind.SOURCE, outputs=[(x, 1)])
        for name, inputs, output in (
            ("first", [x], mid),
            ("second", [mid], left),
            ("other", [x], right),
            ("join", [left, right], loss),
        ):
            make.actor(
                name, ActorKind.COMPUTE, inputs=[(r, 1) for r in inputs], outputs=[(output, 1)],
                launches=[make.launch(name, [at(r) for r in inputs], [at(output)])],
                is_thread=name != "join",
            )  # fmt: skip
        make.actor("log", ActorKind.SINK, inputs=[(loss, 1)])
        shared = make.actors[1].stream
        make.actors[2] = dataclasses.replace(make.actors[2], stream=shared)
        seen = []
        actions = {
            "data": bodies.Counting(), "first": add_one, "second": double, "other": add_one,
            "join": add, "log": lambda tokens: seen.append(tokens[0]["x"][0]), **instead,
        }  # fmt: skip
        ports = {name: fake_port(actions[name]) for name in ("data", "log")}
        kernels = {n: fake_kernel(actions[n]) for n in ("first", "second", "other", "join")}
        plan = make.plan()
        bound = load(plan, ports, (HostDevice(kernels),))
        arena = weakref.ref(ports["log"].bound[0][0]["x"].base)
        for fake in (*ports.values(), *kernels.values()):
            fake.bound.clear()
        return SimpleNamespace(bound=bound, ports=ports, seen=seen, actions=actions, arena=arena)

    return build


def run(bound, steps, **options):
    with Loop(bound, LoopOptions(**options)) as loop:
        loop.admit(steps)
        loop.end()
        assert loop.wait(PATIENCE)
        return loop


def run_failing(bound, **options):
    with Loop(bound, LoopOptions(**options)) as loop:
        loop.admit(50)
        with pytest.raises(ActorFailed) as caught:
            loop.wait(PATIENCE)
        return caught.value


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_actors_on_several_streams_compute_what_one_stream_would(fork, num_slots):
    made = fork(num_slots)
    run(made.bound, 60)
    assert made.seen == [3 * x + 3 for x in range(60)]


def test_actors_of_one_stream_share_its_thread_and_streams_have_one_each(fork):
    names = {}

    def noting(actor, body):
        def note(*arguments):
            names.setdefault(actor, []).append(threading.current_thread().name)
            return body(*arguments)

        return note

    actions = fork().actions
    run(fork(**{n: noting(n, body) for n, body in actions.items()}).bound, 3)
    assert {n: sorted(set(names[n])) for n in STREAMS} == {n: [t] for n, t in STREAMS.items()}


def test_chains_of_one_stream_run_one_after_the_other_and_those_of_two_overlap(fork):
    ticks = iter(range(1, 10**9))
    together = threading.Barrier(2, timeout=PATIENCE)

    def meet(inputs, outputs):
        together.wait()
        add_one(inputs, outputs)

    timeline = Timeline(1024)
    run(fork(first=meet, other=meet).bound, 20, timeline=timeline, clock=lambda: next(ticks))
    rows = timeline.rows()
    shared = [row for row in rows if row[0] in (1, 2)]
    assert len(shared) == 40
    assert all(before[3] < after[2] for before, after in pairwise(shared))
    other = {row[1]: row for row in rows if row[0] == 3}
    first = {row[1]: row for row in rows if row[0] == 1}
    assert all(first[f][2] < other[f][3] and other[f][2] < first[f][3] for f in range(20))


def test_a_long_chain_keeps_no_other_stream_waiting_for_its_messages(fork):
    has_begun, third = threading.Event(), threading.Event()

    def join(inputs, outputs):
        has_begun.set()
        assert third.wait(PATIENCE)
        add(inputs, outputs)

    def other(inputs, outputs):
        if inputs[0][0] == 1:
            assert has_begun.wait(PATIENCE)
        add_one(inputs, outputs)
        if inputs[0][0] == 2:
            third.set()

    made = fork(3, join=join, other=other)
    run(made.bound, 5)
    assert made.seen == [3, 6, 9, 12, 15]


def test_every_thread_that_runs_kernels_is_prepared_once_and_no_other(fork):
    prepared, launched = [], []

    def launch(inputs, outputs):
        launched.append(threading.current_thread().name in prepared)
        add_one(inputs, outputs)

    made = fork(first=launch, second=launch, other=launch)
    run(made.bound, 5, prepare_thread=lambda: prepared.append(threading.current_thread().name))
    assert sorted(prepared) == ["actorflow-first", "actorflow-join", "actorflow-other"]
    assert launched == [True] * 15


def test_what_the_preparation_of_a_stream_raises_fails_the_run_before_its_launches(fork):
    launched = []

    def refuse():
        if threading.current_thread().name == "actorflow-other":
            raise RuntimeError("no such device")

    made = fork(other=lambda inputs, outputs: launched.append(1))
    with Loop(made.bound, LoopOptions(prepare_thread=refuse)) as loop:
        loop.admit(9)
        with pytest.raises(RuntimeError, match="no such device"):
            loop.wait(PATIENCE)
    assert (launched, made.ports["data"].num_closed) == ([], 1)


def settle(loop):
    """Wait until the dispatcher has taken every message sent so far."""
    taken = threading.Event()
    loop.call_soon_threadsafe(taken.set)
    assert taken.wait(PATIENCE)


def test_jobs_that_have_not_begun_when_another_stream_fails_are_dropped(fork, bodies):
    gate, queued, begun = bodies.Gate(), threading.Event(), []

    def first(inputs, outputs):
        begun.append(inputs[0][0])
        add_one(inputs, outputs)

    def other(inputs, outputs):
        assert queued.wait(PATIENCE)
        raise ValueError("no")

    made = fork(3, first=first, second=lambda inputs, outputs: gate(inputs), other=other)
    with Loop(made.bound) as loop:
        loop.admit(50)
        gate.wait_entered()
        # `second` occupies the stream, so a firing of `first` that has started is in the mailbox.
        while loop.examine().states[1] is not State.FIRING:
            settle(loop)
        num_begun = len(begun)
        queued.set()
        while not loop.examine().is_halted:
            settle(loop)
        assert not loop.wait(0)
        gate.open()
        with raises(ActorFailed):
            loop.wait(PATIENCE)
    assert len(begun) == num_begun


def test_of_two_failures_at_once_one_is_raised_and_the_other_noted_on_it(fork):
    together = threading.Barrier(2, timeout=PATIENCE)

    def fail_together(error):
        def body(inputs, outputs):
            together.wait()
            raise error

        return body

    made = fork(first=fail_together(ValueError("left")), other=fail_together(OSError("right")))
    failed = run_failing(made.bound)
    (note,) = failed.__notes__
    raised, noted = (("first", "left"), ("other", "right"))[:: 1 if failed.actor == "first" else -1]
    assert (failed.actor, str(failed.__cause__)) == raised
    assert note.startswith(f"at the same time actor '{noted[0]}' failed in firing 0: launch 1 of 1")
    assert noted[1] in note


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", list(STREAMS))
@pytest.mark.parametrize("firing", [0, 1, 7])
def test_a_failure_anywhere_ends_every_thread_releases_the_arena_and_allows_another_run(
    fork, bodies, name, firing
):
    def fail_at(body):
        left = iter(range(firing))

        def act(*arguments):
            if next(left, None) is None:
                raise ZeroDivisionError("no")
            return body(*arguments)

        return act

    made = fork(**{name: fail_at(fork().actions[name])})
    failed = run_failing(made.bound)
    assert (failed.actor, failed.firing) == (name, firing)
    assert failed.story
    assert len(made.seen) <= firing + 2 * len(STREAMS)
    made.bound.release()
    # The error's traceback keeps the arguments of the launch that raised, as Python's own do.
    del failed
    gc.collect()
    assert made.arena() is None
    again = fork()
    run(again.bound, 3)
    assert again.seen == [3, 6, 9]


def test_close_in_the_middle_of_several_streams_ends_them_all(fork, bodies):
    gate = bodies.Gate()

    def other(inputs, outputs):
        gate(inputs)

    loop = Loop(fork(other=other).bound)
    loop.start()
    loop.admit(50)
    gate.wait_entered()
    gate.permits.put("closed")
    loop.close()
    assert loop.wait(PATIENCE) is False


def test_close_names_the_stream_of_a_kernel_that_hangs(fork, bodies, join_threads):
    gate = bodies.Gate()
    bound = fork(second=lambda inputs, outputs: gate(inputs)).bound
    loop = Loop(bound, LoopOptions(join_timeout_s=0.0))
    loop.start()
    loop.admit(50)
    gate.wait_entered()
    with pytest.raises(ActorflowError, match=r"the threads of \[.*'first'.*\] did not end"):
        loop.close()
    gate.permits.put("closed")
    join_threads()


def test_initial_tokens_bring_a_snapshot_forward_by_as_many_steps(snapshots):
    bound, saved = snapshots(initial={"updated": 2})
    run(bound, 8)
    assert saved == [0, 3, 6]


# -- driven by hand --------------------------------------------------------------------------------


def by_hand(make_chain, posted, failures=None):
    """A worker of the second of two actors, not yet started."""
    callbacks = WorkerCallbacks(posted.append, (failures or posted).append, posted.append)
    times = FiringTimes(clock=lambda: 0, busy_ns=[0, 0], timeline=None)
    activity = ThreadActivity([1, 3], times)
    return Worker(
        "stream", (1,), make_chain(2), activity=activity, callbacks=callbacks, prepare=lambda: None
    )


def finish(worker):
    worker.put(None)
    worker.thread.start()
    worker.thread.join(PATIENCE)


def test_a_worker_that_always_has_a_job_never_waits(make_chain):
    posted = []
    worker = by_hand(make_chain, posted)
    worker.put((1, (lambda: None,)))
    worker.put((1, ()))
    finish(worker)
    assert (worker.num_waits, worker.firings) == (0, [0, 2])
    assert posted == [message(Message.DONE, 1)] * 2
    assert worker.in_flight() is None


def test_a_worker_counts_how_often_it_finds_no_job(make_chain):
    jobs, is_idle = iter([(1, ()), (1, ()), None]), iter([True, False, True])
    worker = by_hand(make_chain, [])
    worker.mailbox = SimpleNamespace(get=lambda: next(jobs), empty=lambda: next(is_idle))
    worker.thread.start()
    worker.thread.join(PATIENCE)
    assert (worker.num_waits, worker.firings) == (2, [0, 2])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_worker_names_the_launch_that_raised(make_chain, bodies, place):
    posted, failures = [], [None]
    worker = by_hand(make_chain, posted, failures)
    chain = [lambda: None] * 3
    chain[place] = bodies.fail_at(0, ValueError("no"))
    worker.put((1, tuple(chain)))
    finish(worker)
    assert (failures[1].actor, failures[1].firing, failures[1].launch) == (1, 0, place)
    assert posted == [message(Message.FAILED, 1)]


def test_no_thread_of_a_run_keeps_the_process_alive(fork):
    loop = Loop(fork().bound)
    assert all(thread.daemon for thread in loop.threads())
    loop.close()
