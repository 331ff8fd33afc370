"""Every optimizer with its parameters and state in parts: what ranks write is what one writes."""

import pytest
from error_texts import raises
from rank_jobs import check_step, laid_out, step_graph

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError
from compiler.contract.placement import Mesh
from compiler.contract.sbp import BROADCAST, Split
from compiler.contract.types import DType, TensorType
from compiler.ops.primitives.sources import VARIABLE


class Net(nn.Module):
    """A wide matrix, a tall one, biases, and axes that are no multiples of the ranks."""

    def __init__(self):
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def __call__(self, x):
        return self.down(af.tanh(self.up(x)))


class Matrices(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(5, 7, bias=False), nn.Linear(7, 5, bias=False)

    def __call__(self, x):
        return self.down(af.tanh(self.up(x)))


OPTIMIZERS = {
    "sgd": af.optim.SGD(0.1, weight_decay=0.1),
    "momentum": af.optim.SGD(0.1, momentum=0.9),
    "nesterov": af.optim.SGD(0.1, momentum=0.9, nesterov=True),
    "damped": af.optim.SGD(0.1, momentum=0.9, dampening=0.5),
    "adam": af.optim.Adam(1e-2),
    "amsgrad": af.optim.AdamW(1e-2, amsgrad=True),
    "adamw": af.optim.AdamW(1e-2),
    "adagrad": af.optim.Adagrad(1e-2),
    "rmsprop": af.optim.RMSprop(1e-2),
    "rmsprop centered": af.optim.RMSprop(1e-2, centered=True, momentum=0.9),
    "lion": af.optim.Lion(1e-2),
    "lamb": af.optim.LAMB(1e-2),
    "adafactor": af.optim.Adafactor(1e-2, weight_decay=0.1),
    "muon": af.optim.Muon(1e-2),
    "muon decayed": af.optim.Muon(1e-2, weight_decay=0.2, nesterov=False),
}

MESHES = [
    Mesh(("zero",), (2,)),
    Mesh(("zero",), (3,)),
    Mesh(("model",), (2,)),
    Mesh(("data", "zero"), (2, 2)),
    Mesh(("model", "zero"), (2, 2)),
]


def split_columns(name):
    """Return how a parameter lies; what has its shape follows it, all else is whole."""
    if "/" in name or name == "counter":
        return BROADCAST
    return Split(1) if name == "up.weight" else Split(0)


SPEC = {"x": TensorType(DType.FLOAT32, (6, 5))}


def job_of(name):
    @af.job(optimizer=OPTIMIZERS[name])
    def train(model, batch):
        return (model(batch.x) ** 2).mean()

    return train


def graph_of(name):
    model = Matrices() if name.startswith("muon") else Net()
    return step_graph(job_of(name), model, SPEC)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_of_parameters_are_updated_as_the_whole(name, mesh):
    _, graphs = check_step(graph_of(name), mesh, split_columns, near=1e-4)
    held = {n.attrs["name"]: n.attrs["shape"] for n in graphs[0].nodes if n.op is VARIABLE}
    assert held["up.weight"] != (7, 5)
    assert held["down.weight"] != (5, 7)


def test_an_update_that_reads_whole_tensors_takes_no_parts_as_it_stands():
    graph = step_graph(job_of("muon"), Matrices(), SPEC, is_staged=False)
    with raises(CompileError):
        laid_out(graph, Mesh(("zero",), (2,)))


@pytest.mark.parametrize("name", ["lamb", "muon", "adafactor", "adamw"])
def test_what_is_written_over_is_the_variable_itself(name):
    _, graphs = check_step(graph_of(name), Mesh(("data", "zero"), (2, 2)), near=1e-4)
    for graph in graphs:
        variables = {n.outputs[0] for n in graph.nodes if n.op is VARIABLE}
        over = [node.inputs[old] for node in graph.nodes for _, old in node.writes]
        assert over
        assert variables.issuperset(over)
