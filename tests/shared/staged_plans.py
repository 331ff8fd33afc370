"""Plans of all stages of a pipeline, and their machines on one virtual time."""

from dataclasses import replace

from graphs import made_up

import actorflow as af
from actorflow import nn
from actors.simulation.costs import Network, Wire
from actors.simulation.ranks import FleetOptions, MultiRankSimulator
from compiler.contract.placement import INSIDE_A_HOST, Mesh, joined
from compiler.contract.plan_tables import ActorKind
from compiler.contract.rank_plans import RankPlans
from compiler.contract.types import DType, Phase, TensorType
from compiler.graph.target import CompileOptions
from compiler.pipeline.pipeline import compile_graph

ROWS = {key: TensorType(DType.FLOAT32, (4, 16)) for key in "xy"}


class Layers(nn.Module):
    """A layer on each stage; `rich` ones have statistics of batches, and dropout.

    The stage `without` has no layer to train: none at all, or one that is frozen.
    """

    def __init__(self, count, *, is_rich=False, width=16, without=None, is_frozen=False):
        self.layers = [nn.Linear(width, width) for _ in range(count)]
        if without is not None and is_frozen:
            self.layers[without].weight.freeze()
            self.layers[without].bias.freeze()
        elif without is not None:
            self.layers[without] = nn.Identity()
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


def staged_plans(
    model, num_stages, every, hardware=None, spec=ROWS, fn=squares, skips=False, **options
):
    """Return the plan of each stage of a training job."""
    job_options = {"optimizer": af.optim.SGD(0.1, momentum=0.9), "accumulate": every, **options}
    graph = af.job(fn, **job_options).graph(model, spec)
    hardware = hardware or made_up("stages", duration_ns=lambda call: 1e5)
    config = CompileOptions(
        "stages",
        accumulate=every,
        clip_norm=options.get("clip_norm", 0.0),
        skips_broken_steps=skips,
        verify=True,
    )
    mesh = Mesh(("stage",), (num_stages,))
    ranks = [joined(mesh, INSIDE_A_HOST, rank) for rank in range(num_stages)]
    return [compile_graph(graph, replace(hardware, ranks=member), config) for member in ranks]


def computing(plan):
    """Return the actors of a plan that compute for each batch, in order."""
    return [
        a
        for a in plan.actors
        if a.kind is ActorKind.COMPUTE and a.name.startswith("gradient") and a.launches
    ]


def durations(plan, forward_ns, backward_ns):
    """Return the time of each actor: those of a batch share the time of its two ways."""
    actors = computing(plan)
    phases = [launch.phase is Phase.FORWARD for a in actors for launch in a.launches]
    times = [0.0] * len(plan.actors)
    for actor in actors:
        up = sum([launch.phase is Phase.FORWARD for launch in actor.launches])
        down = len(actor.launches) - up
        times[actor.id] = up * forward_ns / max(1, sum(phases))
        times[actor.id] += down * backward_ns / max(1, len(phases) - sum(phases))
    return times


def runs_of(plans, batches, forward_ns, backward_ns, *, transfer_ns=0, jitter=0.0, seed=0):
    """Return the run of each stage, which meets the others two by two, or all."""
    num_stages = len(plans)
    mesh = Mesh(("stage",), (num_stages,))
    wire = Wire(1e9, transfer_ns)
    fleet = MultiRankSimulator(
        RankPlans(mesh, tuple(plans), tuple(range(num_stages))),
        [durations(plan, forward_ns, backward_ns) for plan in plans],
        FleetOptions(Network(wire), (1.0,) * num_stages, jitter, seed),
    )
    return list(fleet.run(batches // plans[0].int_option("accumulate", 1)))


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
