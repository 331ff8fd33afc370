"""Which ranks of a mesh share a graph: what is found by looking at few, against all of them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import GPT

import actorflow as af
from actorflow.compile.hardware import hardware_for
from actorflow.data import ArraySource
from actorflow.distributed.agreed_plan import plans_of_classes
from actorflow.options.run_spec import PlanOptions
from compiler.contract.placement import HOST
from compiler.contract.sbp import shard_range
from compiler.contract.types import DType, TensorType
from compiler.graph.target import CompileOptions
from compiler.ops.primitives.body import hash_graph
from compiler.pipeline.pipeline import graphs_of_ranks, local_graphs
from compiler.sbp.distribute import representatives


@st.composite
def grids(draw):
    """Return a shape, and what a graph of it may say of a place: parts of parts of some rows."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    axes = st.lists(st.integers(0, len(shape) - 1), unique=True) if shape else st.just([])
    rows = st.integers(1, 4).map(lambda n: n * 60)
    words = st.tuples(st.one_of(rows, st.integers(130, 300)), axes, st.booleans())
    return shape, draw(st.lists(words, max_size=3))


def told(shape, words, place):
    """Return what a graph says: of each tensor the length of its part, or where that begins."""
    found = []
    for rows, axes, is_sliced in words:
        start, length = 0, rows
        for axis in axes:
            own = shard_range(length, shape[axis], place[axis])
            start, length = start + own.start, len(own)
        found.append((length, start if is_sliced else None))
    return tuple(found)


@settings(max_examples=tiers.examples(300))
@given(grids())
def test_few_places_tell_what_all_of_them_would(drawn):
    shape, words = drawn
    asked = []

    def graph_at(place):
        asked.append(place)
        return told(shape, words, place)

    found = representatives(shape, graph_at)
    assert len(asked) == len(set(asked))
    every = list(itertools.product(*map(range, shape)))
    assert [*found] == every
    for place in every:
        assert told(shape, words, place) == told(shape, words, found[place])
    # And no two that stand for others are equal.
    of_first = [told(shape, words, place) for place in dict.fromkeys(found.values())]
    assert len(of_first) == len(set(of_first))


def test_of_a_thousand_places_that_are_equal_few_are_looked_at():
    asked = []
    found = representatives((40, 25), lambda place: asked.append(place))
    assert {*found.values()} == {(0, 0)}
    assert len(asked) <= 5


class Cut(GPT):
    def __call__(self, x):
        with af.stage(0):
            h = self.emb(x) + self.pos.weight
        for number, block in enumerate(self.blocks):
            with af.stage(number):
                h = block(h)
        return self.head(self.norm(h))


@pytest.mark.parametrize(
    "axes", [{"data": 4, "model": 2}, {"stage": 2, "data": 3}, {"data": 2, "stage": 2, "model": 2}]
)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", [4, 5])
def test_every_rank_has_the_graph_of_its_class(axes, rows):
    @af.job(optimizer=af.optim.AdamW(1e-3), mesh=af.Mesh(**axes), accumulate=2, clip_norm=1.0)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).reshape(-1, 11), batch.y.reshape(-1))

    spec = {name: TensorType(DType.INT32, (rows, 6)) for name in "xy"}
    graph = train.graph(Cut(11, seq=6, width=8, layers=2, dropout=0.1), spec)
    options = CompileOptions("train", accumulate=2, clip_norm=1.0)

    def hardware(rank):
        return replace(hardware_for((HOST,)), ranks=train.ranks(rank))

    graphs = graphs_of_ranks(graph, hardware(0), options)
    found = graphs.told_apart(lambda rank: hash_graph(graphs.of(rank), with_sources=True))
    assert list(found) == [
        hash_graph(local_graphs(graph, hardware(rank), options).step, with_sources=True)
        for rank in range(train.mesh.num_ranks)
    ]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize(
    ("axes", "most"), [({"data": 3, "model": 2}, 5), ({"stage": 2, "data": 2}, 2)]
)
def test_classes_of_ranks_have_the_plans_that_they_would_compile(axes, most, is_evaluated):
    def loss(model, batch):
        return af.cross_entropy(model(batch.x).reshape(-1, 11), batch.y.reshape(-1))

    train = af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(**axes))(loss)
    valid = af.job(train=False)(lambda model, batch: {"loss": loss(model, batch)})
    spec = {name: TensorType(DType.INT32, (4, 6)) for name in "xy"}
    data = ArraySource({name: np.zeros((8, 6), np.int32) for name in "xy"}, batch=4)
    evaluation = af.Evaluation(valid, data, every=2, batches=2) if is_evaluated else None
    model = Cut(11, seq=6, width=8, layers=2)
    asked = train._spec(model, spec, PlanOptions(evaluation=evaluation), train.ranks(0))
    ranks = plans_of_classes(asked)
    assert len(ranks.plans) <= most
    for rank, number in enumerate(ranks.class_of):
        assert ranks.plans[number] == train.compile(model, spec, rank=rank, evaluation=evaluation)
