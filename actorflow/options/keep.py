"""Which checkpoints of a run stay: the newest, the best by an evaluation, one in so many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actorflow.environment.option_values import IntRange, OneOfValues, check_fields
from actorflow.tensor.tracer import find_source

_MOST = 1 << 30


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay; those that any of the rules names.

        fit(..., evaluation=watched, keep=af.Keep(last=3, best=2, metric="loss", every=1000))

    With `best` there is a checkpoint at each evaluation, of exactly the weights that were
    evaluated, and it has the means; so a run that is killed and resumed knows what was best.
    `af.load(run, best=True)` reads the best one. The newest without NaN stays in any case.

    Args:
        last: so many of the newest.
        best: so many of those with the best `metric`; of equal ones the earlier.
        metric: a mean of the run's evaluation. One that is not finite is never the best.
        mode: "min" where less is better, or "max".
        every: the multiples of so many steps, which are saved for that; None for none.

    Raises CompileError with the user's line.
    """

    last: int = field(default=3, metadata={"rule": IntRange(1, _MOST)})
    best: int = field(default=0, metadata={"rule": IntRange(0, _MOST)})
    metric: str = "loss"
    mode: str = field(default="min", metadata={"rule": OneOfValues(("min", "max"))})
    every: int | None = field(default=None, metadata={"rule": IntRange(1, _MOST)})

    def __post_init__(self) -> None:
        check_fields(self, find_source(), " of Keep")

    def kept(self, steps: Sequence[int], measured: Mapping[int, float]) -> set[int]:
        """Return which of some steps stay, ascending; `measured` has the metric of some."""
        from actorflow.checkpoint.reader import best_first  # 15 ms

        ranked = best_first(measured, self.mode)
        regular = [step for step in steps if self.every and step % self.every == 0]
        return {*steps[-self.last :], *ranked[: self.best], *regular}
