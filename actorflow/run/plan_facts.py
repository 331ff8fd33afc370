"""What a plan says of its ends: batches, outputs, snapshots and variables."""

from __future__ import annotations

from compiler.plan import Actor, Plan
from compiler.types import TensorType


def _actor(plan: Plan, name: str) -> Actor | None:
    return next((actor for actor in plan.actors if actor.name == name), None)


def batches_per_step(plan: Plan) -> int:
    """Return how many batches one update consumes."""
    return plan.int_option("accumulate", 1)


def batch_slots(plan: Plan) -> int:
    """Return how many batches the plan has room for."""
    return plan.registers[_batch_register(plan, "data")].num_slots


def batch_fields(plan: Plan, source: str = "data") -> tuple[dict[str, TensorType], dict[str, str]]:
    """Return type and user's line of every field that the plan reads from a data source."""
    register = _batch_register(plan, source)
    fields = [f for f in plan.fields if f.register == register]
    types = {f.name: plan.views[f.view].type for f in fields}
    return types, {f.name: str(plan.sources[f.source]) for f in fields}


def _batch_register(plan: Plan, source: str) -> int:
    return next(a for a in plan.actors if a.name == source).outputs[0].register


def line_of_output(plan: Plan, name: str) -> str | None:
    """Return the user's line of an output of the job, or None where there is none of the name."""
    sink = next(a for a in plan.actors if a.name == "metrics")
    registers = [port.register for port in sink.inputs]
    lines = [
        plan.sources[f.source] for f in plan.fields if f.register in registers and f.name == name
    ]
    return str(lines[0]) if lines else None


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
