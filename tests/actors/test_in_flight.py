import gc
import threading
import weakref

import pytest

from actors.in_flight import NOBODY, InFlight, in_flight

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


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
        self.thread = threading.Thread(target=self.serve)

    def serve(self):
        for actor, chain in self.jobs:  # noqa: B007  # read through the frame
            since = 7
            launches = iter(chain)
            for launch in launches:
                launch()
        actor = NOBODY
        del chain, launches, launch
        self.jobs.clear()
        self.idle()
        return actor, since

    def look(self):
        return in_flight(self.thread, Server.serve.__code__)


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
    server.jobs.append((0, (int,)))
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
    assert isinstance(server.look(), InFlight)
    blocking.let_go.set()
    del held, blocking
    assert server.idle.entered.wait(PATIENCE)
    gc.collect()
    assert alive() is None


def test_the_place_told_is_the_innermost_outside_of_libraries_or_the_innermost():
    wait = f"{threading.__file__}:629 in wait"
    numpy = "/env/lib/python3.11/site-packages/numpy/core.py:1 in dot"
    assert InFlight(0, 0, 0, (wait, numpy, "train.py:4 in f", "run.py:1 in g")).where == (
        "train.py:4 in f"
    )
    assert InFlight(0, 0, 0, (wait, numpy)).where == wait
    assert InFlight(0, 0, 0, ()).where == ""


def test_a_deep_stack_is_cut_to_its_innermost_calls(server):
    blocking = Blocking()

    def deep(depth):
        blocking() if not depth else deep(depth - 1)

    server.jobs.append((0, (lambda: deep(50),)))
    server.thread.start()
    assert blocking.entered.wait(PATIENCE)
    stack = server.look().stack
    blocking.let_go.set()
    assert len(stack) == 8
    assert sum(" in deep" in row for row in stack) >= 4
