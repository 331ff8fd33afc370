"""Which nodes of the backward pass may wait for their reader.

A node that reads nothing made in the backward pass could run at any time after the forward pass: a
clone of `compiler.fusion.recompute_cheap`, or a factor of a gradient that needs no gradient. `fuse`
puts it into the kernel that reads it first.

Where the loss is linear in a long chain of elementwise ops, all of its backward pass is such. So
few wait for one reader; the node that would have to wait for more is placed, and they with it.
"""

from __future__ import annotations

from compiler.fusion.members import Members
from compiler.lowering.storage import launch_of_values
from compiler.types import Phase

MAX_WAITING = 16
"""Nodes that wait for one, those that they wait for included: a norm's factors are six."""


def waiting_nodes(members: Members) -> list[bool]:
    """Mark the nodes of a graph that may wait. O(nodes)."""
    graph = members.graph
    made_by = launch_of_values(graph)
    sizes = [0] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        if node.phase is not Phase.BACKWARD or not members.storage.is_launch[index]:
            continue
        before = {made_by[v] for v in node.inputs if made_by[v] >= 0}
        is_ready = all([graph.nodes[n].phase is Phase.FORWARD or sizes[n] for n in before])
        size = 1 + sum([sizes[n] for n in before])
        if is_ready and size <= MAX_WAITING and members.frame_of(index) is not None:
            sizes[index] = size
    return [size > 0 for size in sizes]
