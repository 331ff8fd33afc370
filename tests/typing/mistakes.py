"""Mistakes that `mypy --strict` refuses: each line that ends with the mark, and no other.

tests/system/test_typing.py checks it; no test runs it.
"""

from __future__ import annotations

import numpy as np

import actorflow as af
from actorflow import nn


def whole(number: int) -> None:
    """Take an integer."""


class Net(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        self.up = nn.Linear(4, "8")  # refused
        self.norm = nn.LayerNorm(8, epsilon=1e-5)  # refused
        self.list = nn.ModuleList([3])  # refused

    def __call__(self, x: af.Tensor) -> af.Tensor:
        y = af.relu(x)
        self.up(x, x)  # refused
        af.reluu(y)  # refused
        y.summ(0)  # refused
        y += "text"  # refused
        af.where(y > 0, "text", y)  # refused
        af.softmax(y, "rows")  # refused
        y.max(1).relu()  # refused
        whole(self.up.weight.sum())  # refused
        nn.CrossEntropyLos()  # refused
        af.optim.AdamW(learning_rate=1e-3)  # refused
        return self.up.weight.shape  # refused


class Other(nn.Module):
    """Another model."""


@af.job(optimizer=af.optim.SGD(0.1))
def train(model: Net, batch: af.Batch) -> af.Tensor:
    """A job."""
    whole(batch.x)  # refused
    return model(batch.x).sum()


@af.job(optimiser=af.optim.SGD(0.1))  # refused
def misspelt(model: Net, batch: af.Batch) -> af.Tensor:
    """A job with an option that there is not."""
    return model(batch.x).sum()


@af.job  # refused
def alone(model: Net) -> af.Tensor:
    """A job without a batch."""
    return model.up.weight.sum()


data = af.data.ArraySource({"x": np.zeros((8, 4))}, batch=4)
train.fit(Other(), data, steps=3)  # refused
train.fit(Net(), data, steps="many")  # refused
train.fit(Net(), data, step=3)  # refused
train.step(Net(), 3)  # refused
train(Net(), {})  # refused
whole(train.fit(Net(), data, steps=1))  # refused
