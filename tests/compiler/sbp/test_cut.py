"""Whole training steps in stages on many ranks against one rank, by numpy's references alone."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT
from rank_graphs import run_ranks
from rank_jobs import drawn, laid_out, part

import actorflow as af
from actorflow import nn
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import Mesh
from compiler.contract.types import DType, Phase, TensorType
from compiler.graph.registry import OpTypeError, infer_type
from compiler.graph.target import CompileOptions
from compiler.ops.primitives.sources import INPUT, NUMBERS, SCRATCH, VARIABLE
from compiler.ops.primitives.transfer import RECEIVE, SEND, TOKEN
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check
from compiler.sbp import stages
from compiler.sbp.distribute import distribute
from compiler.sbp.stages import extract_stage

WORDS = {"x": TensorType(DType.INT64, (4, 5)), "y": TensorType(DType.INT64, (4, 5))}
ROWS = {"x": TensorType(DType.FLOAT32, (4, 6)), "y": TensorType(DType.FLOAT32, (4, 6))}


class Staged(GPT):
    """Its embeddings, each block, and its head on a stage of their own; positions go to the end."""

    def __init__(self, layers):
        super().__init__(11, 5, 8, layers=layers)

    def __call__(self, x):
        with af.stage(0):
            first = h = self.emb(x) + self.pos.weight
        for number, block in enumerate(self.blocks):
            with af.stage(number):
                h = block(h)
        return self.head(self.norm(h + first))


class Net(nn.Module):
    """Layers with statistics of the batch and dropout, one on each of four stages."""

    def __init__(self):
        self.layers = [nn.Linear(6, 6) for _ in range(4)]
        self.norms = [nn.BatchNorm1d(6) for _ in range(4)]

    def __call__(self, x):
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            with af.stage(number):
                x = af.dropout(af.relu(norm(layer(x))), 0.2)
        return x


def words(model, batch):
    return {"loss": af.cross_entropy(model(batch.x).reshape(-1, 11), batch.y.reshape(-1))}


def rows(model, batch):
    with af.stage(0):
        size = (batch.x * batch.x).mean()
    y = model(batch.x)
    return {"loss": ((y - batch.y) ** 2).mean(), "size": size, "mean": y.mean()}


def step_graph(job, model, spec, num_stages, *, skips=False, **options):
    """Return a training graph whose nodes are on stages, as ranks are to share it."""
    job = af.job(job, **options)
    graph = autodiff.differentiate(
        batches.chain_buffers(stages.run(job.graph(model, spec), num_stages))
    )
    graph = (
        autodiff.skip_updates(simplify.simplify_graph(graph))
        if skips
        else simplify.simplify_graph(graph)
    )
    clipped = CompileOptions("job", clip_norm=options.get("clip_norm", 0.0))
    return check(autodiff.clip_gradients(graph, clipped), "clip")


class Rank:
    """One rank of a mesh: its graph, and its variables from batch to batch."""

    def __init__(self, graph, mesh, layouts, rank):
        flat, at = mesh.without("stage"), dict(zip(mesh.names, mesh.coordinates(rank), strict=True))
        self.stage = at.pop("stage", 0)
        self.whole, self.layouts, self.place = graph, layouts, flat.rank(tuple(at.values()))
        self.graph = graph if flat.num_ranks == 1 else distribute(graph, layouts, self.place)
        if "stage" in mesh.names:
            count = mesh.shape[mesh.axis("stage")]
            self.graph = check(extract_stage(self.graph, self.stage, count), "cut")
        self.values, self.found = {}, {}

    def feed(self, op, arrays):
        """Take this rank's parts of whole arrays, which go by names."""
        named = {n.attrs["name"]: n.outputs[0] for n in self.whole.nodes if n.op is op}
        for node in self.graph.nodes:
            if node.op is op and node.attrs["name"] in named:
                value = named[node.attrs["name"]]
                own = part(self.whole, self.layouts, value, self.place)
                self.values[node.outputs[0]] = arrays[value][own]

    def write(self, made, is_last):
        roles = {n.outputs[0]: n.attrs["role"] for n in self.graph.nodes if n.op is VARIABLE}
        self.found = {o.name: made[o.value] for o in self.graph.outputs}
        for write in self.graph.writes:
            if is_last or roles[write.variable] == SCRATCH:
                self.values[write.variable] = made[write.value]

    def variables(self):
        return {
            n.attrs["name"]: self.values[n.outputs[0]]
            for n in self.graph.nodes
            if n.op is VARIABLE and n.attrs["role"] != NUMBERS
        }


def steps_of(graph, mesh, every, steps=2):
    """Run steps of some batches on all ranks; return these."""
    feeds, layouts = drawn(graph), laid_out(graph, mesh.without("stage"))
    ranks = [Rank(graph, mesh, layouts, rank) for rank in range(mesh.num_ranks)]
    for rank in ranks:
        rank.feed(VARIABLE, feeds)
    for batch in range(steps * every):
        rolled = {v: np.roll(a, batch, 0) if a.ndim else a for v, a in feeds.items()}
        for rank in ranks:
            rank.feed(INPUT, rolled)
        made = run_ranks([r.graph for r in ranks], [r.values for r in ranks], mesh)
        for rank, values in zip(ranks, made, strict=True):
            rank.write(values, (batch + 1) % every == 0)
    return ranks


JOBS = {
    "gpt": (words, Staged, WORDS, {"optimizer": af.optim.AdamW(1e-2), "clip_norm": 0.5}),
    "net": (rows, lambda stages: Net(), ROWS, {"optimizer": af.optim.SGD(0.1, momentum=0.9)}),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("mesh", [
    Mesh(("stage",), (4,)), Mesh(("data", "stage"), (2, 4)), Mesh(("stage", "data"), (4, 2))
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", JOBS)
def test_stages_together_do_the_steps_of_one_rank(name, mesh, every):
    job, model, spec, options = JOBS[name]
    graph = step_graph(
        job, model(4), spec, 4, accumulate=every, skips=mesh.num_ranks == 4, **options
    )
    alone = Mesh(("data",), (1,))
    (one,), ranks = steps_of(graph, alone, every), steps_of(graph, mesh, every)
    held = Counter(name for rank in ranks for name in rank.variables())
    assert {*held} == {*one.variables()}
    for rank in ranks:
        for own, want in ((rank.found, one.found), (rank.variables(), one.variables())):
            for key, array in own.items():
                np.testing.assert_allclose(array, want[key], rtol=1e-4, atol=1e-5, err_msg=key)
        assert rank.found.keys() == one.found.keys()
    copies = mesh.num_ranks // 4
    for name, count in held.items():
        is_counter = name in ("step", "seed", "batches", "skipped")
        assert count == copies * (4 if is_counter else 1), name


def transfers(graph, op):
    return [(n.attrs["order"], n.attrs["peer"], n.phase) for n in graph.nodes if n.op is op]


def test_a_stage_receives_sends_receives_and_sends_and_hands_on_what_others_read():
    graph = step_graph(words, Staged(3), WORDS, 3, optimizer=af.optim.SGD(0.1))
    locals_ = [extract_stage(graph, stage, 3) for stage in range(3)]
    up, down = Phase.FORWARD, Phase.BACKWARD
    assert transfers(locals_[0], SEND) == [(0, 1, up), (1, 1, up)]
    assert transfers(locals_[1], RECEIVE)[:2] == [(0, 0, up), (1, 0, up)]
    assert [peer for _, peer, _ in transfers(locals_[1], SEND)] == [2, 2, 0, 0, 0]
    assert [peer for _, peer, _ in transfers(locals_[2], RECEIVE)] == [1, 1]
    moved = [n for local in locals_ for n in local.nodes if n.op in (SEND, RECEIVE)]
    numbers = Counter(n.attrs["order"] for n in moved)
    assert [*sorted(numbers)] == [*range(len(numbers))]
    assert {*numbers.values()} == {2}
    for local in locals_:
        sent = {n.outputs[0] for n in local.nodes if n.op is SEND and n.phase is up}
        for node in local.nodes:
            if node.op is RECEIVE and node.phase is down:
                assert {*node.inputs} == sent


def test_what_is_read_downwards_after_the_batch_has_gone_up_is_refused():
    graph = step_graph(rows, Net(), ROWS, 4, optimizer=af.optim.SGD(0.1))
    nodes = list(graph.nodes)
    late = next(i for i, n in enumerate(nodes) if n.phase is Phase.BACKWARD and n.stage == 0)
    value = nodes[late].outputs[0]
    reader = next(i for i, n in enumerate(nodes) if i > late and value in n.inputs)
    nodes[reader] = replace(nodes[reader], stage=1)
    with raises(CompileError):
        extract_stage(replace(graph, nodes=tuple(nodes)), 0, 4)


GOOD = {"num_ranks": 2, "group": "stage", "peer": 1, "is_up": True, "bucket": 0, "order": 0}


@pytest.mark.parametrize("change", [{"peer": 2}, {"bucket": 1}])
def test_a_transfer_to_nobody_is_refused(change):
    x = TensorType(DType.FLOAT32, (2,))
    attrs = Attrs(GOOD | change)
    with raises(OpTypeError):
        infer_type.get(SEND)((x,), attrs)
    with raises(OpTypeError):
        infer_type.get(RECEIVE)((x,), Attrs(GOOD | {"dtype": "float32", "shape": (2,)}))
    made = infer_type.get(RECEIVE)((TOKEN,), Attrs(GOOD | {"dtype": "float32", "shape": (2,)}))
    assert made == (x,)
