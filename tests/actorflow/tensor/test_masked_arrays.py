"""A masked array of numpy is refused wherever arrays come in: its mask would be lost."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.data import ArraySource, DataError, Tokens
from actorflow.data.source import check_batch, spec_of

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
MASKED = np.ma.masked_array(VALUES, VALUES == 4)
IDS = np.ma.masked_array(np.array([0, 1]), [True, False])


def computed(function, **batch):
    job = af.job(train=False)(lambda model, b: {"y": function(b)})
    return job.step(nn.Module(), batch or {"x": VALUES})["y"]


CONSTANTS = {
    "an operand": lambda b: b.x + MASKED,
    "the first operand": lambda b: MASKED * b.x,
    "a choice": lambda b: af.where(MASKED, b.x, 0.0),
    "the argument of a function": lambda b: af.exp(MASKED) + b.x,
    "a part": lambda b: af.concat([b.x, MASKED], 0),
    "no mask at all": lambda b: b.x + np.ma.masked_array(VALUES),
    "the masked constant": lambda b: b.x + np.ma.masked,
    "an index": lambda b: b.x[IDS],
    "an index of a function": lambda b: af.gather(b.x, 0, IDS.reshape(2, 1)),
    "labels": lambda b: af.cross_entropy(b.x, IDS),
    "weights": lambda b: af.cross_entropy(b.x, np.array([0, 1]), weight=MASKED[0]),
    "an exponent": lambda b: af.pow(b.x, MASKED),
    "a seed of gradients": lambda b: af.grad(b.x * 2.0, [b.x], MASKED)[0],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_masked_constant_is_refused_with_the_line(name):
    with raises(af.CompileError):
        computed(CONSTANTS[name])


class Held(nn.Module):
    def __init__(self):
        self.layer, self.kept = nn.Linear(3, 2), nn.Buffer((2, 3))


def change(change_it):
    def run():
        change_it(Held())

    return run


STATE = {"kept": MASKED, "layer.weight": VALUES, "layer.bias": VALUES[0, :2]}
VARIABLES = {
    "load of a parameter": change(lambda m: m.layer.weight.load(MASKED)),
    "data of a parameter": change(lambda m: setattr(m.layer.weight, "data", MASKED)),
    "load of a buffer": change(lambda m: m.kept.load(MASKED)),
    "a new buffer": lambda: nn.Buffer(MASKED),
    "load of a module": change(lambda m: m.load(STATE)),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_masked_values_of_variables_are_refused(name):
    with raises(af.CompileError):
        VARIABLES[name]()


class Batches:
    """A source whose second batch is masked."""

    def __init__(self):
        self.batches = 0

    def spec(self):
        return spec_of({"x": VALUES})

    def __next__(self):
        self.batches += 1
        return {"x": MASKED if self.batches > 1 else VALUES}

    def fingerprint(self):
        return "masked"

    def state(self):
        return {"batches": self.batches}

    def restore(self, state):
        self.batches = state["batches"]


def fitted():
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, b):
        return model.layer(b.x).mean()

    train.fit(Held(), Batches(), steps=3, progress=False)


SOURCES = {
    "ArraySource": lambda: ArraySource({"x": MASKED}, batch=1),
    "Tokens": lambda: Tokens(IDS, seq=1, batch=1),
    "a spec": lambda: spec_of({"x": MASKED}),
    "a batch": lambda: check_batch({"x": MASKED}, spec_of({"x": VALUES})),
    "a step": lambda: computed(lambda b: b.x, x=MASKED),
}


@pytest.mark.parametrize("name", SOURCES)
def test_masked_data_are_refused(name):
    with raises((DataError, af.CompileError)):
        SOURCES[name]()


def test_a_masked_batch_of_a_source_of_plain_ones_is_refused():
    with raises(DataError):
        fitted()
