"""One rank as a process: `python rank_process.py RANK COUNT SIZE DEADLINE_S CACHE [HOSTS]`.

HOSTS has a letter for the host of each rank; without it all are on one.

It agrees with others over its pipes: a line out for what it has to say, a line in for what all
said.
Then for every line in it meets the others once, and puts out what the sum was.
"""

import ast
import os
import sys
from pathlib import Path

import numpy as np

from actors.collectives import mpi
from actors.collectives.hierarchical import HierarchicalCommunicator
from actors.collectives.shared_memory import SharedMemory
from actors.kernels.library.toolchain import find_toolchain
from compiler.contract.collective import Collective, LaunchSite
from compiler.contract.errors import PeerFailed
from compiler.contract.placement import Mesh
from compiler.contract.types import DType, TensorType


def say(kind, value):
    print(f"{kind} {value!r}", flush=True)


def gather(name, value):
    say("gather", (name, value))
    return ast.literal_eval(sys.stdin.readline())


def main(rank, count, size, deadline_s, cache, hosts=""):
    toolchain = find_toolchain(os.environ, Path(cache))
    asked = int(rank), Mesh(("data",), (int(count),)), gather, toolchain
    if hosts:
        communicator = HierarchicalCommunicator(
            *asked, host=hosts[int(rank)], connect=mpi.connect, deadline_s=float(deadline_s)
        )
    else:
        communicator = SharedMemory(*asked, deadline_s=float(deadline_s))
    type_ = TensorType(DType.FLOAT32, (int(size),))
    array = communicator.allocate(type_.size_bytes, 64).view(np.float32)
    attrs = {"group": "data", "order": 0, "num_ranks": int(count), "by": "sum"}
    site = LaunchSite("a", 0, "w", "", "model.py:1")
    summed = Collective.of("all_reduce", attrs, (type_,), (type_,), site)
    meet = communicator.bind(summed, (array,), (array,))
    communicator.ready()
    say("ready", os.getpid())
    for line in sys.stdin:
        array[...] = float(line) + communicator.rank
        try:
            meet()
            say("met", sorted({*array.tolist()}))
        except PeerFailed as error:
            say("failed", (error.rank, str(error)))


if __name__ == "__main__":
    main(*sys.argv[1:])
