"""The versions of a program's values: what its launches say they read and write.

Every value that a source or a launch makes is a version; a value that only shows another one is a
window on that one's version. Both follow from the logical graph alone. Nothing here knows in which
order launches run, or which values share bytes: an error there must not find its way into the
numbers that are to reveal it.
"""

from __future__ import annotations

from compiler.graph import Graph
from compiler.lowering.plan_builder import PlanBuilder
from compiler.lowering.storage import Storage, is_dense
from compiler.types import ValueId, Version


class ValueVersions:
    """Numbers of one program, given out as they are asked for."""

    def __init__(self, graph: Graph, storage: Storage, plan: PlanBuilder) -> None:
        self._graph = graph
        self._storage = storage
        self._plan = plan
        self._made: dict[ValueId, Version] = {}
        self._shown: list[ValueId] = [ValueId(v) for v in range(len(graph.types))]
        for index, node in enumerate(graph.nodes):
            if node.inputs and not storage.is_launch[index]:
                self._shown[node.outputs[0]] = self._shown[node.inputs[0]]

    def of(self, value: ValueId) -> Version:
        """Return the version that a value is, or shows."""
        shown = self._shown[value]
        if shown not in self._made:
            self._made[shown] = self._plan.version()
        return self._made[shown]

    def know(self, value: ValueId, version: Version) -> None:
        """Let a value be a version that has a number already, such as a variable's."""
        self._made[value] = version

    def read(self, value: ValueId) -> int:
        """Return what a launch that reads a value states: see `Launch.reads`."""
        version, types = self.of(value), self._graph.types
        shown, layout = self._shown[value], self._storage.layout[value]
        is_whole = types[value].size_bytes == types[shown].size_bytes
        if value == shown or (is_whole and is_dense(types[value], layout)):
            return version
        return self._plan.part(version, layout.offset_bytes, layout.strides_bytes)
