"""Snapshots of the variables between two steps: how often, and the copies that take one.

On the host the stream that computes copies them. What a device holds goes to the host's side on the
stream out of it, in one of two ways. A device that holds all and may take what it likes copies them
within its memory first, which takes it a moment between two steps; from there they go out beside
the next steps. Where its bytes have a budget, or there are several devices, they go out straight
away, and the next change of a variable waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.attrs import AttrValue
from compiler.lowering.buffers import copy_info, dense_copy
from compiler.lowering.chain_actors import ChainActors
from compiler.lowering.chains import COMPUTE, StreamKey
from compiler.ops.copies import COPY_TO, place_number
from compiler.ops.shape import COPY
from compiler.ops.sources import SCRATCH, VARIABLE
from compiler.options import CompileOptions
from compiler.placement import HOST_SIDE, StreamRole
from compiler.plan import ActorKind, Field, Launch, RegisterKind
from compiler.registry import Op
from compiler.target import Hardware, KernelInfo
from compiler.types import RegisterId, TensorType, Version

SNAPSHOTS_PER_PERIOD = 4
"""Snapshots offered to the writer per period of seconds; it writes the first one that is due."""

MAX_SNAPSHOT_RATE = 16
"""Steps between two snapshots by time: an estimate knows nothing of a slow data source.

A copy of the variables moves fewer bytes than the update that made them, so one in 16 steps costs
next to nothing.
"""


def snapshot_rate(options: CompileOptions, step_ns: float) -> int:
    """Return the steps per snapshot; 0 for a plan without snapshots."""
    if options.snapshot_every or not options.snapshot_seconds:
        return options.snapshot_every
    steps = options.snapshot_seconds * 1e9 / max(step_ns, 1.0)
    return int(min(max(steps / SNAPSHOTS_PER_PERIOD, 1), MAX_SNAPSHOT_RATE))


@dataclass(frozen=True, slots=True)
class Stage:
    """A copy of all variables: who makes it, on what stream, what it fills, and where that lies."""

    actor: str
    stream: StreamKey
    register: str
    place: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A variable, or a copy of it, as the next copy reads it."""

    name: str
    type: TensorType
    source: int
    view: int
    version: Version
    place: int


def add_snapshots(chains: ChainActors, options: CompileOptions, gates: Sequence[int]) -> None:
    """Add what copies the variables every so many steps, and the sink that writes them.

    `gates` are the actors that let no step change a variable while a snapshot has their credits.
    """
    plan, actors = chains.plan, chains.actors
    every = snapshot_rate(options, chains.program.step_ns)
    if not every:
        return
    kept = _kept_variables(chains)
    first, *later = _stages(kept, plan.hardware, options)
    copier = actors.add(first.actor, ActorKind.COPY, plan.stream_of(first.stream), is_flushed=True)
    reason = f"{every}: one credit per step between two snapshots"
    for gate in gates:
        actors.credits("updated", gate, {copier: every}, every, reason)
    register, kept = _fill(first, copier, kept, chains)
    for stage in later:
        before = copier
        copier = actors.add(stage.actor, ActorKind.COPY, plan.stream_of(stage.stream))
        actors.consume(copier, register, before)
        register, kept = _fill(stage, copier, kept, chains)
    plan.fields += [Field(row.name, register, row.view, row.source, row.version) for row in kept]
    writer = actors.add("checkpoint", ActorKind.SINK, plan.port("checkpoint"))
    actors.consume(writer, register, copier)


def _stages(kept: Sequence[Kept], hardware: Hardware, options: CompileOptions) -> tuple[Stage, ...]:
    """Return the copies of a snapshot, one after the other; the last one is what is written."""
    places = dict.fromkeys([variable.place for variable in kept])
    devices = [p for p in places if hardware.is_apart(p)]
    if not devices:
        # What the device shall not hold all the time it shall not hold for a snapshot either.
        return (Stage("snapshot", COMPUTE, "staging", HOST_SIDE if HOST_SIDE in places else 0),)
    out = StreamKey(*hardware.copy_stream(devices[0], HOST_SIDE))
    if len(places) > 1 or options.memory_budget:
        return (Stage("snapshot", out, "staging", HOST_SIDE),)
    within = StreamKey(devices[0], StreamRole.COMPUTE)
    return (
        Stage("snapshot", within, "snapshot", devices[0]),
        Stage("snapshot.fetch", out, "staging", HOST_SIDE),
    )


def _kept_variables(chains: ChainActors) -> tuple[Kept, ...]:
    """Return the variables of a program as they are between two steps, but for scratch."""
    graph, plan = chains.program.graph, chains.plan
    between = {variable.name: variable.between for variable in plan.variables}
    nodes = [n for n in graph.nodes if n.op is VARIABLE and n.attrs.str_("role") != SCRATCH]
    return tuple(
        [
            Kept(
                node.attrs.str_("name"),
                graph.types[value],
                plan.source(node.source),
                chains.view(value),
                between[node.attrs.str_("name")],
                place_number(graph, value),
            )
            for node in nodes
            for value in node.outputs
        ]
    )


def _fill(
    stage: Stage, copier: int, kept: Sequence[Kept], chains: ChainActors
) -> tuple[RegisterId, tuple[Kept, ...]]:
    """Have an actor make the copies of a stage; return what it fills, and what is there then."""
    plan = chains.plan
    offsets, size = plan.stack([variable.type for variable in kept], stage.place)
    reason = "1: a second snapshot waits until the first is written"
    register = plan.register(
        stage.register, RegisterKind.DATA, size, reason=reason, place=stage.place
    )
    launches: list[Launch] = []
    made: list[Kept] = []
    for variable, offset in zip(kept, offsets, strict=True):
        op, attrs, info = _copy(plan.hardware, stage, variable)
        view, version = plan.view(register, variable.type, offset), plan.version()
        made.append(replace(variable, view=view, version=version, place=stage.place))
        launches.append(
            Launch(
                info.kernel,
                op.name,
                attrs,
                (variable.view,),
                (view,),
                None,
                variable.name,
                variable.source,
                info.duration_ns,
                reads=(variable.version,),
                writes=(version,),
            )
        )
    chains.actors.drafts[copier].launches = tuple(launches)
    chains.actors.produce(copier, register)
    return register, tuple(made)


def _copy(
    hardware: Hardware, stage: Stage, variable: Kept
) -> tuple[Op, tuple[tuple[str, AttrValue], ...], KernelInfo]:
    """Return op, attributes and kernel of a copy: a plain one where no device's memory is left."""
    start, end = variable.place, stage.place
    if start == end or not hardware.is_apart(start):
        return COPY, (), dense_copy(hardware.targets[stage.stream.device], variable.type)
    return COPY_TO, (("bucket", 0), ("to", end)), copy_info(hardware, start, end, variable.type)
