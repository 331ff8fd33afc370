"""Loops on an emulated GPU, in which no step copies a carry: where each value lies is another."""

import numpy as np
import pytest
from kernel_calls import bind_to

import actorflow as af
from actorflow import nn
from actors.kernels.cuda.calls import CopyBytes
from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.cuda.kernel import DeviceView

WIDTHS = (8, 3)
"""Of entries that are stacked where steps make them, and of some that are copied there."""

LOOPS = {
    # a carry that is a result, saved before, both, neither; that of another; two of one value
    "result": lambda c, x: ((c[0] * 0.5 + x, c[1]), (c[0] * 0.5 + x,)),
    "saved": lambda c, x: ((c[0] * 0.5 + x, c[1] - c[0]), (c[0],)),
    "both": lambda c, x: ((c[0] * 0.5 + x, c[1]), (c[0], c[0] * 0.5 + x)),
    "neither": lambda c, x: ((c[0] * c[1] + x, c[1] * 0.5 + c[0]), (x * c[0],)),
    "in turn": lambda c, x: ((c[1], c[0] * 0.5 + c[1] + x), (c[0],)),
    "swapped": lambda c, x: ((c[1], c[0]), (c[0] + x,)),
    "one value": lambda c, x: ((c[0] + x, c[0] + x), (c[1],)),
    "saved twice": lambda c, x: ((c[0] * 0.5 + x, c[1]), (c[0], c[0], c[1])),
    "an entry": lambda c, x: ((x, c[0] + c[1]), (c[0], x)),
}


@pytest.fixture(autouse=True)
def emulated(native_toolchain, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


def by_numpy(loop, x, *, reverse):
    """Return carries and stacked results of a loop, step by step."""
    carries, stacks = (x[0] * 2, x[1] - 1), []
    for entry in x[2:][:: -1 if reverse else 1]:
        carries, results = loop(carries, entry)
        stacks.append(results)
    return [*carries, *[np.stack(s[:: -1 if reverse else 1]) for s in zip(*stacks, strict=True)]]


def job_of(loop, *, reverse=False):
    @af.job(train=False, device="cuda", gpu="h100")
    def job(model, batch):
        x = batch.x
        carries, stacks = af.scan(loop, (x[0] * 2, x[1] - 1), x[2:], reverse=reverse)
        return {f"out{i}": value for i, value in enumerate([*carries, *stacks])}

    return job


def batch_of(steps, width):
    rng = np.random.default_rng(steps)
    return {"x": rng.standard_normal((2 + steps, 4, width)).astype(np.float32)}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", LOOPS)
def test_carries_and_results_are_those_of_a_loop(name, width, steps, reverse):
    batch = batch_of(steps, width)
    expected = by_numpy(LOOPS[name], batch["x"].astype(np.float64), reverse=reverse)
    outputs = job_of(LOOPS[name], reverse=reverse).step(nn.Module(), batch)
    for want, got in zip(expected, outputs.values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def copies_of(name, steps):
    """Return how many copies the loop of a plan has."""
    batch = batch_of(steps, 8)
    data = af.data.ArraySource(batch, batch=len(batch["x"]))
    plan = job_of(LOOPS[name]).compile(nn.Module(), data)
    (launch,) = [x for actor in plan.actors for x in actor.launches if x.op == "scan"]

    def place(index):
        view = plan.views[index]
        base = (1 + view.register) << 32
        return DeviceView(base + view.offset_bytes, view.type, view.strides_bytes)

    operands = [tuple([place(v) for v in side]) for side in (launch.inputs, launch.outputs)]
    workspace = None if launch.workspace is None else place(launch.workspace)
    kernel = kernels_by_name("h100")[launch.kernel]
    calls = bind_to(kernel, dict(launch.attrs), *operands, workspace)
    return len([call for call in calls if isinstance(call, CopyBytes)])


@pytest.mark.parametrize("name", ["result", "saved", "both", "neither"])
def test_no_step_copies_a_carry(name):
    assert copies_of(name, 3) == copies_of(name, 30)


class Recurrent(nn.Module):
    def __init__(self):
        self.lstm, self.head = nn.LSTM(16, 128), nn.Linear(128, 5)


def test_an_lstm_whose_products_have_few_rows_trains_as_on_the_host():
    x = np.random.default_rng(0).standard_normal((6, 3, 16)).astype(np.float32)

    def losses(device):
        def train(model, batch):
            hidden, _ = model.lstm(batch.x)
            return (model.head(hidden) ** 2).mean()

        job = af.job(train, optimizer=af.optim.SGD(0.1), seed=3, device=device)
        model = Recurrent()
        return [float(job.step(model, {"x": x})["loss"]) for _ in range(3)]

    assert losses("cuda") == pytest.approx(losses("host"), rel=1e-5)
