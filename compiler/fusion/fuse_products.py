"""Let the fused kernel that alone reads a matrix product work on it while it is made.

    y = a @ b; h = fused(y, bias)  ->  h = fused_product(a, b, bias)

wherever the product has the rows and columns of the kernel's space. No cycle can arise: nothing but
the kernel reads the product, so no path leads from one to the other around it. Of several products
that a kernel reads, the one made last goes along.

A job's own outputs, products read elsewhere too and products of batches stay as they are.

Guarantees: the same values; of a product and its kernel one node is left, where the kernel was.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.attrs import Attrs
from compiler.fusion.program import FusedProgram, Instruction, Kind
from compiler.fusion.spaces import Space
from compiler.graph import Graph, Node, sole_readers
from compiler.ops.fused import FUSED, program_of, space_of
from compiler.ops.fused_product import FUSED_PRODUCT
from compiler.ops.matmul import MATMUL
from compiler.prune import prune
from compiler.rates import needed_per_step


def fuse_products(graph: Graph) -> Graph:
    """Return the graph with products inside the kernels that read them. O(nodes)."""
    if not any([node.op is FUSED for node in graph.nodes]):
        return graph
    producers, per_step, alone = graph.producers(), needed_per_step(graph), sole_readers(graph)
    nodes: list[Node] = []
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
                    node = _with_product(graph.nodes[producer], node, position, graph)
                    break
        nodes.append(node)
    fused = replace(graph, nodes=tuple(nodes))
    return prune(fused) if len([n for n in nodes if n.op is FUSED_PRODUCT]) else graph


def _fits(graph: Graph, product: Node, kernel: Node, position: int) -> bool:
    """Whether a kernel may work on a product that is its input at a position."""
    if product.op is not MATMUL or product.phase is not kernel.phase:
        return False
    shape = graph.types[product.outputs[0]].shape
    if len(shape) != 2 or 0 in shape:
        return False
    program = program_of(kernel.attrs)
    operand = program.inputs[position]
    if operand.kind is not Kind.FULL or operand.count:
        return False
    return Space(*shape) == space_of(kernel.attrs)


def _with_product(product: Node, kernel: Node, position: int, graph: Graph) -> Node:
    rows, columns = graph.types[product.outputs[0]].shape
    program = _with_first(program_of(kernel.attrs), position)
    attrs = {
        **product.attrs,
        **kernel.attrs,
        "program": program,
        "rows": rows,
        "columns": columns,
        "members": (product.op.name, *kernel.attrs.texts("members")),
    }
    others = (*kernel.inputs[:position], *kernel.inputs[position + 1 :])
    return replace(
        kernel,
        op=FUSED_PRODUCT,
        inputs=(*product.inputs, *others),
        attrs=Attrs(attrs),
    )


def _with_first(program: FusedProgram, position: int) -> FusedProgram:
    """Return a program whose input at a position is the first one."""
    num = len(program.inputs)
    order = [position, *[i for i in range(num) if i != position]]
    number = {old: new for new, old in enumerate(order)}

    def moved(value: int) -> int:
        return number.get(value, value)

    instructions = [
        Instruction(i.op, tuple([moved(v) for v in i.operands]), i.dtype, i.kind, i.constants)
        for i in program.instructions
    ]
    inputs = tuple([program.inputs[i] for i in order])
    return FusedProgram(inputs, tuple(instructions), program.outputs)
