"""Whole training steps on many ranks against one rank, by numpy's references alone."""

from dataclasses import replace

import numpy as np
import pytest
from rank_jobs import check_step, drawn, laid_out, run_parts, step_graph

import actorflow as af
from actorflow import nn
from compiler.contract.attrs import Attrs
from compiler.contract.placement import Mesh
from compiler.contract.sbp import BROADCAST, Split
from compiler.contract.types import DType, TensorType
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.sources import DROPOUT, RANDOM_BITS
from compiler.sbp.distribute import distribute


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
        y = af.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
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
    """Return the training graph of a job."""
    job, model, spec = JOBS[name]
    return step_graph(job, model(), spec)


def split_weights(name):
    """Return how a weight lies over an axis that cuts the layers themselves."""
    if name.startswith(("block.qkv", "block.up", "tok.", "head.", "conv.")):
        return Split(0)
    return Split(1) if name.startswith(("block.proj.w", "block.down.w")) else BROADCAST


MESHES = [
    *[Mesh((name,), (parts,)) for name in ("data", "model", "zero") for parts in (2, 3)],
    Mesh(("data", "model"), (2, 2)),
    Mesh(("data", "zero"), (2, 2)),
    Mesh(("model", "data"), (2, 3)),
    Mesh(("data", "model", "zero"), (2, 2, 2)),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_ranks_together_do_the_step_of_one(name, mesh):
    check_step(graph_of(name), mesh, split_weights)


def thinned(x):
    return af.dropout(x, 0.4)


CUT_BY_THREE = [
    ((7, 8, 1), (0, 1, 1)),
    ((7, 8, 1), (0, 0, 1)),
    ((6, 4, 1, 1), (0, 1, 0)),
    ((7, 4, 2), (0, 1, 2)),
    ((6, 2, 1), (0, 0, 1)),
]
"""Shapes, and the axis that each axis of a mesh splits."""


@pytest.mark.parametrize(
    ("draw", "shape", "cut"),
    [
        *[(draw, *case) for draw in (af.randn_like, thinned) for case in CUT_BY_THREE],
        (af.randn_like, (7, 8, 0), (0, 1, 0)),
    ],
)
def test_parts_of_any_shape_draw_what_the_whole_draws(draw, shape, cut):
    mesh = Mesh(("data", "a", "b"), (2, 2, 2))
    words = tuple((name, Split(axis)) for name, axis in zip(mesh.names, cut, strict=True))

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        drawn = draw(batch.x + 1.0)
        return {"loss": model(batch.y).sum() * drawn.sum(), "drawn": drawn}

    spec = {"x": of(DType.FLOAT32, *shape), "y": of(DType.FLOAT32, 4, 3)}
    graph = step_graph(train, nn.Linear(3, 3), spec)
    nodes = [
        replace(node, attrs=Attrs({**node.attrs, "sbp": words}))
        if node.op in (RANDOM_BITS, DROPOUT)
        else node
        for node in graph.nodes
    ]
    assert nodes != list(graph.nodes)
    check_step(replace(graph, nodes=tuple(nodes)), mesh)


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
    first = laid_out(graph, mesh, split_weights).choices
    assert laid_out(graph, mesh, split_weights).choices == first


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("name", ["gpt", "dropout"])
def test_ranks_with_different_rows_have_equal_graphs(name, mesh):
    graph = graph_of(name)
    layouts = laid_out(graph, mesh, split_weights)
    ranks = range(mesh.num_ranks)
    assert len({hash_graph(distribute(graph, layouts, rank)) for rank in ranks}) == 1
