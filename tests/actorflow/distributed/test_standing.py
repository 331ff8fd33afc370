"""Where threads are that run code of the user."""

import threading

import pytest

from actorflow.distributed.member import user_stack_dump


@pytest.fixture
def hanging():
    """Return a function that has the user's code hang in a thread of a name, deep in a library."""
    end, threads, code = threading.Event(), [], {}
    library = threading.__file__  # a file of Python's own
    nested = "def nested(level, call): return nested(level - 1, call) if level else call()"
    exec(compile(nested, library, "exec"), code)

    def hang(name, depth):
        is_there = threading.Event()

        def wait():
            is_there.set()
            end.wait()

        def users_function():
            code["nested"](depth, wait)

        threads.append(threading.Thread(target=users_function, name=name))
        threads[-1].start()
        assert is_there.wait(60)

    yield hang
    end.set()
    for thread in threads:
        thread.join()


def seen_from_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(user_stack_dump()))
    thread.start()
    thread.join()
    return found[0]


def test_functions_of_the_user_that_hang_in_threads_come_before_the_main_thread(hanging):
    for number in range(8):
        hanging(f"left of run {number}", 0)
    hanging("source-data", 0)
    hanging("sink-metrics", 9)
    told = seen_from_another_thread()
    places = [told.index(f"thread '{n}'") for n in ("source-data", "sink-metrics", "MainThread")]
    assert places == sorted(places)
    assert "in wait" in told
    assert "in seen_from_another_thread" in told[places[-1] :]


def test_threads_without_code_of_the_user_are_left_out():
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="idle")
    thread.start()
    told = seen_from_another_thread()  # a line of its own, which is told
    assert "thread 'idle'" not in told
    end.set()
    thread.join()
