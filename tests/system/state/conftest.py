"""A model in training, and the oracle of what can be read of it.

The oracle is a twin that is stepped one step at a time: whatever is read while a run is open must
be, bit for bit, what the twin held after one of its steps.
"""

import numpy as np
import pytest

import actorflow as af

STEPS = 12
OPTIONS = [{}, {"streams": 2}, {"accumulate": 2}, {"streams": 2, "accumulate": 2}]


@pytest.fixture(params=OPTIONS, ids=str)
def options(request, many_chains):
    return request.param


@pytest.fixture
def score():
    @af.job(train=False)
    def score(model, batch):
        return {"loss": af.cross_entropy(model(batch.x), batch.y)}

    return score


def join(state):
    return b"".join([state[name].tobytes() for name in sorted(state)])


@pytest.fixture
def bytes_of():
    """All bytes of a state, to be compared."""
    return join


class Twin:
    """The states of a model after 1, 2, ... steps."""

    def __init__(self, states):
        self.states = [join(state) for state in states]

    def step_of(self, state):
        """The number of the step after which the twin held this state; fails where it never did."""
        return 1 + self.states.index(join(state))


@pytest.fixture
def twin(mlp, classification, classify):
    """Train a twin by single steps and return it."""

    def make(options, steps=STEPS):
        job, model, data = classify(**options), mlp(), classification()
        each = options.get("accumulate", 1)
        states = []
        for _ in range(steps):
            job.step(model, [next(data) for _ in range(each)])
            states.append(model.state())
        job.close(model)
        return Twin(states)

    return make


@pytest.fixture
def still():
    """A job whose steps change nothing, and whose outputs tell the parameters they were made of."""

    def make(**options):
        @af.job(optimizer=af.optim.SGD(0.0), **options)
        def total(model, batch):
            parts = {name: p.sum() for name, p in model.named_parameters()}
            return {"loss": af.cross_entropy(model(batch.x), batch.y), **parts}

        return total

    return make


@pytest.fixture
def filled():
    """A state of a model with one number everywhere."""
    return lambda model, number: {
        path: np.full(p.type.shape, number, np.float32) for path, p in model.named_parameters()
    }
