import pytest

import actorflow as af
from actorflow import nn
from compiler.contract.types import DType, TensorType

X, Y = TensorType(DType.FLOAT32, (32, 8)), TensorType(DType.INT32, (32,))


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def __call__(self, x):
        return self.down(af.gelu(self.up(x), approximate="tanh"))


@af.job(optimizer=af.optim.AdamW(1e-2))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@pytest.fixture(scope="session")
def training_plan():
    """A training plan with snapshots: every kind of register a job of one chain has.

    Of numpy's kernels, so that each op has a tensor of its own to be looked for.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_NATIVE", "0")
        return train.compile(Net(), {"x": X, "y": Y}, every="5s")
