"""Bodies: graphs inside a node, such as what a scan does at each step; and the hash of a graph.

The operands of a body are its nodes `input`, in the order in which they stand; its results are the
graph's outputs. A body is part of the attributes of its node, and so of every hash of the graph;
lines of the user's program count where those of the nodes outside do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from compiler.contract.attrs import Attrs
from compiler.contract.codec import PlanAttribute, to_msgpack
from compiler.contract.errors import InternalError
from compiler.contract.types import TensorType, ValueId
from compiler.graph.graph import UNSTAGED, Graph, GraphBuilder, Node, Output
from compiler.graph.registry import Types, reference
from compiler.ops.primitives.sources import INPUT


@dataclass(frozen=True, slots=True, eq=False)
class Body(PlanAttribute):
    """A graph as an attribute. Equal where the same is computed, on whatever lines."""

    graph: Graph

    @property
    def operands(self) -> tuple[ValueId, ...]:
        """The values that come from outside, in order."""
        return tuple([node.outputs[0] for node in self.graph.nodes if node.op is INPUT])

    @property
    def results(self) -> tuple[ValueId, ...]:
        """What it computes, in order."""
        return tuple([output.value for output in self.graph.outputs])

    @property
    def operand_types(self) -> Types:
        """Types of what comes from outside."""
        return tuple([self.graph.types[v] for v in self.operands])

    @property
    def result_types(self) -> Types:
        """Types of what it computes."""
        return tuple([self.graph.types[v] for v in self.results])

    @property
    def packed(self) -> bytes:
        """What it is compared by."""
        return to_msgpack(self._row)

    @property
    def _row(self) -> dict[str, object]:  # type: ignore[override]  # no plan file holds a body

        return {"body": hash_graph(self.graph)}

    def __call__(self, *arrays: object) -> tuple[object, ...]:
        """Compute by the references of its ops. Raises LookupError where one has none."""
        values: dict[ValueId, object] = dict(zip(self.operands, arrays, strict=True))
        for node in self.graph.nodes:
            if node.op is not INPUT:
                outputs = reference.get(node.op)(node.attrs, *[values[v] for v in node.inputs])
                values.update(zip(node.outputs, outputs, strict=True))
        return tuple([values[v] for v in self.results])


def body_of(attrs: Attrs, name: str = "body") -> Body:
    """Return a body among attributes. Raises InternalError where there is none of that name."""
    body = attrs[name]
    if not isinstance(body, Body):
        raise InternalError(f"attribute {name!r} is {body!r:.60}, no body")
    return body


def bodies_in(node: Node) -> tuple[Body, ...]:
    """Return the bodies of a node."""
    return tuple([value for value in node.attrs.values() if isinstance(value, Body)])


def add_operand(b: GraphBuilder, type_: TensorType) -> ValueId:
    """Emit an operand of the body that is being built."""
    name = str(len(b.nodes))
    return b.emit_one(INPUT, name=name, dtype=type_.dtype.value, shape=type_.shape)


def finish_body(b: GraphBuilder, results: Sequence[ValueId]) -> Body:
    """Return the body that has been built, with these results."""
    b.outputs = [Output(str(i), value) for i, value in enumerate(results)]
    return Body(b.freeze())


def clone_nodes(
    graph: Graph,
    b: GraphBuilder,
    known: dict[ValueId, ValueId],
    wanted: Sequence[ValueId],
) -> list[ValueId]:
    """Emit what some values of a graph need beyond those that are known in `b`; return them.

    `known` grows by what was emitted. Raises InternalError where an operand is needed and unknown.
    """
    needed, marks = set(wanted), list[Node]()
    for node in reversed(graph.nodes):
        if any([v in needed and v not in known for v in node.outputs]):
            marks.append(node)
            needed.update(node.inputs)
    for node in reversed(marks):
        if node.op is INPUT:
            raise InternalError(f"an operand of a body at {node.source} is not there")
        copies = b.copy(
            node,
            tuple([known[v] for v in node.inputs]),
            [graph.types[v] for v in node.outputs],
        )
        known.update([p for p in zip(node.outputs, copies, strict=True) if p[0] not in known])
    return [known[v] for v in wanted]


def needed_operands(body: Body, results: Sequence[int]) -> set[int]:
    """Return the numbers of the operands that some results are computed from."""
    needed = {body.results[i] for i in results}
    for node in reversed(body.graph.nodes):
        if any([v in needed for v in node.outputs]):
            needed.update(node.inputs)
    return {i for i, v in enumerate(body.operands) if v in needed}


def prune_body(body: Body, operands: Sequence[int], results: Sequence[int]) -> Body:
    """Return a body with some of its operands, in order, and results that need no others."""
    graph, producers = body.graph, body.graph.producers()
    b, known = GraphBuilder(), dict[ValueId, ValueId]()
    for value in [body.operands[i] for i in operands]:
        with b.like_node(graph.nodes[producers[value]]):
            known[value] = add_operand(b, graph.types[value])
    return finish_body(b, clone_nodes(graph, b, known, [body.results[i] for i in results]))


def hash_graph(graph: Graph, *, with_sources: bool = False) -> str:
    """Return a hash of what the graph computes; `with_sources` adds scopes and user lines."""
    nodes = []
    for node in graph.nodes:
        row: list[object] = [node.op.name, node.inputs, node.outputs, node.attrs.packed]
        if with_sources:
            row += [node.scope, node.source.file, node.source.line]
            row += [hash_graph(body.graph, with_sources=True) for body in bodies_in(node)]
        if node.device:
            row.append(node.device)
        if node.stage != UNSTAGED:
            row.append(("stage", node.stage))
        nodes.append(row)
    outputs = [
        (o.name, o.value, str(o.source)) if with_sources and o.source else (o.name, o.value)
        for o in graph.outputs
    ]
    rules = [
        (u.op.name, u.variable, u.state, u.scalars, u.attrs.packed, u.objective)
        for u in graph.updates
    ]
    body = [
        nodes,
        # Not `.value`, which Python finds by a search through the class each time.
        [(t.dtype._value_, t.shape) for t in graph.types],
        outputs,
        rules,
        [(w.variable, w.value) for w in graph.writes],
        None if graph.accumulation is None else astuple(graph.accumulation),
    ]
    return hashlib.blake2b(to_msgpack(body), digest_size=16).hexdigest()
