"""Loops over steps on many ranks: rows of a batch are split, and weights' gradients are shares."""

import pytest
from rank_jobs import check_step, step_graph

import actorflow as af
from actorflow import nn
from compiler.contract.placement import Mesh
from compiler.contract.sbp import BROADCAST, PARTIAL, Split
from compiler.contract.types import DType, TensorType
from compiler.ops.families.loops import SCAN
from compiler.sbp.infer import Speed
from compiler.sbp.local_form import candidate_signatures

SLOW = Speed(1e-4, 1e-4)
"""What a rank computes with, so that it pays to split even what is small."""


_START = (("kind", "constant"), ("value", 0.4))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        self.loop, self.out = kind(3, 5, batch_first=True, **options), nn.Linear(5, 2)

    def __call__(self, x):
        return self.out(self.loop(x)[0])


class Decayed(nn.Module):
    """A loop that the user states, with a weight that no product reads."""

    def __init__(self, drop=0.0):
        self.drop = drop
        self.rate, self.out = nn.Parameter((3,), _START), nn.Linear(3, 2)

    def __call__(self, x):
        def step(held, entry):
            held = af.dropout(af.tanh(held * self.rate + entry), self.drop)
            return held, held * 2

        first = af.zeros(x.shape[0], 3)
        return self.out(af.scan(step, first, x.transpose(0, 1))[1])


MODELS = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "two layers": lambda: Recurrent(nn.LSTM, num_layers=2),
    "by hand": Decayed,
}
MESHES = [
    Mesh(("data",), (2,)),
    Mesh(("data",), (4,)),  # of 6 rows two ranks have more
    Mesh(("data", "zero"), (3, 2)),
    Mesh(("more", "data"), (2, 3)),
]


@af.job(optimizer=af.optim.AdamW(1e-2), clip_norm=0.5)
def train(model, batch):
    return (model(batch.x) ** 2).mean()


def graph_of(name):
    return step_graph(train, MODELS[name](), {"x": TensorType(DType.FLOAT32, (6, 4, 3))})


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loops_over_rows_of_a_batch_are_those_of_the_whole(name, mesh):
    graph = graph_of(name)
    layouts, graphs = check_step(graph, mesh, near=1e-4, speed=SLOW)
    choice = layouts.choices[mesh.axis("data")]
    ways = [w for n, w in zip(graph.nodes, choice.signatures, strict=True) if n.op is SCAN]
    assert ways
    assert not any([way.signature.is_whole for way in ways])
    if mesh.names == ("data",) and mesh.shape == (2,):
        bodies = [[n.attrs["body"] for n in local.nodes if n.op is SCAN] for local in graphs]
        assert bodies[0] == bodies[1]


def test_a_loop_that_draws_is_done_whole_by_each_rank():
    graph = step_graph(train, Decayed(0.4), {"x": TensorType(DType.FLOAT32, (6, 4, 3))})
    layouts, _ = check_step(graph, MESHES[0], near=1e-4, speed=SLOW)
    (choice,) = layouts.choices
    ways = [w for n, w in zip(graph.nodes, choice.signatures, strict=True) if n.op is SCAN]
    assert all([way.signature.is_whole for way in ways])


def test_what_weights_get_is_a_share_of_a_sum():
    graph = graph_of("gru")
    (*_, back) = [n for n in graph.nodes if n.op is SCAN]
    types = [tuple([graph.types[v] for v in side]) for side in (back.inputs, back.outputs)]
    found = {way.signature for way in candidate_signatures(SCAN, *types, back.attrs, 2)}
    (split,) = [signature for signature in found if not signature.is_whole]
    assert Split(0) in split.inputs
    assert PARTIAL in split.outputs
    assert BROADCAST not in split.outputs


def test_the_axis_of_steps_stays_whole():
    graph = graph_of("lstm")
    (node, *_) = [n for n in graph.nodes if n.op is SCAN]
    types = [tuple([graph.types[v] for v in side]) for side in (node.inputs, node.outputs)]
    for way in candidate_signatures(SCAN, *types, node.attrs, 2):
        carries = node.attrs.int_("carries")
        assert Split(0) not in way.signature.outputs[carries:]
