"""Collectives of parts along the first axis, where a device moves contiguous memory only.

    all_gather(x, axis)      ->  moved back(all_gather(moved to the front(x), 0))
    reduce_scatter(x, axis)  ->  moved back(reduce_scatter(moved to the front(x), 0))
    all_to_all(x, a to b)    ->  moved back(all_to_all(blocks(x), 1 to 0))

`blocks` has one entry of its first axis for each rank: the rows of b that this one gets, where all
ranks have as many, a row of zeros made up where one has less. What NCCL does on host and device is
described in its user guide ("Collective Operations", "Point-to-point communication").

Guarantees: the same values, to the bit; no other node changes. Sums of a type that the device does
not add up between ranks are an error here.
"""

from __future__ import annotations

import math
from dataclasses import replace

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.sbp import shard_range
from compiler.contract.types import ValueId
from compiler.graph.graph import Graph, Node, new_value
from compiler.graph.registry import Op, infer_type
from compiler.graph.target import Hardware
from compiler.ops.primitives.shape import RESHAPE, TRANSPOSE
from compiler.ops.primitives.slicing import CONCAT, PAD, SLICE
from compiler.ops.primitives.transfer import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    is_collective,
)


def move_parts_first(graph: Graph, hardware: Hardware) -> Graph:
    """Return the graph with parts along first axes. O(nodes x ranks of a group)."""
    rewriting = _Rewriting(graph)
    for node in graph.nodes:
        target = hardware.targets[node.device]
        if not is_collective(node.op) or target.reduced_dtypes is None:
            rewriting.nodes.append(node)
            continue
        type_ = graph.types[node.inputs[0]]
        is_reduced = node.op in (ALL_REDUCE, REDUCE_SCATTER)
        if is_reduced and type_.dtype not in target.reduced_dtypes:
            names = ", ".join([dtype.value for dtype in target.reduced_dtypes])
            raise CompileError(
                f"{node.source}: {node.op} of {type_}: GPUs of several ranks reduce only"
                f" {names}; cast the tensor to one of these with .to(...)"
            )
        rewriting.take(node)
    return replace(graph, nodes=tuple(rewriting.nodes), types=tuple(rewriting.types))


class _Rewriting:
    """The graph so far."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        self.types = list(graph.types)

    def take(self, node: Node) -> None:
        """Add a collective, on parts along the first axis."""
        if node.op is ALL_TO_ALL:
            self._exchange(node)
            return
        axis = node.attrs.int_("axis") if node.op in (ALL_GATHER, REDUCE_SCATTER) else 0
        shape = self.types[node.inputs[0]].shape
        if math.prod(shape[:axis]) == 1:
            self.nodes.append(node)
            return
        others = [i for i in range(len(shape)) if i != axis]
        x = self._emit(node, TRANSPOSE, node.inputs[0], perm=(axis, *others))
        y = self._emit(node, node.op, x, **{**dict(node.attrs), "axis": 0})
        self._leave(node, TRANSPOSE, y, perm=_inverse((axis, *others)))

    def _exchange(self, node: Node) -> None:
        attrs, x = node.attrs, node.inputs[0]
        axis, to_axis, ranks = attrs.int_("axis"), attrs.int_("to_axis"), attrs.int_("num_ranks")
        shape, own_rows = self.types[x].shape, attrs.int_("to_rows")
        rest = [i for i in range(len(shape)) if i not in (axis, to_axis)]
        extents = tuple([shape[i] for i in rest])
        x = self._emit(node, TRANSPOSE, x, perm=(to_axis, axis, *rest))
        rows = -(-shape[to_axis] // ranks)
        if shape[to_axis] % ranks:
            x = self._padded(node, x, rows, ranks)
        # [to_axis, axis, ...] as [rank, rows, axis, ...], then rank and axis are the first two.
        x = self._emit(node, RESHAPE, x, shape=(ranks, rows, shape[axis], *extents))
        swapped = (0, 2, 1, *range(3, len(shape) + 1))
        x = self._emit(node, TRANSPOSE, x, perm=swapped)
        parts = {"axis": 1, "rows": attrs.int_("rows"), "to_axis": 0, "to_rows": 1}
        y = self._emit(node, ALL_TO_ALL, x, **{**dict(attrs), **parts})
        y = self._emit(node, RESHAPE, y, shape=(attrs.int_("rows"), rows, *extents))
        if rows != own_rows:
            y = self._rows_of(node, y, 1, range(own_rows))
        self._leave(node, TRANSPOSE, y, perm=_inverse((axis, to_axis, *rest)))

    def _padded(self, node: Node, x: ValueId, rows: int, ranks: int) -> ValueId:
        """Return x with as many rows for each rank: the last ones have zeros behind theirs."""
        shape, parts = self.types[x].shape, []
        for rank in range(ranks):
            own = shard_range(shape[0], ranks, rank)
            part = self._rows_of(node, x, 0, own)
            if len(own) < rows:
                none, one = (0,) * len(shape), (1,) * len(shape)
                part = self._emit(node, PAD, part, low=none, high=(1, *none[1:]), steps=one)
            parts.append(part)
        return self._emit(node, CONCAT, *parts, axis=0)

    def _rows_of(self, node: Node, x: ValueId, axis: int, rows: range) -> ValueId:
        stops = list(self.types[x].shape)
        starts = [0] * len(stops)
        starts[axis], stops[axis] = rows.start, rows.stop
        steps = (1,) * len(stops)
        return self._emit(node, SLICE, x, starts=tuple(starts), stops=tuple(stops), steps=steps)

    def _emit(self, node: Node, op: Op, *inputs: ValueId, **attrs: AttrValue) -> ValueId:
        """Add a node beside another one and return what it makes."""
        types = tuple([self.types[v] for v in inputs])
        value = new_value(self.types, infer_type.get(op)(types, Attrs(attrs))[0])
        added = replace(node, op=op, inputs=inputs, outputs=(value,), attrs=Attrs(attrs))
        self.nodes.append(added)
        return value

    def _leave(self, node: Node, op: Op, *inputs: ValueId, **attrs: AttrValue) -> None:
        """Add the node that makes the output of the collective."""
        self.nodes.append(replace(node, op=op, inputs=inputs, attrs=Attrs(attrs)))


def _inverse(perm: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([perm.index(axis) for axis in range(len(perm))])
