"""What the engine counts: finished steps and batches, and the seed of the run."""

from __future__ import annotations

from actorflow.tensor import Tensor
from actorflow.trace.tracer import Trace
from compiler.ops.sources import SCRATCH
from compiler.types import DType, TensorType


def step_of(trace: Trace) -> Tensor:
    """Return the number of finished steps as an int64 scalar."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("step", counter, "counter", (("kind", "zeros"),)))


def batches_of(trace: Trace) -> Tensor:
    """Return the number of finished batches as an int64 scalar, where a step has several."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("batches", counter, SCRATCH, (("kind", "zeros"),)))


def seed_of(trace: Trace) -> Tensor:
    """Return the seed of the run as an int64 scalar."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("seed", counter, "counter", (("kind", "seed"),)))
