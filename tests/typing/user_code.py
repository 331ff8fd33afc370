"""Code as users write it: `mypy --strict` accepts it, and knows the types that it states.

tests/system/test_typing.py checks it; no test runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import actorflow as af
import actorflow.nn.functional as F  # noqa: N812  # as users of torch call it
from actorflow import nn

Array = npt.NDArray[np.float32]


class Net(nn.Module):
    """A model of layers, lists of them and parameters of its own."""

    def __init__(self, width: int) -> None:
        self.up = nn.Linear(4, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.heads = nn.ModuleDict({"y": nn.Linear(width, 3)})
        self.tail = nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
        self.scale = nn.Parameter((width,), "ones")
        self.mean = nn.Buffer((width,))
        self.conv = nn.weight_norm(nn.Conv1d(1, 1, 3, padding=1))

    def __call__(self, x: af.Tensor) -> af.Tensor:
        h = af.relu(self.up(x))
        for block in self.blocks:
            assert_type(block, nn.Linear)
            h = h + block(h)
        assert_type(self.blocks[0], nn.Linear)
        assert_type(self.blocks[:1], nn.ModuleList[nn.Linear])
        assert_type(self.conv, nn.Conv1d)
        self.mean.assign(h.mean(0))
        h = assert_type(self.tail(h), af.Tensor) * self.scale
        return self.heads["y"](h)


def functions(x: af.Tensor) -> dict[str, af.Tensor]:
    """Functions, methods and operators."""
    assert_type(x.shape, tuple[int, ...])
    assert_type(x.ndim, int)
    values, places = x.topk(2)
    assert_type(af.sort(x).indices, af.Tensor)
    assert_type(af.mean(x, axis=1, keepdims=True), af.Tensor)
    assert_type(af.sum(x, 1, keepdim=True), af.Tensor)
    assert_type(x.max(), af.Tensor)
    assert_type(x.max(1).values, af.Tensor)
    assert_type(af.min(x, 1).indices, af.Tensor)
    assert_type(x.split(2), tuple[af.Tensor, ...])
    assert_type(2.0 * x @ x.T - np.float32(1.0), af.Tensor)
    assert_type(x > 0, af.Tensor)
    assert_type(x[0, ..., None], af.Tensor)
    assert_type(af.where(x > 0, x, 0.0), af.Tensor)
    assert_type(F.cross_entropy(x, places), af.Tensor)
    assert_type(F.max_pool2d(x, 2), af.Tensor)
    assert_type(af.linalg.inv(x), af.Tensor)
    assert_type(af.grad(x.sum(), x), af.Tensor)
    assert_type(af.grad(x.sum(), [x, x]), tuple[af.Tensor, ...])
    last, _ = af.scan(lambda held, row: (held + row, held), x[0], x)
    return {"values": values, "clamped": x.clamp(0, 1), "norm": x.norm(), "last": last}


optimizer = af.optim.AdamW(
    af.optim.warmup(af.optim.cosine(1e-3, steps=100), steps=10),
    groups=[af.optim.group("*.bias", weight_decay=0.0)],
)


@af.job(optimizer=optimizer, clip_norm=1.0)
def train(model: Net, batch: af.Batch) -> af.Tensor:
    """With options."""
    assert_type(batch.x, af.Tensor)
    assert_type(batch["x"], af.Tensor)
    return af.cross_entropy(model(batch.x), batch.y)


@af.job
def plain(model: Net, batch: af.Batch) -> af.Tensor:
    """Without."""
    return nn.MSELoss()(model(batch.x), batch.y)


@af.job(train=False)
def predict(model: nn.Module, batch: Any) -> dict[str, af.Tensor]:
    """Of any model, on a batch of any type."""
    logits: af.Tensor = model(batch.x)
    return {"y": logits.softmax(-1), "loss": af.cross_entropy(logits, batch.y)}


assert_type(train, af.Job[Net, af.Tensor])
assert_type(predict, af.Job[nn.Module, dict[str, af.Tensor]])


def steps(job: af.Job, model: nn.Module, batch: Mapping[str, Array]) -> float:
    """A function of any job."""
    return float(job.step(model, batch)["loss"])


def run(folder: Path) -> None:
    """What a script does."""
    arrays: dict[str, npt.NDArray[Any]] = {"x": np.zeros((8, 4), "f4"), "y": np.zeros(8, int)}
    data = af.data.ArraySource(arrays, batch=4)
    net = assert_type(Net(8).init(0), Net)
    result = train.fit(net, data, steps=3, checkpoint=folder, on_step=lambda step, made: None)
    assert_type(result, af.FitResult)
    for metrics in train.stream(net, data, steps=2):
        print(metrics["loss"])
    assert_type(train.step(net, arrays), Mapping[str, Any])
    assert_type(train.compile(net, data), af.Plan)
    assert_type(train.function(net, af.Batch.__new__(af.Batch)), af.Tensor)
    steps(train, net, {})
    state = net.state()
    net.load(state, strict=False)
    net.save(folder / "model.safetensors")
    adapters = nn.lora(net, rank=2)
    adapters.save(folder)
    try:
        af.load(folder)
    except (af.CheckpointError, af.NonFiniteLoss) as error:
        print(error)
    with af.eager():
        print(float(net(af.zeros(2, 4)).mean()))
