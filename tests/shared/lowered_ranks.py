"""Plans of many ranks from graphs of whole tensors: cut, passed on, lowered, proven."""

from __future__ import annotations

from dataclasses import replace

from graphs import made_up

from actors.race.race import check_races
from compiler.contract.placement import AxisLinks, MeshLink, joined
from compiler.contract.rank_plans import RankPlans
from compiler.graph.target import NO_CHOICE, CompileOptions
from compiler.lowering.lower import lower
from compiler.ops.primitives.body import hash_graph
from compiler.pipeline.pipeline import LOWERING_NEEDS, PASSES, _within_budget, with_choice
from compiler.pipeline.rewrites import PassContext, check_order, run_passes
from compiler.sbp.distribute import SbpAssignment, distribute, turns_between
from compiler.sbp.infer import MeshAxis, Speed, choose
from compiler.verify.cross_rank import verify_ranks
from compiler.verify.verify import verify_plan

NEAR = MeshLink(latency_ns=0.0)
"""Ranks so near each other that no bucket is too small."""


def laid_out(graph, mesh, fixed_words, link=NEAR):
    """Return the layouts over a mesh; `fixed_words` gives those that are stated, by its axes."""
    choices = []
    for axis, name in enumerate(mesh.names):
        earlier = list(zip(mesh.shape, choices, strict=False))
        mesh_axis = MeshAxis(mesh.shape[axis], AxisLinks.alike(MeshLink()), Speed())
        choices.append(choose(graph, earlier, mesh_axis, fixed_words(graph, name)))
    return SbpAssignment(mesh, (AxisLinks.alike(link),) * len(mesh.shape), tuple(choices))


def graphs_of(graph, layouts):
    """Return the graph of every rank."""
    turns = turns_between(graph, layouts)
    return [distribute(graph, layouts, r, turns) for r in range(layouts.mesh.num_ranks)]


def ordered(local, mesh, hardware=None, **asked):
    """Return a rank's graph after all passes, what it was made for, and the options."""
    hardware = hardware or made_up("made-up", ("mul", "add", "fused"))
    hardware = replace(hardware, ranks=joined(mesh, MeshLink()))
    devices = tuple([str(device) for device in hardware.devices])
    settings = {"verify": True, "mesh": mesh.axes, "devices": devices}
    options = CompileOptions("job", **settings, **asked)
    steps = [s for s in check_order(PASSES, options, LOWERING_NEEDS) if s.name != "distribute"]
    names = [step.name for step in steps]
    steps = [step for step in steps[names.index("stage_updates") :] if not step.per_choice]
    return run_passes(local, steps, PassContext(hardware, options), None), hardware, options


def plan_of(local, mesh, fingerprint="", hardware=None, **asked):
    """Return the plan of a rank, proven, and free of races."""
    graph, hardware, options = ordered(local, mesh, hardware, **asked)

    def lowered(ordered):
        return lower(ordered, hardware, options, fingerprint)

    if options.asks_for_less:
        plan = _within_budget(graph, hardware, options, lowered, None)
    else:
        plan = lowered(with_choice(graph, NO_CHOICE, hardware, options))
    verify_plan(plan)
    check_races(plan)
    return plan


def plans_of(graph, layouts, **asked):
    """Return the plans of all ranks, one for each class, proven together."""
    numbers, plans, class_of = {}, [], []
    for local in graphs_of(graph, layouts):
        number = numbers.setdefault(hash_graph(local), len(numbers))
        class_of.append(number)
        if number == len(plans):
            plans.append(plan_of(local, layouts.mesh, hash_graph(graph), **asked))
    ranks = RankPlans(layouts.mesh, tuple(plans), tuple(class_of))
    verify_ranks(ranks)
    return ranks
