"""Let every node read what lies on its own device: copy whatever comes from another one.

A value that nodes of another device read gets one `copy_to` for that device, which they share; so
does one that the user copies, and a copy to where a value lies already is none. Constants are made
once on each device, and a broadcast, whose result is larger than what it shows, is repeated there:
neither costs bytes on a link.

A parameter is copied only where the user says so: to read one on two devices moves all of it in
every step, which is seldom meant. What the engine itself reads, counters and learning rates, is
copied like any other value. Gradients need no rule of their own: one that was made on a device
where the parameter does not lie is read where it does, and copied for that.

Each copy has a bucket of its own: it can be awaited alone.

Guarantees: what a node reads lies on its device, or in a source with a place of its own; a copy
leads to another place than its input's, and a value has one for each.
"""

from __future__ import annotations

from compiler.errors import CompileError
from compiler.graph import Graph, GraphBuilder, Node, consumers
from compiler.ops.copies import COPY_TO, is_copy
from compiler.ops.sources import CONSTANT, VARIABLE
from compiler.registry import is_source, view
from compiler.target import Hardware
from compiler.types import Phase, ValueId


def run(graph: Graph, hardware: Hardware) -> Graph:
    """Return the graph with a copy for each value and device that it goes to. O(nodes).

    Raises CompileError, with the lines of both, for a parameter that nodes of two devices read.
    """
    if len({node.device for node in graph.nodes}) == 1 and not any(map(is_copy, graph.nodes)):
        return graph
    return _CrossingCopies(graph, hardware).run()


class _CrossingCopies:
    """One copy of a graph; a value of the old one has up to one per device in the new one."""

    def __init__(self, graph: Graph, hardware: Hardware) -> None:
        self._graph = graph
        self._hardware = hardware
        self._b = GraphBuilder()
        self._new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
        self._place: dict[ValueId, int] = {}
        """Where a value of the new graph lies."""
        self._brought: dict[tuple[ValueId, int], ValueId] = {}
        self._num_copies = 0

    def run(self) -> Graph:
        for node in self._graph.nodes:
            outputs = self._take(node)
            for old, new in zip(node.outputs, outputs, strict=True):
                self._new_id[old] = new
        return self._b.freeze_as(self._graph, self._new_id)

    def _take(self, node: Node) -> tuple[ValueId, ...]:
        """Append a node with the copies that it needs; return its values."""
        read = [self._new_id[v] for v in node.inputs]
        if is_copy(node):
            return (self._copied(read[0], node.attrs.int_("to"), node),)
        inputs = tuple([self._on_device(v, node.device, node) for v in read])
        types = [self._graph.types[v] for v in node.outputs]
        outputs = self._b.copy(node, inputs, types)
        is_elsewhere = is_source.get(node.op) and "place" in node.attrs
        place = node.attrs.int_("place") if is_elsewhere else node.device
        self._place.update(dict.fromkeys(outputs, place))
        return outputs

    def _on_device(self, value: ValueId, device: int, reader: Node) -> ValueId:
        """Return a value as a node reads it that runs on a device."""
        if self._place[value] == device:
            return value
        maker = self._b.producer_of(value)
        if self._shown(value).op is CONSTANT or (view.has(maker.op) and self._is_wider(maker)):
            return self._repeated(value, maker, device, reader)
        if self._is_parameter(value):
            self._refuse(value, device, reader)
        return self._copied(value, device, reader)

    def _is_wider(self, node: Node) -> bool:
        """Whether a view has more elements than what it shows."""
        (x,), (y,) = node.inputs, node.outputs
        return self._b.type_of(x).num_elements < self._b.type_of(y).num_elements

    def _repeated(self, value: ValueId, maker: Node, device: int, reader: Node) -> ValueId:
        """Return a value that is made once more, on another device."""
        key = (value, device)
        if key not in self._brought:
            inputs = [self._on_device(v, device, reader) for v in maker.inputs]
            with self._b.beside(maker), self._b.on(device):
                (made,) = self._b.emit(maker.op, inputs, maker.attrs)
            self._place[made] = device
            self._brought[key] = made
        return self._brought[key]

    def _copied(self, value: ValueId, to: int, reader: Node) -> ValueId:
        """Return a value where its copy lies, or itself where it is there."""
        if self._place[value] == to:
            return value
        key = (value, to)
        if key not in self._brought:
            with self._b.beside(reader), self._b.on(self._b.producer_of(value).device):
                made = self._b.one(COPY_TO, value, to=to, bucket=self._num_copies)
            self._num_copies += 1
            self._place[made] = to
            self._brought[key] = made
        return self._brought[key]

    def _is_parameter(self, value: ValueId) -> bool:
        """Whether a value is a parameter, or shows one."""
        maker = self._shown(value)
        return maker.op is VARIABLE and maker.attrs.str_("role") == "parameter"

    def _shown(self, value: ValueId) -> Node:
        maker = self._b.producer_of(value)
        while view.has(maker.op):
            maker = self._b.producer_of(maker.inputs[0])
        return maker

    def _refuse(self, value: ValueId, device: int, reader: Node) -> None:
        variable, names = self._shown(value), self._hardware.devices
        home = self._place[variable.outputs[0]]
        raise CompileError(
            f"{reader.source}: {reader.op} on {names[device]} reads parameter"
            f" {variable.attrs['name']!r}, which lies on {names[home]}, where"
            f" {self._first_use(variable)} uses it; a parameter is not copied unasked: read"
            f' parameter.to("{names[device]}") here, which copies it in every step, or run both on'
            " one device"
        )

    def _first_use(self, variable: Node) -> str:
        """Return the line that made a parameter lie where it does."""
        graph = self._graph
        readers = consumers(graph)
        shown = [
            n.outputs[0]
            for n in graph.nodes
            if n.op is VARIABLE and n.attrs["name"] == variable.attrs["name"]
        ]
        for value in shown:  # grows by the views of what is in it
            for index in readers[value]:
                node = graph.nodes[index]
                if view.has(node.op):
                    shown.append(node.outputs[0])
                elif node.device == variable.device and node.phase is not Phase.UPDATE:
                    return str(node.source)
        return str(variable.source)
