"""Which snapshots of a run become checkpoints, and how they do: the same ones on all its ranks.

A period in steps is counted, so all ranks come to the same. A period of time is that of the first
rank's clock: it asks for a checkpoint, and the coordinator names a step that no rank has begun, on
all of them (`actorflow.ranks.agreement`); the first snapshot from there on is the one. Then every
rank tells what it has, and the first writes the whole: at once where that has all of it, else when
the parts have come (`joining.py`). Meanwhile training goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from actorflow.logs import logger
from actorflow.run.among import ONE_RANK
from actorflow.run.joining import Joining
from actorflow.run.run_options import RunOptions
from compiler.errors import PeerFailed
from compiler.plan import Plan
from memory.report import format_bytes

Array = np.ndarray[Any, Any]


class Keeping:
    """What becomes of the snapshots of one run. All ranks make it at the same place.

    `is_due` and `save` belong to the thread of the snapshots.

    Args:
        plan: of the run.
        options: of the run; nothing is kept where there is no `every` in them.
        ask: asks for a checkpoint on all ranks, soon.
    """

    def __init__(self, plan: Plan, options: RunOptions, ask: Callable[[], object]) -> None:
        self._saver, self._every, self._ask = options.saver, options.every, ask
        self._last_step = options.first_step
        self._told: deque[int] = deque()
        self._joining: Joining | None = None
        self._is_shared = options.among is not ONE_RANK
        if self._is_shared and self._every is not None:
            self._joining = Joining(plan, options.among, options.settings.rank_seconds)
            if options.saver is not None and self.needs_others:
                size = format_bytes(self._joining.size_bytes)
                logger.info("rank 0 joins the parts of variables for checkpoints in %s", size)

    @property
    def needs_others(self) -> bool:
        """Whether a checkpoint takes what other ranks have."""
        return self._joining is not None and self._joining.size_bytes > 0

    def tell(self, step: int) -> None:
        """Hear that the first snapshot from a step on is due. On any thread, in order of steps."""
        self._told.append(step)

    def is_due(self, step: int) -> bool:
        """Whether the snapshot of a step is to be saved."""
        every, saver = self._every, self._saver
        if every is None:
            return False
        if not self._is_shared:
            return saver is not None and saver.is_due(step)
        if every.seconds is None:
            is_due = every.is_due(step=step, now_ns=0, last_step=self._last_step, last_ns=0)
        else:
            is_due = bool(self._told) and self._told[0] <= step
            while self._told and self._told[0] <= step:
                self._told.popleft()
            # What was told and is still to come is answer enough; asking twice is one question.
            if not (is_due or self._told) and saver is not None and saver.is_due(step):
                self._ask()
        if is_due:
            self._last_step = step
        return is_due

    def save(
        self,
        step: int,
        arrays: Mapping[str, Array],
        position: Callable[[int], Mapping[str, Any]],
    ) -> None:
        """Save a snapshot, or this rank's share of it; `position` says where the data is after it.

        Returns when the first rank has all, there when it is durable. Raises what `Saver.save`
        does, and PeerFailed where another rank ended.
        """
        joining, saver = self._joining, self._saver
        if joining is not None and saver is None:
            joining.tell(step, arrays)
        elif saver is not None:
            whole = arrays if joining is None else joining.join(step, arrays)
            saver.save(step, whole, position(step))

    def stop(self, error: BaseException) -> None:
        """Wait for no other rank any more, because of an error; from any thread."""
        if self._joining is not None:
            self._joining.stop(str(error))

    def close(self) -> None:
        """Make a save that waits for another rank raise."""
        self.stop(PeerFailed("the run is over"))

    def release(self) -> None:
        """Let go of what was made for it, when no save goes on. Idempotent."""
        if self._joining is not None:
            self._joining.close()
