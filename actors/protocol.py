"""What the runtime asks of the things it drives: launches, host ports, clocks.

A launch is prebound: it takes no argument, allocates no array and works on planned bytes. A host
port is the blocking end of a SOURCE or SINK actor (data, metrics, checkpoint); it is bound once per
slot at load, exactly like a kernel, and its launches run on a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Arrays = tuple[Array, ...]
Launch = Callable[[], object]
"""One prebound call. Its return value is ignored; an exception fails the actor."""

Clock = Callable[[], int]
"""Monotonic time in nanoseconds."""

Chain = tuple[Launch, ...]
"""The launches of one firing, in order."""

Token = Mapping[str, Array]
"""The tensors of one slot by field name; views on planned bytes, valid only during a launch."""


class HostPort(Protocol):
    """The host's end of a SOURCE or SINK actor."""

    def bind(self, tokens: tuple[Token, ...]) -> Launch:
        """Return the launch for these slots, one token per unit of the port's rate.

        A source's launch fills the arrays, or raises `SourceExhausted` when there is no more data.
        A sink's launch reads them. A flushed sink may be bound with fewer tokens than its rate.
        """

    def close(self) -> None:
        """Make a launch that blocks return or raise soon; called once, from another thread."""


@runtime_checkable
class GivesUp(Protocol):
    """A source's port of which a firing that blocks need not be waited for."""

    def give_up(self) -> bool:
        """Block in no firing more; return whether one is under way.

        Whatever that one still brings no longer counts: it must not touch its slot from now on
        where it can help it, and raise. Called on the dispatcher's thread, which runs the launches
        of further firings, and that of this one again, where the port is not admitted.
        """
