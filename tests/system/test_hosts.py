"""Jobs on several hosts, which are names that ranks of this one are given: tensors go by MPI."""

import json

import pytest
from launching import end_of, launcher

from actors.collectives.segments import library

SCRIPT = """
import json, os, signal, sys
import numpy as np
import actorflow as af
from actorflow import nn
from actorflow.distributed.member import current_rank

rank = int(os.environ.get("RANK", "0"))
hosts, fault = os.environ.get("HOSTS", ""), os.environ.get("FAULT", "")
if hosts:
    # What an agent of each host would say of it.
    current_rank().host = hosts[rank]

class Net(nn.Module):
    def __init__(self):
        self.table = nn.Embedding(64, 16)
        self.block = nn.TransformerBlock(16, heads=2, causal=True, sbp={"model": af.split(0)})
        self.out = nn.Linear(16, 64)

    def __call__(self, x):
        return self.out(self.block(self.table(x)))

mesh = None if os.environ["WORLD_SIZE"] == "1" else af.Mesh(data=2, model=2)

@af.job(optimizer=af.optim.SGD(0.1, momentum=0.9), **({} if mesh is None else {"mesh": mesh}))
def train(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

rng = np.random.default_rng(0)
tokens = rng.integers(0, 64, (64, 9)).astype(np.int32)
data = af.data.ArraySource({"x": tokens[:, :-1], "y": tokens[:, 1:]}, batch=8, seed=1)
losses = []

def note(step, metrics):
    losses.append(float(metrics["loss"]))
    if fault == "kill" and rank == 3 and len(losses) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

train.fit(Net(), data, steps=8, progress=False, on_step=note)
with open(f"rank{rank}.json", "w") as file:
    json.dump(losses, file)
"""


pytestmark = pytest.mark.no_gpu("tensors of the host go by shared memory and MPI")


@pytest.fixture(scope="module")
def train(tmp_path_factory, built_kernels, native_toolchain):
    """Return what trains on hosts, named by a letter for each rank, and returns the losses of all.

    The plan is compiled once, for what it is does not depend on where its ranks are.
    """
    library(native_toolchain)  # or four ranks would build it side by side
    cache = tmp_path_factory.mktemp("cache")
    (cache / "native").symlink_to(built_kernels, target_is_directory=True)

    def run(hosts, n=4, **environ):
        folder = tmp_path_factory.mktemp("run")
        with launcher(folder) as start:
            environ |= {"HOSTS": hosts, "ACTORFLOW_CACHE": str(cache)}
            code, _, err = end_of(start(SCRIPT, n=n, grace=3, **environ))
        losses = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
        assert code or losses == losses[:1] * n
        return code, err, losses

    return run


@pytest.fixture(scope="module")
def on_one_host(train):
    return train("")


@pytest.mark.extra("mpi")
@pytest.mark.parametrize(
    "hosts", ["aabb", *[pytest.param(h, marks=pytest.mark.slow) for h in ("abba", "aaab", "abcd")]]
)
def test_a_mesh_on_several_hosts_has_the_losses_of_one_to_the_bit(train, on_one_host, hosts):
    assert train(hosts) == on_one_host
    assert on_one_host[0] == 0, on_one_host[1]


def test_one_process_has_the_losses_to_rounding(train, on_one_host):
    assert train("", n=1)[2][0] == pytest.approx(on_one_host[2][0], rel=1e-6)


@pytest.mark.extra("mpi")
def test_a_rank_that_is_killed_ends_the_ranks_of_all_hosts(train, on_one_host):
    code, err, losses = train("aabb", FAULT="kill", ACTORFLOW_RANK_SECONDS="3600")
    assert (code, losses) == (137, [])
    assert "actorflow launch: rank 3 was ended by SIGKILL" in err
