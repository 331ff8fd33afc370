"""Define an op by its program: one statement, from which all that is known of the op follows.

    SOFTSIGN = fused_op("softsign", "x -> y", lambda x: x / (1 + abs(x)))

From signature and program come the columns `infer_type`, `frame`, `expand`, `reference`, `cost`,
`is_exact` and `gradient`; so the op has kernels wherever programs run, and no file of its own in
any other room. Attributes are the program's keyword-only arguments, typed by annotation or default.
`compiler.fusion.derive` differentiates the program; `gradient` is another program in its place,
where a better formula is known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from compiler.attrs import NO_ATTRS, Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.check import ProgramError, check_program
from compiler.fusion.expressions import Expression, as_expression
from compiler.fusion.forms import Form, Slot, output_of, register_program, trace
from compiler.fusion.notation import Extents, OperandSpec, Signature, read_signature
from compiler.fusion.program import ELEMENTWISE, FusedProgram, Instruction, Kind, joined
from compiler.fusion.stated import (
    FOREIGN,
    Attribute,
    Function,
    OwnGradient,
    Settings,
    attributes_of,
    expect_takes,
    read_gradient,
    remembered,
    results_of,
    settings_of,
)
from compiler.ops.signature import Types, expect_inputs
from compiler.registry import Op, OpAttr, OpTypeError, define, infer_type, is_exact
from compiler.types import DType, TensorType

Check = Callable[[Types, Attrs], None]
"""What the signature cannot say; raises OpTypeError."""

_EXACT = (
    *("add", "sub", "mul", "div", "sqrt", "neg", "abs", "max", "min", "select"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
"""Instructions that round once by IEEE 754, or not at all."""

_OF_ELEMENTS = (*ELEMENTWISE, "constant", "cast")
"""Instructions that are the same whatever rows and columns there are."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedOp:
    """What a definition says. Equal to itself alone."""

    op: Op
    signature: Signature
    program: Function
    attributes: tuple[Attribute, ...]
    gradient: OwnGradient | None
    check: Check | None
    where: str
    traces_at_once: bool

    def settings(self, attrs: Attrs) -> Settings:
        """Return every attribute, defaults put in. Raises OpTypeError for wrong ones."""
        return settings_of(self.attributes, attrs)

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        """Return the types of the outputs."""
        expect_inputs(inputs, *[spec.name for spec in self.signature.inputs])
        made = self.signature.types_of(inputs)
        if self.attributes or attrs:
            self.settings(attrs)
        if self.check is not None:
            self.check(inputs, attrs)
        if self.traces_at_once and 0 not in [t.num_elements for t in inputs]:
            self._expect(trace(self, inputs, attrs), made)
        return made

    def _expect(self, program: FusedProgram, made: Types) -> None:
        """Check that a program is what the signature says. Raises OpTypeError."""
        for spec, value, type_ in zip(self.signature.outputs, program.outputs, made, strict=True):
            came = program.dtype_of(value)
            if came is not type_.dtype:
                is_bool = came is DType.BOOL
                mend = f"say '{spec.name}: bool'" if is_bool else "cast it with .to(...)"
                raise OpTypeError(
                    f"has a program that makes {spec.name} of {came}, where its signature says"
                    f" {type_.dtype}; {mend}"
                )
        for instruction in program.instructions:
            if self.signature.is_elementwise and instruction.op not in _OF_ELEMENTS:
                raise OpTypeError(
                    f"has a program with {instruction.op}, and its signature has no rows and"
                    " columns; say how operands lie, as in 'x[*, D] -> y[*, D]'"
                )
        try:
            check_program(program)
        except ProgramError as error:
            raise OpTypeError(f"has a program that cannot be computed: {error}") from None

    def form(self, inputs: Types, attrs: Attrs) -> Form:
        """Return how the operands of a call lie."""
        signature = self.signature
        made = signature.types_of(inputs)
        extents = None if signature.is_elementwise else signature.extents_of(inputs)
        return Form(_slots(signature.inputs, inputs), _slots(signature.outputs, made), extents)

    def emit(
        self, p: ProgramBuilder, attrs: Attrs, extents: Extents | None, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Emit the program on values; return one value per output."""
        specs = self.signature.inputs
        shapes = [() if extents is None else extents.of(s.kind or Kind.FULL) for s in specs]
        given = [Expression(p, v, shape) for v, shape in zip(values, shapes, strict=True)]
        says = "has a program that "
        results = results_of(says, self.program, *given, **self.settings(attrs))
        if len(results) != len(self.signature.outputs):
            raise OpTypeError(
                f"{says}returns {len(results)} values for {len(self.signature.outputs)} outputs"
            )
        wide = joined([p.kind_of(v) for v in values])
        kinds = [s.kind or wide for s in self.signature.outputs]
        return tuple([output_of(p, r, k) for r, k in zip(results, kinds, strict=True)])


definition = OpAttr[FusedOp]("definition", "the op's program and signature; read by derivation")


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
        signature: see `compiler.fusion.notation`.
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
    from compiler.fusion.products import derived_gradient, product_of  # of what is defined here
    from compiler.rules import gradient as gradients

    read = read_signature(signature)
    attributes = attributes_of(program)
    inputs, outputs = [[spec.name for spec in side] for side in (read.inputs, read.outputs)]
    expect_takes(program, inputs, "program")
    own = None
    if gradient is not None:
        own = read_gradient(gradient, [*inputs, *outputs], outputs, attributes)
    draft = FusedOp(Op(name), read, program, attributes, own, check, where, traces_at_once)
    single = _instruction_of(draft)  # what is no program says so before anything is registered
    found = replace(draft, op=define(name))
    if traces_at_once:
        FOREIGN.append(found)
    op = found.op
    definition.register(op, found, where)
    infer_type.register(op, remembered(1024)(found.infer), where)
    register_program(op, found, where)
    if not has_rule and any([spec.elements != "bool" for spec in read.outputs]):
        by_rule = single if gradient is None else None
        gradients.register(op, derived_gradient(found, by_rule), where)
        if by_rule is None:
            product_of(found)
    if single is not None and single.op in _EXACT:
        is_exact.register(op, True, where)
    if single is not None and single.operands == tuple(range(len(read.inputs))):
        OP_OF_INSTRUCTION.setdefault(single.op, op)
    return op


OP_OF_INSTRUCTION: dict[str, Op] = {}
"""The ops that are one instruction of their operands, in order; the first of each."""


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
    made = trace(found, types, NO_ATTRS).instructions
    return made[0] if len(made) == 1 else None


def inlined(op: Op, operands: tuple[object, ...], attrs: Attrs) -> tuple[Expression, ...]:
    """Return the outputs of an op inside another's program. Raises OpTypeError for one of none."""
    if not definition.has(op):
        raise OpTypeError(f"has a program that uses {op}, which is not defined by a program")
    found = definition.get(op)
    if found.traces_at_once:  # by somebody who may call methods of numbers
        first = next(o for o in operands if isinstance(o, Expression))
        operands = tuple([as_expression(o, first) for o in operands])
    return results_of("has a program that ", found.program, *operands, **found.settings(attrs))


def _slots(specs: tuple[OperandSpec, ...], types: Types) -> tuple[Slot, ...]:
    pairs = zip(specs, types, strict=True)
    return tuple([Slot(s.name, s.kind or Kind.FULL, t.dtype) for s, t in pairs])
