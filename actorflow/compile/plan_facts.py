"""What a plan says of itself to a run: batches, outputs, snapshots, variables, credits."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from compiler.contract.errors import PlanFormatError
from compiler.contract.placement import HOST, Memory
from compiler.contract.plan import Plan, proof
from compiler.contract.plan_tables import Actor, ActorKind, Field, RegisterKind
from compiler.contract.sbp import shard_slices
from compiler.contract.types import TensorType, contiguous_strides
from compiler.ops.primitives.sources import NUMBERS, OF_MODEL, PACKED
from compiler.verify.verify import edges_of
from memory.registers import RateEdge, repetition_vector


def _actor(plan: Plan, name: str) -> Actor | None:
    return next((actor for actor in plan.actors if actor.name == name), None)


def batch_slots(plan: Plan) -> int:
    """Return how many batches the plan has room for."""
    return plan.registers[_batch_register(plan, "data")].num_slots


def batch_fields(plan: Plan, source: str = "data") -> tuple[dict[str, TensorType], dict[str, str]]:
    """Return type and user's line of every field that the plan reads from a data source.

    The types are those of whole batches, which is what sources give.
    """
    fields = _fields_of(plan, source)
    types: dict[str, TensorType] = {}
    for field in fields:
        local = plan.views[field.view].type
        types[field.name] = (
            local if field.sharding is None else replace(local, shape=field.sharding.shape)
        )
    return types, {f.name: str(plan.sources[f.source]) for f in fields}


def batch_parts(plan: Plan, rank: int, source: str = "data") -> dict[str, tuple[slice, ...]]:
    """Return where a rank's part of a batch lies, of the fields of which it has one."""
    fields = [(f.name, f.sharding) for f in _fields_of(plan, source)]
    mesh = plan.mesh
    return {name: shard_slices(part, mesh, rank) for name, part in fields if part is not None}


def _fields_of(plan: Plan, source: str) -> list[Field]:
    register = _batch_register(plan, source)
    return [field for field in plan.fields if field.register == register]


def _batch_register(plan: Plan, source: str) -> int:
    return next(a for a in plan.actors if a.name == source).outputs[0].register


def losses_of(plan: Plan) -> tuple[str, ...]:
    """Return the outputs that gradients are of; none where the plan does not train."""
    named = plan.option("losses") or ("loss",)
    if not isinstance(named, tuple) or not all([isinstance(name, str) for name in named]):
        raise PlanFormatError(f"option losses is {named!a:.40}")
    return cast("tuple[str, ...]", named) if plan.option("is_training") else ()


def losses_with_lines(plan: Plan) -> dict[str, str]:
    """Return the user's line of each loss, "" for one that is no output, by name."""
    outputs = sink_fields(plan, "metrics")
    lines = {f.name: str(plan.sources[f.source]) for f in reversed(outputs)}
    return {name: lines.get(name, "") for name in losses_of(plan)}


def sink_fields(plan: Plan, name: str) -> list[Field]:
    """Return the outputs that come to a sink."""
    sink = next(a for a in plan.actors if a.name == name)
    registers = [port.register for port in sink.inputs]
    return [f for f in plan.fields if f.register in registers]


def output_lines(plan: Plan, name: str) -> dict[str, str]:
    """Return the user's line of each output that comes to a sink, by name."""
    return {field.name: str(plan.sources[field.source]) for field in sink_fields(plan, name)}


def takes_snapshots(plan: Plan) -> bool:
    """Whether the plan was compiled to write checkpoints."""
    return _actor(plan, "checkpoint") is not None


def snapshot_rate(plan: Plan) -> int:
    """Return the steps between two snapshots of the variables; 0 where the plan takes none."""
    snapshot = _actor(plan, "snapshot")
    return 0 if snapshot is None else snapshot.inputs[0].rate


def saved_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of the variables that a checkpoint holds, in order of plan.

    What only an evaluation reads is no part of the training.
    """
    writer = _actor(plan, "checkpoint")
    if writer is None:
        return tuple(v.name for v in plan.state)
    staging = writer.inputs[0].register
    return tuple(f.name for f in plan.fields if f.register == staging)


@proof
def state_layout(plan: Plan) -> tuple[object, ...]:
    """Return where a plan has its variables: plans that agree in it can be open on one memory.

    Copies that launches keep in a form of their own are no part of it, nor are numbers of rows:
    each plan has its own, and fills them again.
    """
    rows = []
    for variable in plan.variables:
        view = plan.views[variable.view]
        register = plan.registers[view.register]
        place = (register.arena, register.offsets_bytes, view.offset_bytes, view.strides_bytes)
        if variable.role not in (PACKED, NUMBERS):
            rows.append((variable.name, variable.role, view.type, place, variable.sharding))
    arenas = [(arena.place, arena.alignment) for arena in plan.arenas]
    return (*arenas, *sorted(rows, key=lambda row: row[0]))


@proof
def written_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of the variables that a step changes, in order of the plan."""
    written = {
        plan.views[view].register
        for actor in plan.actors
        for launch in actor.launches
        for view in launch.outputs
    }
    return tuple(v.name for v in plan.state if plan.views[v.view].register in written)


@proof
def read_only_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of a model's variables that no step changes, in order of the plan.

    Only such as lie densely in memory of the host, each in a register of its own: an array of the
    same type can take its place.
    """
    written = {*written_variables(plan)}
    names: list[str] = []
    for variable in plan.state:
        view = plan.views[variable.view]
        register = plan.registers[view.register]
        arena, steps = plan.arenas[register.arena], contiguous_strides(view.type.shape, 1)
        item = view.type.dtype.itemsize
        is_whole = register.size_bytes == view.type.size_bytes and register.num_slots == 1
        is_dense = view.strides_bytes == tuple([step * item for step in steps])
        is_on_host = arena.device == HOST and arena.memory is Memory.HOST
        is_of_model = variable.role in OF_MODEL and variable.name not in written
        if is_of_model and is_whole and is_dense and is_on_host and variable.sharding is None:
            names.append(variable.name)
    return tuple(names)


def credits_after(plan: Plan, steps: int) -> dict[str, int]:
    """Return the credits that control registers hold after some steps, by name.

    What comes every n steps counts them over all runs of a training, not from the start of this
    one; but a sink begins anew, for the outputs of earlier steps went to the run before.
    """
    edges, registers = edges_of(plan)
    firings = _firings(plan, edges, steps * plan.batches_per_step)
    by_name: dict[str, int] = {}
    for edge, register in zip(edges, registers, strict=True):
        # What was produced and not yet consumed lies in the register as credits.
        tokens = firings[edge.producer] * edge.produce - firings[edge.consumer] * edge.consume
        is_sink = plan.actors[edge.consumer].kind is ActorKind.SINK
        if tokens and plan.registers[register].kind is RegisterKind.CONTROL and not is_sink:
            by_name[plan.registers[register].name] = tokens
    return by_name


def _firings(plan: Plan, edges: list[RateEdge], batches: int) -> list[int]:
    """Return how often each actor fires on some batches, when all that can fire has fired.

    An evaluation has all its firings or none, so these are no shares of a period.
    """
    feeder = next(a.id for a in plan.actors if a.name == "data")
    repetitions = repetition_vector(len(plan.actors), edges)
    # Rounded up, then lowered below until every edge has its tokens: a fixed point from above.
    fired = [-(-batches * count // repetitions[feeder]) for count in repetitions]
    is_settled = False
    while not is_settled:
        is_settled = True
        for edge in edges:
            possible = fired[edge.producer] * edge.produce // edge.consume
            if fired[edge.consumer] > possible:
                fired[edge.consumer] = possible
                is_settled = False
    return fired
