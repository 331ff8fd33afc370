"""Snapshots of the variables between two steps: how often, where, and the launches that take one.

On the host the stream that computes copies them. What a device holds is copied to the host's side
on the stream out of it, so that batches come in and outputs go out meanwhile; of several devices
the first one's stream copies for all.
"""

from __future__ import annotations

from compiler.attrs import AttrValue
from compiler.graph import Graph
from compiler.lowering.buffers import copy_info, dense_copy
from compiler.lowering.chain_actors import ChainActors
from compiler.lowering.chains import COMPUTE, StreamKey
from compiler.ops.copies import COPY_TO, place_number
from compiler.ops.shape import COPY
from compiler.ops.sources import SCRATCH, VARIABLE
from compiler.options import CompileOptions
from compiler.placement import HOST, HOST_SIDE
from compiler.plan import Field, Launch, RegisterKind
from compiler.registry import Op
from compiler.target import Hardware, KernelInfo
from compiler.types import RegisterId, TensorType

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


def snapshot_stream(graph: Graph, hardware: Hardware) -> StreamKey:
    """Return the stream on which a snapshot of a graph's variables is taken."""
    for node in graph.nodes:
        if node.op is VARIABLE and hardware.devices[node.device].kind is not HOST.kind:
            return StreamKey(*hardware.copy_stream(node.device, HOST_SIDE))
    return COMPUTE


def stage_variables(
    chains: ChainActors, hardware: Hardware
) -> tuple[RegisterId, tuple[Launch, ...]]:
    """Add the staging register, one field per variable of a program; return what fills it."""
    graph, plan = chains.program.graph, chains.plan
    between = {variable.name: variable.between for variable in plan.variables}
    nodes = [n for n in graph.nodes if n.op is VARIABLE and n.attrs.str_("role") != SCRATCH]
    types = [graph.types[n.outputs[0]] for n in nodes]
    reason = "1: a second snapshot waits until the first is written"
    # What the device shall not hold all the time it shall not hold for a snapshot either.
    stream = snapshot_stream(graph, hardware)
    places = [place_number(graph, n.outputs[0]) for n in nodes]
    place = HOST_SIDE if HOST_SIDE in places or stream != COMPUTE else 0
    offsets, size = plan.stack(types, place)
    staging = plan.register("staging", RegisterKind.DATA, size, reason=reason, place=place)
    launches: list[Launch] = []
    for node, type_, start, offset in zip(nodes, types, places, offsets, strict=True):
        op, attrs, info = _copy(hardware, stream, start, place, type_)
        view = plan.view(staging, type_, offset)
        name, source = node.attrs.str_("name"), plan.source(node.source)
        version = plan.version()
        plan.fields.append(Field(name, staging, view, source, version))
        read = chains.view(node.outputs[0])
        launches.append(
            Launch(
                info.kernel,
                op.name,
                attrs,
                (read,),
                (view,),
                None,
                name,
                source,
                info.duration_ns,
                reads=(between[name],),
                writes=(version,),
            )
        )
    return staging, tuple(launches)


def _copy(
    hardware: Hardware, stream: StreamKey, start: int, end: int, type_: TensorType
) -> tuple[Op, tuple[tuple[str, AttrValue], ...], KernelInfo]:
    """Return op, attributes and kernel of a copy on a stream; a plain one of what the host has."""
    if start == HOST_SIDE or hardware.devices[start].kind is HOST.kind:
        return COPY, (), dense_copy(hardware.targets[stream.device], type_)
    return COPY_TO, (("bucket", 0), ("to", end)), copy_info(hardware, start, end, type_)
