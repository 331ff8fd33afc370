"""Ranks of a test, each with its end of the transport."""

import pytest
from rank_threads import RankThreads

from actors.collectives.shared_memory import SharedMemory
from compiler.contract.placement import Mesh


@pytest.fixture
def together(native_toolchain):
    """Return what runs `do(communicator)` on all ranks of a mesh at once."""

    def run(shape, do, names=("data", "model", "stage"), timeout_s=60, **options):
        mesh = Mesh(names[: len(shape)], tuple(shape))
        threads = RankThreads(mesh.num_ranks, timeout_s)

        def one(rank):
            communicator = SharedMemory(
                rank, mesh, threads.gather(rank), native_toolchain, **options
            )
            try:
                return do(communicator)
            finally:
                communicator.close()

        run.threads = threads
        return threads.run(one)

    return run
