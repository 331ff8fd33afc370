"""A source that is fed from outside, batch by batch: what `step` pushes into."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.types import TensorType


class Mailbox:
    """A `DataSource` over a mailbox.

    `put` may be called from any thread; `__next__` blocks until there is a batch.
    """

    def __init__(self, spec: Mapping[str, TensorType]) -> None:
        self._spec = dict(spec)
        self._batches: queue.SimpleQueue[Mapping[str, np.ndarray[Any, Any]] | None] = (
            queue.SimpleQueue()
        )

    def put(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Give the next batch."""
        self._batches.put(batch)

    def close(self) -> None:
        """End the stream; a blocked `__next__` raises StopIteration."""
        self._batches.put(None)

    def spec(self) -> dict[str, TensorType]:
        """Return the types of a batch."""
        return dict(self._spec)

    def __next__(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Return the next batch; blocks."""
        batch = self._batches.get()
        if batch is None:
            raise StopIteration
        return batch

    def state(self) -> dict[str, Any]:
        """Return nothing: what was pushed cannot be sought."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Accept any state; the caller pushes what follows."""

    def fingerprint(self) -> str:
        """Return a fixed text: the caller knows what it pushes."""
        return "mailbox"
