"""Plans of all stages of a pipeline, and their machines on one virtual time."""

from dataclasses import dataclass, replace
from functools import partial
from random import Random

from graphs import made_up

import actorflow as af
from actorflow import nn
from actors.simulate import Calendar, VirtualRank
from actors.table import MachineTable
from actors.transitions import Message, message
from compiler.mesh import INSIDE_A_HOST, Mesh, joined
from compiler.options import CompileOptions
from compiler.pipeline import compile_graph
from compiler.plan import ActorKind
from compiler.types import DType, Phase, TensorType

ROWS = {key: TensorType(DType.FLOAT32, (4, 16)) for key in "xy"}


class Layers(nn.Module):
    """A layer on each stage; `rich` ones have statistics of batches, and dropout."""

    def __init__(self, count, *, is_rich=False, width=16):
        self.layers = [nn.Linear(width, width) for _ in range(count)]
        self.norms = [nn.BatchNorm1d(width) for _ in range(count if is_rich else 0)]

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            with af.stage(number):
                x = af.relu(layer(x))
                if self.norms:
                    x = af.dropout(self.norms[number](x), 0.1)
        return x


def squares(model, batch):
    return {"loss": ((model(batch.x) - batch.y) ** 2).mean()}


def staged_plans(model, num_stages, every, hardware=None, spec=ROWS, fn=squares, **options):
    """Return the plan of each stage of a training job."""
    given = {"optimizer": af.optim.SGD(0.1, momentum=0.9), "accumulate": every, **options}
    graph = af.job(fn, **given).graph(model, spec)
    hardware = hardware or made_up("stages", duration_ns=lambda call: 1e5)
    chosen = CompileOptions(
        "stages",
        accumulate=every,
        clip_norm=options.get("clip_norm", 0.0),
        verify=True,
    )
    mesh = Mesh(("stage",), (num_stages,))
    ranks = [joined(mesh, INSIDE_A_HOST, rank) for rank in range(num_stages)]
    return [compile_graph(graph, replace(hardware, ranks=own), chosen) for own in ranks]


def computing(plan):
    """Return the actors of a plan that compute for each batch, in order."""
    return [
        a
        for a in plan.actors
        if a.kind is ActorKind.COMPUTE and a.name.startswith("gradient") and a.launches
    ]


def durations(plan, forward_ns, backward_ns):
    """Return the time of each actor: those of a batch share the time of its two ways."""
    own = computing(plan)
    phases = [launch.phase is Phase.FORWARD for a in own for launch in a.launches]
    found = [0.0] * len(plan.actors)
    for actor in own:
        up = sum([launch.phase is Phase.FORWARD for launch in actor.launches])
        down = len(actor.launches) - up
        found[actor.id] = up * forward_ns / max(1, sum(phases))
        found[actor.id] += down * backward_ns / max(1, len(phases) - sum(phases))
    return found


@dataclass
class StagedRuns:
    """A run of each stage; the machines meet two by two, or all, at the firings of COMM actors."""

    plans: list
    transfer_ns: int = 0
    jitter: float = 0.0
    seed: int = 0

    def run(self, batches, forward_ns, backward_ns):
        self.calendar, self.met = Calendar(), {}
        self.machines = [
            VirtualRank(
                rank,
                MachineTable.of(plan),
                durations(plan, forward_ns, backward_ns),
                self.calendar,
                rng=Random(self.seed + rank),
                jitter=self.jitter,
                meets=[
                    partial(self._meet, rank) if a.kind is ActorKind.COMM else None
                    for a in plan.actors
                ],
            )
            for rank, plan in enumerate(self.plans)
        ]
        for machine in self.machines:
            machine.start(batches)
        while self.calendar:
            now, rank, code = self.calendar.next()
            self.machines[rank].take(now, code)
        return [machine.finish(1) for machine in self.machines]

    def _meet(self, rank, actor):
        attrs = dict(self.plans[rank].actors[actor].launches[0].attrs)
        ranks = (*range(len(self.plans)),)
        if "peer" in attrs:
            ranks = tuple(sorted((rank, attrs["peer"])))
        key = ranks, attrs["order"], self.machines[rank].machine.firing_index(actor)
        came = self.met.setdefault(key, [])
        came.append((rank, actor))
        if len(came) == len(ranks):
            now = self.machines[rank].now + self.transfer_ns
            for other, theirs in self.met.pop(key):
                self.calendar.schedule(now, other, message(Message.DONE, theirs))


def most_under_way(plan, run):
    """Return the most batches of a stage between the begin of one way and the end of the other."""
    first, last = computing(plan)[0].id, computing(plan)[-1].id
    events = [(start, 1, 1) for actor, _, start, _ in run.rows if actor == first]
    events += [(end, 0, -1) for actor, _, _, end in run.rows if actor == last]
    most = now = 0
    for _, _, change in sorted(events):
        now += change
        most = max(most, now)
    return most
