"""A source's thread in the user's code: whether its answer still counts."""

from __future__ import annotations

from actorflow.data import DataSource


class Fetching:
    """The fetches of a source, each of which ends once.

    It ends when the source answers (`settle`), or when it is given up because the run is to stop
    and the source does not answer (`give_up`): then the answer no longer counts. `is_inside` says
    that the thread is in the user's code.

    Taking an item of a list is one atomic step, so the two need no lock.
    """

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self._open: list[None] = []
        self._is_given_up = False
        self.is_inside = False

    def begin(self) -> bool:
        """Begin a fetch; return False when the source was given up."""
        self._open.append(None)
        if self._is_given_up:
            self._taken()
            return False
        self.is_inside = True
        return True

    def settle(self) -> bool:
        """End a fetch that has its answer; return whether that still counts."""
        self.is_inside = False
        return self._taken()

    def give_up(self) -> bool:
        """Have no fetch more; return whether one was under way, whose answer no longer counts."""
        self._is_given_up = True
        return self._taken()

    def close(self) -> None:
        """Ask a source that blocks in a fetch to stop, if it can be asked.

        A source that is not fetching is left alone: it belongs to the user, who may use it again.
        """
        close = getattr(self._source, "close", None)
        if self.is_inside and callable(close):
            close()

    def _taken(self) -> bool:
        try:
            self._open.pop()
        except IndexError:
            return False
        return True
