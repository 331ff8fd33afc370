"""Leave out of scans what nobody reads: ys, carries, and operands that served those only.

A gradient computes what might be asked for, and a user stacks what she may not use. A carry stays
where it is read after the last step, or where another result that stays depends on it. Of equal ys
one is read for all: the gradient of a sum is that of each of its parts.

Guarantees: every y of a scan is read, and every operand but carries by its body.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.body import narrowed, needed_operands
from compiler.graph import Graph, Node
from compiler.ops.scan import SCAN, ScanParts
from compiler.passes import simplify
from compiler.prune import prune
from compiler.types import ValueId


def run(graph: Graph) -> Graph:
    """Return the graph with narrower scans. O(nodes), and those of the bodies per carry."""
    if not any([node.op is SCAN for node in graph.nodes]):
        return graph
    graph = _reading_one(graph)
    needed: set[ValueId] = set(graph.roots())
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not any([v in needed for v in node.outputs]):
            continue
        if node.op is SCAN:
            node = _narrowed(node, needed)
        nodes.append(node)
        needed.update(node.inputs)
    return prune(replace(graph, nodes=tuple(nodes[::-1])))


def _reading_one(graph: Graph) -> Graph:
    """Return the graph with the first of several equal ys read in place of the others."""
    firsts: dict[ValueId, ValueId] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if any([v in firsts for v in node.inputs]):
            node = replace(node, inputs=tuple([firsts.get(v, v) for v in node.inputs]))
        nodes.append(node)
        if node.op is SCAN:
            cut, known = ScanParts.of(node.attrs), dict[ValueId, ValueId]()
            made = simplify.run(cut.body.graph).outputs  # equal expressions are one value there
            for output, value in list(zip(made, node.outputs, strict=True))[cut.carries :]:
                if known.setdefault(output.value, value) != value:
                    firsts[value] = known[output.value]
    return replace(graph, nodes=tuple(nodes))


def _narrowed(node: Node, needed: set[ValueId]) -> Node:
    """Return a scan without the results that are not needed, and what these alone read."""
    cut = ScanParts.of(node.attrs)
    results = [i for i, value in enumerate(node.outputs) if value in needed]
    while True:
        read = needed_operands(cut.body, results)
        more = [i for i in read if i < cut.carries and i not in results]
        if not more:
            break
        results = sorted([*results, *more])
    operands = sorted(read | {i for i in results if i < cut.carries})
    if len(operands) == len(node.inputs) and len(results) == len(node.outputs):
        return node
    attrs = {
        **node.attrs,
        "body": narrowed(cut.body, operands, results),
        "carries": sum([i < cut.carries for i in operands]),
        "xs": sum([cut.carries <= i < cut.first_constant for i in operands]),
    }
    return replace(
        node,
        inputs=tuple([node.inputs[i] for i in operands]),
        outputs=tuple([node.outputs[i] for i in results]),
        attrs=Attrs(attrs),
    )
