"""Batches of a step: their way to a device, what they hand on, their outputs, the two rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiler.contract.attrs import NO_ATTRS, Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST_SIDE, Device, DeviceKind
from compiler.contract.types import TensorType, ValueId
from compiler.graph.graph import Graph, GraphBuilder, Node, Output, Write, new_value, reachable
from compiler.graph.registry import is_source
from compiler.ops.families.updates import ASSIGN, HANDED_ON, HOLD
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import INPUT, SCRATCH, VARIABLE
from compiler.ops.primitives.transfer import COPY_TO, is_copy, next_bucket, value_devices
from compiler.sbp.collective_schedule import split_by_rate
from compiler.storage.order import needed_per_batch, needed_per_step, outputs_per_step
from compiler.storage.storage import OldRead, assign_storage, old_reads

# Batches come to a device, and outputs leave it, through the host's pinned memory.
#
# A port runs on the host. So where a device reads a batch, the batch lies on the host's side, and a
# copy takes it to each device that reads it; and what a device puts out is copied to the host's
# side, where the port finds it. These copies run *beside steps*: that of the next batch while a
# step runs, that of the last outputs too. So no fence of the step holds them, and what they share
# with a step has slots: the credits of the slots are all that orders the two.
#
# Guarantees: what a port fills or reads lies on the host's side wherever a device would have read
# or made it; the values of all nodes are what they were.


def feed_devices(graph: Graph, devices: Sequence[Device]) -> Graph:
    """Return an ordered graph with the copies that its devices need; itself on the host. O(nodes).

    Copies to a device are first among what runs, and one bucket; so are those from it, at the end,
    but for outputs that there is one of per step of several batches.
    """
    is_host = [device.kind is DeviceKind.HOST for device in devices]
    return graph if all(is_host) else _Feeding(graph, is_host).run()


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
        """Append a node that reads the copies on its device; a copy made already is left out."""
        device = _device_of(node)
        inputs = tuple([self._now(self._brought.get((v, device), v)) for v in node.inputs])
        # The user's own copy of a batch that is brought there anyway stands for that one.
        if is_copy(node) and (node.inputs[0], device) in self._brought:
            self._stands_for[node.outputs[0]] = inputs[0]
            return
        after = tuple([self._now(v) for v in node.after])
        self._nodes.append(replace(node, inputs=inputs, after=after))

    def _outputs(self) -> tuple[Output, ...]:
        """Append the copies of outputs; return these instead of what they copy."""
        graph, place, rare = self._graph, value_devices(self._graph), outputs_per_step(self._graph)
        outputs: list[Output] = []
        for output in graph.outputs:
            device, value = place[output.value], self._now(output.value)
            if self._is_host[device]:
                outputs.append(replace(output, value=value))
                continue
            maker = graph.nodes[graph.producers()[output.value]]
            copy = replace(maker, inputs=(value,), after=(), device=device)
            # Copies at one rate and device go together; rates never share a bucket.
            bucket = len(self._is_host) * (2 if output.value in rare else 1) + device
            outputs.append(replace(output, value=self._append(copy, HOST_SIDE, bucket)))
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


# Let each batch of a step see what the one before assigned, and the step keep the last one's.
#
#     assign(buffer, f(buffer))  ->  held' = hold(held, f(handed_on(batch, buffer, held)))
#                                    assign(buffer, held')
#
# Batches of a step hand on a buffer in the scratch variable `batch/<name>`; the buffer itself is
# written once per step, as parameters are. So whoever reads between steps finds what whole steps
# made, a step that is skipped keeps nothing of any of its batches, and what a step that was cut
# left behind is never read.
#
# It runs before `autodiff`, which counts batches.
#
# Guarantees: where a step has several batches, what is assigned is held once per batch.


def chain_buffers(graph: Graph) -> Graph:
    """Return the graph with buffers that batches hand on. O(nodes)."""
    assigned = [node for node in graph.nodes if node.op is ASSIGN]
    if graph.accumulation is None or not assigned:
        return graph
    b = GraphBuilder.continuing(graph)
    every, batch = graph.accumulation.every, graph.accumulation.batch
    current: dict[ValueId, ValueId] = {}
    scratch: dict[ValueId, ValueId] = {}
    for node in assigned:
        buffer = node.inputs[0]
        maker = b.producer_of(buffer)
        with b.like_node(maker):
            name = f"batch/{maker.attrs.str_('name')}"
            attrs = {**maker.attrs, "name": name, "role": SCRATCH}
            (scratch[buffer],) = b.emit(VARIABLE, (), attrs)
            current[buffer] = b.emit_one(HANDED_ON, batch, buffer, scratch[buffer], every=every)
    early = [n for n in b.nodes if n.op is VARIABLE] + [n for n in b.nodes if n.op is HANDED_ON]
    b.nodes = early  # variables need nothing, so that whoever reads one may come next
    for node in graph.nodes:
        if node.op is ASSIGN:
            buffer, value = node.inputs
            with b.like_node(node):
                value = b.emit_one(HOLD, scratch[buffer], current.get(value, value))
            b.writes.append(Write(scratch[buffer], value))
            b.nodes.append(replace(node, inputs=(buffer, value)))
        elif node.op is not VARIABLE:
            inputs = tuple([current.get(v, v) for v in node.inputs])
            b.nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    b.outputs = [replace(o, value=current.get(o.value, o.value)) for o in b.outputs]
    return b.freeze()


# Give bytes of their own to outputs, and to old values that outlive their variable's update.
#
# An output can then live in a register that a consumer reads later. One that is a view, an input, a
# variable, a constant, or the same value as an earlier output gets a `copy` node; all others are
# produced in place in the register.
#
# Every reader of a variable's old value must run before its update. Where that cannot be, the
# reader gets a `copy`: of two updates that read each other's variable (the loss `a * b` has the
# gradients b and a), the later one does; and an update whose other inputs show the variable that it
# overwrites does, for its kernel may read them in another order than it writes.
#
# Guarantees: every output value is the dense root of its storage, produced by a launch, and named
# once; an order exists with every reader of a variable before its update.


def copy_outputs(graph: Graph) -> Graph:
    """Return the graph with a copy node for each output, or old value, that needs one.

    O(nodes), times the updates whose variable is read later on.
    """
    return _with_old_values(_with_owned_outputs(graph))


def _with_owned_outputs(graph: Graph) -> Graph:
    producers, storage = graph.producers(), assign_storage(graph)
    b = GraphBuilder.continuing(graph)
    output_values: set[ValueId] = set()
    outputs: list[Output] = []
    for output in graph.outputs:
        value = output.value
        owns = storage.root[value] == value and storage.is_launch[producers[value]]
        # A second output of one value needs bytes of its own, as each has its own field.
        if not owns or value in output_values:
            node = graph.nodes[producers[value]]
            with b.like_node(node):
                value = b.emit_one(COPY, value)
        output_values.add(value)
        outputs.append(replace(output, value=value))
    if outputs == list(graph.outputs):
        return graph
    b.outputs = outputs
    return b.freeze()


def _with_old_values(graph: Graph) -> Graph:
    late = {(r.reader, r.position) for r in _late_reads(graph)}
    if not late:
        return graph
    nodes: list[Node] = []
    types = list(graph.types)
    copy_of: dict[ValueId, ValueId] = {}
    for index, node in enumerate(graph.nodes):
        inputs = list(node.inputs)
        for position, value in enumerate(node.inputs):
            if (index, position) not in late:
                continue
            # One copy serves all late readers of a value.
            if value not in copy_of:
                copy_of[value] = copied = new_value(types, graph.types[value])
                nodes.append(
                    replace(
                        node, op=COPY, inputs=(value,), outputs=(copied,), attrs=NO_ATTRS, after=()
                    )
                )
            inputs[position] = copy_of[value]
        nodes.append(replace(node, inputs=tuple(inputs)))
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _late_reads(graph: Graph) -> list[OldRead]:
    """Return the reads that need a copy.

    A circle of nodes that wait for each other has an edge against the order in which they stand,
    and only the edge from a reader to an earlier writer goes that way: without those, none is left.
    """
    is_launch = assign_storage(graph).is_launch
    reads = [r for r in old_reads(graph) if is_launch[r.reader]]
    # Only a reader behind the writer in the given order can be part of a circle.
    late = [r for r in reads if r.reader >= r.writer]
    if not late:
        return late
    successors = _successors(graph, reads)
    after = {writer: reachable(successors, [writer]) for writer in sorted({r.writer for r in late})}
    return [r for r in late if r.reader in after[r.writer]]


def _successors(graph: Graph, reads: list[OldRead]) -> list[list[int]]:
    """Return, per node, those that must run after it: its consumers, and overtaking updates."""
    producers = graph.producers()
    successors: list[list[int]] = [[] for _ in graph.nodes]
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            successors[producers[value]].append(index)
    for read in reads:
        if read.reader != read.writer:
            successors[read.reader].append(read.writer)
    return successors


# Let nothing be shared between what runs once per batch and what runs once per step.
#
# What both need (a learning rate that is also a metric) is computed in each: values would otherwise
# have to cross between two rates, and all that both can need follows from variables alone.
#
# Guarantees: where a step sums gradients over batches, only sources and the sums are read at both
# rates.


def split_rates(graph: Graph) -> Graph:
    """Return the graph with a second node for each one that both rates need. O(nodes)."""
    per_step = needed_per_step(graph)
    if not any(per_step):
        return graph
    per_batch = needed_per_batch(graph)
    types = list(graph.types)
    nodes: list[Node] = []
    twin_of: dict[ValueId, ValueId] = {}
    for index, node in enumerate(graph.nodes):
        if not per_step[index] or is_source.get(node.op):
            # A source is shared by both rates: it has no launch.
            _check_rate(node, is_per_step=per_step[index])
            nodes.append(node)
            continue
        inputs = tuple([twin_of.get(v, v) for v in node.inputs])
        if not per_batch[index]:
            nodes.append(replace(node, inputs=inputs))
            continue
        outputs = tuple([new_value(types, graph.types[v]) for v in node.outputs])
        twin_of.update(zip(node.outputs, outputs, strict=True))
        node, twin = split_by_rate(node)
        nodes += [node, replace(twin, inputs=inputs, outputs=outputs)]
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _check_rate(node: Node, *, is_per_step: bool) -> None:
    if is_per_step and node.op is INPUT:
        raise CompileError(
            f"{node.source}: the optimizer reads batch[{node.attrs['name']!r}]; it runs once per"
            " step, after several batches, so it can read parameters, gradients and counters only"
        )
