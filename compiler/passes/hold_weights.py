"""Let convolutions of jobs that only read their weights keep these as their kernels like them.

    y = conv(x, w)  ->  y = conv(x, w, held=True)

A library brings weights to a layout of its own before it convolves, which for one picture takes a
fifth of the time. Where w is a variable that no step writes, a kernel may do so once: its launch
has scratch of its own for the whole run, which is zeros again when w is given other values (see
`compiler.target.KernelInfo`). So a plan has such weights twice, and says so.

Not for jobs that train, whose evaluations read what their steps write, nor where bytes are counted.

Guarantees: the same values; no other node changes.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.graph import Graph, Node
from compiler.lowering.storage import call_of, dense_layout
from compiler.ops.convolution import CONV
from compiler.ops.sources import OF_MODEL, VARIABLE
from compiler.options import CompileOptions
from compiler.target import Hardware
from compiler.types import ValueId


def run(graph: Graph, hardware: Hardware, options: CompileOptions) -> Graph:
    """Return the graph with weights held where the kernels of a device hold them. O(nodes)."""
    if options.is_training or options.asks_for_less or options.mesh:
        return graph
    changed = {write.variable for write in graph.writes}
    read_only = {
        node.outputs[0]
        for node in graph.nodes
        if node.op is VARIABLE and node.attrs["role"] in OF_MODEL
    } - changed
    nodes = [
        _held(graph, node, hardware) if _reads(node, read_only) else node for node in graph.nodes
    ]
    is_same = all([new is old for new, old in zip(nodes, graph.nodes, strict=True)])
    return graph if is_same else replace(graph, nodes=tuple(nodes))


def _reads(node: Node, read_only: set[ValueId]) -> bool:
    return node.op is CONV and node.inputs[1] in read_only


def _held(graph: Graph, node: Node, hardware: Hardware) -> Node:
    """Return a convolution that holds its weights; itself where its device has no kernel for it."""
    held = replace(node, attrs=Attrs({**node.attrs, "held": True}))
    call = call_of(held, graph.types, lambda value: dense_layout(graph.types[value]))
    try:
        needs = hardware.targets[node.device].query(call)
    except LookupError:  # lowering says so, with the user's line
        return node
    return node if needs.keeps is None else held
