"""What hosts, and extents that ranks do not divide, change in the layouts of whole steps."""

import itertools

import pytest
from rank_jobs import step_graph

import actorflow as af
from actorflow import nn
from compiler.contract.placement import INSIDE_A_HOST, Hosts, Mesh, MeshLink, on_hosts
from compiler.contract.sbp import BROADCAST, Split
from compiler.contract.types import DType, TensorType
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.sbp import infer
from compiler.sbp.distribute import RankGraphs, assign_sbp
from compiler.sbp.infer import (
    MeshAxis,
    SbpSearchProblem,
    Speed,
    bucketable_values,
    enumerate_candidates,
)

ROWS = 16


class Classes(nn.Module):
    """Layers, and then one class for each of the last layer's outputs."""

    def __init__(self, *layers):
        self.layers = nn.Sequential(*layers)

    def __call__(self, x):
        y = self.layers(x)
        return y.flatten(0, -2) if len(y.shape) > 2 else y


def gpt():
    blocks = [
        nn.TransformerBlock(256, heads=4, causal=True, sbp={"model": af.split(0)}) for _ in range(2)
    ]
    return Classes(nn.Embedding(1024, 256), *blocks, nn.Linear(256, 1024))


def perceptron():
    return Classes(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())


def convolution():
    layers = [nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()]
    return Classes(*layers, nn.Linear(64 * 16, 64))


MODELS = {
    "GPT": (gpt, TensorType(DType.INT32, (ROWS, 128)), ROWS * 128),
    "perceptron": (perceptron, TensorType(DType.FLOAT32, (ROWS, 256)), ROWS),
    "convolution": (convolution, TensorType(DType.FLOAT32, (ROWS, 16, 4, 4)), ROWS),
}


@af.job(optimizer=af.optim.AdamW(1e-3), clip_norm=1.0)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y.flatten())


def graph_of(name):
    make, x, rows = MODELS[name]
    y = TensorType(DType.INT32, (ROWS, rows // ROWS))
    return step_graph(train, make(), {"x": x, "y": y})


def price(graph, context, layouts):
    """Return the time of layouts over the links of some ranks, added up from what each says."""
    total = 0.0
    for number, (name, link) in enumerate(zip(context.mesh.names, context.links, strict=True)):
        parts, earlier = context.mesh.shape[:number], layouts.choices[:number]
        types = [
            infer.part_type(type_, [choice.words[value] for choice in earlier], parts)
            for value, type_ in enumerate(graph.types)
        ]
        axis, words = MeshAxis(context.mesh.shape[number], link, Speed(), name), {}
        problem = SbpSearchProblem(
            graph, types, axis, {}, list(zip(parts, earlier, strict=True)),
            bundled=bucketable_values(graph),
        )  # fmt: skip
        enumerate_candidates(problem)
        choice, needs = layouts.choices[number], {(o.value, BROADCAST) for o in graph.outputs}
        for index, way in enumerate(choice.signatures):
            total += problem.own_ns[index][problem.candidates[index].index(way)]
            needs |= {*zip(graph.nodes[index].inputs, way.signature.inputs, strict=True)}
            words |= zip(graph.nodes[index].outputs, way.signature.outputs, strict=True)
        moves = [(v, need) for v, need in sorted(needs, key=str) if words[v] != need]
        total += sum([problem.move(v, words[v], need) for v, need in moves])
    return total


@pytest.mark.parametrize(
    ("names", "shape", "per_host"),
    [(("data",), (16,), 4), (("data", "model"), (4, 2), 2), (("data", "model"), (2, 4), 2)],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_layouts_that_are_chosen_for_hosts_take_no_longer_there_than_those_for_one_host(
    name, names, shape, per_host
):
    graph, mesh = graph_of(name), Mesh(names, shape)
    there = on_hosts(mesh, Hosts((per_host,), INSIDE_A_HOST, MeshLink(1.25, 30_000.0)))
    here = on_hosts(mesh, Hosts((mesh.num_ranks,), INSIDE_A_HOST, INSIDE_A_HOST))
    own, other = [assign_sbp(graph, context) for context in (there, here)]
    assert price(graph, there, own) <= price(graph, there, other) * (1 + 1e-9)


class Mixed(nn.Module):
    """Layers of widths of which 5 ranks have unlike remainders."""

    def __init__(self, *widths):
        self.layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mixed(rows):
    spec = {"x": TensorType(DType.FLOAT32, (rows, 501)), "y": TensorType(DType.INT32, (rows, 1))}
    return step_graph(train, Mixed(501, 1002, 503, 1004), spec)


LINK = MeshLink(1.25, 30_000.0)


def is_uneven(graph, words, parts, value):
    word = words[value]
    return isinstance(word, Split) and graph.types[value].shape[word.axis] % parts != 0


def test_gradients_of_any_extents_lie_alike_on_all_ranks_with_as_many_rows():
    graph = mixed(rows=10)
    context = on_hosts(Mesh(("data",), (5,)), Hosts((1,), LINK, LINK))
    (choice,) = assign_sbp(graph, context).choices
    uneven = [v for v in range(len(graph.types)) if is_uneven(graph, choice.words, 5, v)]
    assert uneven == []
    graphs = RankGraphs(graph, context)
    assert len({*graphs.told_apart(lambda rank: len(graphs.of(rank).nodes))}) == 1


def test_ranks_with_fewer_rows_of_a_batch_share_its_work_all_the_same():
    graph = mixed(rows=1001)
    context = on_hosts(Mesh(("data",), (5,)), Hosts((1,), LINK, LINK))
    (choice,) = assign_sbp(graph, context).choices
    given = [n.outputs[0] for n in graph.nodes if n.op is INPUT]
    assert all(is_uneven(graph, choice.words, 5, v) for v in given)
    products = [n.outputs[0] for n in graph.nodes if n.op.name == "matmul"]
    forward = [v for v in products if graph.types[v].shape[0] == 1001]
    assert forward
    assert {choice.words[v] for v in forward} == {Split(0)}


def test_work_that_only_uneven_parts_share_is_shared():
    b_rows, width = 7, 4099
    spec = {
        "x": TensorType(DType.FLOAT32, (b_rows, width)),
        "y": TensorType(DType.INT32, (b_rows, 1)),
    }
    graph = step_graph(train, Mixed(width, width, width), spec)
    context = on_hosts(Mesh(("model",), (5,)), Hosts((5,), INSIDE_A_HOST, LINK))
    (choice,) = assign_sbp(graph, context).choices
    variables = {n.outputs[0] for n in graph.nodes if n.op is VARIABLE}
    assert any(is_uneven(graph, choice.words, 5, v) for v in range(len(graph.types)))
    assert not any(is_uneven(graph, choice.words, 5, v) for v in variables)
