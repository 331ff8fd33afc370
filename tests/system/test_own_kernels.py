"""Kernels of a user for ops that would be fused: asked first, and the op is left to them."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actors.kernels.common.kernel import KernelNeeds
from actors.kernels.host import catalogue


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def __call__(self, x):
        return self.down(af.softmax(self.up(x)))


def softmax_into(x, y):
    np.exp(x - x.max(axis=-1, keepdims=True), out=y)
    y /= y.sum(axis=-1, keepdims=True)


@dataclass
class WholeSoftmax:
    """A softmax in one piece, for float32 alone."""

    name: str = "mine.softmax"
    op: str = "softmax"
    calls: int = 0

    def query(self, attrs, inputs, outputs):
        is_taken = inputs[0].dtype == np.float32 and attrs["scale"] == 1.0
        return KernelNeeds() if is_taken and not attrs["causal"] else None

    def bind(self, attrs, inputs, outputs, workspace):
        return partial(softmax_into, inputs[0], outputs[0])


@pytest.fixture
def registered():
    yield af.kernel(WholeSoftmax)
    catalogue.unregister("mine.softmax")


def kernels_and_loss():
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(6, 8)).astype(np.float32), "y": np.arange(6, dtype=np.int32) % 4}

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    model = Net()
    data = af.data.ArraySource(batch, batch=6, seed=0)
    losses = [m["loss"] for m in train.stream(model, data, steps=3)]
    plan = train.compile(model, data)
    return {launch.kernel for actor in plan.actors for launch in actor.launches}, losses


@pytest.mark.no_gpu("a user's kernel is for the host")
def test_a_users_kernel_takes_its_op_out_of_fusion_and_computes_the_same(registered):
    with_mine, mine = kernels_and_loss()
    catalogue.unregister("mine.softmax")
    without, ours = kernels_and_loss()
    catalogue.register(WholeSoftmax())
    assert "mine.softmax" in with_mine - without
    np.testing.assert_allclose(mine, ours, rtol=1e-6)


def test_an_op_without_a_kernel_of_the_user_is_fused_again(registered):
    catalogue.unregister("mine.softmax")
    kernels, _ = kernels_and_loss()
    catalogue.register(WholeSoftmax())
    assert not [k for k in kernels if "softmax" in k]


@dataclass
class OfNoOp(WholeSoftmax):
    op: str = "softmx"


class NoKernel:
    name = "mine.nothing"

    def query(self, attrs, inputs, outputs):
        return None


class OfTwo(WholeSoftmax):
    def __init__(self, first, second): ...


BEFORE = KernelNeeds(duration_ns=1.0)


@pytest.mark.parametrize(
    "needs",
    [
        5,
        KernelNeeds(workspace_bytes=-5),
        KernelNeeds(workspace_bytes=1.5),
        KernelNeeds(in_place=((0, 7),)),
        KernelNeeds(duration_ns=float("nan")),
        ValueError("no"),
        pytest.param(BEFORE, marks=pytest.mark.no_gpu("a user's kernel is for the host")),
    ],
)
def test_what_a_kernel_answers_is_checked_each_time_it_is_registered_anew(needs):
    """A plan of the kernel that had the name before is none of this one."""

    class Bent(WholeSoftmax):
        def query(self, attrs, inputs, outputs):
            if isinstance(needs, Exception):
                raise needs
            return needs

        def bind(self, attrs, inputs, outputs, workspace):
            return None

    af.kernel(Bent)
    try:
        with raises((af.CompileError, af.DeviceError)):
            kernels_and_loss()
    finally:
        catalogue.unregister("mine.softmax")


@pytest.mark.parametrize("cls", [OfNoOp, NoKernel, OfTwo, softmax_into])
def test_what_is_no_kernel_of_an_op_is_refused(cls):
    with raises(ValueError):
        af.kernel(cls)
