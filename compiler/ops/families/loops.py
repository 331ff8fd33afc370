"""Loops and branches over bodies: `scan`, `while` and `cond`, one node whatever the length.

A scan runs its body once for every entry of an axis, and hands its results on from step to step:

    carries..., xs..., constants...  ->  last carries..., ys...

The operands of the body are the carries, an entry of each of the xs, and the constants; its results
the carries of the next step, and an entry of each of the ys. Semantics are those of jax.lax.scan.

**Gradient.** Another scan that goes the other way. Its body is the vector-Jacobian product of the
body, by `emit_gradients`; its carries are the gradients of the carries, and of the constants, which
are summed over the steps. What it reads of the body going forward, the scan hands out as further ys
(`GraphBuilder.add_outputs`); with `recompute` only the carries before each step, from which the
rest is computed once more. Views, and what follows from constants alone, are always made again.
Without it, sums of products over the steps become one product after the loop (`emit_sum`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import InternalError
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import reference_of, streaming_cost
from compiler.graph.graph import GraphBuilder, Maybe, Node, gradient
from compiler.graph.registry import (
    Array,
    Cost,
    OpTypeError,
    Types,
    cost,
    define,
    expect_type,
    infer_type,
    input_output_aliases,
    is_source,
    reference,
    typed,
    view,
)
from compiler.ops.families.arithmetic import ADD
from compiler.ops.families.gradients import emit_gradients
from compiler.ops.language.define import update_op
from compiler.ops.primitives.body import Body, add_operand, body_of, clone_nodes, finish_body
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import (
    RESHAPE,
    TRANSPOSE,
    broadcast_value,
    is_swapped,
    reshape_to,
    swap_last_axes,
)
from compiler.ops.primitives.sources import INPUT, scalar

if TYPE_CHECKING:
    from compiler.contract.plan import SubPlan

# `cond` is a choice between two bodies, `while` goes on as long as a body says. Semantics are those
# of jax.lax.cond and while_loop. The host looks at a flag and runs one plan or another; a GPU runs
# both plans of a choice, and has no such loop. The gradient of a choice is the choice of the
# gradients, with what they need computed once more. A loop of unknown length has none.

COND = define("cond")
"""flag [] bool, operands -> results of one of two bodies of the same types.

Attrs: then, otherwise: bodies, which get the flag, too.
"""

WHILE = define("while")
"""carries, constants -> last carries. Attrs: carries (how many), test, body.

The test gives back the carries, and a bool [] that says whether the body runs once more.
"""

_FLAG = TensorType(DType.BOOL, ())


def _signature(attrs: Attrs, name: str) -> tuple[Types, Types]:
    """Return the types of a body's operands and results, whether it is planned or not."""
    body: AttrValue = attrs[name]
    if isinstance(body, Body):
        return body.operand_types, body.result_types
    from compiler.contract.plan import SubPlan  # 20 ms, and no trace needs it

    if isinstance(body, SubPlan):
        body.check()
        return body.operands, body.results
    raise InternalError(f"attribute {name!r} is no body")


def _expect(inputs: Types, wanted: Types) -> None:
    """Check operands; a body that is planned may know less than those of the other one's."""
    if len(inputs) < len(wanted):
        raise OpTypeError(f"expects {len(wanted)} inputs, got {len(inputs)}")
    for number, (type_, expected) in enumerate(zip(inputs, wanted, strict=False)):
        expect_type(type_, f"operand {number}", expected)


@infer_type.of(COND)
def _cond_types(inputs: Types, attrs: Attrs) -> Types:
    then, results = _signature(attrs, "then")
    otherwise, others = _signature(attrs, "otherwise")
    _expect(inputs, then)
    _expect(inputs, otherwise)
    if then[0] != _FLAG or results != others:
        raise OpTypeError("needs a flag of type bool[], and two bodies of the same results")
    return results


@infer_type.of(WHILE)
def _while_types(inputs: Types, attrs: Attrs) -> Types:
    carries = attrs.int_("carries")
    test, test_results = _signature(attrs, "test")
    body, results = _signature(attrs, "body")
    _expect(inputs, test)
    _expect(inputs, body)
    if results != inputs[:carries] or test_results != (*results, _FLAG):
        raise OpTypeError(
            "needs a body that gives back its carries, and a test that makes a bool[]"
        )
    return results


@reference.of(COND)
def _cond(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    branch = body_of(attrs, "then" if inputs[0] else "otherwise")
    return tuple([np.array(array) for array in branch(*inputs)])


@reference.of(WHILE)
def _while(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    count, test, body = attrs.int_("carries"), body_of(attrs, "test"), body_of(attrs)
    carries: tuple[object, ...] = inputs[:count]
    constants = inputs[count:]
    while test(*carries, *constants)[-1]:
        carries = body(*carries, *constants)
    return tuple([np.array(array) for array in carries])


@gradient.of(COND)
def _branch_gradient(b: GraphBuilder, node: Node, grads: Maybe) -> Maybe:
    flowing = [i for i, grad in enumerate(grads) if grad is not None]
    pulls = [_Pull(node, name, flowing) for name in ("then", "otherwise")]
    indices = [i for i, v in enumerate(node.inputs) if any([i in pull.made for pull in pulls])]
    if not indices:
        return (None,) * len(node.inputs)
    operands = [*node.inputs, *[g for g in grads if g is not None]]
    attrs = {
        name: pull.closed(indices) for name, pull in zip(("then", "otherwise"), pulls, strict=True)
    }
    gradients = dict(zip(indices, b.emit(COND, operands, attrs), strict=True))
    return tuple([gradients.get(i) for i in range(len(node.inputs))])


class _Pull:
    """The gradient of one of the bodies; `made` has what comes to its operands, by number."""

    def __init__(self, node: Node, name: str, flowing: list[int]) -> None:
        body = body_of(node.attrs, name)
        self._node, self._inside = node, GraphBuilder.continuing(body.graph)
        inside = self._inside
        with inside.like_node(node):
            flows = [add_operand(inside, inside.type_of(body.results[i])) for i in flowing]
            seeds: dict[ValueId, ValueId] = {}
            for value, flow in zip([body.results[i] for i in flowing], flows, strict=True):
                seeds[value] = inside.emit_one(ADD, seeds[value], flow) if value in seeds else flow
        floats = [v for v in body.operands if inside.type_of(v).dtype.is_float]
        gradients = emit_gradients(inside, seeds, floats)
        self._operands = (*body.operands, *flows)
        self.made = {i: gradients[v] for i, v in enumerate(body.operands) if v in gradients}

    def closed(self, wanted: list[int]) -> Body:
        """Return it as a body that gives the gradients of these operands; zeros where none come."""
        inside = self._inside
        with inside.like_node(self._node):
            results = [
                self.made[i] if i in self.made else self._zeros(self._operands[i]) for i in wanted
            ]
        new, known = GraphBuilder(), dict[ValueId, ValueId]()
        with new.like_node(self._node):
            for value in self._operands:
                known[value] = add_operand(new, inside.type_of(value))
        return finish_body(new, clone_nodes(inside.freeze(), new, known, results))

    def _zeros(self, value: ValueId) -> ValueId:
        type_ = self._inside.type_of(value)
        return broadcast_value(self._inside, scalar(self._inside, 0.0, type_.dtype), type_.shape)


# A sum over the steps of a scan, as one op on what the steps made, stacked.
#
#     the sum over t of x[t].T @ dy[t]   ->  reshape(x).T @ reshape(dy)
#     the sum over t of sum(dy[t], axes)  ->  sum(dy, (0, axes + 1))
#
# So a weight's gradient is one large product after the loop, not a small one and a pass over the
# whole weight in every step. What is summed may be a sum of such, under another shape or
# transposed.

_SEEN_ANEW = (RESHAPE, TRANSPOSE)


Addends = dict[ValueId, bool]
"""What must be stacked, and whether that is worth it though nobody else stacks it."""


def addends(b: GraphBuilder, value: ValueId) -> Addends | None:
    """Return what must be stacked for the sum of a value over all steps; None where it must run.

    For a product it is worth its memory; for a sum over axes only where it is stacked anyway.
    """
    node = b.producer_of(value)
    if node.op in _SEEN_ANEW:
        return addends(b, node.inputs[0])
    if node.op is ADD and b.type_of(node.inputs[0]) == b.type_of(node.inputs[1]):
        one, other = [addends(b, v) for v in node.inputs]
        if one is None or other is None:
            return None
        return {v: one.get(v, False) or other.get(v, False) for v in (*one, *other)}
    if node.op is SUM:
        return {node.inputs[0]: False}
    is_plain = node.op is MATMUL and not node.attrs and b.type_of(value).rank == 2
    if is_plain and b.type_of(node.inputs[1]).rank == 2 and is_swapped(b, node.inputs[0]):
        return {b.producer_of(node.inputs[0]).inputs[0]: True, node.inputs[1]: True}
    return None


def emit_sum(
    b: GraphBuilder, inside: GraphBuilder, value: ValueId, stacked: Mapping[ValueId, ValueId]
) -> ValueId:
    """Emit the sum over all steps of a value of a body, of its addends of all steps."""
    node, type_ = inside.producer_of(value), inside.type_of(value)
    if node.op in _SEEN_ANEW:
        return b.emit_one(node.op, emit_sum(b, inside, node.inputs[0], stacked), **node.attrs)
    if node.op is ADD:
        one, other = [emit_sum(b, inside, v, stacked) for v in node.inputs]
        return b.emit_one(ADD, one, other)
    if node.op is SUM:
        axes = (0, *[axis + 1 for axis in node.attrs.ints("axes")])
        total = b.emit_one(SUM, stacked[node.inputs[0]], axes=axes, keepdims=False)
        return reshape_to(b, total, type_.shape)
    parts = (inside.producer_of(node.inputs[0]).inputs[0], node.inputs[1])
    left, right = [_rows(b, stacked[part]) for part in parts]
    return b.emit_one(MATMUL, swap_last_axes(b, left), right)


def _rows(b: GraphBuilder, value: ValueId) -> ValueId:
    """Return matrices of all steps as one, with the rows of one after the other's."""
    steps, rows, columns = b.type_of(value).shape
    return reshape_to(b, value, (steps * rows, columns))


SCAN = define("scan")
"""carries, xs [length, ...], constants -> carries, ys [length, ...].

Attrs: body, length, reverse (from the last entry to the first), carries and xs (how many of each),
recompute.
"""

CARRY = define("carry")
"""old, new -> new, over old: what a body does at the end of a step."""

typed(CARRY, "old, new = old -> old")
input_output_aliases.register(CARRY, ((0, 0),))
streaming_cost(CARRY)
reference_of(CARRY)(lambda attrs, old, new: new.copy())

CARRY_SUM = update_op(
    "carry_sum", "old: float, more = old -> old", lambda old, more: old + more, skippable=False
)
"""old, more -> old + more, over old: a carry that sums up what the steps make."""


_NUMBERS = ("length", "carries", "xs")


@dataclass(frozen=True, slots=True)
class ScanParts:
    """Which operands and results of a scan are what."""

    body: Body
    length: int
    carries: int
    xs: int

    @staticmethod
    def of(attrs: Attrs) -> ScanParts:
        """Return how a scan with these attributes is cut."""
        length, carries, xs = [attrs.int_(name) for name in _NUMBERS]
        return ScanParts(body_of(attrs), length, carries, xs)

    @property
    def first_constant(self) -> int:
        """The number of the first operand that is the same at every step."""
        return self.carries + self.xs


@infer_type.of(SCAN)
def _types(inputs: Types, attrs: Attrs) -> Types:
    length, carries, xs = [attrs.int_(name) for name in _NUMBERS]
    operands, results = _signature(attrs, "body")
    body = attrs["body"]
    # `_signature` knows no third kind.
    planned = None if isinstance(body, Body) else cast("SubPlan", body)
    if planned is not None and (planned.carries, planned.xs) != (carries, xs):
        raise OpTypeError(f"has {carries} carries and {xs} xs, and its plan others")
    if len(inputs) != len(operands) or not carries + xs <= len(operands) or carries > len(results):
        raise OpTypeError(f"expects {len(operands)} inputs, got {len(inputs)}")
    for number, (type_, expected) in enumerate(zip(inputs, operands, strict=True)):
        is_x = carries <= number < carries + xs
        expect_type(type_, f"operand {number}", _stacked(expected, length) if is_x else expected)
    for number in range(carries):
        expect_type(results[number], f"carry {number} after a step", operands[number])
    return results[:carries] + tuple([_stacked(y, length) for y in results[carries:]])


def _stacked(type_: TensorType, length: int) -> TensorType:
    """Return the type of the entries of all steps."""
    return TensorType(type_.dtype, (length, *type_.shape))


@reference.of(SCAN)
def _reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    parts = ScanParts.of(attrs)
    carries: Sequence[object] = inputs[: parts.carries]
    xs, constants = inputs[parts.carries : parts.first_constant], inputs[parts.first_constant :]
    y_types = parts.body.result_types[parts.carries :]
    widest = max([x.dtype for x in inputs if x.dtype.kind == "f"], default=np.dtype(np.float64))
    ys = [
        np.zeros((parts.length, *t.shape), widest if t.dtype.is_float else t.dtype.value)
        for t in y_types
    ]
    for step in range(parts.length)[:: -1 if attrs.bool_("reverse") else 1]:
        results = parts.body(*carries, *[x[step] for x in xs], *constants)
        carries = results[: parts.carries]
        for y, entry in zip(ys, results[parts.carries :], strict=True):
            y[step] = entry
    return (*[np.array(array) for array in carries], *ys)


@cost.of(SCAN)
def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    body, length = attrs["body"], attrs.int_("length")
    if not isinstance(body, Body):  # it is planned, and priced, by then
        return Cost(0.0, float(sum([t.size_bytes for t in (*inputs, *outputs)])))
    graph, flops, moved_bytes = body.graph, 0.0, 0.0
    # A part of the operands is a part of the work.
    whole_sizes = [t.num_elements for t in body.operand_types[: attrs.int_("carries")]]
    sizes = [t.num_elements for t in inputs[: attrs.int_("carries")]]
    share = min([n / max(m, 1) for n, m in zip(sizes, whole_sizes, strict=True)], default=1.0)
    for node in graph.nodes:
        if not is_source.get(node.op):
            in_types, out_types = [
                tuple([graph.types[v] for v in side]) for side in (node.inputs, node.outputs)
            ]
            own_cost = cost.get(node.op)(in_types, out_types, node.attrs)
            flops, moved_bytes = flops + own_cost.flops, moved_bytes + own_cost.bytes
    return Cost(share * length * flops, share * length * moved_bytes)


@gradient.of(SCAN)
def _scan_gradient(b: GraphBuilder, node: Node, grads: Maybe) -> Maybe:
    node = b.producer_of(node.outputs[0])  # a gradient before may have asked for more of it
    return _Backward(b, node, grads).emit()


class _Backward:
    """One gradient of a scan: the body of the scan that goes back, and its operands outside."""

    def __init__(self, b: GraphBuilder, node: Node, grads: Maybe) -> None:
        self.b, self.node, self.cut = b, node, ScanParts.of(node.attrs)
        self.grads = (*grads, *[None] * (len(node.outputs) - len(grads)))
        body = self.cut.body
        self.operands, self.types = body.operands, body.graph.types
        self.floats = [i for i, t in enumerate(body.operand_types) if t.dtype.is_float]
        self.held = [i for i in self.floats if i < self.cut.carries]
        self.inside = GraphBuilder.continuing(body.graph)
        self.num_forward = len(body.graph.nodes)
        self.num_forward_values = len(body.graph.types)

    def emit(self) -> Maybe:
        """Emit the scan that goes back, and return the gradients of all operands."""
        cut, inside = self.cut, self.inside
        ys = [r for r, g in enumerate(self.grads) if r >= cut.carries and g is not None]
        flows = {r: add_operand(inside, self.types[cut.body.results[r]]) for r in (*self.held, *ys)}
        body_grads = self._pulled(flows)
        later, leaves = self._summed_later(body_grads)
        summed = [i for i in body_grads if i >= cut.first_constant and i not in later]
        entries = [i for i in body_grads if cut.carries <= i < cut.first_constant]
        sums = [add_operand(inside, self.types[self.operands[i]]) for i in summed]
        results = [body_grads[i] if i in body_grads else self._zeros(inside, i) for i in self.held]
        with inside.like_node(self.node):
            results += [inside.emit_one(ADD, sums[n], body_grads[i]) for n, i in enumerate(summed)]
        forward = [v for v in leaves if self._is_forward(v)]
        stacks = [*[body_grads[i] for i in entries]]
        stacks += [v for v in leaves if v not in forward and v not in stacks]
        results += stacks
        needed = self._read_forward(results)
        place_of = {v: i for i, v in enumerate(self.operands) if i >= cut.carries}
        xs = [v for v in needed if place_of.get(v, cut.first_constant) < cut.first_constant]
        constants = [v for v in needed if v in place_of and v not in xs]
        saved = [v for v in needed if v not in place_of]
        stacked = self._handed_out([*saved, *[v for v in forward if v not in (*saved, *place_of)]])
        stacked |= {v: self.node.inputs[place_of[v]] for v in forward if v in place_of}
        heads = [*[flows[i] for i in self.held], *sums, *[flows[r] for r in ys]]
        body = self._closed([*heads, *saved, *xs, *constants], results)
        outside = [*[self._into(i) for i in self.held], *[self._zeros(self.b, i) for i in summed]]
        outside += [g for r in ys if (g := self.grads[r]) is not None]
        outside += [stacked[v] for v in saved]
        outside += [self.node.inputs[place_of[v]] for v in (*xs, *constants)]
        attrs = {
            **self.node.attrs,
            "body": body,
            "reverse": not self.node.attrs.bool_("reverse"),
            "carries": len(self.held) + len(summed),
            "xs": len(ys) + len(saved) + len(xs),
        }
        gradients = self.b.emit(SCAN, outside, attrs)
        first = len(self.held) + len(summed)
        stacked |= zip(stacks, gradients[first:], strict=True)
        by_operand = dict(zip((*self.held, *summed), gradients, strict=False))
        by_operand |= {i: stacked[body_grads[i]] for i in entries}
        by_operand |= {i: emit_sum(self.b, inside, body_grads[i], stacked) for i in later}
        return tuple([by_operand.get(i) for i in range(len(self.operands))])

    def _summed_later(self, made: Mapping[int, ValueId]) -> tuple[list[int], list[ValueId]]:
        """Return the constants whose gradients are summed after the loop, and what of each step.

        What is stacked takes memory, so it is not done where the rest is computed again to save it.
        """
        constants = set(self.operands[self.cut.first_constant :])
        sums: dict[int, Addends] = {}
        for number in [i for i in made if i >= self.cut.first_constant]:
            terms = addends(self.inside, made[number])
            if terms is not None and not constants.intersection(terms):
                sums[number] = terms
        if self.node.attrs.bool_("recompute"):
            return [], []
        stacked = {v for i, v in made.items() if self.cut.carries <= i < self.cut.first_constant}
        stacked |= {v for terms in sums.values() for v, is_worth_it in terms.items() if is_worth_it}
        later = [number for number, terms in sums.items() if stacked.issuperset(terms)]
        return later, list(dict.fromkeys([v for number in later for v in sums[number]]))

    def _is_forward(self, value: ValueId) -> bool:
        """Whether the body going forward makes a value, or gets it."""
        return value < self.num_forward_values

    def _pulled(self, flows: dict[int, ValueId]) -> dict[int, ValueId]:
        """Emit the gradient of the body; return what comes to each of its operands."""
        seeds: dict[ValueId, ValueId] = {}
        for result, flow in flows.items():
            value = self.cut.body.results[result]
            with self.inside.like_node(self.node):
                seeds[value] = (
                    self.inside.emit_one(ADD, seeds[value], flow) if value in seeds else flow
                )
        gradients = emit_gradients(self.inside, seeds, [self.operands[i] for i in self.floats])
        return {i: gradients[v] for i in self.floats if (v := self.operands[i]) in gradients}

    def _read_forward(self, results: Sequence[ValueId]) -> list[ValueId]:
        """Return what going back has to be given of the body going forward, in order of making."""
        producers, nodes = self.inside.freeze().producers(), self.inside.nodes
        remade = self._remade()
        reads: dict[ValueId, None] = {}
        seen, waiting = set[ValueId](), list(results)
        while waiting:
            value = waiting.pop()
            index = producers[value]
            if value in seen:
                continue
            seen.add(value)
            is_forward = index < self.num_forward
            if is_forward and not remade[index]:
                reads[value] = None
            elif nodes[index].op is not INPUT:
                waiting += nodes[index].inputs
        return sorted(reads, key=lambda value: (producers[value], value))

    def _remade(self) -> list[bool]:
        """Return, per node going forward, whether going back computes it once more."""
        is_constant = set(self.operands[self.cut.first_constant :])
        remade: list[bool] = []
        for node in self.inside.nodes[: self.num_forward]:
            if node.op is not INPUT and all([v in is_constant for v in node.inputs]):
                is_constant.update(node.outputs)
            is_again = self.node.attrs.bool_("recompute") or view.has(node.op)
            remade.append(
                node.op is not INPUT and (is_again or is_constant.issuperset(node.outputs))
            )
        return remade

    def _handed_out(self, kept: Sequence[ValueId]) -> dict[ValueId, ValueId]:
        """Return values of all steps, stacked; the scan hands out those that it did not yet."""
        cut, node = self.cut, self.node
        ys = zip(cut.body.results[cut.carries :], node.outputs[cut.carries :], strict=True)
        stacked = dict(ys)
        more = [v for v in kept if v not in stacked]
        if more:
            body = self._closed(self.operands, (*cut.body.results, *more))
            attrs = {**node.attrs, "body": body}
            types = [_stacked(self.inside.type_of(v), cut.length) for v in more]
            stacked.update(
                zip(more, self.b.add_outputs(node.outputs[0], Attrs(attrs), types), strict=True)
            )
        return {v: stacked[v] for v in kept}

    def _closed(self, operands: Sequence[ValueId], results: Sequence[ValueId]) -> Body:
        """Return a body with these operands and results."""
        new, known = GraphBuilder(), dict[ValueId, ValueId]()
        with new.like_node(self.node):
            for value in operands:
                known[value] = add_operand(new, self.inside.type_of(value))
        return finish_body(new, clone_nodes(self.inside.freeze(), new, known, results))

    def _into(self, number: int) -> ValueId:
        """Return what flows into a carry at the end of the scan."""
        grad = self.grads[number]
        return self._zeros(self.b, number) if grad is None else grad

    def _zeros(self, b: GraphBuilder, number: int) -> ValueId:
        type_ = self.types[self.operands[number]]
        with b.like_node(self.node):
            return broadcast_value(b, scalar(b, 0.0, type_.dtype), type_.shape)
