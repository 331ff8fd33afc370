import gc
import threading
import weakref

import pytest

from actors.loop.worker import FiringTimes, RunningLaunch, ThreadActivity, launch_number

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""

TIMES = FiringTimes(clock=lambda: 0, busy_ns=[], timeline=None)


class Bytes:
    """Stands for an array that a launch holds."""


class Blocking:
    """A launch that says that it was entered and waits to be let go."""

    def __init__(self):
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.let_go.wait(PATIENCE)


class Server:
    """A thread that runs chains as the loop's two do."""

    def __init__(self):
        self.jobs = []
        self.idle = Blocking()
        self.note = ThreadActivity([3, 3, 3, 3, 3], TIMES)
        self.thread = threading.Thread(target=self.serve)

    def serve(self):
        note = self.note
        for job in self.jobs:
            note.since_ns = 7
            note.launches = launches = iter(job[1])
            note.job = job
            for launch in launches:
                launch()
            note.clear()
        del job, launches, launch
        self.jobs.clear()
        self.idle()

    def look(self):
        return self.note.look(self.thread, Server.serve.__code__)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.idle.let_go.set()
    server.thread.join(PATIENCE)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_running_chain_is_shown_with_its_launch_its_start_and_the_innermost_call(server, index):
    blocking = Blocking()
    chain = [int, int, int]
    chain[index] = blocking
    server.jobs.append((4, tuple(chain)))
    server.thread.start()
    assert blocking.entered.wait(PATIENCE)
    seen = server.look()
    blocking.let_go.set()
    assert (seen.actor, seen.launch, seen.since_ns) == (4, index, 7)
    assert seen.stack[-1].startswith(f"{__file__}:")
    assert seen.stack[-1].endswith(" in __call__")
    assert " in wait" in seen.stack[0]
    assert seen.where == seen.stack[-1]


def test_a_thread_that_waits_or_has_not_begun_or_has_ended_runs_nothing(server):
    server.jobs.append((0, (int, int, int)))
    assert server.look() is None
    server.thread.start()
    assert server.idle.entered.wait(PATIENCE)
    assert server.look() is None
    server.idle.let_go.set()
    server.thread.join(PATIENCE)
    assert server.look() is None


def test_a_look_does_not_keep_what_the_chain_holds(server):
    held = Bytes()
    alive = weakref.ref(held)
    blocking = Blocking()
    blocking.held = held
    server.jobs.append((0, (blocking,)))
    server.thread.start()
    assert blocking.entered.wait(PATIENCE)
    assert isinstance(server.look(), RunningLaunch)
    blocking.let_go.set()
    del held, blocking
    assert server.idle.entered.wait(PATIENCE)
    gc.collect()
    assert alive() is None


def test_the_place_told_is_the_innermost_outside_of_libraries_or_the_innermost():
    wait = f"{threading.__file__}:629 in wait"
    numpy = "/env/lib/python3.11/site-packages/numpy/core.py:1 in dot"
    assert RunningLaunch(0, 0, 0, (wait, numpy, "train.py:4 in f", "run.py:1 in g")).where == (
        "train.py:4 in f"
    )
    assert RunningLaunch(0, 0, 0, (wait, numpy)).where == wait
    assert RunningLaunch(0, 0, 0, ()).where == ""


@pytest.mark.parametrize("depth", [50, 300])  # fewer and more calls than are told
def test_a_deep_stack_is_cut_to_its_innermost_calls(server, depth):
    blocking = Blocking()

    def deep(depth):
        blocking() if not depth else deep(depth - 1)

    server.jobs.append((0, (lambda: deep(depth),)))
    server.thread.start()
    assert blocking.entered.wait(PATIENCE)
    stack = server.look().stack
    blocking.let_go.set()
    assert len(stack) == 8
    assert sum(" in deep" in row for row in stack) >= 4
    assert " in deep" in stack[-1]


class Joined:
    """Stands for launches that a device runs as one, and may know which of them is on."""

    def __init__(self, num_launches, running):
        self.num_launches, self.running = num_launches, running


@pytest.mark.parametrize(
    ("chain", "item", "number"),
    [
        ((int, int, int), 1, 1),
        ((Joined(2, 1), int), 0, 1),
        ((Joined(2, 1), int), 1, 2),
        ((int, Joined(2, 0)), 1, 1),
        ((int, Joined(2, None)), 1, None),  # the device does not tell
        ((Joined(2, None), int), 1, 2),  # it need not
        ((int,), 0, None),  # one call stands for all three
        ((), 0, None),
    ],
)
def test_a_launch_is_numbered_as_in_the_plan_where_that_is_known(chain, item, number):
    assert launch_number(chain, item, 3) == number


def test_what_runs_is_told_without_the_number_of_its_launch_where_none_is_known(server):
    blocking = Blocking()
    server.jobs.append((4, (blocking,)))
    server.thread.start()
    assert blocking.entered.wait(PATIENCE)
    seen = server.look()
    blocking.let_go.set()
    assert (seen.actor, seen.launch) == (4, None)
    assert seen.where.endswith(" in __call__")


def test_a_chain_without_launches_has_none_that_runs():
    assert launch_number((), 0, 0) is None


def test_a_look_between_two_writes_of_the_thread_tells_what_is_known():
    note = ThreadActivity([3], TIMES)
    note.job = (0, (int, int, int))
    seen = note.look(threading.current_thread(), Server.serve.__code__)
    assert (seen.actor, seen.launch, seen.stack, seen.where) == (0, None, (), "")
