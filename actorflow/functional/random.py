"""Random numbers, each a pure function of the seed, the step, the op and the element.

So they are the same after a resume and under recomputation, and there is nothing of them to save.
"""

from __future__ import annotations

from actorflow.functional.counters import batches_of, seed_of, step_of
from actorflow.literals import checked_number
from actorflow.tensor import Tensor, apply
from actorflow.trace.tracer import current_trace, find_source
from compiler.errors import CompileError
from compiler.fusion.expressions import Expression
from compiler.ops import random

__all__ = ["dropout"]


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero elements with probability p and scale the rest by 1/(1-p).

    Outside training it is the identity. The mask is a pure function of (seed, step, this op,
    element), so that it replays after a resume and under recomputation.
    """
    p = checked_probability(p)
    given: object = x
    if isinstance(given, Expression):  # it would be the identity, for nothing trains while it runs
        raise CompileError(
            f"{find_source()}: a program draws no random numbers; draw them in the job, and make"
            " them an operand"
        )
    trace = current_trace()
    if trace is None or not trace.is_training or p == 0.0:
        return x
    key = trace.next_random_key()
    counter = batches_of(trace) if trace.batches_per_step > 1 else step_of(trace)
    return apply(random.DROPOUT, x, seed_of(trace), counter, p=p, key=key)


def checked_probability(p: float) -> float:
    """Return a dropout probability as a float. Raises CompileError outside of [0, 1)."""
    number = checked_number(p, "dropout probability")
    if not 0.0 <= number < 1.0:
        raise CompileError(f"{find_source()}: dropout probability must be in [0, 1), got {number}")
    return number
