"""A loop without threads: whoever sends it a command runs what can run."""

import threading

import pytest

from actors.loop.admission import QuiescentCallback, QuiescentCondition
from actors.loop.dispatch import LoopOptions
from actors.loop.loop import Loop
from actors.machine.errors import ActorFailed

PATIENCE = 30
DRIVEN = LoopOptions(drive=lambda serve: serve())


def firings(loop):
    return tuple([actor.firings for actor in loop.statistics().actors])


@pytest.fixture
def driven(pipeline):
    """Return a function that makes a driven loop of the pipeline."""

    def make(options=DRIVEN, **bodies):
        return Loop(pipeline(is_one_thread=True, **bodies)[0], options)

    return make


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_steps_run_where_they_are_admitted_and_are_over_then(driven, num_slots, new_threads):
    here = []

    def note(*arguments):
        here.append(threading.current_thread())

    with driven(compute=note, sink=note, num_slots=num_slots) as loop:
        for steps in (1, 3, 5):
            loop.admit(steps)
            assert firings(loop) == (len(here) // 2,) * 3
        assert len(here) == 18
        assert {*here} == {threading.current_thread()}
        assert not loop.wait(0)
        loop.end()
        assert loop.wait(PATIENCE)
    assert not new_threads()
    assert firings(loop) == (9, 9, 9)


def test_what_a_driven_loop_computes_is_what_threads_compute(pipeline, driven):
    def rows(loop, seen):
        with loop:
            loop.admit(20)
            loop.end()
            assert loop.wait(PATIENCE)
        return seen

    bodies = [{"sink": lambda tokens, own=own: own.append(tokens[0]["x"][0])} for own in ([], [])]
    seen = [body["sink"].__defaults__[0] for body in bodies]
    assert rows(driven(**bodies[0]), seen[0]) == rows(Loop(pipeline(**bodies[1])[0]), seen[1])
    assert seen[0] == [*range(20)]


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_that_admit_at_once_take_turns_and_leave_nothing_undone(driven, num_threads):
    inside, most, counts = [], [], []

    def compute(*arguments):
        inside.append(None)
        most.append(len(inside))
        inside.pop()

    together = threading.Barrier(num_threads)
    with driven(compute=compute, sink=lambda tokens: counts.append(1)) as loop:

        def admit():
            together.wait()
            for _ in range(100):
                loop.admit(1)

        threads = [threading.Thread(target=admit) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A command that came while another thread had the turn was obeyed by that one.
        assert len(counts) == 100 * num_threads
    assert max(most) == 1


@pytest.mark.parametrize("firing", [0, 3])
def test_a_launch_that_fails_ends_the_run_and_wait_raises_it(driven, bodies, firing):
    error, finished = ValueError("broken"), []
    options = LoopOptions(drive=DRIVEN.drive, on_finished=lambda: finished.append(1))
    with driven(options, compute=bodies.fail_at(firing, error)) as loop:
        loop.admit(10)
        assert finished == [1]
        with pytest.raises(ActorFailed) as failed:
            loop.wait(PATIENCE)
    assert failed.value.__cause__ is error
    assert finished == [1]


class Interrupt(BaseException):
    """As ^C raises, between any two lines of Python."""


def test_an_interrupt_before_anything_ran_leaves_it_to_the_next_who_calls(driven):
    calls, seen = [], []

    def drive(serve):
        calls.append(1)
        if len(calls) == 2:
            raise Interrupt
        return serve()

    with driven(LoopOptions(drive=drive), sink=lambda tokens: seen.append(1)) as loop:
        loop.admit(1)
        with pytest.raises(Interrupt):
            loop.admit(1)
        assert len(seen) == 1
        loop.admit(1)
        assert len(seen) == 3


def test_what_settles_may_ask_for_more_and_its_error_is_the_callers(driven):
    seen, settled = [], []

    def settle():
        settled.append(len(seen))
        if settled[-1] == 1:
            loop.admit(1)
            raise KeyError("settled")

    options = LoopOptions(drive=DRIVEN.drive, settle=settle)
    with driven(options, sink=lambda tokens: seen.append(1)) as loop:
        with pytest.raises(KeyError, match="settled"):
            loop.admit(1)
        assert len(seen) == settled[-1] == 2
        loop.end()
        assert loop.wait()


@pytest.mark.parametrize("reading", [*range(4, 12)])
def test_an_interrupt_between_two_launches_is_the_failure_of_the_run(driven, reading):
    error, readings = Interrupt(), []

    def clock():
        readings.append(1)
        if len(readings) == reading:
            raise error
        return len(readings)

    with driven(LoopOptions(drive=DRIVEN.drive, clock=clock)) as loop:
        for _ in range(4):
            loop.admit(1)
        with pytest.raises(Interrupt):
            loop.wait(PATIENCE)
        loop.admit(1)  # a run that is over makes no step, and nobody waits for it
        assert loop.failure is error


def test_visits_are_made_by_whoever_asks_and_refused_within_a_launch(driven):
    seen = []

    def compute(*arguments):
        with pytest.raises(RuntimeError):
            loop.run_when_quiescent(visit())
        seen.append("refused")

    def visit():
        return QuiescentCallback(
            QuiescentCondition(frozenset(), is_idle=True), lambda: seen.append("made")
        )

    with driven(compute=compute) as loop:
        loop.admit(1)
        loop.run_when_quiescent(own := visit())
        assert own.wait()
    assert seen == ["refused", "made"]
    loop.run_when_quiescent(late := visit())
    assert not late.wait()


@pytest.mark.parametrize("where", ["compute", "sink"])
def test_a_launch_may_abort_and_another_thread_may_close(driven, where):
    error = RuntimeError("enough")

    def abort(*arguments):
        loop.abort(error)

    with driven(**{where: abort}) as loop:
        loop.admit(5)
        with pytest.raises(RuntimeError, match="enough"):
            loop.wait(PATIENCE)
        closer = threading.Thread(target=loop.close)
        closer.start()
        closer.join()
    assert loop.is_closed
    assert firings(loop)[1] < 5


@pytest.mark.parametrize("where", ["source", "compute", "sink"])
def test_who_closes_waits_for_what_another_thread_runs(driven, bodies, where):
    gate, finished, came = bodies.Gate(), [], []
    options = LoopOptions(drive=DRIVEN.drive, on_finished=lambda: finished.append(1))
    loop = driven(options, **{where: lambda *arguments: gate(None)})
    loop.start()
    stepper = threading.Thread(target=lambda: came.append(loop.admit(3)))
    closer = threading.Thread(target=loop.close)
    stepper.start()
    gate.wait_entered()
    closer.start()
    gate.open(9)
    stepper.join(PATIENCE)
    closer.join(PATIENCE)
    assert came == [None]
    assert loop.is_closed
    assert finished == [1]


@pytest.mark.parametrize("where", ["compute", "sink"])
def test_a_launch_may_close_its_own_loop(driven, where):
    finished = []
    options = LoopOptions(drive=DRIVEN.drive, on_finished=lambda: finished.append(1))
    with driven(options, **{where: lambda *arguments: loop.close()}) as loop:
        loop.admit(3)
        assert finished == [1]
    assert loop.is_closed
    assert firings(loop)[1] < 3
