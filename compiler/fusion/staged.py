"""Define an update that needs more than one pass over its elements: norms, products, sums of axes.

    LAMB = staged_update("lamb", "param: float, grad = param, ... -> param, m, v", lamb)

Until every pass that cares for gradients has run (scale, skipped steps, ranks) it is one node like
any other update. Then the pass `stage_updates` puts in its place what the function `lamb` emits:
ordinary nodes, and updates by a program (`compiler.fusion.updates`) that read them.

The function takes a `StageBuilder`, the operands as expressions, and attributes by keyword; it
returns the new values, in the order of the outputs. What it emits must read none of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compiler.attrs import Attrs, AttrValue
from compiler.fusion.expressions import Expression
from compiler.fusion.products import GraphEmitter
from compiler.fusion.stated import Attribute, attributes_of, settings_of
from compiler.fusion.updates import MAXIMIZE
from compiler.graph import GraphBuilder
from compiler.ops.matmul import MATMUL
from compiler.ops.reduce import SUM
from compiler.ops.shape import TRANSPOSE
from compiler.ops.signature import Array, Types, TypeSignature, read_types
from compiler.ops.sources import CONSTANT, INPUT, constant_array
from compiler.registry import (
    Cost,
    Op,
    OpAttr,
    cost,
    define,
    infer_type,
    reference,
    writes,
)
from compiler.types import DType, TensorType, ValueId


@dataclass(frozen=True, slots=True)
class StageBuilder:
    """What a function emits by: nodes of a graph, with the skip flag of the update that they are.

    Expressions on tensors broadcast as ops do.
    """

    b: GraphBuilder
    emitter: GraphEmitter
    skip: tuple[ValueId, ...]

    def read(self, value: ValueId) -> Expression:
        """Return a value as an expression."""
        return Expression(self.emitter, value, self.b.type_of(value).shape)

    def update(self, op: Op, *operands: Expression, **attrs: AttrValue) -> tuple[ValueId, ...]:
        """Emit an update by its program; return the new values."""
        return self.b.emit(op, (*[o.value for o in operands], *self.skip), attrs)

    def sum(self, x: Expression, axes: tuple[int, ...] | None = None) -> Expression:
        """Return a sum over some axes, which stay with extent 1; or over all, as a number."""
        rank = self.b.type_of(x.value).rank
        over = tuple(range(rank)) if axes is None else tuple(sorted(a % rank for a in axes))
        return self.read(self.b.one(SUM, x.value, axes=over, keepdims=axes is not None))

    def mean(self, x: Expression, axes: tuple[int, ...] | None = None) -> Expression:
        """Return a mean, as `sum`; of nothing it is 0."""
        shape = self.b.type_of(x.value).shape
        count = math.prod(shape if axes is None else [shape[a] for a in axes])
        return self.sum(x, axes) * (1.0 / max(count, 1))

    def norm(self, x: Expression) -> Expression:
        """Return the root of the sum of all squares."""
        return self.sum(x * x).sqrt()

    def product(self, a: Expression, b: Expression) -> Expression:
        """Return a product of matrices."""
        return self.read(self.b.one(MATMUL, a.value, b.value))

    def turned(self, a: Expression) -> Expression:
        """Return a matrix with rows as columns."""
        return self.read(self.b.one(TRANSPOSE, a.value, perm=(1, 0)))


@dataclass(frozen=True, slots=True, eq=False)
class StagedUpdate:
    """What a definition says. Equal to itself alone."""

    function: Callable[..., tuple[ValueId, ...]]
    attributes: tuple[Attribute, ...]
    num_operands: int

    def emit(self, b: GraphBuilder, inputs: Sequence[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Emit what the update is made of; return the new values of what it writes over."""
        stage = StageBuilder(b, GraphEmitter(b), tuple(inputs[self.num_operands :]))
        operands = [stage.read(value) for value in inputs[: self.num_operands]]
        settings = settings_of(self.attributes, attrs)
        if settings.pop(MAXIMIZE.name, False):
            operands[1] = -operands[1]
        return self.function(stage, *operands, **settings)


stages = OpAttr[StagedUpdate]("stages", "what an update is made of; read by stage_updates")


def staged_update(name: str, signature: str, function: Callable[..., tuple[ValueId, ...]]) -> Op:
    """Define an update by what it is made of, and return it.

    The signature is that of `update_op`, and so is the last input, `skip`.
    """
    where = sys._getframe(1).f_code.co_filename
    op = define(name)
    types: TypeSignature = read_types(signature.replace(" ->", ", skip? = int64 ->"))
    names = [row.name for row in types.operands if not row.optional]
    found = StagedUpdate(function, (*attributes_of(function), MAXIMIZE), len(names))
    over = tuple([(out, names.index(result)) for out, result in enumerate(types.results)])

    def infer(inputs: Types, attrs: Attrs) -> Types:
        settings_of(found.attributes, attrs)
        return types.infer(inputs)

    def run(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
        given = [np.asarray(array) for array in arrays]
        own = tuple([TensorType(DType(a.dtype.name), a.shape) for a in given])
        b, inputs, made = _alone(found, own, attrs)
        known = dict(zip(inputs, given, strict=True))
        for node in b.nodes[len(inputs) :]:
            read = [known[v] for v in node.inputs]
            news = (constant_array(node),) if node.op is CONSTANT else ()
            news = news or reference.get(node.op)(node.attrs, *read)
            known |= dict(zip(node.outputs, news, strict=True))
        return tuple([known[value] for value in made])

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        b, given, _ = _alone(found, inputs, attrs)
        rows = [
            cost.get(node.op)(
                tuple([b.type_of(v) for v in node.inputs]),
                tuple([b.type_of(v) for v in node.outputs]),
                node.attrs,
            )
            for node in b.nodes[len(given) :]
            if node.op is not CONSTANT
        ]
        return Cost(sum([c.flops for c in rows]), sum([t.size_bytes for t in (*inputs, *outputs)]))

    stages.register(op, found, where)
    writes.register(op, over, where)
    infer_type.register(op, infer, where)
    reference.register(op, run, where)
    cost.register(op, work, where)
    return op


def _alone(
    found: StagedUpdate, types: Types, attrs: Attrs
) -> tuple[GraphBuilder, tuple[ValueId, ...], tuple[ValueId, ...]]:
    """Return an update in a graph of its own, the inputs there and the new values."""
    b = GraphBuilder()
    inputs = tuple(
        [b.one(INPUT, name=str(i), dtype=t.dtype.value, shape=t.shape) for i, t in enumerate(types)]
    )
    return b, inputs, found.emit(b, inputs, attrs)
