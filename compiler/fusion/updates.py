"""Define an update of variables by its program: new values from old ones, in the same memory.

    SGD = update_op("sgd_update", "param: float, grad = param, lr = param [] -> param", sgd)

The signature is that of `compiler.ops.signature.typed`; an output called like an operand is written
over it. From signature and program come the columns `infer_type`, `writes`, `reference`, `cost` and
`update`; an optimizer has no kernel of its own. Every update takes one more input, `skip` [] int64,
at the end, which is no operand of the program: where it is not 0, the launch does nothing.

The pass `update_programs` puts the program into the attributes of the node. From then on it is what
the update computes, and whoever runs programs runs it (`runs_as`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expressions import Expression
from compiler.fusion.forms import output_of
from compiler.fusion.interpreter import evaluate
from compiler.fusion.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.fusion.spaces import Space
from compiler.fusion.stated import Attribute, attributes_of, settings_of
from compiler.ops.fused import FUSED, program_flops, program_of, program_types, space_of
from compiler.ops.signature import Array, Check, Types, read_types
from compiler.registry import (
    Cost,
    Op,
    OpAttr,
    OpTypeError,
    cost,
    define,
    infer_type,
    reference,
    runs_as,
    writes,
)
from compiler.types import DType


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
        shares: attributes that must be in [0, 1). All numbers must be finite.
        check: refuses, by OpTypeError, what neither says.
        skippable: whether a broken step leaves out the update; counters go on.
    """
    where = sys._getframe(1).f_code.co_filename
    op = define(name)
    types = read_types(signature.replace(" ->", ", skip? = int64 ->") if skippable else signature)
    operands = [row for row in types.operands if not row.optional]
    names = [row.name for row in operands]
    attributes = (*attributes_of(program), *[MAXIMIZE] * (skippable and "grad" in names))
    over = tuple([(out, names.index(name)) for out, name in enumerate(types.results)])
    numbers = tuple([row.is_number and row.name not in types.results for row in operands])
    found = Update(program, attributes, numbers, over)

    def infer(inputs: Types, attrs: Attrs) -> Types:
        if "program" in attrs:  # which may read numbers more, for what is done to the gradient
            read = len(program_of(attrs).inputs)
            program_types(program_of(attrs), inputs[:read], attrs)
            inputs = (*inputs[: len(numbers)], *inputs[read:])
        made = types.infer(inputs)
        own = {a.name: attrs[a.name] for a in attributes if a.name in attrs}
        for name, value in settings_of(attributes, Attrs(own)).items():
            if not isinstance(value, (int, float)):
                continue
            if name in shares and not 0 <= value < 1:
                raise OpTypeError(f"needs 0 <= {name} < 1, got {value}")
            if not math.isfinite(value):
                raise OpTypeError(f"needs a finite {name}, got {value}")
        if check is not None:
            check(inputs, attrs)
        return made

    def run(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
        read = len(program_of(attrs).inputs) if "program" in attrs else len(numbers)
        given = _of_one_width([np.asarray(array) for array in arrays[:read]])
        if any([skip != 0 for skip in arrays[read:]]):
            return tuple([given[old].copy() for _, old in over])
        if "program" in attrs:
            whole, space = program_of(attrs), space_of(attrs)
        else:
            dtypes = tuple([DType(str(array.dtype)) for array in given])
            whole, space = _traced(found, dtypes, Attrs(attrs)), Space(1, given[0].size)
        made = zip(evaluate(whole, space, tuple(given)), over, strict=True)
        return tuple([new.reshape(given[old].shape) for new, (_, old) in made])

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        whole = program_of(attrs) if "program" in attrs else found.program_for(inputs, attrs)
        moved = sum([t.size_bytes for t in (*inputs, *outputs)])
        return Cost(program_flops(whole, Space(1, inputs[0].num_elements)), float(moved))

    update.register(op, found, where)
    writes.register(op, over, where)
    runs_as.register(op, FUSED.name, where)
    infer_type.register(op, lru_cache(maxsize=1024)(infer), where)
    reference.register(op, run, where)
    cost.register(op, work, where)
    return op


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
    made = found.program(*operands, **settings)
    results = made if isinstance(made, tuple) else (made,)
    news = [output_of(p, new, Kind.FULL) for new in results]
    return p.whole(tuple([_made_late(p, news[out], values[old]) for out, old in found.over]))


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
    known: list[int | None] = [zero if v == gradient else v for v in range(len(program.inputs))]
    for instruction in program.instructions:
        own = [known[v] for v in instruction.operands]
        found: int | None = None
        if instruction.op == "mul" and zero in own:
            found = zero
        elif instruction.op in ("add", "sub") and own[1] == zero:
            found = own[0]
        elif instruction.op == "add" and own[0] == zero:
            found = own[1]
        elif instruction.op in ("div", "neg", "abs", "sign", "sqrt", "cast") and own[0] == zero:
            found = zero
        known.append(found)
    return all([known[new] == old for new, old in zip(program.outputs, olds, strict=True)])
