"""Who meets whom: all ranks along an axis of the mesh, or two of them where one sends.

Streams that move tensors between ranks run side by side, so a rank may wait for several others at
once: what it says of itself for one must not stand where it says what it does for another. On its
board each lane that it is in has a line of its own, in the order of lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_NONE = -1


class RankLane(NamedTuple):
    """An axis, and which of the streams all ranks along it meet on, or who sends to whom there.

    `sender` and `receiver` are coordinates along the axis; what two streams of two ranks have to do
    with each other has no number of a stream.
    """

    axis: int
    stream: int = _NONE
    sender: int = _NONE
    receiver: int = _NONE

    def members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return who meets, of the ranks along the axis: the one that sends comes first."""
        if self.sender == _NONE:
            return tuple(ranks)
        return ranks[self.sender], ranks[self.receiver]
