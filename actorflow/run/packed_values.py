"""Values of a model that an open plan alone has, in the form that its launches read.

A convolution brings its weights to the layout of its library once, and reads them there in every
step. The arrays that it brought them from are then of no use but to who asks for the model's
values. So the model lends these to the plan (`actorflow.nn.lease`), whose launches bring them back
bit by bit when somebody reads, trains or saves them, or when the plan ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.loop.bound import VariableMemory
from compiler.contract.host_arrays import freeze

if TYPE_CHECKING:
    from actorflow.nn.lease import Lease

Array = np.ndarray[Any, Any]


class PackedValues:
    """What a lease asks of the run that has the values (`OpenRun`); steps change none of them.

    Args:
        memory: of the plan.
        names: of the variables.
    """

    can_be_lost = False
    is_over = True
    """Nothing changes them, so they can be read at any time, by any thread."""

    def __init__(self, memory: VariableMemory, names: Iterable[str]) -> None:
        self._memory = memory
        self.names = tuple(names)
        self.lease: Lease | None = None
        """On the cells of these variables, once they are handed over."""
        self.pending: Mapping[str, Array] = {}
        """What was written since: the plan is to take it over from the model."""

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def may_have(self, name: str) -> bool:
        """Whether a variable is here."""
        return name in self.names

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Return read-only arrays that nobody else has."""
        pending = self.pending
        return {n: pending[n] if n in pending else self._read(n) for n in names}

    def write(self, values: Mapping[str, Array]) -> None:
        """Note new values; of all names that are here."""
        self.pending = {**self.pending, **{n: a for n, a in values.items() if n in self.names}}

    def _read(self, name: str) -> Array:
        array = self._memory.read(name)
        freeze(array)
        return array
