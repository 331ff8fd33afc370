from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
from actorflow import nn


class Model(nn.Module):
    def __init__(self):
        self.emb, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(af.gelu(self.up(self.norm(self.emb(x))), approximate="tanh"))


@pytest.fixture(scope="session")
def plan():
    """A plan with snapshots on numpy's kernels, op by op."""
    return compiled()


@pytest.fixture(scope="session")
def accumulating():
    """The same with two batches a step."""
    return compiled(accumulate=2)


def compiled(**options):
    @af.job(optimizer=af.optim.AdamW(1e-2), **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 11, 64).astype(np.int32), rng.integers(0, 5, 64).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CACHE", "off")
        patch.setenv("ACTORFLOW_NATIVE", "0")
        return train.compile(Model(), af.data.ArraySource({"x": x, "y": y}, batch=16), every=2)


class Edit:
    """Change rows of a plan: the launches of its step, its views, its registers."""

    def __init__(self, plan):
        self.plan = plan
        self.step = next(a for a in plan.actors if a.name == "step")

    def launch(self, op):
        """Return the place of the first launch of an op, or of the kernel that it is fused into."""
        launches = list(enumerate(self.step.launches))
        own = [i for i, launch in launches if launch.op == op]
        return (own or [i for i, launch in launches if op in launch.made_of])[0]

    def with_launch(self, which, **changes):
        """Return the plan with the first launch of an op changed."""
        launches = list(self.step.launches)
        place = self.launch(which)
        launches[place] = replace(launches[place], **changes)
        return self.with_actor("step", launches=tuple(launches))

    def with_actor(self, which, **changes):
        actors = tuple(replace(a, **changes) if a.name == which else a for a in self.plan.actors)
        return replace(self.plan, actors=actors)

    def with_view(self, index, **changes):
        views = list(self.plan.views)
        views[index] = replace(views[index], **changes)
        return replace(self.plan, views=tuple(views))

    def with_operand(self, op, position, **changes):
        """Return the plan where an input of the first launch of an op is another view."""
        launch = self.step.launches[self.launch(op)]
        view = replace(self.plan.views[launch.inputs[position]], **changes)
        inputs = list(launch.inputs)
        inputs[position] = len(self.plan.views)
        changed = self.with_launch(op, inputs=tuple(inputs))
        return replace(changed, views=(*changed.views, view))

    def with_attr(self, op, name, value):
        launch = self.step.launches[self.launch(op)]
        return self.with_launch(op, attrs=tuple((dict(launch.attrs) | {name: value}).items()))


@pytest.fixture
def edit(plan):
    return Edit(plan)
