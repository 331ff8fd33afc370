"""A choice between two bodies, and a loop that goes on as long as a body says.

Semantics are those of jax.lax.cond and while_loop. The host looks at a flag and runs one plan or
another; a GPU runs both plans of a choice, and has no such loop. The gradient of a choice is the
choice of the gradients, with what they need computed once more. A loop of unknown length has none.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs, AttrValue
from compiler.body import Body, body_of, closed, copied, operand
from compiler.errors import InternalError
from compiler.gradients import emit_gradients
from compiler.graph import GraphBuilder, Node
from compiler.ops.binary import ADD
from compiler.ops.shape import broadcast_value
from compiler.ops.signature import Array, Types, expect_type
from compiler.ops.sources import scalar
from compiler.registry import OpTypeError, define, infer_type, reference
from compiler.rules import Maybe, gradient
from compiler.sub_plan import SubPlan
from compiler.types import DType, TensorType, ValueId

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
    if isinstance(body, SubPlan):
        body.check()
        return body.operands, body.results
    if isinstance(body, Body):
        return body.operand_types, body.result_types
    raise InternalError(f"attribute {name!r} is no body")


def _expect(inputs: Types, wanted: Types) -> None:
    """Check operands; a body that is planned may know less than those of the other one's."""
    if len(inputs) < len(wanted):
        raise OpTypeError(f"expects {len(wanted)} inputs, got {len(inputs)}")
    for number, (type_, own) in enumerate(zip(inputs, wanted, strict=False)):
        expect_type(type_, f"operand {number}", own)


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
    test, made = _signature(attrs, "test")
    body, results = _signature(attrs, "body")
    _expect(inputs, test)
    _expect(inputs, body)
    if results != inputs[:carries] or made != (*results, _FLAG):
        raise OpTypeError(
            "needs a body that gives back its carries, and a test that makes a bool[]"
        )
    return results


@reference.of(COND)
def _cond(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    chosen = body_of(attrs, "then" if inputs[0] else "otherwise")
    return tuple([np.array(made) for made in chosen(*inputs)])


@reference.of(WHILE)
def _while(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    count, test, body = attrs.int_("carries"), body_of(attrs, "test"), body_of(attrs)
    held: tuple[object, ...] = inputs[:count]
    constants = inputs[count:]
    while test(*held, *constants)[-1]:
        held = body(*held, *constants)
    return tuple([np.array(made) for made in held])


@gradient.of(COND)
def _gradient(b: GraphBuilder, node: Node, grads: Maybe) -> Maybe:
    flowing = [i for i, grad in enumerate(grads) if grad is not None]
    pulls = [_Pull(node, name, flowing) for name in ("then", "otherwise")]
    wanted = [i for i, v in enumerate(node.inputs) if any([i in pull.made for pull in pulls])]
    if not wanted:
        return (None,) * len(node.inputs)
    operands = [*node.inputs, *[g for g in grads if g is not None]]
    attrs = {
        name: pull.closed(wanted) for name, pull in zip(("then", "otherwise"), pulls, strict=True)
    }
    found = dict(zip(wanted, b.emit(COND, operands, attrs), strict=True))
    return tuple([found.get(i) for i in range(len(node.inputs))])


class _Pull:
    """The gradient of one of the bodies; `made` has what comes to its operands, by number."""

    def __init__(self, node: Node, name: str, flowing: list[int]) -> None:
        body = body_of(node.attrs, name)
        self._node, self._inside = node, GraphBuilder.continuing(body.graph)
        inside = self._inside
        with inside.beside(node):
            flows = [operand(inside, inside.type_of(body.results[i])) for i in flowing]
            seeds: dict[ValueId, ValueId] = {}
            for value, flow in zip([body.results[i] for i in flowing], flows, strict=True):
                seeds[value] = inside.one(ADD, seeds[value], flow) if value in seeds else flow
        floats = [v for v in body.operands if inside.type_of(v).dtype.is_float]
        found = emit_gradients(inside, seeds, floats)
        self._operands = (*body.operands, *flows)
        self.made = {i: found[v] for i, v in enumerate(body.operands) if v in found}

    def closed(self, wanted: list[int]) -> Body:
        """Return it as a body that gives the gradients of these operands; zeros where none come."""
        inside = self._inside
        with inside.beside(self._node):
            results = [
                self.made[i] if i in self.made else self._zeros(self._operands[i]) for i in wanted
            ]
        new, known = GraphBuilder(), dict[ValueId, ValueId]()
        with new.beside(self._node):
            for value in self._operands:
                known[value] = operand(new, inside.type_of(value))
        return closed(new, copied(inside.freeze(), new, known, results))

    def _zeros(self, value: ValueId) -> ValueId:
        type_ = self._inside.type_of(value)
        return broadcast_value(self._inside, scalar(self._inside, 0.0, type_.dtype), type_.shape)
