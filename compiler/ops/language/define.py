"""Define an op by its program: one statement, from which all that is known of the op follows.

    SOFTSIGN = fused_op("softsign", "x -> y", lambda x: x / (1 + abs(x)))
    SGD = update_op("sgd_update", "param: float, grad = param, lr = param [] -> param", sgd)
    LAMB = composite_update("lamb", "param: float, grad = param, ... -> param, m, v", lamb)

From signature (`compiler.ops.language.expressions`) and program of a `fused_op` come the columns
`infer_type`, `frame`, `expand`, `reference`, `cost`, `is_exact` and `gradient`; so the op has
kernels wherever programs run, and no file of its own in any other room. Attributes are the
program's keyword-only arguments, typed by annotation or default. `compiler.ops.language.vjp`
differentiates the program; `gradient` is another program in its place, where a better formula is
known.

An `update_op` makes new values of variables from old ones, in the same memory. Its signature is
that of `compiler.graph.registry.typed`; an output called like an operand is written over it. It has
the columns `infer_type`, `input_output_aliases`, `reference`, `cost` and `update`; an optimizer has
no kernel of its own. Every update takes one more input, `skip` [] int64, at the end, which is no
operand of the program: where it is not 0, the launch does nothing. The pass `update_programs` puts
the program into the attributes of the node. From then on it is what the update computes, and
whoever runs programs runs it (`kernel_op`).

A `composite_update` needs more than one pass over its elements: norms, products, sums of axes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from compiler.contract.attrs import NO_ATTRS, Attrs, AttrValue
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.spaces import Space
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.graph import GraphBuilder
from compiler.graph.program_builder import ProgramBuilder
from compiler.graph.registry import (
    Array,
    Check,
    Cost,
    Op,
    OpAttr,
    OpTypeError,
    Types,
    TypeSignature,
    cost,
    define,
    infer_type,
    input_output_aliases,
    is_exact,
    kernel_op,
    read_types,
    reference,
)
from compiler.ops.language.definition import (
    FOREIGN,
    OP_OF_INSTRUCTION,
    Attribute,
    Function,
    FusedOp,
    attributes_of,
    definition,
    definition_cache,
    expect_takes,
    output_of,
    read_gradient,
    register_program,
    settings_of,
    trace,
)
from compiler.ops.language.expressions import Expression, read_signature
from compiler.ops.language.program_ops import (
    FUSED,
    evaluate,
    program_flops,
    program_of,
    program_types,
    space_of,
)
from compiler.ops.language.vjp import GraphEmitter
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import TRANSPOSE
from compiler.ops.primitives.sources import CONSTANT, INPUT, constant_array


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What a definition says. Equal to itself alone.

    `is_number` tells the operands that are single numbers; `over` are pairs (output, operand).
    """

    program: Callable[..., Any]
    attributes: tuple[Attribute, ...]
    is_number: tuple[bool, ...]
    over: tuple[tuple[int, int], ...]

    @property
    def num_operands(self) -> int:
        """How many operands an update has that is only its definition's."""
        return len(self.is_number)

    def program_for(self, types: Types, attrs: Attrs) -> FusedProgram:
        """Return the program of a node that has none yet: one for all shapes."""
        operands = types[: len(self.is_number)]
        return _traced(self, tuple([t.dtype for t in operands]), attrs)


MAXIMIZE = Attribute("maximize", bool, False, is_required=False)
"""Every update by a gradient has it: the gradient, its second operand, is negated first."""

update = OpAttr[Update]("update", "the program that makes new values of a variable's old ones")


def update_op(
    name: str,
    signature: str,
    program: Callable[..., Any],
    *,
    settings: type | None = None,
    shares: tuple[str, ...] = (),
    check: Check | None = None,
    skippable: bool = True,
) -> Op:
    """Define an update by its program and return it.

    Args:
        name: the op's name.
        signature: types of operands and outputs; the variable first, then its gradient.
        program: takes an `Expression` per operand, and the attributes by keyword; returns one
            expression per output, a tuple of them where there are several.
        settings: what the program takes as its last argument in place of keywords: a dataclass, of
            which the attributes are the fields.
        shares: attributes that must be in [0, 1). All numbers must be finite.
        check: refuses, by OpTypeError, what neither says.
        skippable: whether a broken step leaves out the update; counters go on.
    """
    where = sys._getframe(1).f_code.co_filename
    op = define(name)
    types = read_types(signature.replace(" ->", ", skip? = int64 ->") if skippable else signature)
    operands = [row for row in types.operands if not row.optional]
    names = [row.name for row in operands]
    maximize = [MAXIMIZE] * (skippable and "grad" in names)
    attributes = (*attributes_of(settings or program), *maximize)
    over = tuple([(out, names.index(name)) for out, name in enumerate(types.results)])
    numbers = tuple([row.is_number and row.name not in types.results for row in operands])
    rule = Update(_by_keywords(program, settings), attributes, numbers, over)

    def infer(inputs: Types, attrs: Attrs) -> Types:
        if "program" in attrs:  # which may read numbers more, for what is done to the gradient
            num_read = len(program_of(attrs).inputs)
            program_types(program_of(attrs), inputs[:num_read], attrs)
            inputs = (*inputs[: len(numbers)], *inputs[num_read:])
        outputs = types.infer(inputs)
        settings = {a.name: attrs[a.name] for a in attributes if a.name in attrs}
        for name, value in settings_of(attributes, Attrs(settings)).items():
            if not isinstance(value, (int, float)):
                continue
            if name in shares and not 0 <= value < 1:
                raise OpTypeError(f"needs 0 <= {name} < 1, got {value}")
            if not math.isfinite(value):
                raise OpTypeError(f"needs a finite {name}, got {value}")
        if check is not None:
            check(inputs, attrs)
        return outputs

    def run(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
        num_read = len(program_of(attrs).inputs) if "program" in attrs else len(numbers)
        values = _of_one_width([np.asarray(array) for array in arrays[:num_read]])
        if any([skip != 0 for skip in arrays[num_read:]]):
            return tuple([values[old].copy() for _, old in over])
        if "program" in attrs:
            body, space = program_of(attrs), space_of(attrs)
        else:
            dtypes = tuple([DType(str(array.dtype)) for array in values])
            body, space = _traced(rule, dtypes, Attrs(attrs)), Space(1, values[0].size)
        results = zip(evaluate(body, space, tuple(values)), over, strict=True)
        return tuple([new.reshape(values[old].shape) for new, (_, old) in results])

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        body = program_of(attrs) if "program" in attrs else rule.program_for(inputs, attrs)
        moved_bytes = sum([t.size_bytes for t in (*inputs, *outputs)])
        return Cost(program_flops(body, Space(1, inputs[0].num_elements)), float(moved_bytes))

    update.register(op, rule, where)
    input_output_aliases.register(op, over, where)
    kernel_op.register(op, FUSED.name, where)
    infer_type.register(op, lru_cache(maxsize=1024)(infer), where)
    reference.register(op, run, where)
    cost.register(op, work, where)
    return op


def _by_keywords(program: Callable[..., Any], settings: type | None) -> Callable[..., Any]:
    """Return a program that takes by keyword what this one takes as its last argument."""
    if settings is None:
        return program
    return lambda *operands, **attrs: program(*operands, settings(**attrs))


def _of_one_width(arrays: list[Array]) -> list[Array]:
    """Return arrays whose floats are all as wide as the widest: a walk in float64 mixes them."""
    floats = [a.dtype for a in arrays if a.dtype.kind == "f"]
    return [a.astype(max(floats)) if a.dtype in floats else a for a in arrays]


@lru_cache(maxsize=1024)
def _traced(found: Update, dtypes: tuple[DType, ...], attrs: Attrs) -> FusedProgram:
    p = ProgramBuilder(1, 1)
    values = [
        p.input(ProgramInput(dtype, Kind.SCALAR if single else Kind.FULL))
        for dtype, single in zip(dtypes, found.is_number, strict=True)
    ]
    operands = [Expression(p, v) for v in values]
    settings = settings_of(found.attributes, attrs)
    if settings.pop(MAXIMIZE.name, False):
        operands[1] = -operands[1]
    returned = found.program(*operands, **settings)
    results = returned if isinstance(returned, tuple) else (returned,)
    new_values = [output_of(p, new, Kind.FULL) for new in results]
    return p.whole(tuple([_made_late(p, new_values[out], values[old]) for out, old in found.over]))


def _made_late(p: ProgramBuilder, new: int, old: int) -> int:
    """Return a value as one that is made after the last read of what it will lie over."""
    later = [p.made_by(v) for v in range(new + 1, p.num_values)]
    is_read = any([isinstance(i, Instruction) and old in i.operands for i in later])
    return p.copied(new) if is_read else new


def keeps_rows(program: FusedProgram, gradient: int, olds: tuple[int, ...]) -> bool:
    """Whether a program leaves what it lies over as it is wherever the gradient is 0.

    `olds` are the inputs under its outputs. Followed by rules that need no numbers: 0 times
    anything is 0, and what 0 is added to stays.
    """
    zero = -1
    equals: list[int | None] = [zero if v == gradient else v for v in range(len(program.inputs))]
    for instruction in program.instructions:
        operands = [equals[v] for v in instruction.operands]
        same: int | None = None
        if instruction.op == "mul" and zero in operands:
            same = zero
        elif instruction.op in ("add", "sub") and operands[1] == zero:
            same = operands[0]
        elif instruction.op == "add" and operands[0] == zero:
            same = operands[1]
        elif (
            instruction.op in ("div", "neg", "abs", "sign", "sqrt", "cast") and operands[0] == zero
        ):
            same = zero
        equals.append(same)
    return all([equals[new] == old for new, old in zip(program.outputs, olds, strict=True)])


_EXACT = (
    *("add", "sub", "mul", "div", "sqrt", "neg", "abs", "max", "min", "select"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
"""Instructions that round once by IEEE 754, or not at all."""


def fused_op(
    name: str,
    signature: str,
    program: Function,
    *,
    gradient: Function | None = None,
    has_rule: bool = False,
    check: Check | None = None,
    where: str | None = None,
    traces_at_once: bool = False,
) -> Op:
    """Define an op by its program and return it.

    Args:
        name: the op's name.
        signature: see `compiler.ops.language.expressions`.
        program: takes an `Expression` per operand, and the attributes by keyword; returns one
            expression per output, a tuple of them where there are several.
        gradient: takes, by their names, what it needs of the operands, the outputs and their
            gradients (`dy` for an output `y`), and the attributes; returns one expression per float
            operand. Derived from the program where it is None, and for outputs whose gradients it
            does not name.
        has_rule: its gradient is no program but a rule, which the caller registers.
        check: refuses, by OpTypeError, what the signature cannot say.
        where: the file that knows, by default the caller's.
        traces_at_once: run the program when types are inferred, so that what is wrong with it is
            told with the line that calls the op.

    Raises:
        ValueError: the signature is none, or the name is taken.
        OpTypeError: a function takes what it may not, or no program comes out of an elementwise op
            without attributes.
    """
    where = where or sys._getframe(1).f_code.co_filename
    from compiler.graph.graph import gradient as gradients
    from compiler.ops.language.vjp import derived_gradient, vjp_of  # of what is defined here

    parsed = read_signature(signature)
    attributes = attributes_of(program)
    inputs, outputs = [[spec.name for spec in side] for side in (parsed.inputs, parsed.outputs)]
    expect_takes(program, inputs, "program")
    custom = None
    if gradient is not None:
        custom = read_gradient(gradient, [*inputs, *outputs], outputs, attributes)
    draft = FusedOp(Op(name), parsed, program, attributes, custom, check, where, traces_at_once)
    single = _instruction_of(draft)  # what is no program says so before anything is registered
    fused = replace(draft, op=define(name))
    if traces_at_once:
        FOREIGN.append(fused)
    op = fused.op
    definition.register(op, fused, where)
    infer_type.register(op, definition_cache(1024)(fused.infer), where)
    register_program(op, fused, where)
    if not has_rule and any([spec.elements != "bool" for spec in parsed.outputs]):
        by_rule = single if gradient is None else None
        gradients.register(op, derived_gradient(fused, by_rule), where)
        if by_rule is None:
            vjp_of(fused)
    if single is not None and single.op in _EXACT:
        is_exact.register(op, True, where)
    if single is not None and single.operands == tuple(range(len(parsed.inputs))):
        OP_OF_INSTRUCTION.setdefault(single.op, op)
    return op


def _instruction_of(found: FusedOp) -> Instruction | None:
    """Return the one instruction on nothing but its operands that an op is; None for any other.

    Raises OpTypeError where no program comes out of an elementwise op without attributes.
    """
    if not found.signature.is_elementwise or found.attributes:
        return None
    dtypes = {"bool": DType.BOOL} | dict.fromkeys(("int", "whole", "bits"), DType.INT64)
    specs = found.signature.inputs
    types = tuple([TensorType(dtypes.get(s.elements, DType.FLOAT32), ()) for s in specs])
    found.infer(types, NO_ATTRS)
    instructions = trace(found, types, NO_ATTRS).instructions
    return instructions[0] if len(instructions) == 1 else None


# Until every pass that cares for gradients has run (scale, skipped steps, clipping) a staged update
# is one node like any other update. Then the pass `stage_updates` puts in its place what its
# function emits: ordinary nodes, and updates by a program that read them.
#
# The function takes a `CompositeBuilder`, the operands as expressions, and attributes by keyword;
# it returns the new values, in the order of the outputs. What it emits must read none of them.


@dataclass(frozen=True, slots=True)
class CompositeBuilder:
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
        return self.read(self.b.emit_one(SUM, x.value, axes=over, keepdims=axes is not None))

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
        return self.read(self.b.emit_one(MATMUL, a.value, b.value))

    def turned(self, a: Expression) -> Expression:
        """Return a matrix with rows as columns."""
        return self.read(self.b.emit_one(TRANSPOSE, a.value, perm=(1, 0)))


EmitUpdate = Callable[..., tuple[ValueId, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class CompositeUpdate:
    """What a definition says. Equal to itself alone."""

    function: EmitUpdate
    attributes: tuple[Attribute, ...]
    num_operands: int

    def emit(self, b: GraphBuilder, inputs: Sequence[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Emit what the update is made of; return the new values of what it writes over."""
        stage = CompositeBuilder(b, GraphEmitter(b), tuple(inputs[self.num_operands :]))
        operands = [stage.read(value) for value in inputs[: self.num_operands]]
        settings = settings_of(self.attributes, attrs)
        if settings.pop(MAXIMIZE.name, False):
            operands[1] = -operands[1]
        return self.function(stage, *operands, **settings)


stages = OpAttr[CompositeUpdate]("stages", "what an update is made of; read by stage_updates")


def composite_update(
    name: str, signature: str, function: EmitUpdate, *, settings: type | None = None
) -> Op:
    """Define an update by what it is made of, and return it.

    Signature and `settings` are those of `update_op`, and so is the last input, `skip`.
    """
    where = sys._getframe(1).f_code.co_filename
    op = define(name)
    types: TypeSignature = read_types(signature.replace(" ->", ", skip? = int64 ->"))
    names = [row.name for row in types.operands if not row.optional]
    attributes = (*attributes_of(settings or function), MAXIMIZE)
    composite = CompositeUpdate(_by_keywords(function, settings), attributes, len(names))
    over = tuple([(out, names.index(result)) for out, result in enumerate(types.results)])

    def infer(inputs: Types, attrs: Attrs) -> Types:
        settings_of(composite.attributes, attrs)
        return types.infer(inputs)

    def run(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
        values = [np.asarray(array) for array in arrays]
        operand_types = tuple([TensorType(DType(a.dtype.name), a.shape) for a in values])
        b, inputs, results = _alone(composite, operand_types, attrs)
        value_of = dict(zip(inputs, values, strict=True))
        for node in b.nodes[len(inputs) :]:
            operands = [value_of[v] for v in node.inputs]
            outputs = (constant_array(node),) if node.op is CONSTANT else ()
            outputs = outputs or reference.get(node.op)(node.attrs, *operands)
            value_of |= dict(zip(node.outputs, outputs, strict=True))
        return tuple([value_of[value] for value in results])

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        b, operands, _ = _alone(composite, inputs, attrs)
        rows = [
            cost.get(node.op)(
                tuple([b.type_of(v) for v in node.inputs]),
                tuple([b.type_of(v) for v in node.outputs]),
                node.attrs,
            )
            for node in b.nodes[len(operands) :]
            if node.op is not CONSTANT
        ]
        return Cost(sum([c.flops for c in rows]), sum([t.size_bytes for t in (*inputs, *outputs)]))

    stages.register(op, composite, where)
    input_output_aliases.register(op, over, where)
    infer_type.register(op, infer, where)
    reference.register(op, run, where)
    cost.register(op, work, where)
    return op


def _alone(
    found: CompositeUpdate, types: Types, attrs: Attrs
) -> tuple[GraphBuilder, tuple[ValueId, ...], tuple[ValueId, ...]]:
    """Return an update in a graph of its own, the inputs there and the new values."""
    b = GraphBuilder()
    inputs = tuple(
        [
            b.emit_one(INPUT, name=str(i), dtype=t.dtype.value, shape=t.shape)
            for i, t in enumerate(types)
        ]
    )
    return b, inputs, found.emit(b, inputs, attrs)
