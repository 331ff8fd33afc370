"""What a plan says of itself to a run: batches, outputs, snapshots, variables, credits."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from compiler.contract.errors import PlanFormatError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, ActorKind, Field, RegisterKind
from compiler.contract.sbp import shard_slices
from compiler.contract.types import TensorType
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


def written_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of the variables that a step changes, in order of the plan."""
    written = {
        plan.views[view].register
        for actor in plan.actors
        for launch in actor.launches
        for view in launch.outputs
    }
    return tuple(v.name for v in plan.state if plan.views[v.view].register in written)


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
