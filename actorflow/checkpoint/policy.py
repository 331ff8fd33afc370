"""When a checkpoint is due: every so many steps or seconds. Pure; the clock is the caller's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from actorflow.checkpoint.errors import CheckpointError

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*\Z")
_HOW = 'give a number of steps (500) or a time ("30s", "10min", "1h")'


@dataclass(frozen=True, slots=True)
class Every:
    """A period in steps or in seconds of the clock; exactly one of the two is set.

    In steps, a checkpoint is due at the first snapshot that reaches or passes a multiple of the
    period. A run that starts at a multiple has its snapshots just there; one that was stopped
    between two multiples has them as far after each.

    Raises:
        CheckpointError: none or both are set, or the period is not positive.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise CheckpointError(f"expected a period in steps or in seconds, got {self}; {_HOW}")
        period = self.steps if self.seconds is None else self.seconds
        if period is None or not 0 < period < float("inf"):
            raise CheckpointError(f"expected a positive period, got {period}; {_HOW}")

    @classmethod
    def parse(cls, text: object) -> Every:
        """Return the period a user wrote: `500`, `"500"`, `"500 steps"`, `"5s"`, `"10min"`, `"1h"`.

        Raises:
            CheckpointError: the text says nothing of the kind.
        """
        if isinstance(text, Every):
            return text
        if isinstance(text, int) and not isinstance(text, bool):
            return cls(steps=text)
        match = _TEXT.match(text) if isinstance(text, str) else None
        if match is not None:
            number, unit = match.groups()
            if unit in ("", "step", "steps") and "." not in number:
                return cls(steps=int(number))
            if unit in _SECONDS:
                return cls(seconds=float(number) * _SECONDS[unit])
        raise CheckpointError(f"cannot read the checkpoint period {text!r}; {_HOW}")

    def is_due(self, *, step: int, now_ns: int, last_step: int, last_ns: int) -> bool:
        """Whether to save after `step`, the last save (or the start) having been at `last_step`.

        Args:
            step: updates done so far.
            now_ns: the clock now, monotonic.
            last_step: updates done at the last save, or at the start of this process.
            last_ns: the clock then.
        """
        if step <= last_step:
            return False
        if self.steps is not None:
            return step // self.steps > last_step // self.steps
        return self.seconds is not None and now_ns - last_ns >= self.seconds * 1e9
