"""A run that other ranks are on, too: what it tells them, and what all of them have decided.

Steps begin where all ranks may begin them, and the run ends after one and the same step on each: a
stop that one asks for is granted to all, at the edge of what has been granted so far. A rank that
fails ends the others at once, and they raise what it raised (`actorflow.ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from actorflow.run.given_batches import GivenBatches
from actors.errors import ActorFailed

if TYPE_CHECKING:
    from actorflow.ranks.member import RankMember
    from actorflow.ranks.shared_run import RunCallbacks, SharedRun


class Together:
    """This rank's side of a run; steps are counted from the beginning of training.

    Args:
        member: the rank.
        first_step: the step before the run's first.
        callbacks: what the run is told.

    `asked` is why this rank asked for the end, if it did.
    """

    def __init__(self, member: RankMember, first_step: int, callbacks: RunCallbacks) -> None:
        self._member = member
        self._first_step = first_step
        self._callbacks = callbacks
        self._shared: SharedRun | None = None
        self.asked = ""

    def begin(self) -> None:
        """Meet the others for the run. Raises PeerFailed where one does not come."""
        self._shared = self._member.begin_run(self._callbacks, first_step=self._first_step)
        if self.asked:
            self._shared.ask_stop(self.asked)

    def fed(self, step: int) -> None:
        """Say that a step has its data, before it begins; more can be granted."""
        if self._shared is not None:
            self._shared.fed(step)
            self._shared.reached(step)

    def batches(self, lines: Mapping[str, str]) -> GivenBatches:
        """Return what sees whole batches, and tells them; `lines` are those that read the fields.

        Where the user gives them one by one, all are told.
        """
        line, is_every = next(iter(lines.values()), ""), self._callbacks.is_stepped
        return GivenBatches(self._given, line, self._first_step, is_every=is_every)

    def _given(self, step: int, digest: int, line: str) -> None:
        if self._shared is not None:
            self._shared.given(step, digest, line)

    def data_ended(self, step: int, why: str) -> None:
        """Say that there is no data after a step, and what ended it, where something did."""
        if self._shared is not None:
            self._shared.data_ended(step, why)

    def would_end(self, step: int) -> None:
        """Say which step has begun, after which none does until all have said so."""
        if self._shared is not None:
            self._shared.would_end(step)

    def ask_stop(self, reason: str) -> None:
        """Ask for the end on all ranks. Takes no lock, so a signal handler may call it."""
        self.asked = self.asked or reason
        if self._shared is not None:
            self._shared.ask_stop(reason)

    def ask_checkpoint(self) -> None:
        """Ask for a checkpoint of all ranks after one and the same step."""
        if self._shared is not None:
            self._shared.ask_checkpoint()

    def ended(self, step: int) -> None:
        """Say that the run is over, and well."""
        if self._shared is not None:
            self._shared.end(step)

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others of an error; return what is to be raised: the error that was first."""
        if isinstance(error, ActorFailed):
            self._member.fail(error, op=error.op, line=str(error.source))
        else:
            self._member.fail(error)
        first = self._member.failure
        is_others = first is not None and getattr(first, "rank", None) != self._member.rank
        return first if first is not None and is_others else error
