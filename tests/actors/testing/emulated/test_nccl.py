"""What the emulated NCCL refuses, and what it leaves where a call has failed."""

import threading
from random import Random

import numpy as np
import pytest

from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import CollectiveKind, RunCollective
from actors.kernels.cuda.kernel import gpu_named
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule
from compiler.contract.types import DType


class Ranks:
    """Drivers of two GPUs with a communicator, a stream and 64 bytes each."""

    def __init__(self, toolchain):
        self.drivers = [
            EmulatedDriver(EmulatedCuda(LateSchedule(Random(rank))), toolchain, gpu, rank)
            for rank, gpu in enumerate([gpu_named("h200")] * 2)
        ]
        unique_id = self.drivers[0].unique_id()
        assert len(unique_id) == 128
        self.communicators = self.at_once(
            lambda rank: self.drivers[rank].join_communicator(unique_id, 2, rank, 60.0)
        )
        self.streams = [driver.make_stream("comm") for driver in self.drivers]
        self.blocks = [driver.allocate(64) for driver in self.drivers]

    def at_once(self, do):
        found = {}
        threads = [
            threading.Thread(target=lambda rank=rank: found.update({rank: do(rank)}))
            for rank in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[rank] for rank in range(2)]

    def call(self, rank, count=4, address=None, dtype=DType.FLOAT32, by="sum"):
        place = self.blocks[rank] if address is None else address
        kind = CollectiveKind.ALL_REDUCE
        return RunCollective(kind, self.communicators[rank], place, place, (count,), dtype, by)

    def put(self, rank, **changed):
        self.drivers[rank].collective_later(self.call(rank, **changed), self.streams[rank])

    def read(self, rank, count=4):
        array = np.empty(count, np.float32)
        self.drivers[rank].copy(array.ctypes.data, self.blocks[rank], array.nbytes)
        return array

    def write(self, rank, value):
        array = np.full(4, value, np.float32)
        self.drivers[rank].copy(self.blocks[rank], array.ctypes.data, array.nbytes)


@pytest.fixture
def ranks(native_toolchain):
    made = Ranks(native_toolchain)
    yield made
    for driver in made.drivers:
        driver.close()


def test_a_captured_call_meets_each_time_that_its_graph_runs(ranks):
    def do(rank):
        driver, stream = ranks.drivers[rank], ranks.streams[rank]
        ranks.write(rank, rank + 1.0)
        driver.begin_capture(stream)
        ranks.put(rank)
        graph = driver.end_capture(stream)
        for _ in range(3):
            driver.graph_later(graph, stream)
        driver.synchronize()
        return ranks.read(rank)

    for array in ranks.at_once(do):
        np.testing.assert_array_equal(array, np.full(4, 12.0))


def test_ranks_of_which_one_captured_are_an_error_of_both(ranks):
    def do(rank):
        driver, stream = ranks.drivers[rank], ranks.streams[rank]
        if rank:
            driver.begin_capture(stream)
        ranks.put(rank)
        if rank:
            driver.graph_later(driver.end_capture(stream), stream)
        driver.synchronize()
        with pytest.raises(CudaError, match="came to another call"):
            driver.check_communicator(ranks.communicators[rank])
        return ranks.read(rank)

    for array in ranks.at_once(do):
        assert np.isnan(array).all()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dtype": DType.INT16}, "NCCL has no type for int16"),
        ({"dtype": DType.BOOL}, "NCCL has no type for bool"),
        ({"by": "mean"}, "NCCL reduces by nothing called 'mean'"),
        ({"count": 17}, "68 bytes at 0x.* are nobody's"),
    ],
)
def test_a_call_that_cannot_be_is_refused_when_it_is_put(ranks, changed, text):
    with pytest.raises(CudaError, match=text):
        ranks.put(0, **changed)


def test_nothing_is_put_by_a_communicator_that_was_aborted(ranks):
    ranks.drivers[0].abort_communicator(ranks.communicators[0])
    with pytest.raises(CudaError, match="the communicator was aborted"):
        ranks.put(0)
    ranks.drivers[0].check_communicator(ranks.communicators[0])  # which is no failure


def test_an_id_that_nobody_made_is_refused(ranks):
    with pytest.raises(CudaError, match="no communicator is known by this id"):
        ranks.drivers[0].join_communicator(bytes(128), 2, 0, 60.0)
