"""Which values of the forward pass to keep in place of what is made of them.

    e = exp(-x); y = x / (1 + e)  ->  x, where the backward pass reads e and y

An *origin* is a value of which alone generated code makes, element by element, values that the
backward pass reads and that would be kept. It is worth its bytes where these are several, or where
it is written in any case, as a later launch reads it, or one of other rows and columns.

A product is no origin: it would be a tensor of its own where now it is part of its reader.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.fusion.members import Members
from compiler.fusion.spaces import Space
from compiler.graph import Node
from compiler.ops.matmul import MATMUL
from compiler.types import Phase, ValueId


def find_origins(
    members: Members,
    whole_inputs: Callable[[int], list[ValueId] | None],
    is_saved: Callable[[ValueId], bool],
) -> set[ValueId]:
    """Return the origins worth their bytes. O(edges).

    Args:
        members: the nodes, as members of kernels.
        whole_inputs: the tensors of which generated code makes a node's output by element, but for
            small ones; None where it does not.
        is_saved: whether the backward pass reads a value in kernels alone.
    """
    graph, is_launch = members.graph, members.storage.is_launch
    written = _Written(members)
    origin: dict[ValueId, ValueId] = {}
    nearest: dict[ValueId, ValueId] = {}
    num_saved: dict[ValueId, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.phase is not Phase.FORWARD or not is_launch[index]:
            continue
        written.look_at(index, node)
        if node.op is not MATMUL:
            origin.update([(v, v) for v in node.outputs])
        whole = whole_inputs(index)
        if whole is None:
            continue
        (made,) = node.outputs
        far = {origin.get(v, made) for v in whole}
        near = {nearest.get(v, v) for v in whole}
        if len(far) == 1:
            (origin[made],) = far
        if len(near) == 1 and near != far:  # made of one value that is kept
            (nearest[made],) = near
        elif is_saved(made):
            nearest[made] = made
            num_saved[origin[made]] = num_saved.get(origin[made], 0) + 1
        elif len(near) == 1:
            (nearest[made],) = near
    return {v for v, count in num_saved.items() if count > 1 or v in written.values}


class _Written:
    """The values that are in memory in any case, as nodes are looked at in order.

    A node's level is the number of launches before it that generated code does not compute.
    """

    def __init__(self, members: Members) -> None:
        self.values: set[ValueId] = set()
        self._members = members
        self._levels = [0] * len(members.graph.nodes)
        self._spaces: list[Space | None] = [None] * len(members.graph.nodes)

    def look_at(self, index: int, node: Node) -> None:
        """Note the values that a node reads from memory."""
        members, levels = self._members, self._levels
        roots = [members.storage.root[v] for v in node.inputs]
        before = [members.producers[v] for v in roots]
        space = self._spaces[index] = members.natural_space(index)
        level = max([levels[n] for n in before], default=0)
        levels[index] = level + (space is None)
        for value, producer in zip(roots, before, strict=True):
            if levels[producer] < levels[index]:
                self.values.add(value)
            elif value not in self.values:
                own = self._spaces[producer]
                is_fit = own in (None, space) or members.fit(index, own, {}) is not None
                if not is_fit:
                    self.values.add(value)
        if space is None and node.op is not MATMUL:
            self.values.update(node.outputs)
