"""Values that the kernel of a product keeps for the backward pass, and goes on from.

    h = x @ w + bias; g = gelu(h); y = g @ v        h is kept, for the gradient of gelu

A forward cluster ends at what is kept, so that what follows may run again from it alone. Where the
kernel of a product puts out both h and g, on the targets that say so (`product_finishes`), one
launch that makes both is worth more: then it runs again whole or not at all. Either way a launch
has the bits that it had, whatever runs again.

It is so of a sum with a product in it that the forward pass reads by such an op alone, whose result
it reads by products alone.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.fusion.members import Members
from compiler.graph import Node, consumers
from compiler.ops.binary import ADD
from compiler.ops.matmul import MATMUL
from compiler.types import Phase, ValueId

FinishesOf = Callable[[int], tuple[str, ...]]
"""From a device's number to the ops that its products go on with."""


def no_finishes(device: int) -> tuple[str, ...]:
    """Return that a device's products end at what is kept."""
    return ()


def finished_values(members: Members, finishes: FinishesOf) -> frozenset[ValueId]:
    """Return the values that a product's kernel keeps as it goes on from them. O(nodes)."""
    nodes = members.graph.nodes
    known = {device: finishes(device) for device in {node.device for node in nodes}}
    if not any(known.values()):
        return frozenset()
    found: list[ValueId] = []
    for node in nodes:
        if node.phase is not Phase.FORWARD or node.op.name not in known[node.device]:
            continue
        value = members.storage.root[node.inputs[0]]
        own, after = _readers(members, value), _readers(members, node.outputs[0])
        if own == [node] and _has_product(members, value, node) and _are_products(after, node):
            found.append(value)
    return frozenset(found)


def _readers(members: Members, value: ValueId) -> list[Node]:
    """Return the forward launches that read a value, in person or as a view."""
    graph, is_launch = members.graph, members.storage.is_launch
    found: list[Node] = []
    todo = [value]
    while todo:
        for index in consumers(graph)[todo.pop()]:
            node = graph.nodes[index]
            if not is_launch[index]:
                todo += node.outputs
            elif node.phase is Phase.FORWARD:
                found.append(node)
    return found


def _are_products(readers: list[Node], node: Node) -> bool:
    return bool(readers) and all([r.op is MATMUL and r.device == node.device for r in readers])


def _has_product(members: Members, value: ValueId, reader: Node) -> bool:
    """Whether a value is a sum, of any number of terms, one of which is a product."""
    nodes, producers = members.graph.nodes, members.producers
    todo = [value]
    is_sum = False
    while todo:
        node = nodes[producers[members.storage.root[todo.pop()]]]
        if node.phase is not Phase.FORWARD or node.device != reader.device:
            continue
        if node.op is MATMUL and is_sum:
            return True
        if node.op is ADD:
            is_sum = True
            todo += node.inputs
    return False
