"""Batches come to a device, and outputs leave it, through the host's pinned memory.

A port runs on the host. So where a device reads a batch, the batch lies on the host's side, and a
copy takes it to each device that reads it; and what a device puts out is copied to the host's side,
where the port finds it. These copies run *beside steps*: that of the next batch while a step runs,
that of the last outputs too. So no fence of the step holds them, and what they share with a step
has slots (`Beside.slots`): the credits of the slots are all that orders the two.

Guarantees: what a port fills or reads lies on the host's side wherever a device would have read or
made it; the values of all nodes are what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiler.attrs import Attrs
from compiler.facts import fact
from compiler.graph import Graph, Node, Output, new_value
from compiler.ops.copies import COPY_TO, is_copy, next_bucket, places
from compiler.ops.sources import INPUT
from compiler.placement import HOST_SIDE, Device, DeviceKind
from compiler.rates import outputs_per_step
from compiler.registry import is_source
from compiler.types import TensorType, ValueId


def run(graph: Graph, devices: Sequence[Device]) -> Graph:
    """Return an ordered graph with the copies that its devices need; itself on the host. O(nodes).

    Copies to a device are first among what runs, and one bucket; so are those from it, at the end,
    but for outputs that there is one of per step of several batches.
    """
    is_host = [device.kind is DeviceKind.HOST for device in devices]
    return graph if all(is_host) else _Feeding(graph, is_host).run()


@fact
def runs_beside_steps(graph: Graph) -> tuple[bool, ...]:
    """Mark the nodes that bring a batch to a device, or outputs from one. O(nodes)."""
    place, producers = places(graph), graph.producers()
    out = {output.value for output in graph.outputs}
    marks: list[bool] = []
    for node in graph.nodes:
        is_in = is_copy(node) and graph.nodes[producers[node.inputs[0]]].op is INPUT
        is_out = is_copy(node) and node.outputs[0] in out and place[node.outputs[0]] == HOST_SIDE
        marks.append(is_in or is_out)
    return tuple(marks)


class _Feeding:
    """The graph with its copies, node by node."""

    def __init__(self, graph: Graph, is_host: Sequence[bool]) -> None:
        self._graph = graph
        self._is_host = is_host
        self._types: list[TensorType] = list(graph.types)
        self._nodes: list[Node] = []
        self._first_bucket = next_bucket(graph)
        self._brought: dict[tuple[ValueId, int], ValueId] = {}
        self._stands_for: dict[ValueId, ValueId] = {}
        """By the output of a copy of a batch that was there, the copy that is there now."""

    def run(self) -> Graph:
        graph = self._graph
        fed = self._readers()
        sources = [node for node in graph.nodes if is_source.get(node.op)]
        for node in sources:
            is_fed = node.outputs[0] in fed
            attrs = Attrs({**node.attrs, "place": HOST_SIDE}) if is_fed else node.attrs
            self._nodes.append(replace(node, attrs=attrs))
        for node in sources:
            for device in fed.get(node.outputs[0], ()):
                copy = replace(node, inputs=node.outputs, device=device)
                self._brought[node.outputs[0], device] = self._append(copy, device, device)
        for node in graph.nodes:
            if not is_source.get(node.op):
                self._take(node)
        outputs = self._outputs()
        return replace(graph, nodes=tuple(self._nodes), types=tuple(self._types), outputs=outputs)

    def _readers(self) -> dict[ValueId, tuple[int, ...]]:
        """Return, for each batch that is not the host's alone, the devices that read it.

        One that nobody reads is its own device's.
        """
        graph = self._graph
        batches = {v: n.device for n in graph.nodes if n.op is INPUT for v in n.outputs}
        readers: dict[ValueId, dict[int, None]] = {v: {} for v in batches}
        for node in graph.nodes:
            for value in node.inputs:
                if value in batches:
                    readers[value][_device_of(node)] = None
        return {
            value: tuple(devices)
            for value, devices in readers.items()
            if not all([self._is_host[device] for device in (*devices, batches[value])])
        }

    def _take(self, node: Node) -> None:
        """Append a node that reads what was brought to it; a copy that brought it is done."""
        device = _device_of(node)
        inputs = tuple([self._now(self._brought.get((v, device), v)) for v in node.inputs])
        if is_copy(node) and (node.inputs[0], device) in self._brought:
            self._stands_for[node.outputs[0]] = inputs[0]
            return
        after = tuple([self._now(v) for v in node.after])
        self._nodes.append(replace(node, inputs=inputs, after=after))

    def _outputs(self) -> tuple[Output, ...]:
        """Append the copies of outputs; return these instead of what they copy."""
        graph, place, rare = self._graph, places(self._graph), outputs_per_step(self._graph)
        outputs: list[Output] = []
        for output in graph.outputs:
            device, value = place[output.value], self._now(output.value)
            if self._is_host[device]:
                outputs.append(Output(output.name, value))
                continue
            maker = graph.nodes[graph.producers()[output.value]]
            copy = replace(maker, inputs=(value,), after=(), device=device)
            bucket = len(self._is_host) * (2 if output.value in rare else 1) + device
            outputs.append(Output(output.name, self._append(copy, HOST_SIDE, bucket)))
        return tuple(outputs)

    def _now(self, value: ValueId) -> ValueId:
        return self._stands_for.get(value, value)

    def _append(self, node: Node, to: int, bucket: int) -> ValueId:
        value = new_value(self._types, self._types[node.inputs[0]])
        attrs = Attrs({"to": to, "bucket": self._first_bucket + bucket})
        self._nodes.append(replace(node, op=COPY_TO, outputs=(value,), attrs=attrs))
        return value


def _device_of(node: Node) -> int:
    """Return the device where a node wants what it reads, or takes it to."""
    return node.attrs.int_("to") if is_copy(node) else node.device
