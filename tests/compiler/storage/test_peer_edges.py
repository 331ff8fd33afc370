"""No write of a step's state can run on one rank before every rank has data for that step."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import made_up
from staged_plans import ROWS, Layers

import actorflow as af
from actorflow import nn
from compiler.contract.placement import INSIDE_A_HOST, Mesh, joined
from compiler.contract.plan_tables import ActorKind
from compiler.contract.rank_plans import RankPlans
from compiler.graph.target import CompileOptions
from compiler.ops.primitives.sources import UNSAVED
from compiler.pipeline.pipeline import compile_graph
from compiler.storage import order
from compiler.verify.verify import edges_of


class Counting(nn.Module):
    """A layer on each stage, and at the first of them what needs nobody: a count and an average."""

    def __init__(self, num_stages):
        self.model = Layers(num_stages, is_rich=True)
        self.seen = nn.Buffer(np.zeros((), np.float32))
        self.average = nn.Buffer(np.zeros(16, np.float32))

    def __call__(self, x):
        with af.stage(0):
            self.seen.assign(self.seen + 1.0)
            self.average.assign(self.average * 0.9 + x[0] / self.seen)
        return self.model(x)


MESHES = {
    "replicas": {"data": 3},
    "two stages": {"stage": 2},
    "three stages": {"stage": 3},
    "two axes": {"data": 2, "model": 2},
    "two axes and stages": {"stage": 2, "data": 2, "model": 2},
    "stages of replicas": {"stage": 3, "data": 2},
}


def plans_of(axes, every, *, zero):
    def loss(model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    model = Counting(axes.get("stage", 1))
    for layer in model.model.layers if "model" in axes else ():
        layer.weight.sbp = {"model": af.split(0)}
    job = af.job(loss, optimizer=af.optim.Adam(0.1), accumulate=every, mesh=af.Mesh(**axes))
    graph = job.graph(model, ROWS)
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    options = CompileOptions("together", accumulate=every, zero=zero, verify=True)
    plans = []
    for rank in range(mesh.num_ranks):
        hardware = made_up("ranks", duration_ns=lambda call: 1e5)
        hardware = replace(hardware, ranks=joined(mesh, INSIDE_A_HOST, rank))
        plans.append(compile_graph(graph, hardware, options))
    return RankPlans(mesh, tuple(plans), tuple(range(mesh.num_ranks)))


def predecessors_of(ranks):
    """Return, by rank and actor, what has come before its firing of a step ends."""
    before, ends = {}, {}
    for rank, plan in enumerate(ranks.plans):
        for edge in edges_of(plan)[0]:
            before.setdefault((rank, edge.consumer), set()).add((rank, edge.producer))
        for meeting in ranks.meetings[rank]:
            for move in meeting.moves:
                key = frozenset(ranks.group(rank, meeting)), move.order
                ends.setdefault(key, []).append((move.op, (rank, meeting.actor)))
    for members in ends.values():
        for op, node in members:
            if op != "send":
                before.setdefault(node, set()).update(n for _, n in members if n != node)
    return before


def early_writes(ranks):
    """Return the variables that a rank may write while another one has no batch."""
    before, early = predecessors_of(ranks), set()
    sources = {
        (rank, actor.id)
        for rank, plan in enumerate(ranks.plans)
        for actor in plan.actors
        if actor.kind is ActorKind.SOURCE
    }
    for rank, plan in enumerate(ranks.plans):
        state = [v for v in plan.state if v.role not in UNSAVED]
        saved = {plan.views[v.view].register: v.name for v in state}
        for actor in plan.actors:
            reached, todo = set(), [(rank, actor.id)]
            while todo:
                new = before.get(todo.pop(), set()) - reached
                reached |= new
                todo += new
            if sources <= reached:
                continue
            for launch in actor.launches:
                registers = {plan.views[view].register for view in launch.outputs}
                if launch.op != "increment":  # set back after a cut
                    early |= {saved[register] for register in registers & saved.keys()}
    return early


@pytest.mark.thinned(2)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_a_write_waits_for_the_data_of_all_ranks(name, every):
    assert early_writes(plans_of(MESHES[name], every, zero="data" in MESHES[name])) == set()


@pytest.mark.parametrize("name", MESHES)
def test_without_these_edges_some_do_not(name, monkeypatch):
    monkeypatch.setattr(order, "peer_edges", lambda *args: [])
    assert early_writes(plans_of(MESHES[name], 1, zero=False)) >= {"seen"}
