import sys
import threading
from pathlib import Path

import pytest

from actors.machine.thread_stacks import MAX_CALLS, StackCall, thread_stacks

ROOT = Path(__file__).parents[3]
PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


@pytest.fixture
def waiting():
    """Return a function that runs a call in a thread, which gets `wait`; it returns the ident."""
    end, threads = threading.Event(), []

    def run(call):
        is_there = threading.Event()

        def wait():
            is_there.set()
            assert end.wait(PATIENCE)

        threads.append(threading.Thread(target=call, args=(wait,)))
        threads[-1].start()
        assert is_there.wait(PATIENCE)
        return threads[-1].ident

    yield run
    end.set()
    for thread in threads:
        thread.join(PATIENCE)


def test_calls_of_every_thread_are_told_innermost_first(waiting):
    def outer(wait):
        inner(wait)

    def inner(wait):
        wait()

    idents = [waiting(outer), waiting(inner)]
    stacks = thread_stacks()
    first = outer.__code__.co_firstlineno
    own = [call for call in stacks[idents[0]] if call.function in ("outer", "inner")]
    assert own == [
        StackCall(__file__, first + 4, "inner"),
        StackCall(__file__, first + 1, "outer"),
    ]
    assert stacks[idents[0]][-1].function == "_bootstrap"
    assert "outer" not in [call.function for call in stacks[idents[1]]]
    own = [call.function for call in stacks[threading.get_ident()]]
    assert test_calls_of_every_thread_are_told_innermost_first.__name__ in own


@pytest.mark.parametrize("name", ["été.py", "\u6a21\u578b.py", "\U0001f40d.py", 'a "b", line 3.py'])
def test_names_of_files_come_as_they_are(waiting, name):
    code = {}
    exec(compile("def größe(wait): wait()", f"/home/{name}", "exec"), code)
    ident = waiting(code["größe"])
    assert StackCall(f"/home/{name}", 1, "größe") in thread_stacks()[ident]


def test_of_a_deep_recursion_the_innermost_calls_are_told(waiting):
    def deep(wait, level=300):
        return deep(wait, level - 1) if level else wait()

    ident = waiting(deep)
    calls = thread_stacks()[ident]
    assert len(calls) == MAX_CALLS
    assert {call.function for call in calls[10:]} == {"deep"}


@pytest.mark.parametrize("name", [sys._current_frames.__name__, "f_locals"])
def test_no_module_reads_frames_or_locals_of_other_threads(name):
    rooms = [ROOT / room for room in ("actorflow", "actors", "compiler", "memory")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    assert len(files) > 100
    assert not [file for file in files if name in file.read_text()]
