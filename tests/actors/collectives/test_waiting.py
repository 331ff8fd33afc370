"""A rank that is missed where others wait for each other: the last of them is named."""

import threading

import numpy as np
import pytest
from meetings import call

from compiler.contract.errors import PeerFailed
from compiler.contract.types import DType, TensorType

TYPE = TensorType(DType.FLOAT32, (8,))
# On a mesh of 2 x 2, by rank, along which axis it waits; ranks that are left out never come.
WAITS = {
    "nobody waits for another": ({0: "data"}, {0: 2}),
    "one waits for another": ({0: "data", 2: "model"}, {0: 3, 2: 3}),
    "a chain of three": ({0: "model", 1: "data", 3: "model"}, {0: 2, 1: 2, 3: 2}),
    "a chain to the first": ({1: "data", 3: "model", 2: "data"}, {1: 0, 2: 0, 3: 0}),
    "two chains": ({0: "data", 1: "data"}, {0: 2, 1: 3}),
}


class Arrived:
    """The boards of ranks: how often each has arrived along an axis."""

    def __init__(self, lanes, axis):
        self.lanes, self.axis = lanes, axis

    def arrived(self, lane):
        return 5 + (self.lanes[lane].axis == self.axis)

    def waits_for(self):
        """Return the rank of another host that is waited for: all are on one."""
        return


@pytest.mark.parametrize("case", WAITS)
def test_who_waits_for_whom_is_followed_to_the_end(together, case):
    waits, blamed = WAITS[case]

    def do(communicator):
        bound(communicator)
        communicator.ready()
        axes = {"data": 0, "model": 1}
        lanes = communicator._lanes_of
        communicator._boards = {
            rank: Arrived(lanes[rank], axes.get(waits.get(rank))) for rank in range(4)
        }
        rank = communicator.rank
        last = communicator._follow(communicator._waited_for(rank))[-1] if rank in waits else None
        communicator._boards = {}
        return last

    found = together((2, 2), do)
    assert {rank: last for rank, last in enumerate(found) if last is not None} == blamed


@pytest.mark.slow
def test_one_that_never_comes_is_named_by_all_who_wait(together):
    waits, _ = WAITS["a chain of three"]
    done = threading.Semaphore(0)

    def do(communicator):
        meet = bound(communicator)
        communicator.ready()
        if communicator.rank == 2:
            for _ in waits:
                assert done.acquire(timeout=60)
            return None
        try:
            with pytest.raises(PeerFailed) as caught:
                meet[waits[communicator.rank]]()
            return caught.value.rank, str(caught.value)
        finally:
            done.release()

    found = together((2, 2), do, deadline_s=4.0)
    assert [row and row[0] for row in found] == [2, 2, None, 2]
    for row in (found[0], found[1], found[3]):
        assert "rank 2 did not arrive within 4 s where rank 3 waits" in row[1]


def test_a_rank_counts_how_long_it_waits_and_the_last_one_waits_for_nobody(together):
    first, has_waited = [], threading.Event()

    def do(communicator):
        meet = bound(communicator)["model"]
        communicator.ready()
        if communicator.rank == 0:
            first.append(communicator)
            has_waited.set()
        elif communicator.rank == 1:
            assert has_waited.wait(timeout=60)
            # Rank 0 has come and waits, and nothing but this rank can end that.
            while not first[0].waited_ns:
                pass
        if communicator.rank < 2:
            meet()
        return communicator.waited_ns

    waited_ns = together((2, 2), do)
    assert waited_ns[0] > waited_ns[1] == 0


def bound(communicator):
    """Return the launches of a sum along each axis."""
    launches = {}
    for axis in ("data", "model"):
        array = communicator.allocate(TYPE.size_bytes, 64).view(np.float32)
        summed = call(
            "all_reduce", TYPE, TYPE, num_ranks=2, by="sum", group=axis, actor=f"sum over {axis}"
        )
        launches[axis] = communicator.bind(summed, (array,), (array,))
    return launches
