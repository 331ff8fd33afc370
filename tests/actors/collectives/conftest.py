"""Ranks of a test, each with its end of the transport."""

import pytest
from rank_threads import RankThreads

from actors.collectives.shared_memory import SharedMemory
from compiler.contract.placement import Mesh


@pytest.fixture
def together(native_toolchain):
    """Return what runs `do(communicator)` on all ranks of a mesh at once.

    `tells(rank, name, value)` may return something else than a rank has to tell in a gather, and
    `meshes(rank, mesh)` another mesh than that of the others.
    """

    def run(
        shape, do, names=("data", "model", "stage"), timeout_s=60,
        tells=lambda rank, name, value: value, meshes=lambda rank, mesh: mesh, **options,
    ):  # fmt: skip
        mesh = Mesh(names[: len(shape)], tuple(shape))
        threads = RankThreads(mesh.num_ranks, timeout_s)

        def one(rank):
            gather = threads.gather(rank)

            def told(name, value):
                return gather(name, tells(rank, name, value))

            own_mesh = meshes(rank, mesh)
            communicator = SharedMemory(rank, own_mesh, told, native_toolchain, **options)
            try:
                return do(communicator)
            finally:
                communicator.close()

        run.threads = threads
        return threads.run(one)

    return run
