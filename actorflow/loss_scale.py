"""What the loss of a job in float16 is multiplied by, so that small gradients do not become 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from actorflow.keywords import Count
from actorflow.literals import checked_number
from actorflow.tensor import Tensor, as_tensor
from actorflow.trace.tracer import Trace, find_source
from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import Output, Write
from compiler.ops.update import RESCALE
from compiler.options import GOOD_STEPS, LOSS_SCALE
from compiler.types import DType, TensorType

_LARGEST = 2.0**126
"""A scale of float32, whose inverse is a normal number, too."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A scale that follows how steps go, as torch.amp.GradScaler has it.

    Args:
        init_scale: the scale of the first step.
        growth_factor: what the scale is multiplied by after `growth_interval` steps in a row whose
            gradients were finite; above 1.
        backoff_factor: what it is multiplied by after a step whose loss or gradients were not, and
            which was skipped; between 0 and 1.
        growth_interval: steps, as above.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        where = find_source()
        for name, least, most in (
            ("init_scale", 0.0, _LARGEST),
            ("growth_factor", 1.0, _LARGEST),
            ("backoff_factor", 0.0, 1.0),
        ):
            number = getattr(self, name)
            if not _is_between(checked_number(number, name), least, most):
                raise CompileError(
                    f"{where}: {name} of a loss scale must be above {least:g} and below {most:g},"
                    f" got {number!r}"
                )
        interval = Count(1, (1 << 31) - 1).expected(self.growth_interval)
        if interval:
            raise CompileError(
                f"{where}: growth_interval of a loss scale must be {interval}, got"
                f" {self.growth_interval!r}"
            )


def _is_between(number: float, least: float, most: float) -> bool:
    return least < number < most


def is_scale(value: object) -> bool:
    """Whether something is a loss scale: a `LossScale`, or a number for one that stays."""
    if isinstance(value, LossScale):
        return True
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0.0 < float(value) < _LARGEST  # type: ignore[arg-type]  # a Real


def scaled(
    trace: Trace, losses: Mapping[str, Tensor], scaling: LossScale | float
) -> dict[str, Tensor]:
    """Return losses times a scale, which becomes an output of the job and state of its plan."""
    single, counter = TensorType(DType.FLOAT32, ()), TensorType(DType.INT64, ())
    if isinstance(scaling, LossScale):
        init = (("kind", "constant"), ("value", float(scaling.init_scale)))
        scale = trace.variable(LOSS_SCALE, single, "counter", init)
        good = trace.variable(GOOD_STEPS, counter, "counter", (("kind", "zeros"),))
        attrs = {
            "growth_factor": float(scaling.growth_factor),
            "backoff_factor": float(scaling.backoff_factor),
            "growth_interval": scaling.growth_interval,
        }
        # Whether the step is skipped stands for the 0 once it is known (`passes.loss_scale`).
        unknown = as_tensor(0, DType.INT64)._value_in(trace)
        with trace.scope("optimizer"):
            news = trace.emit(RESCALE, [scale, good, unknown], Attrs(attrs))
        trace.builder.writes += [
            Write(old, new) for old, new in zip((scale, good), news, strict=True)
        ]
    else:
        scale = as_tensor(float(scaling))._value_in(trace)
    trace.builder.outputs.append(Output(LOSS_SCALE, scale))
    return {name: _times(loss, Tensor(trace, scale)) for name, loss in losses.items()}


def _times(loss: Tensor, scale: Tensor) -> Tensor:
    wide = DType.FLOAT64 if loss.dtype is DType.FLOAT64 else DType.FLOAT32
    return loss.to(wide) * scale.to(wide)
