"""Whole training steps on many ranks against one rank, by numpy's references alone."""

import numpy as np
import pytest
from rank_graphs import run_ranks

import actorflow as af
from actorflow import nn
from compiler.fusion.updates import update
from compiler.ops.sources import INPUT, VARIABLE
from compiler.options import CompileOptions
from compiler.passes import autodiff, buffers, clip, fuse_attention, simplify
from compiler.sbp.distribute import Layouts, distribute
from compiler.sbp.infer import MeshAxis, Speed, choose
from compiler.sbp.mesh import Mesh
from compiler.sbp.moves import MeshLink
from compiler.sbp.words import BROADCAST, Split, local_slices
from compiler.types import DType, TensorType

ALONE = Mesh(("ranks",), (1,))


class Block(nn.Module):
    def __init__(self, width, heads):
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def __call__(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.qkv(self.norm(x)).split(width, dim=-1)
        q, k, v = [part.reshape(*shape).transpose(1, 2) for part in parts]
        y = af.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(af.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self):
        self.tok, self.block, self.head = nn.Embedding(11, 8), Block(8, 4), nn.Linear(8, 11)

    def __call__(self, x):
        return self.head(self.block(self.tok(x)))


class Net(nn.Module):
    """A convolution with statistics of the batch, a pool, and classes."""

    def __init__(self):
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool, self.out = nn.MaxPool2d(2), nn.Linear(16, 5)

    def __call__(self, x):
        return self.out(af.flatten(self.pool(af.relu(self.norm(self.conv(x)))), 1))


@af.job(optimizer=af.optim.AdamW(1e-2), clip_norm=0.5)
def words(model, batch):
    return af.cross_entropy(model(batch.x).reshape(-1, 11), batch.y.reshape(-1))


@af.job(optimizer=af.optim.SGD(0.1, momentum=0.9))
def images(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@af.job(optimizer=af.optim.SGD(0.1))
def dropped(model, batch):
    return (af.dropout(model(batch.x), 0.4) ** 2).mean()


def of(dtype, *shape):
    return TensorType(dtype, shape)


JOBS = {
    "gpt": (words, Gpt, {"x": of(DType.INT64, 6, 4), "y": of(DType.INT64, 6, 4)}),
    "images": (images, Net, {"x": of(DType.FLOAT32, 6, 2, 4, 4), "y": of(DType.INT64, 6)}),
    "dropout": (dropped, lambda: nn.Linear(4, 4), {"x": of(DType.FLOAT32, 6, 4)}),
}


def graph_of(name):
    """Return the training graph of a job with gradients and updates, as ranks are to share it."""
    job, model, spec = JOBS[name]
    graph = simplify.run(autodiff.run(buffers.run(fuse_attention.run(job.graph(model(), spec)))))
    clipped = job.options.clip_norm or 0.0
    return clip.run(graph, CompileOptions("job", clip_norm=clipped)) if clipped else graph


def split_weights(name):
    """Return how a weight lies over an axis that cuts the layers themselves."""
    if name.startswith(("block.qkv", "block.up", "tok.", "head.", "conv.")):
        return Split(0)
    return Split(1) if name.startswith(("block.proj.w", "block.down.w")) else BROADCAST


def fixed_words(graph, axis):
    """Return the layouts that a user states along an axis of the mesh, by its name."""
    fixed = {}
    for node in graph.nodes:
        (value, *_), shape = node.outputs, node.attrs.get("shape", ())
        if node.op is INPUT:
            fixed[value] = Split(0) if axis == "data" else BROADCAST
        elif node.op is VARIABLE:
            is_split = axis == "model" and len(shape) > 0
            fixed[value] = split_weights(node.attrs["name"]) if is_split else BROADCAST
            if axis == "zero" and shape and shape[0] >= 2 and node.attrs["role"] != "buffer":
                fixed[value] = Split(0)
    for node in graph.nodes:
        if update.has(node.op) and node.inputs[0] in fixed:
            for _, over in node.writes:
                fixed[node.inputs[over]] = fixed[node.inputs[0]]
    return fixed | {w.value: fixed[w.variable] for w in graph.writes}


def drawn(graph):
    """Return numbers for the sources of a graph."""
    rng, found = np.random.default_rng(5), {}
    for node in graph.nodes:
        if node.op in (INPUT, VARIABLE):
            shape, dtype = node.attrs["shape"], node.attrs["dtype"]
            if dtype.startswith("int"):
                array = rng.integers(0, 5, shape).astype(dtype)
            else:
                array = abs(rng.standard_normal(shape)).astype(dtype) * 0.3
            found[node.outputs[0]] = np.asarray(array)
    return found


def laid_out(graph, mesh):
    choices = []
    for axis, name in enumerate(mesh.names):
        earlier = list(zip(mesh.shape, choices, strict=False))
        own = MeshAxis(mesh.shape[axis], MeshLink(), Speed())
        choices.append(choose(graph, earlier, own, fixed_words(graph, name)))
    return Layouts(mesh, (MeshLink(),) * len(mesh.shape), tuple(choices))


def part(graph, layouts, value, rank, of=None):
    """Return which elements a rank has of a value, as it or another one lies."""
    words = layouts.of(value if of is None else of)
    at = layouts.mesh.coordinates(rank)
    return local_slices(graph.types[value].shape, words, layouts.mesh.shape, at)


def run_parts(graph, layouts, feeds):
    """Return the graph of each rank, and the values of each."""
    graphs = [distribute(graph, layouts, rank) for rank in range(layouts.mesh.num_ranks)]
    sources = [n.outputs[0] for n in graph.nodes if n.op in (INPUT, VARIABLE)]
    own = []
    for rank, local in enumerate(graphs):
        values = [n.outputs[0] for n in local.nodes if n.op in (INPUT, VARIABLE)]
        pairs = zip(sources, values, strict=True)
        own.append({v: feeds[s][part(graph, layouts, s, rank)] for s, v in pairs})
    return graphs, run_ranks(graphs, own, layouts.mesh)


MESHES = [
    *[Mesh((name,), (parts,)) for name in ("data", "model", "zero") for parts in (2, 3)],
    Mesh(("data", "model"), (2, 2)),
    Mesh(("data", "zero"), (2, 2)),
    Mesh(("model", "data"), (2, 3)),
    Mesh(("data", "model", "zero"), (2, 2, 2)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_ranks_together_do_the_step_of_one(name, mesh):
    graph = graph_of(name)
    feeds, layouts = drawn(graph), laid_out(graph, mesh)
    (whole,) = run_ranks([graph], [feeds], ALONE)
    graphs, values = run_parts(graph, layouts, feeds)
    for rank, (local, found) in enumerate(zip(graphs, values, strict=True)):
        for output, mine in zip(graph.outputs, local.outputs, strict=True):
            np.testing.assert_allclose(found[mine.value], whole[output.value], rtol=1e-5, atol=1e-6)
        for write, mine in zip(graph.writes, local.writes, strict=True):
            want = whole[write.value][part(graph, layouts, write.value, rank, write.variable)]
            np.testing.assert_allclose(found[mine.value], want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_what_ranks_hold_alike_is_equal_to_the_bit(mesh):
    graph = graph_of("gpt")
    graphs, values = run_parts(graph, laid_out(graph, mesh), drawn(graph))
    for writes in zip(*[local.writes for local in graphs], strict=True):
        news = [found[w.value] for found, w in zip(values, writes, strict=True)]
        for other in news[1:]:
            np.testing.assert_array_equal(other, news[0])


def test_choices_are_the_same_in_every_run():
    graph, mesh = graph_of("gpt"), Mesh(("data", "model"), (2, 2))
    assert laid_out(graph, mesh).choices == laid_out(graph, mesh).choices
