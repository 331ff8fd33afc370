"""Let the fused kernel that alone reads a matrix product work on it while it is made.

    y = a @ b; h = fused(y, bias)  ->  h = region(a, b, bias)

wherever the product has the rows and columns of the kernel's space. No cycle can arise: nothing but
the kernel reads the product, so no path leads from one to the other around it. Of several products
that a kernel reads, the one made last goes along.

A job's own outputs, products read elsewhere too and products of batches stay as they are.

Guarantees: the same values; of a product and its kernel one node is left, where the kernel was.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.fusion.program import Kind
from compiler.fusion.region_steps import Wide, make_region, names_of
from compiler.fusion.spaces import Space
from compiler.graph import Graph, GraphBuilder, Node, sole_readers
from compiler.ops.fused import FUSED, program_of, space_of
from compiler.ops.matmul import MATMUL
from compiler.ops.region import REGION, region_attrs
from compiler.prune import prune
from compiler.rates import needed_per_step
from compiler.types import ValueId


def fuse_products(graph: Graph) -> Graph:
    """Return the graph with products inside the kernels that read them. O(nodes)."""
    if not any([node.op is FUSED for node in graph.nodes]):
        return graph
    producers, per_step, alone = graph.producers(), needed_per_step(graph), sole_readers(graph)
    b, nodes = GraphBuilder.continuing(graph), list[Node]()
    known: dict[object, _Made] = {}
    for index, node in enumerate(graph.nodes):
        if node.op is FUSED:
            inputs = [
                (producers[value], position)
                for position, value in enumerate(node.inputs)
                if alone[value] == index
                and node.inputs.count(value) == 1
                and per_step[producers[value]] == per_step[index]
            ]
            for producer, position in sorted(inputs, reverse=True):
                if _fits(graph, graph.nodes[producer], node, position):
                    node = _with_product(b, graph.nodes[producer], node, known)
                    break
        nodes.append(node)
    fused = replace(graph, nodes=tuple(nodes))
    is_same = all([before is after for before, after in zip(graph.nodes, nodes, strict=True)])
    return graph if is_same else prune(fused)


def _fits(graph: Graph, product: Node, kernel: Node, position: int) -> bool:
    """Whether a kernel may work on a product that is its input at a position."""
    if product.op is not MATMUL or product.phase is not kernel.phase:
        return False
    if product.device != kernel.device:
        return False
    shape = graph.types[product.outputs[0]].shape
    if len(shape) != 2 or 0 in shape:
        return False
    program = program_of(kernel.attrs)
    operand = program.inputs[position]
    if operand.kind is not Kind.FULL or operand.count:
        return False
    return Space(*shape) == space_of(kernel.attrs)


_Made = tuple[Attrs, tuple[int, ...]]
"""The attributes of a region, and which of its nodes' inputs are its operands."""


def _with_product(b: GraphBuilder, product: Node, kernel: Node, known: dict[object, _Made]) -> Node:
    """Return the region of a product and a kernel; layers that are alike share its attributes."""
    (made,), nodes = product.outputs, (product, kernel)
    read, number = (*product.inputs, *kernel.inputs), dict[ValueId, int]()
    places = tuple([number.setdefault(v, len(number)) for v in (made, *read, *kernel.outputs)])
    types = tuple([(b.type_of(v).dtype, b.type_of(v).shape) for v in number])
    key = (product.attrs, kernel.attrs, places, types)
    if key not in known:
        space = space_of(kernel.attrs)
        wide = Wide(space.rows, space.columns, {made: made}, frozenset())
        region, inputs = make_region(b, nodes, wide, kernel.outputs, chunk_rows=0)
        operands = tuple([read.index(v) for v in inputs])
        known[key] = region_attrs(region, names_of(nodes)), operands
    attrs, operands = known[key]
    return replace(kernel, op=REGION, inputs=tuple([read[i] for i in operands]), attrs=attrs)
