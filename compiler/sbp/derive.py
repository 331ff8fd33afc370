"""Signatures of an op that is a program, from its program.

The program is followed once for every axis of the tensor that it walks over, with a word in place
of each value: what a rank knows of it that has a slice of that axis alone.

    row_sum(x)          x split along the rows' columns    ->  partial: each rank has its own sum
    row_sum(x) * scale  partial times what all have        ->  partial still
    x - row_max(x)      partial (max) beside a split       ->  the maximum is made whole first

A partial value stays partial as long as what is made of it is linear. What is made whole on the way
(`CandidateSignature.whole`) is a collective in the op's local form, so that softmax, norms and
cross entropy of classes split over ranks need no op of their own. Nothing is made whole that came
partial: that is the business of whoever brought it.

The numbers of rows and columns are those of the rank's part, and so are random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from compiler.contract.attrs import Attrs
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.sbp import (
    BROADCAST,
    PARTIAL,
    PARTIAL_MAX,
    PARTIAL_MIN,
    ReduceOp,
    Sbp,
    Shape,
    Split,
)
from compiler.graph import program_builder
from compiler.graph.columns import SbpSignature
from compiler.graph.program_builder import IterationDomain, ProgramBuilder
from compiler.graph.registry import SIGNED, Op, Types, kernel_op
from compiler.ops.language.define import Update, update
from compiler.ops.language.program_ops import FUSED

_MOST_SUBSETS = 4
"""Up to this many operands, every subset of partial ones is tried; beyond, single ones and all."""


class ShardState(Enum):
    """What a rank knows of a value: all of it, its slice, its share of a sum or of an extreme."""

    ALL = "all"
    SLICE = "slice"
    SHARE = "share"
    SHARE_OF_MAX = "share of max"
    SHARE_OF_MIN = "share of min"

    __hash__ = object.__hash__


_SHARES = {
    ShardState.SHARE: PARTIAL,
    ShardState.SHARE_OF_MAX: PARTIAL_MAX,
    ShardState.SHARE_OF_MIN: PARTIAL_MIN,
}
_EXTREMES = {"max": ShardState.SHARE_OF_MAX, "min": ShardState.SHARE_OF_MIN}


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A call of an op as a program on a tensor; `num_leading` axes of it are its rows."""

    frame: IterationDomain
    program: FusedProgram
    num_leading: int


@dataclass(frozen=True, slots=True)
class CandidateSignature:
    """A signature, and what the local form of it does on the way.

    `axis` is the one of the walked tensor that is split, or -1. `whole` are pairs (instruction,
    value): before that instruction of the program the value, a share until then, is made whole.
    """

    signature: SbpSignature
    axis: int
    whole: tuple[tuple[int, int, ReduceOp], ...] = ()
    reads_position: bool = False


class _LostError(Exception):
    """No SBP word describes what a rank holds of a value."""


def call_of(op: Op, inputs: Types, outputs: Types, attrs: Attrs) -> ProgramCall | None:
    """Return a call as a program; None of an op that is none, or not for these shapes."""
    if update.has(op):
        if kernel_op.get(op) != FUSED.name:
            return None
        return _call_of_update(update.get(op), inputs, outputs, attrs)
    if not program_builder.expand.has(op):
        return None
    frame = program_builder.frame.get(op)(inputs, outputs, attrs)
    if frame is None:
        return None
    cut = len(frame.shape) - (frame.num_trailing or 0)
    if frame.num_trailing is None:  # every element alone: any space will do
        cut = 0
    rows, columns = 1, 1
    for extent in frame.shape[:cut]:
        rows *= extent
    for extent in frame.shape[cut:]:
        columns *= extent
    p = ProgramBuilder(rows, columns)
    values = tuple(
        [
            p.input(ProgramInput(t.dtype, _kind(aligned, frame, cut)))
            for t, aligned in zip(inputs, frame.inputs, strict=True)
        ]
    )
    results = program_builder.expand.get(op)(p, attrs, inputs, values)
    return ProgramCall(frame, p.whole(results), cut)


def _call_of_update(found: Update, inputs: Types, outputs: Types, attrs: Attrs) -> ProgramCall:
    """Return an update as a program on its variable; the flag that skips it is no operand."""
    shapes = [t.shape for t in inputs[: found.num_operands]]
    frame = IterationDomain(shapes[0], tuple(shapes), tuple([t.shape for t in outputs]))
    return ProgramCall(frame, found.program_for(inputs, attrs), 0)


def _kind(aligned: Shape, frame: IterationDomain, cut: int) -> Kind:
    """Return how an operand lies in the space; where two kinds are the same, the larger one."""
    if frame.num_trailing is None:
        return Kind.FULL
    leading = len(aligned) - (len(frame.shape) - cut)
    wide, has_rows = frame.shape[cut:], leading > 0
    last = aligned[max(leading, 0) :]
    has_columns = bool(last) and (last == wide or any([n != 1 for n in last]))
    if has_rows:
        return Kind.FULL if has_columns or not wide else Kind.ROW
    return Kind.COLUMN if has_columns else Kind.SCALAR


def derived(op: Op, inputs: Types, outputs: Types, attrs: Attrs) -> tuple[CandidateSignature, ...]:
    """Return the signatures that follow from an op's program, in the order of the axes."""
    call = call_of(op, inputs, outputs, attrs)
    if call is None or 0 in call.frame.shape:
        return ()
    inputs = inputs[: len(call.frame.inputs)]
    tried = [*_split_ways(call, inputs), *_partial_ways(call, inputs)]
    candidates: dict[SbpSignature, CandidateSignature] = {}
    for axis, states in tried:
        try:
            way = _follow(call, axis, states)
        except _LostError:
            continue
        words = _words(call, axis, way, inputs, outputs)
        if words is not None:
            candidates.setdefault(words.signature, words)
    return tuple(candidates.values())


def _split_ways(call: ProgramCall, inputs: Types) -> Iterator[tuple[int, tuple[ShardState, ...]]]:
    """Return, for each axis that can be split, what a rank knows of the operands."""
    for axis, extent in enumerate(call.frame.shape):
        if extent > 1:
            has_axis = [_has(call.frame, aligned, axis) for aligned in call.frame.inputs]
            if any(has_axis):
                yield axis, tuple([ShardState.SLICE if has else ShardState.ALL for has in has_axis])


def _partial_ways(call: ProgramCall, inputs: Types) -> Iterator[tuple[int, tuple[ShardState, ...]]]:
    """Return choices of operands that are partial, all others being whole."""
    may = [i for i, t in enumerate(inputs) if t.dtype.is_float or t.dtype in SIGNED]
    sizes = range(1, len(may) + 1) if len(may) <= _MOST_SUBSETS else (1, len(may))
    for share in _SHARES:
        for size in sizes:
            for subset in combinations(may, size):
                states = [share if i in subset else ShardState.ALL for i in range(len(inputs))]
                yield -1, tuple(states)


def _has(frame: IterationDomain, aligned: Shape, axis: int) -> bool:
    """Whether an operand is as long as the tensor along an axis of it."""
    local_axis = axis - (len(frame.shape) - len(aligned))
    return local_axis >= 0 and aligned[local_axis] == frame.shape[axis]


@dataclass(slots=True)
class _Way:
    """What is known of the values of a program so far."""

    states: list[ShardState]
    whole: list[tuple[int, int, ReduceOp]]
    reads_position: bool = False


def _follow(call: ProgramCall, axis: int, states: Sequence[ShardState]) -> _Way:
    """Follow a program. Raises _LostError."""
    way = _Way([*states], [])
    for number, instruction in enumerate(call.program.instructions):
        way.states.append(_result(call, axis, way, number, instruction))
    return way


def _result(
    call: ProgramCall, axis: int, way: _Way, number: int, instruction: Instruction
) -> ShardState:
    name, operands = instruction.op, instruction.operands
    states = [way.states[v] for v in operands]
    if name in _REDUCTIONS:
        return _reduced(call, axis, instruction, states[0])
    if name in ("column_index", "row_index"):
        return _position(call, axis, instruction, way)
    if name == "philox" and axis >= 0:
        if {*states} != {ShardState.ALL} or len(operands) > 2:
            raise _LostError  # that of a part already
        way.reads_position = True
        return ShardState.SLICE
    if any([s in _SHARES for s in states]):
        state = _linear(call.program, instruction, states)
        if state is not None:
            return state
    for position, value in enumerate(operands):
        if states[position] in _SHARES:
            if axis < 0:
                raise _LostError  # it came partial
            by = _SHARES[states[position]].by
            # From here on the value is whole for all later instructions, too.
            if way.states[value] in _SHARES:
                way.whole.append((number, value, by))
            way.states[value] = states[position] = ShardState.ALL
    return ShardState.SLICE if ShardState.SLICE in states else ShardState.ALL


_REDUCTIONS = {
    "row_sum": ShardState.SHARE,
    "column_sum": ShardState.SHARE,
    "row_max": ShardState.SHARE_OF_MAX,
    "row_min": ShardState.SHARE_OF_MIN,
}


def _reduced(
    call: ProgramCall, axis: int, instruction: Instruction, state: ShardState
) -> ShardState:
    """Return what a rank knows of a reduction of a FULL value."""
    name, is_row = instruction.op, axis < call.num_leading
    if state in _SHARES:
        if axis >= 0 or state is not _REDUCTIONS[name]:
            raise _LostError
        return state
    if axis < 0 or (name == "column_sum") is not is_row:
        return state
    # A value that all have is repeated along the axis: each rank adds up its own repetitions.
    return _REDUCTIONS[name]


def _position(call: ProgramCall, axis: int, instruction: Instruction, way: _Way) -> ShardState:
    """Return what a rank knows of the numbers of rows or columns."""
    is_row = instruction.op == "row_index"
    if axis < 0 or is_row is not (axis < call.num_leading):
        return ShardState.ALL
    way.reads_position = True
    return ShardState.SLICE


def _linear(
    program: FusedProgram, instruction: Instruction, states: Sequence[ShardState]
) -> ShardState | None:
    """Return what a rank knows of a linear function of shares; None where it is none."""
    name, operands = instruction.op, instruction.operands
    if name in ("max", "min") and operands[0] == operands[1]:
        return states[0]  # a copy
    if name == "cast":
        # Shares may be larger than their sum: rounded to fewer digits they would lose its own.
        target, source = instruction.dtype, program.dtype_of(operands[0])
        is_kept = target.is_float and (target.itemsize >= source.itemsize or not source.is_float)
        return states[0] if is_kept else None
    if name == "select":
        either = [
            s for v, s in zip(operands[1:], states[1:], strict=True) if not _is_zero(program, v)
        ]
        is_alike = states[0] is ShardState.ALL and len({*either}) == 1
        is_zero = len(either) < 2 and either != [
            ShardState.SHARE
        ]  # a largest share is none beside 0
        return either[0] if is_alike and not is_zero else None
    if name in _EXTREMES:
        return _EXTREMES[name] if {*states} <= {ShardState.ALL, _EXTREMES[name]} else None
    is_linear = {
        "neg": states[:1] == [ShardState.SHARE],
        "add": states == [ShardState.SHARE, ShardState.SHARE],
        "sub": states == [ShardState.SHARE, ShardState.SHARE],
        "mul": {*states} == {ShardState.SHARE, ShardState.ALL},
        "div": states == [ShardState.SHARE, ShardState.ALL],
    }
    return ShardState.SHARE if is_linear.get(name, False) else None


def _is_zero(program: FusedProgram, value: int) -> bool:
    """Whether a value is the number 0, which is a share of every sum."""
    number = value - len(program.inputs)
    maker = program.instructions[number] if number >= 0 else None
    return maker is not None and maker.op == "constant" and maker.constants == (0,)


def _words(
    call: ProgramCall, axis: int, way: _Way, inputs: Types, outputs: Types
) -> CandidateSignature | None:
    """Return the signature of a way; None where nothing is split or partial of what it makes."""
    frame, program = call.frame, call.program
    ins = [
        _word(way.states[i], frame, aligned, axis, t.shape)
        for i, (aligned, t) in enumerate(zip(frame.inputs, inputs, strict=True))
    ]
    outs = [
        _word(way.states[v], frame, aligned, axis, t.shape)
        for v, aligned, t in zip(program.outputs, frame.outputs, outputs, strict=True)
    ]
    signature = SbpSignature(tuple(ins), tuple(outs))
    return CandidateSignature(signature, axis, tuple(way.whole), way.reads_position)


def _word(
    state: ShardState, frame: IterationDomain, aligned: Shape, axis: int, shape: Shape
) -> Sbp:
    """Return the word for an operand or result, whose axes of one element may have been added."""
    if state in _SHARES:
        return _SHARES[state]
    if axis < 0 or not _has(frame, aligned, axis):
        return BROADCAST
    local_axis = axis - (len(frame.shape) - len(aligned))
    # Axes of one element may be missing in either shape, so that the others are counted.
    place = len([n for n in aligned[:local_axis] if n != 1])
    axes = [i for i, n in enumerate(shape) if n != 1]
    return Split(axes[place])
