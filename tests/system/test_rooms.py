"""A compilation goes from room to room, and comes back only where a reason is given."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rooms():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setenv("ACTORFLOW_CACHE", "off")
        import rooms

        yield rooms
    for name in ("rooms", "bench_compile"):
        sys.modules.pop(name, None)


@pytest.mark.host("a device leads to further rooms")
def test_a_compilation_returns_to_a_room_only_for_a_reason_that_is_given(rooms):
    rooms.compilation(1)()
    found = rooms.stops(rooms.compilation(2), rooms.leads_compilation)
    order = list(dict.fromkeys([room for room, _, _ in found if room.startswith("compiler")]))
    names = "pipeline ops/primitives sbp passes fusion lowering storage verify"
    assert order == [f"compiler/{name}" for name in names.split()]
    assert rooms.returns(found) == [room for room, _ in rooms.RETURNS]


@pytest.mark.host("a device leads to further rooms")
def test_every_pass_that_runs_is_a_stop(rooms):
    rooms.compilation(1)()
    functions = {
        function for _, _, function in rooms.stops(rooms.compilation(2), rooms.leads_compilation)
    }
    assert {"fuse_launches", "recompute_cheap", "differentiate"} <= functions  # two by lambdas


@pytest.mark.host("a device leads to further rooms")
def test_a_fit_returns_to_a_room_only_for_a_reason_that_is_given(rooms):
    rooms.fit()()
    calls = rooms.until_loop(rooms.stops(rooms.fit(), rooms.leads_fit))
    assert rooms.returns(calls) == [room for room, _ in rooms.FIT_RETURNS]


def test_a_return_is_counted_each_time_that_a_room_is_entered_again(rooms):
    way = [(room, "file.py", "f") for room in ("a", "a", "b", "a", "c", "b", "a")]
    assert rooms.returns(way) == ["a", "b", "a"]
