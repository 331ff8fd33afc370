"""Values of eager mode: ids that lead to their data, and to the op that made it.

A value is a `ValueId`, so that tensors, functions and layers handle it like one of a trace. It
leads to the `OpRecord` of the op that made it, and that to the values that the op read, as far as
gradients flow. Nothing else holds a record: it lives as long as a value that was computed from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from actorflow.eager_mode.launches import ValueStorage
from compiler.contract.attrs import Attrs
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.graph import Node, SourceLocation
from compiler.graph.registry import Op

_NUMBERS = itertools.count()
"""Numbers of records: what a record reads has a smaller one, of whatever thread or block it is."""

_MOST_OUTPUTS = 1 << 20
"""Outputs of an op; a value's id is the number of its record times this, and its place."""


Place = tuple[str, SourceLocation, Phase]
"""The module path, the user's line and the phase of an op."""


class OpRecord:
    """One run of an op: what it was, what it read, and what it made.

    `stored` is None where the outputs were let go: they can be computed again from the inputs.
    """

    __slots__ = ("attrs", "inputs", "number", "op", "place", "stored", "types")

    def __init__(
        self,
        op: Op,
        attrs: Attrs,
        inputs: tuple[EagerValue, ...],
        types: tuple[TensorType, ...],
        stored: Sequence[ValueStorage],
        place: Place,
    ) -> None:
        self.number = next(_NUMBERS)
        self.op, self.attrs, self.inputs = op, attrs, inputs
        self.types, self.place = types, place
        self.stored: Sequence[ValueStorage] | None = stored

    def values(self) -> tuple[EagerValue, ...]:
        """Return the outputs."""
        return tuple([EagerValue(self, index) for index in range(len(self.types))])

    def node(self) -> Node:
        """Return what a graph would have of it."""
        scope, source, phase = self.place
        ids = [ValueId(self.number * _MOST_OUTPUTS + i) for i in range(len(self.types))]
        inputs = tuple([ValueId(value) for value in self.inputs])
        return Node(self.op, inputs, tuple(ids), self.attrs, scope, source, phase)


class EagerValue(int):
    """The id of a value, with its record and its place among the outputs."""

    record: OpRecord
    index: int

    def __new__(cls, record: OpRecord, index: int) -> EagerValue:
        """Return the id of an output of a record."""
        value = super().__new__(cls, record.number * _MOST_OUTPUTS + index)
        value.record, value.index = record, index
        return value

    @property
    def type(self) -> TensorType:
        """Dtype and shape."""
        return self.record.types[self.index]
