"""Let the update of a parameter write the rounded form that products read, too.

    y = matmul(x, cast(w)); adamw_update(w, dw, m, v, ...)
      ->  y = matmul(x, r);  joined_updates(w, m, v, r, dw, ...)

where r is a variable of its own, with the bits of cast(w): the update has the new numbers at hand,
and a cast would read them all again in the next step. It is made of its parameter wherever that is
given a value (`actors.bound`), so nothing saves it, and nobody sees it.

Only on devices that join updates, and not where a budget is to be met: the rounded form lives as
long as the parameter, where a cast may be made twice instead.

Guarantees: all values have the bits that they had; every r is written with its parameter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from compiler.attrs import Attrs, AttrValue
from compiler.fusion.lone_updates import LoneUpdate, joined, lone_update
from compiler.fusion.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.graph import Graph, Node, Write, consumers, new_value
from compiler.ops.elementwise import CAST
from compiler.ops.sources import ROUNDED, VARIABLE
from compiler.target import Hardware
from compiler.types import DType, TensorType, ValueId


def run(graph: Graph, hardware: Hardware) -> Graph:
    """Return the graph with casts of parameters written by their updates. O(nodes)."""
    if all([target.joined_updates(1) <= 1 for target in hardware.targets]):
        return graph
    nodes, types, writes = list(graph.nodes), list(graph.types), list(graph.writes)
    readers, makers = consumers(graph), graph.producers()
    for index, node in enumerate(graph.nodes):
        alone = lone_update(graph, node)
        if alone is None or not _is_taken(graph, node, alone, hardware):
            continue
        variable = alone.operands[0]
        casts = [i for i in readers[variable] if _is_rounding(graph, graph.nodes[i])]
        maker = graph.nodes[makers[variable]]
        if maker.op is not VARIABLE or [graph.nodes[i].device for i in casts] != [node.device]:
            continue
        (value,) = graph.nodes[casts[0]].outputs
        after = new_value(types, graph.types[value])
        nodes[casts[0]] = _variable(maker, value, graph.types[value])
        update = replace(
            alone,
            program=with_rounded(alone.program),
            over=(*alone.over, len(alone.operands)),
            operands=(*alone.operands, value),
        )
        nodes[index] = joined(graph, node, [update], (*node.outputs, after))
        writes.append(Write(value, after))
    return replace(graph, nodes=tuple(nodes), types=tuple(types), writes=tuple(writes))


def _is_taken(graph: Graph, node: Node, alone: LoneUpdate, hardware: Hardware) -> bool:
    """Whether an update writes over a float32 variable first, on a device that joins it."""
    is_single = graph.types[alone.operands[0]].dtype is DType.FLOAT32
    most = hardware.targets[node.device].joined_updates(len(alone.full) + 1)
    return alone.over[0] == 0 and is_single and most > 1


def _is_rounding(graph: Graph, node: Node) -> bool:
    """Whether a node is a cast to bfloat16 that nobody but other nodes reads."""
    (value,) = node.outputs[:1]
    is_cast = node.op is CAST and graph.types[value].dtype is DType.BFLOAT16
    return is_cast and value not in graph.roots()


def _variable(maker: Node, value: ValueId, type_: TensorType) -> Node:
    """Return the rounded form of a variable, as a variable."""
    name = maker.attrs.str_("name")
    attrs: dict[str, AttrValue] = {
        "name": f"{type_.dtype.value}/{name}",
        "dtype": type_.dtype.value,
        "shape": type_.shape,
        "role": ROUNDED,
        "init": (("kind", ROUNDED), ("of", name)),
    }
    return replace(maker, outputs=(value,), attrs=Attrs(attrs))


@lru_cache(maxsize=256)  # layers repeat, and share it
def with_rounded(program: FusedProgram) -> FusedProgram:
    """Return a program with one operand and one output more: output 0 in bfloat16, to lie there."""
    count = len(program.inputs)

    def moved(value: int) -> int:
        return value + (value >= count)

    low = DType.BFLOAT16
    steps = [replace(i, operands=tuple(map(moved, i.operands))) for i in program.instructions]
    cast = Instruction("cast", (moved(program.outputs[0]),), low, Kind.FULL)
    outputs = (*map(moved, program.outputs), count + 1 + len(steps))
    return FusedProgram(
        (*program.inputs, ProgramInput(low, Kind.FULL)), (*steps, cast), tuple(outputs)
    )
