"""The pool of threads and the generated functions of a process."""

import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from error_texts import raises

from actors.kernels.common.host_memory import address
from actors.kernels.library import runtime
from actors.kernels.library.launch import NativeChain, NativeError, native_launch, single
from actors.kernels.library.runtime import CFunction, unique_name
from actors.kernels.library.toolchain import CompilerError

MARK = """
static void NAME_body(void *arguments, int64_t chunk, int32_t worker) {
    af_word *a = arguments;
    int64_t *counts = a[0].p, *workers = a[1].p;
    counts[chunk] += 1;
    workers[chunk] = worker;
}
AF_EXPORT int32_t NAME(void *arguments) {
    af_word *a = arguments;
    af_parallel(NAME_body, arguments, a[2].i, a[3].i);
    return 0;
}
"""
STATUS = """
AF_EXPORT int32_t NAME(void *arguments) { return ((af_word *)arguments)[0].i; }
"""
MEETING = """
/* Of two chunks the caller's waits until a helper has the other; the helper's ends long after. */
static void NAME_body(void *arguments, int64_t chunk, int32_t worker) {
    int64_t *came = ((af_word *)arguments)[0].p, *left = came + 1, *done = came + 2;
    (void)chunk;
    if (worker == 0) {
        for (int64_t i = 0; i < 1000000 && !__atomic_load_n(came, __ATOMIC_SEQ_CST); i++)
            sched_yield();
        __atomic_store_n(left, 1, __ATOMIC_SEQ_CST);
        return;
    }
    __atomic_store_n(came, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < 1000000 && !__atomic_load_n(left, __ATOMIC_SEQ_CST); i++)
        sched_yield();
    for (volatile int64_t i = 0; i < 1000000; i++) {}
    __atomic_store_n(done, 1, __ATOMIC_SEQ_CST);
}
AF_EXPORT int32_t NAME(void *arguments) {
    int64_t *came = ((af_word *)arguments)[0].p;
    came[0] = came[1] = came[2] = 0;
    af_parallel(NAME_body, arguments, 2, 2);
    came[3] = came[0] ? (__atomic_load_n(came + 2, __ATOMIC_SEQ_CST) ? 1 : 2) : 3;
    return 0;
}
"""
ENDED, LEFT_BEHIND, NOBODY_CAME = 1, 2, 3
WAITING = """
AF_EXPORT int32_t NAME(void *arguments) {
    int64_t *flags = ((af_word *)arguments)[0].p;
    __atomic_store_n(flags, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(flags + 1, __ATOMIC_SEQ_CST)) sched_yield();
    return 0;
}
"""
WORDS = """
AF_EXPORT int32_t NAME(void *arguments) {
    af_word *a = arguments;
    ((double *)a[0].p)[0] = a[1].d + a[2].f + a[3].i;
    return 0;
}
"""


def function(text, about=""):
    name = unique_name("test", text)
    return CFunction(name, text.replace("NAME", name), about)


def marked(native, num_chunks, max_workers):
    counts, workers = np.zeros(max(num_chunks, 1), np.int64), np.zeros(max(num_chunks, 1), np.int64)
    where = native.address_of(function(MARK))
    words = [address(counts), address(workers), num_chunks, max_workers]
    return native_launch(where, words, (counts, workers)), counts, workers


def meeting(native):
    """Return a call that says how it went with a helper whose chunk is the last to end."""
    flags = np.zeros(4, np.int64)
    where = native.address_of(function("#include <sched.h>\n" + MEETING))
    launch = native_launch(where, [address(flags)], (flags,))

    def call():
        launch()
        return int(flags[3])

    return call


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3, 100, 5000])
@pytest.mark.parametrize("max_workers", [1, 2, 64])
def test_every_chunk_runs_exactly_once(native, num_chunks, max_workers):
    launch, counts, workers = marked(native, num_chunks, max_workers)
    for _ in range(20):
        launch()
    assert counts[:num_chunks].tolist() == [20] * num_chunks
    assert workers.min() >= 0
    assert workers.max() < min(max_workers, 2)


def test_a_call_returns_after_the_last_chunk_of_a_helper(native):
    meet = meeting(native)
    assert [meet() for _ in range(10)] == [ENDED] * 10


def test_a_chain_that_runs_beside_another_one_leaves_it_its_core(native):
    """Two chains and a pool of two threads: none has a helper until the other has ended."""
    flags, met = np.zeros(2, np.int64), np.zeros(4, np.int64)
    wait = native.address_of(function("#include <sched.h>\n" + WAITING))
    meet = native.address_of(function("#include <sched.h>\n" + MEETING))
    waiting, call = [
        NativeChain((native_launch(where, [address(held)], (held,)),) * 2)
        for where, held in ((wait, flags), (meet, met))
    ]
    other = threading.Thread(target=waiting)
    other.start()
    while not flags[0]:
        os.sched_yield()
    beside = []
    for made in (call, call.launches[0]):  # a launch that is in no chain, too
        made()
        beside.append(int(met[3]))
    flags[1] = 1
    other.join()
    call()
    assert (beside, int(met[3])) == ([NOBODY_CAME] * 2, ENDED)


def test_threads_that_call_at_once_each_get_all_their_chunks(native):
    """One has the pool, the others run alone; none waits for another's chunks."""
    cases = [marked(native, 64, 2) for _ in range(4)]

    def call(launch):
        for _ in range(500):
            launch()

    threads = [threading.Thread(target=call, args=(launch,)) for launch, _, _ in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, counts, _ in cases:
        assert counts.tolist() == [500] * 64


def test_a_sleeping_helper_wakes_for_the_next_call(native):
    """Calls that come long after the helpers went to sleep lose no chunk."""
    launch, counts, _ = marked(native, 8, 2)
    pause = threading.Event()
    for _ in range(5):
        launch()
        pause.wait(0.002)  # nothing is measured: the helpers' spin is 20 times shorter
    assert counts.tolist() == [5] * 8


def test_a_status_is_an_error_with_its_meaning(native):
    where = native.address_of(function(STATUS))
    native_launch(where, [0])()
    launch = native_launch(where, [7], explain=lambda status: f"meaning of {status}")
    with raises(NativeError):
        launch()


def test_words_arrive_as_integers_doubles_and_singles(native):
    out = np.zeros(1)
    words = [address(out), 0.1, single(2.5), -3]
    native_launch(native.address_of(function(WORDS)), words, (out,))()
    assert out[0] == 0.1 + 2.5 - 3


@pytest.mark.parametrize(("padding", "num_libraries"), [(0, 1), (15_000, 2)])
def test_short_functions_share_a_library_and_long_ones_have_as_many_as_threads(
    native, native_toolchain, monkeypatch, padding, num_libraries
):
    built = []
    real = type(native_toolchain).library
    monkeypatch.setattr(
        type(native_toolchain),
        "library",
        lambda self, text: built.append(text) or real(self, text),
    )
    run = uuid4()  # none of them may be kept from an earlier run
    wanted = [function(f"{STATUS}/* {i} of {run}{' ' * padding} */") for i in range(5)]
    native.prepare(wanted)
    native.prepare(wanted)
    addresses = {native.address_of(f) for f in wanted}
    assert len(built) == num_libraries
    assert len(addresses) == 5


def test_a_refused_function_is_named_and_the_others_are_built(native):
    good = function(STATUS + "/* beside a bad one */")
    bad = function("AF_EXPORT int32_t NAME(void *a) { return no_such_thing; }", "add, gelu of x.py")
    with pytest.raises(CompilerError, match=r"add, gelu of x\.py: .*no_such_thing"):
        native.prepare([bad, good])
    assert native.is_broken(bad)
    assert not native.is_broken(good)
    native_launch(native.address_of(good), [0])()
    assert "no_such_thing" in native.refusals()[bad.name]


def test_names_follow_from_content():
    assert unique_name("x", "a") == unique_name("x", "a") != unique_name("x", "b")


def test_what_is_off_takes_no_call_and_has_no_fingerprint(native, native_toolchain):
    assert native.is_enabled()
    assert native.fingerprint().endswith("-2")
    native.disable()
    assert not native.is_enabled()
    assert native.fingerprint() == ""
    assert native.num_threads() == 1


def test_fewer_threads_than_the_pool_has_may_be_asked_for(native, native_toolchain):
    native.enable(native_toolchain, 1)
    assert native.num_threads() == 1
    native.enable(native_toolchain, 2)
    assert native.num_threads() == 2


def in_child(call):
    """Return what a call gives in a forked child; b"" if it raises, or waits until an alarm."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the parent does with it
        signal.alarm(30)
        try:
            os.write(writer, call())
        finally:
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 16)
    os.close(reader)
    os.waitpid(child, 0)
    return said


def test_a_forked_child_runs_alone(native):
    """The helpers stay with the parent; the child must not wait for them."""
    launch, counts, _ = marked(native, 16, 2)
    launch()

    def child():
        launch()
        return bytes([int(counts.sum())])

    assert in_child(child) == bytes([32])


def test_a_forked_child_that_turns_native_kernels_on_has_helpers_of_its_own(
    native, native_toolchain
):
    meet = meeting(native)
    assert meet() == ENDED

    def child():
        before = native.num_threads()
        native.enable(native_toolchain, 2)
        return bytes([before, native.num_threads(), meet()])

    assert in_child(child) == bytes([1, 2, ENDED])
    assert meet() == ENDED, "the parent keeps its own"


def test_a_child_forked_while_a_thread_holds_the_lock_does_not_wait_for_it(
    native, native_toolchain
):
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with runtime._lock:
            is_held.set()
            is_over.wait()

    def child():
        native.enable(native_toolchain, 2)
        return bytes([native.num_threads()])

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        assert in_child(child) == bytes([2])
    finally:
        is_over.set()
        thread.join()


def test_what_is_turned_on_again_has_the_pool_that_it_had(native, native_toolchain):
    """Also where no folder keeps the runtime's library: two pools would fight for the cores."""
    chain = replace(native_toolchain, folder=None)
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(3):
        native.disable()
        native.enable(chain, 2)
        assert native.num_threads() == 2
    # Not "==": a thread of an earlier test may end meanwhile.
    assert len(list(Path("/proc/self/task").iterdir())) <= before


def test_helpers_take_no_signal(native):
    """Signals are for the interpreter's main thread: a helper runs no Python."""
    lines = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread of an earlier test has ended since it was listed
            lines += (task / "status").read_text().splitlines()
    blocked = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")]
    assert [mask for mask in blocked if mask & 1 << (signal.SIGINT - 1)]
