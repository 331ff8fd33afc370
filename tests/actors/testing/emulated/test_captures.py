"""What may be done while a stream is captured, with CUDA's codes for what may not."""

import ctypes
import threading
from random import Random

import pytest

from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.kernel import gpu_named
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule


class Bench:
    """A driver with two streams, two events and eight bytes of pinned memory."""

    def __init__(self, toolchain, seed):
        cuda = EmulatedCuda(LateSchedule(Random(seed)))
        self.driver = EmulatedDriver(cuda, toolchain, gpu_named("h200"), seed=seed)
        self.one, self.two = (self.driver.make_stream(name) for name in ("one", "two"))
        self.event, self.other = self.driver.make_event(), self.driver.make_event()
        self.place = self.driver.allocate_pinned(8)

    def fill(self, stream, value):
        self.driver.fill_later(self.place, value, 1, stream)

    def copy(self, stream, target):
        self.driver.copy_later(self.place + target, self.place, 1, stream)

    def bytes(self):
        self.driver.synchronize()
        return [*ctypes.string_at(self.place, 8)]


@pytest.fixture(params=range(5))
def bench(request, native_toolchain):
    bench = Bench(native_toolchain, request.param)
    yield bench
    bench.driver.close()


def refused(code, call, *arguments):
    with pytest.raises(CudaError) as caught:
        call(*arguments)
    assert caught.value.code == code, caught.value


def test_what_is_captured_runs_when_its_graph_does_as_often_as_that(bench):
    driver = bench.driver
    driver.begin_capture(bench.one)
    bench.fill(bench.one, 1)
    bench.copy(bench.one, 1)
    bench.fill(bench.two, 9)  # not captured
    graph = driver.end_capture(bench.one)
    assert bench.bytes() == [9] + [255] * 7
    driver.graph_later(graph, bench.two)
    assert bench.bytes() == [1, 1] + [255] * 6
    bench.fill(bench.two, 7)
    driver.graph_later(graph, bench.two)
    bench.fill(bench.two, 7)
    assert bench.bytes() == [7, 1] + [255] * 6


CALLS = {
    "allocate": lambda b: b.driver.allocate(8),
    "allocate pinned": lambda b: b.driver.allocate_pinned(8),
    "copy": lambda b: b.driver.copy(b.place, b.place + 4, 4),
    "synchronize": lambda b: b.driver.synchronize(),
    "synchronize an event": lambda b: b.driver.synchronize_event(b.event),
    "ask an event": lambda b: b.driver.is_done(b.event),
    "load": lambda b: b.driver.load([]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_would_wait_or_allocate_breaks_the_capture(bench, name):
    bench.driver.begin_capture(bench.one)
    bench.fill(bench.one, 1)
    refused(900, CALLS[name], bench)
    refused(901, bench.fill, bench.one, 2)
    refused(901, bench.driver.end_capture, bench.one)
    bench.fill(bench.one, 3)
    assert bench.bytes()[0] == 3


def test_another_thread_may_do_all_of_that(bench):
    bench.driver.begin_capture(bench.one)
    wrong = []

    def elsewhere():
        try:
            bench.driver.synchronize()
            bench.driver.synchronize_event(bench.event)
        except CudaError as error:
            wrong.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    bench.driver.end_capture(bench.one)
    assert wrong == []


def test_a_capture_ends_in_the_thread_that_began_it(bench):
    thread = threading.Thread(target=bench.driver.begin_capture, args=(bench.one,))
    thread.start()
    thread.join()
    refused(908, bench.driver.end_capture, bench.one)


def test_streams_fork_and_join_by_events(bench):
    driver = bench.driver
    driver.begin_capture(bench.one)
    bench.fill(bench.one, 1)
    driver.record(bench.event, bench.one)
    driver.wait(bench.two, bench.event)
    bench.copy(bench.two, 1)
    driver.record(bench.other, bench.two)
    driver.wait(bench.one, bench.other)
    bench.fill(bench.one, 2)
    graph = driver.end_capture(bench.one)
    driver.graph_later(graph, bench.one)
    assert bench.bytes() == [2, 1] + [255] * 6


def test_a_fork_that_is_not_joined_is_refused(bench):
    driver = bench.driver
    driver.begin_capture(bench.one)
    driver.record(bench.event, bench.one)
    driver.wait(bench.two, bench.event)
    driver.record(bench.other, bench.two)
    driver.wait(bench.one, bench.other)
    bench.fill(bench.two, 1)  # after what the first stream has waited for
    refused(904, driver.end_capture, bench.one)
    bench.fill(bench.two, 3)
    assert bench.bytes()[0] == 3


def test_a_captured_stream_waits_for_nothing_outside(bench):
    driver = bench.driver
    driver.record(bench.event, bench.two)
    driver.begin_capture(bench.one)
    driver.wait(bench.one, bench.other)  # never recorded: no wait
    refused(905, driver.wait, bench.one, bench.event)
    refused(901, driver.end_capture, bench.one)


def test_an_event_of_a_capture_is_for_that_alone(bench):
    driver = bench.driver
    driver.begin_capture(bench.one)
    driver.record(bench.event, bench.one)
    driver.end_capture(bench.one)
    for call in (driver.is_done, driver.synchronize_event):
        refused(907, call, bench.event)
    refused(907, driver.wait, bench.two, bench.event)
    driver.record(bench.event, bench.two)
    driver.synchronize_event(bench.event)


def test_two_captures_stay_apart(bench):
    driver = bench.driver
    driver.begin_capture(bench.one)
    driver.begin_capture(bench.two)
    driver.record(bench.event, bench.one)
    refused(902, driver.wait, bench.two, bench.event)
    for stream in (bench.one, bench.two):
        refused(901, driver.end_capture, stream)


def test_a_capture_is_begun_once_and_ended_once(bench):
    driver = bench.driver
    refused(903, driver.end_capture, bench.one)
    driver.begin_capture(bench.one)
    refused(903, driver.begin_capture, bench.one)
    driver.end_capture(bench.one)
    refused(903, driver.end_capture, bench.one)
