"""The versions of a program's values: what its launches say they read and write.

Every value that a source or a launch makes is a version; a value that only shows another one is a
window on that one's version; and one that is joined of parts in place is a version, too, of which
the plan says the parts (`compiler.plan.Join`). All follow from the logical graph alone. Nothing
here knows in which order launches run, or which values share bytes: an error there must not find
its way into the numbers that are to reveal it.
"""

from __future__ import annotations

from compiler.graph import Graph, Node
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
        self.joins: list[Node] = []
        for index, node in enumerate(graph.nodes):
            if len(node.inputs) > 1 and not storage.is_launch[index]:
                self.joins.append(node)
            elif node.inputs and not storage.is_launch[index]:
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
        version, shown = self.of(value), self._shown[value]
        if value == shown:
            return version
        types, layout = self._graph.types, self._storage.layout[value]
        made = self._storage.layout[shown]
        is_whole = types[value].size_bytes == types[shown].size_bytes
        are_dense = is_dense(types[value], layout) and is_dense(types[shown], made)
        if is_whole and are_dense:
            return version
        offset_bytes = layout.offset_bytes - made.offset_bytes
        return self._plan.part(version, offset_bytes, layout.strides_bytes)
