"""The emulation runs all ways to do the same, and takes one by a rule that nothing else enters."""

from contextlib import contextmanager

import pytest

from actors.device.cuda.driver import CudaError, TimedAlternatives
from actors.testing.emulated.driver import tried
from tests.shared.recording_driver import RecordingDriver


def test_all_ways_run_after_scratch_is_filled_and_each_of_them_is_taken_for_some_keys():
    done = []

    @contextmanager
    def trial():
        runs = [lambda stream, name=name: done.append((name, stream)) for name in ("a", "b")]
        yield TimedAlternatives(lambda stream: done.append(("fill", stream)), tuple(runs))

    found = [tried(RecordingDriver(), f"key {n}", trial) for n in range(20)]
    assert done == [(name, "trial") for _ in found for name in ("fill", "a", "b")]
    assert {*found} == {0, 1}
    assert found == [tried(RecordingDriver(), f"key {n}", trial) for n in range(20)]


@pytest.mark.parametrize("code", [2, 700])
def test_where_there_is_no_room_the_first_way_is_taken(code):
    def trial():
        raise CudaError("no", code=code, call="allocate")

    if code == 2:
        assert tried(RecordingDriver(), "key", trial) == 0
        return
    with pytest.raises(CudaError):
        tried(RecordingDriver(), "key", trial)
