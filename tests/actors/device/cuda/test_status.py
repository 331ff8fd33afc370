"""A bad index is told as the host tells it, with the launch and the firing in which it was."""

import ctypes
from itertools import pairwise

import pytest

from actors.device.cuda.memory import StatusReports
from actors.device.cuda.streams import _NUM_FIRSTS
from actors.kernels.cuda.calls import StatusWord
from actors.machine.protocol import DeviceFault
from tests.shared.recording_driver import kernel_call


def report(address, place, value):
    """What `af_report` of device.cuh does."""
    cell = (ctypes.c_int64 * 6).from_address(address)
    firing = ctypes.c_int64.from_address(cell[4]).value + 1
    if cell[1] == 0 or firing < cell[1] or (firing == cell[1] and place < cell[2]):
        cell[1], cell[2], cell[3] = firing, place, value
    ctypes.c_int64.from_address(cell[5]).value = 1


def explain(place, value):
    return IndexError(f"index {value} at position {place}")


@pytest.fixture
def reporting(make_device):
    """Return what makes a device with a chain of launches; those of `bad` may report."""

    def make(bad, num_launches=4, **options):
        def kernel(number):
            def run(words):
                for place, value in bad.get(number, ()):
                    report(words[1], place, value)

            status = StatusWord(1, explain) if number in bad else None
            return (kernel_call(run, (0, 0), status),)

        device = make_device({str(n): kernel(n) for n in range(num_launches)}, **options)
        stream = device.make_stream("compute")
        launches = tuple([device.bind(str(n), {}, (), (), None, ()) for n in range(num_launches)])
        return device, stream, launches, device.bind_chain(stream, launches)[0]

    return make


def raised(wait):
    with pytest.raises(DeviceFault) as caught:
        wait()
    return caught.value


def test_a_chain_with_a_cell_counts_its_firings_and_another_does_not(reporting, driver):
    _, stream, _, chain = reporting({2: []})
    assert driver.names()[-7:] == ["begin_capture", *["launch_later"] * 5, "end_capture"]
    count = ctypes.c_int64.from_address(stream.count_address)
    assert count.value == -1
    chain()
    chain()
    assert count.value == 1
    kept = reporting({})
    assert kept
    assert driver.names()[-6:] == ["begin_capture", *["launch_later"] * 4, "end_capture"]


def test_a_wait_after_a_bad_index_raises_with_the_launch_on_the_stream(reporting):
    bad = {2: []}
    device, stream, _, chain = reporting(bad)
    event = device.make_event()
    chain()
    stream.record(event)
    event.synchronize()
    bad[2] = [(7, 99), (3, -5), (4, 12)]
    chain()
    stream.record(event)
    fault = raised(event.synchronize)
    assert str(fault) == "IndexError: index -5 at position 3"
    assert isinstance(fault.__cause__, IndexError)
    assert (fault.stream, fault.launch) == (stream, 6)
    bad[2] = [(0, 100)]
    chain()
    again = raised(device.synchronize)
    assert (str(again), again.launch) == (str(fault), 6)  # the earliest firing, and for ever


def test_a_wait_tells_only_of_what_it_waited_for(reporting):
    """However far the device is: what steps before the bad one gave comes out."""
    bad = {2: []}
    device, stream, _, chain = reporting(bad)
    copies = device.make_stream("d2h")
    events = [device.make_event() for _ in range(6)]
    for step in range(3):
        bad[2] = [(1, 9)] if step == 1 else []
        chain()
        stream.record(events[step])
        copies.wait(events[step])
        copies.record(events[3 + step])
    for number in (0, 3):
        events[number].synchronize()
    for number in (1, 2, 4, 5):
        assert raised(events[number].synchronize).launch == 6
    assert raised(device.synchronize).launch == 6


def test_what_another_device_brings_out_is_held_back_too(reporting):
    reports = StatusReports()
    one, stream, _, chain = reporting({0: [(1, 9)]}, reports=reports)
    two, beside, *_ = reporting({}, reports=reports, index=1)
    before, after, last = one.make_event(), two.make_event(), two.make_event()
    beside.record(after)
    chain()
    stream.record(before)
    beside.wait(before)
    beside.record(last)
    after.synchronize()
    fault = raised(last.synchronize)
    assert (str(fault), fault.stream, fault.launch) == (
        "IndexError: index 9 at position 1", stream, 0,
    )  # fmt: skip


def test_of_several_the_earliest_launch_is_told(reporting):
    device, _, _, chain = reporting({3: [(0, 1)], 1: [(5, 6)]})
    chain()
    fault = raised(device.synchronize)
    assert (str(fault), fault.launch) == ("IndexError: index 6 at position 5", 1)


def test_launches_of_other_chains_on_the_stream_are_counted_by_the_host(reporting):
    bad = {0: []}
    device, stream, launches, chain = reporting(bad)
    (other,) = device.bind_chain(stream, launches[1:])
    for _ in range(3):
        other()
        chain()
    bad[0] = [(1, 1)]
    other()
    chain()
    assert raised(device.synchronize).launch == 3 * 7 + 3


def test_a_firing_that_is_long_ago_has_no_number(reporting):
    device, _, _, chain = reporting({0: [(1, 1)]})
    for _ in range(_NUM_FIRSTS):
        chain()
    assert raised(device.synchronize).launch == 0
    chain()
    assert raised(device.synchronize).launch is None


def test_a_stepwise_device_tells_it_at_the_launch_and_of_no_firing_before(reporting):
    bad = {2: []}
    device, stream, _, chain = reporting(bad, is_stepwise=True)
    event = device.make_event()
    chain()
    stream.record(event)
    bad[2] = [(4, 8)]
    fault = raised(chain)
    assert (str(fault), fault.stream, fault.launch) == (
        "IndexError: index 8 at position 4", stream, 6,
    )  # fmt: skip
    assert chain.running == 2
    event.synchronize()


def test_a_device_has_one_page_until_it_is_full(reporting, driver):
    device, *_ = reporting({0: []}, num_launches=1)
    assert driver.counts()["allocate_pinned"] == 1
    for _ in range(100):
        device.bind("0", {}, (), (), None, ())
    assert driver.counts()["allocate_pinned"] == 2
    addresses = sorted([cell.address for cell in device._context.status.cells])
    assert len(addresses) == 101
    assert all([later - earlier >= 56 for earlier, later in pairwise(addresses)])


def test_a_device_that_failed_is_told_before_its_cells(reporting, driver):
    device, stream, _, chain = reporting({0: [(1, 1)]})
    event = device.make_event()
    chain()
    stream.record(event)
    driver.failing["synchronize"] = 700
    fault = raised(event.synchronize)
    assert "a kernel addressed memory that is not its own" in str(fault)
