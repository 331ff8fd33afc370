"""The plan of a small training job, and plans with one actor or register changed."""

from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
from actorflow import nn


class Classifier(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(af.dropout(af.relu(self.up(x)), 0.2))


@af.job(optimizer=af.optim.AdamW(1e-2))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def trained_plan(folder, every):
    """Return a plan of a training step with a snapshot of the variables after so many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CACHE", str(folder))
        data = {"x": np.zeros((16, 8), np.float32), "y": np.zeros(16, np.int32)}
        return train.compile(Classifier(), af.data.ArraySource(data, batch=4), every=every)


def actor_of(plan, name):
    return next(a for a in plan.actors if a.name == name)


def register_of(plan, name):
    return next(r for r in plan.registers if r.name == name)


def with_actor(plan, name, **changes):
    actors = [replace(a, **changes) if a.name == name else a for a in plan.actors]
    return replace(plan, actors=tuple(actors))


def with_register(plan, name, **changes):
    registers = [replace(r, **changes) if r.name == name else r for r in plan.registers]
    return replace(plan, registers=tuple(registers))
