"""Compile the bodies of nodes: each becomes a plan of its own, which its launch runs.

    scan(..., body=graph)  ->  scan(copy(x), ..., body=plan)

A body goes through the same passes and the same lowering as the job, for the device of its node and
in the job's precision. So nothing that looks into graphs, outside, looks into a body: precision,
fusion, simplification and order are done within. Carries become variables, which the step writes
over; constants become variables that it reads. Constants that the passes made within are handed in
from outside, for a frame holds nothing from one launch to the next.

Operands are made dense: a launch finds the entry of a step by an offset.

Guarantees: no node has a body that is a graph; a node with a body reads dense operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compiler.attrs import NO_ATTRS, Attrs
from compiler.body import Body, bodies_in
from compiler.graph import Graph, GraphBuilder, Node, Output, Write, new_value
from compiler.lowering.storage import assign_storage, is_dense
from compiler.ops.binary import ADD
from compiler.ops.scan import CARRY, CARRY_SUM
from compiler.ops.shape import COPY
from compiler.ops.sources import CONSTANT, INPUT, SCRATCH, VARIABLE, declared_type
from compiler.options import CompileOptions
from compiler.plan import Plan
from compiler.registry import Types
from compiler.sub_plan import SubPlan
from compiler.target import Hardware, one_device
from compiler.types import TensorType, ValueId

Prepare = Callable[[Graph, Hardware, CompileOptions], Graph]
"""From a body as a job of one device to what is lowered."""

Lower = Callable[[Graph, Hardware, CompileOptions], Plan]

_ZEROS = (("kind", "zeros"),)


def run(
    graph: Graph, hardware: Hardware, options: CompileOptions, prepare: Prepare, lower: Lower
) -> Graph:
    """Return the graph with plans for bodies. O(nodes), and what the bodies take."""
    if not any([isinstance(v, Body) for node in graph.nodes for v in node.attrs.values()]):
        return graph
    layouts = assign_storage(graph).layout
    nodes: list[Node] = []
    types = list(graph.types)
    known: dict[tuple[object, ...], tuple[SubPlan, tuple[Node, ...]]] = {}
    for node in graph.nodes:
        if not bodies_in(node):
            nodes.append(node)
            continue
        inputs = list(node.inputs)
        for position, value in enumerate(node.inputs):
            if not is_dense(types[value], replace(layouts[value], offset_bytes=0)):
                inputs[position] = copy = new_value(types, types[value])
                nodes.append(
                    replace(node, op=COPY, inputs=(value,), outputs=(copy,), attrs=NO_ATTRS)
                )
        attrs = dict(node.attrs)
        for name, body in node.attrs.items():
            if not isinstance(body, Body):
                continue
            before = tuple([types[v] for v in inputs[len(node.inputs) :]])
            key = (body, node.device, node.attrs.get("carries"), before)
            if key not in known:
                alone = one_device(hardware.targets[node.device], hardware.devices[node.device])
                for_it = alone, _options_on(alone, options)
                known[key] = _compiled(body, node, before, for_it, prepare, lower)
            attrs[name], constants = known[key]
            for constant in constants:
                made = new_value(types, _type(constant))
                nodes.append(
                    replace(constant, outputs=(made,), device=node.device, phase=node.phase)
                )
                inputs.append(made)
        nodes.append(replace(node, inputs=tuple(inputs), attrs=Attrs(attrs)))
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _options_on(hardware: Hardware, options: CompileOptions) -> CompileOptions:
    """Return what bodies on a device are compiled for."""
    return CompileOptions(
        "body",
        is_training=False,
        precision=options.precision,
        devices=(str(hardware.devices[0]),),
        gpu=options.gpu,
        deterministic=options.deterministic,
        verify=options.verify,
    )


def _compiled(
    body: Body,
    node: Node,
    before: Types,
    for_it: tuple[Hardware, CompileOptions],
    prepare: Prepare,
    lower: Lower,
) -> tuple[SubPlan, tuple[Node, ...]]:
    """Return the plan of a body, and the constants that it wants after its other operands.

    `before` are types of constants that another body of the node wants before those.
    """
    carries, xs = [node.attrs.int_(n) if n in node.attrs else 0 for n in ("carries", "xs")]
    graph = prepare(_as_job(body, carries, xs), *for_it)
    constants = tuple([n for n in graph.nodes if n.op is CONSTANT])
    operands = body.operand_types + before
    numbers = {n.outputs[0]: len(operands) + i for i, n in enumerate(constants)}
    nodes = [
        replace(n, op=VARIABLE, attrs=_variable(numbers[n.outputs[0]], _type(n)))
        if n.op is CONSTANT
        else n
        for n in graph.nodes
    ]
    plan = lower(replace(graph, nodes=tuple(nodes)), *for_it)
    operands += tuple([_type(n) for n in constants])
    made = SubPlan(plan, operands, body.result_types, carries, xs)
    made.check()
    return made, constants


def _as_job(body: Body, carries: int, xs: int) -> Graph:
    """Return a body as the graph of a job whose steps are those of the loop."""
    graph, b = body.graph, GraphBuilder()
    numbers = {value: i for i, value in enumerate(body.operands)}
    known: dict[ValueId, ValueId] = {}
    for node in graph.nodes:
        own = node.attrs
        if node.op is INPUT:
            number, type_ = numbers[node.outputs[0]], graph.types[node.outputs[0]]
            is_x = carries <= number < carries + xs
            own = Attrs({**own, "name": str(number)}) if is_x else _variable(number, type_)
            node = replace(node, op=node.op if is_x else VARIABLE, attrs=own)
        made = b.copy(
            replace(node, device=0),
            tuple([known[v] for v in node.inputs]),
            [graph.types[v] for v in node.outputs],
        )
        known.update(zip(node.outputs, made, strict=True))
    for old, new in zip(body.operands[:carries], body.results, strict=False):
        if new != old:
            with b.beside(b.producer_of(known[new])):
                b.writes.append(Write(known[old], _carried(b, known[old], known[new])))
    b.outputs = [Output(f"out{i}", known[v]) for i, v in enumerate(body.results) if i >= carries]
    return b.freeze()


def _carried(b: GraphBuilder, old: ValueId, new: ValueId) -> ValueId:
    """Emit the write of a carry: of a sum, what is added."""
    node = b.producer_of(new)
    adds = node.op is ADD and node.inputs[0] == old and b.type_of(old).dtype.is_float
    if adds and b.type_of(node.inputs[1]) == b.type_of(old):
        return b.one(CARRY_SUM, old, node.inputs[1])
    return b.one(CARRY, old, new)


def _variable(number: int, type_: TensorType) -> Attrs:
    return Attrs(
        {
            "name": str(number),
            "dtype": type_.dtype.value,
            "shape": type_.shape,
            "role": SCRATCH,
            "init": _ZEROS,
        }
    )


def _type(constant: Node) -> TensorType:
    return declared_type(constant.attrs)
