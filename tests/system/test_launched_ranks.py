"""Ranks that were launched meet in shared memory, and what ends them is told once."""

import os
from pathlib import Path

import meetings
import pytest
from launching import STAGED, end_of, launcher

PATH = os.pathsep.join(
    [str(Path(meetings.__file__).parent), str(Path(meetings.__file__).parents[2])]
)

SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy as np
from meetings import call
from actorflow.distributed.member import current_rank
from actors.collectives.shared_memory import SharedMemory
from actors.kernels.library.toolchain import find_toolchain
from compiler.contract.placement import Mesh
from compiler.contract.types import DType, TensorType

fault, cache, deadline_s = sys.argv[1:]
member = current_rank()
count = member.num_ranks
toolchain = find_toolchain(os.environ, Path(cache))
communicator = SharedMemory(
    member.rank, Mesh(("data",), (count,)), member.all_gather_object, toolchain,
    deadline_s=float(deadline_s),
)
type_ = TensorType(DType.FLOAT32, (1000,))
array = communicator.allocate(type_.size_bytes, 64).view(np.float32)
summed = call("all_reduce", type_, type_, num_ranks=count, by="sum")
meet = communicator.bind(summed, (array,), (array,))
communicator.ready()
for step in range(3):
    if step == 2 and member.rank == 1:
        if fault == "raise":
            raise RuntimeError("of rank 1")
        if fault != "none":
            os.kill(os.getpid(), getattr(signal, fault))
    array[...] = step + member.rank
    meet()
    print(step, {*array.tolist()}, flush=True)
communicator.close()
"""


@pytest.mark.parametrize(
    ("fault", "deadline_s", "status", "said"),
    [
        ("none", 60, 0, ""),
        ("raise", 60, 1, "rank 1 of 3 failed:"),
        ("SIGKILL", 60, 137, "rank 1 was ended by SIGKILL"),
        pytest.param("SIGSTOP", 8, 1, "rank 1 was stopped (SIGSTOP) ", marks=pytest.mark.slow),
    ],
)
def test_ranks_meet_and_the_one_that_fails_is_told_once(
    tmp_path, native_toolchain, fault, deadline_s, status, said
):
    with launcher(tmp_path) as start:
        arguments = (fault, str(native_toolchain.folder), str(deadline_s))
        code, out, err = end_of(start(SCRIPT, *arguments, n=3, grace=3, PYTHONPATH=PATH))
    sums = ["0 {3.0}", "1 {6.0}", "2 {9.0}"]
    assert code == status, err
    assert out.splitlines() == (sums if fault == "none" else sums[:2])
    last = err.rpartition("---\n")[2]
    assert said in last
    assert last.count("actorflow launch:") == (fault != "none")
    assert last.count("RuntimeError: of rank 1") == (fault == "raise")


BROKEN_SOURCE = f"""{STAGED}
import os, sys

class Source(af.data.ArraySource):
    count = 0

    def __next__(self):
        self.count += 1
        if os.environ["RANK"] == "1" and self.count == 12:
            raise RuntimeError("no more of it")
        return super().__next__()

train = af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))(loss)
source = Source(arrays, batch=8, seed=1)
train.fit(Net(), source, steps=10_000, checkpoint="run", every="0.01s")
"""


def test_a_source_that_fails_on_one_rank_ends_all_with_its_error(tmp_path):
    """Its last snapshot is no checkpoint: the other rank is at another step, and would not vote."""
    with launcher(tmp_path) as begin:
        process = begin(BROKEN_SOURCE, ACTORFLOW_RANK_SECONDS="600")
        code, _, err = end_of(process)
    assert code == 1
    assert "actorflow launch: rank 1 of 2 failed:\n" in err
    assert err.endswith("RuntimeError: no more of it\n")
