"""Where a data source stood after the batches whose step may yet be saved, and after no others.

A checkpoint of step n saves the position after n's last batch, long after the source has moved on.
Saved are the steps at which the plan takes a snapshot, and the last step of the run; so what is
kept is bounded by the slots of the plan, and by the snapshots between two that are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

State = Mapping[str, Any]


class Positions:
    """Positions by number of batches done. `note` belongs to one thread, the rest to another.

    Args:
        batch: batches done before the first.
        state: the position then.
        stride: batches between two snapshots, counted from batch 0.
        in_flight: batches that may be fetched and not done.
    """

    def __init__(self, batch: int, state: State, *, stride: int, in_flight: int) -> None:
        self._states: dict[int, State] = {batch: state}
        self._oldest = batch
        self._stride = stride
        self._in_flight = in_flight

    def __len__(self) -> int:
        """Return how many positions are kept."""
        return len(self._states)

    def note(self, batch: int, state: State) -> None:
        """Keep the position after `batch` batches."""
        self._states[batch] = state
        done = batch - self._in_flight - 1
        if done % self._stride and done > self._oldest:
            self._states.pop(done, None)

    def after(self, batch: int) -> State:
        """Return the position after `batch` batches and forget those before it."""
        self.forget_before(batch)
        return self._states[batch]

    def forget_before(self, batch: int) -> None:
        """Forget positions before `batch`. Linear in what is kept."""
        for kept in [kept for kept in list(self._states) if kept < batch]:
            self._states.pop(kept, None)
        self._oldest = batch
