"""Which values share bytes: views on another value, and updates written over a variable.

A value's *root* is the value that owns the bytes; its *layout* says where in them it lies. View ops
cost no launch. Update ops (column `input_output_aliases`) have their variable as root, so every
other reader of its old value must run before them: `old_reads` lists those readers,
`write_after_read` the pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.contract.errors import InternalError
from compiler.contract.types import TensorType, ValueId, contiguous_strides
from compiler.graph.graph import Graph, Node, cached_analysis
from compiler.graph.registry import Layout, Op, ViewOf, input_output_aliases, is_source, view
from compiler.graph.target import CallOperand, KernelCall


@dataclass(frozen=True, slots=True)
class Storage:
    """Per value its root and layout; per node whether it is a launch.

    A launch is a node that is neither a source nor a view.
    """

    root: tuple[ValueId, ...]
    layout: tuple[Layout, ...]
    is_launch: tuple[bool, ...]

    @property
    def launches(self) -> list[int]:
        """The nodes that are launches, in order."""
        return [index for index, is_launch in enumerate(self.is_launch) if is_launch]


@dataclass(frozen=True, slots=True)
class OldRead:
    """Node `reader` reads, as input `position`, bytes that node `writer` overwrites.

    The two are the same node where an update reads its variable through another input as well.
    """

    reader: int
    position: int
    writer: int


def call_of(
    node: Node, types: Sequence[TensorType], layout_of: Callable[[ValueId], Layout]
) -> KernelCall:
    """Return what a target is asked of a node whose operands lie so."""
    inputs, outputs = [
        tuple([CallOperand(types[v], layout_of(v)) for v in values])
        for values in (node.inputs, node.outputs)
    ]
    return KernelCall(node.op.name, node.attrs, inputs, outputs)


def dense_layout(type_: TensorType) -> Layout:
    """Return the row-major layout of a value that owns its bytes."""
    return _dense_layout(type_.shape, type_.dtype.itemsize)


@functools.lru_cache(1 << 12)
def _dense_layout(shape: tuple[int, ...], itemsize: int) -> Layout:
    return Layout(0, contiguous_strides(shape, itemsize))


def is_dense(type_: TensorType, layout: Layout) -> bool:
    """Whether a value covers a whole row-major block from offset 0."""
    return layout.offset_bytes == 0 and all(
        extent <= 1 or stride == dense
        for extent, stride, dense in zip(
            type_.shape,
            layout.strides_bytes,
            contiguous_strides(type_.shape, type_.dtype.itemsize),
            strict=True,
        )
    )


@cached_analysis
def assign_storage(graph: Graph) -> Storage:
    """Resolve views and updates of a graph. O(nodes)."""
    types = graph.types
    root: list[ValueId] = [ValueId(-1)] * len(types)
    layout: list[Layout] = [Layout(0, ())] * len(types)
    is_launch: list[bool] = []
    columns: dict[Op, tuple[ViewOf | None, bool, tuple[tuple[int, int], ...]]] = {}
    for node in graph.nodes:
        op = node.op
        # Columns are asked once per op, not once per node.
        if op not in columns:
            columns[op] = (
                view.get(op) if view.has(op) else None,
                is_source.get(op),
                input_output_aliases.get(op),
            )
        place, is_made, written = columns[op]
        if place is not None:
            source, target = node.inputs[0], node.outputs[0]
            new_layout = place(types[source], layout[source], types[target], node.attrs)
            # None: no strides show it, so the node is a launch that copies.
            if new_layout is not None:
                root[target], layout[target] = root[source], new_layout
                is_launch.append(False)
                continue
        is_launch.append(not is_made)
        for value in node.outputs:
            layout[value] = dense_layout(types[value])
            root[value] = value
        for output, over in written:
            if output < len(node.outputs) and over < len(node.inputs):
                # An update's output has the bytes of the variable that it writes over.
                root[node.outputs[output]] = root[node.inputs[over]]
    return Storage(tuple(root), tuple(layout), tuple(is_launch))


@cached_analysis
def launch_of_values(graph: Graph) -> tuple[int, ...]:
    """Return, per value, the node index of the launch that made its bytes; -1 for sources."""
    storage = assign_storage(graph)
    made_by = [-1] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        if storage.is_launch[index]:
            maker = index
        else:
            maker = made_by[node.inputs[0]] if node.inputs else -1
        for value in node.outputs:
            made_by[value] = maker
    return tuple(made_by)


def write_after_read(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs (reader, writer) of node indices: the reader must run before the writer.

    Raises InternalError when two nodes write one variable.
    """
    return [(r.reader, r.writer) for r in old_reads(graph) if r.reader != r.writer]


@cached_analysis
def old_reads(graph: Graph) -> tuple[OldRead, ...]:
    """Return every read of a variable's old value, but for the inputs that updates write over.

    Raises InternalError when two nodes write one variable. O(nodes).
    """
    # Asked once per op, not once per node: few ops write over anything.
    writing = {op for op in {node.op for node in graph.nodes} if input_output_aliases.get(op)}
    if not writing:
        return ()
    storage = assign_storage(graph)
    root, writer_of, after = storage.root, dict[ValueId, int](), set[ValueId]()
    for index, node in enumerate(graph.nodes):
        for output, _ in node.writes if node.op in writing else ():
            variable = root[node.outputs[output]]
            # One writer at most: else the last value would depend on the order of two.
            if variable in writer_of:
                raise InternalError(f"{node.op} at {node.source} writes a variable written before")
            writer_of[variable] = index
            after.add(node.outputs[output])
        # A view on what an update made shows the new value, too.
        if after and not storage.is_launch[index] and node.inputs and node.inputs[0] in after:
            after.update(node.outputs)
    if not writer_of:
        return ()
    is_old = [base in writer_of and v not in after for v, base in enumerate(root)]
    reads: list[OldRead] = []
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.inputs):
            if is_old[value] and position not in [over for _, over in node.writes]:
                reads.append(OldRead(index, position, writer_of[root[value]]))
    return tuple(reads)
