"""Give bytes of their own to outputs, and to old values that outlive their variable's update.

An output can then live in a register that a consumer reads later. One that is a view, an input, a
variable, a constant, or the same value as an earlier output gets a `copy` node; all others are
produced in place in the register.

Every reader of a variable's old value must run before its update. Where that cannot be, the reader
gets a `copy`: of two updates that read each other's variable (the loss `a * b` has the gradients b
and a), the later one does; and an update whose other inputs show the variable that it overwrites
does, for its kernel may read them in another order than it writes.

Guarantees: every output value is the dense root of its storage, produced by a launch, and named
once; an order exists with every reader of a variable before its update.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import NO_ATTRS
from compiler.graph import Graph, GraphBuilder, Node, Output, new_value
from compiler.lowering.storage import OldRead, assign_storage, old_reads
from compiler.ops.shape import COPY
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with a copy node for each output, or old value, that needs one.

    O(nodes), times the updates whose variable is read later on.
    """
    return _with_old_values(_with_owned_outputs(graph))


def _with_owned_outputs(graph: Graph) -> Graph:
    producers, storage = graph.producers(), assign_storage(graph)
    b = GraphBuilder.continuing(graph)
    taken: set[ValueId] = set()
    outputs: list[Output] = []
    for output in graph.outputs:
        value = output.value
        owns = storage.root[value] == value and storage.is_launch[producers[value]]
        if not owns or value in taken:
            node = graph.nodes[producers[value]]
            with b.beside(node):
                value = b.one(COPY, value)
        taken.add(value)
        outputs.append(Output(output.name, value))
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
            if value not in copy_of:
                copy_of[value] = made = new_value(types, graph.types[value])
                nodes.append(
                    replace(
                        node, op=COPY, inputs=(value,), outputs=(made,), attrs=NO_ATTRS, after=()
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
    late = [r for r in reads if r.reader >= r.writer]
    if not late:
        return late
    successors = _successors(graph, reads)
    after = {writer: _reachable(successors, writer) for writer in sorted({r.writer for r in late})}
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


def _reachable(successors: list[list[int]], start: int) -> set[int]:
    """Return the nodes that run after `start`, and itself."""
    reached, waiting = {start}, [start]
    while waiting:
        for after in successors[waiting.pop()]:
            if after not in reached:
                reached.add(after)
                waiting.append(after)
    return reached
