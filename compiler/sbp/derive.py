"""Signatures of an op that is a program, from its program.

The program is followed once for every axis of the tensor that it walks over, with an SBP word in
place of each value: how it lies where that axis alone is split. `Split` names the axis of the
walked tensor here; in the signature it is that of the operand or result.

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
from itertools import combinations

from compiler.contract.attrs import Attrs
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.sbp import (
    BROADCAST,
    PARTIAL,
    PARTIAL_MAX,
    PARTIAL_MIN,
    NdSbp,
    Partial,
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


_SHARES = (PARTIAL, PARTIAL_MAX, PARTIAL_MIN)
_EXTREMES: dict[str, Sbp] = {"max": PARTIAL_MAX, "min": PARTIAL_MIN}


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A call of an op as a program on a tensor; `num_leading` axes of it are its rows."""

    frame: IterationDomain
    program: FusedProgram
    num_leading: int


@dataclass(frozen=True, slots=True)
class CandidateSignature:
    """A signature, and what the local form of it does on the way.

    `whole` are triples (instruction, value, reduction): before that instruction of the program the
    value, a share until then, is made whole.
    """

    signature: SbpSignature
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
    candidates: dict[SbpSignature, CandidateSignature] = {}
    for axis, words in [*_split_ways(call), *_partial_ways(inputs)]:
        try:
            way = _follow(call, axis, words)
        except _LostError:
            continue
        candidate = _candidate(call, axis, way, inputs, outputs)
        candidates.setdefault(candidate.signature, candidate)
    return tuple(candidates.values())


def _split_ways(call: ProgramCall) -> Iterator[tuple[int, NdSbp]]:
    """Yield each axis that can be split, and the words of the operands."""
    for axis, extent in enumerate(call.frame.shape):
        if extent > 1:
            has_axis = [_has(call.frame, aligned, axis) for aligned in call.frame.inputs]
            if any(has_axis):
                yield axis, tuple([Split(axis) if has else BROADCAST for has in has_axis])


def _partial_ways(inputs: Types) -> Iterator[tuple[int, NdSbp]]:
    """Yield -1, for no axis, and choices of operands that are partial, all others being whole."""
    may = [i for i, t in enumerate(inputs) if t.dtype.is_float or t.dtype in SIGNED]
    sizes = range(1, len(may) + 1) if len(may) <= _MOST_SUBSETS else (1, len(may))
    for share in _SHARES:
        for size in sizes:
            for subset in combinations(may, size):
                yield -1, tuple([share if i in subset else BROADCAST for i in range(len(inputs))])


def _has(frame: IterationDomain, aligned: Shape, axis: int) -> bool:
    """Whether an operand is as long as the tensor along an axis of it."""
    local_axis = axis - (len(frame.shape) - len(aligned))
    return local_axis >= 0 and aligned[local_axis] == frame.shape[axis]


@dataclass(slots=True)
class _Way:
    """How the values of a program lie so far."""

    words: list[Sbp]
    whole: list[tuple[int, int, ReduceOp]]
    reads_position: bool = False


def _follow(call: ProgramCall, axis: int, inputs: NdSbp) -> _Way:
    """Follow a program. Raises _LostError."""
    way = _Way([*inputs], [])
    for number, instruction in enumerate(call.program.instructions):
        way.words.append(_result(call, axis, way, number, instruction))
    return way


def _result(call: ProgramCall, axis: int, way: _Way, number: int, instruction: Instruction) -> Sbp:
    name, operands = instruction.op, instruction.operands
    words = [way.words[v] for v in operands]
    if name in _REDUCTIONS:
        return _reduced(call, axis, instruction, words[0])
    if name in ("column_index", "row_index"):
        return _position(call, axis, instruction, way)
    if name == "philox" and axis >= 0:
        if {*words} != {BROADCAST} or len(operands) > 2:
            raise _LostError  # that of a part already
        way.reads_position = True
        return Split(axis)
    if any([isinstance(word, Partial) for word in words]):
        word = _linear(call.program, instruction, words)
        if word is not None:
            return word
    for value in operands:
        word = way.words[value]
        if isinstance(word, Partial):
            if axis < 0:
                raise _LostError  # it came partial
            # From here on the value is whole for all later instructions, too.
            way.whole.append((number, value, word.by))
            way.words[value] = BROADCAST
    return next((word for word in words if isinstance(word, Split)), BROADCAST)


_REDUCTIONS = {
    "row_sum": PARTIAL,
    "column_sum": PARTIAL,
    "row_max": PARTIAL_MAX,
    "row_min": PARTIAL_MIN,
}


def _reduced(call: ProgramCall, axis: int, instruction: Instruction, word: Sbp) -> Sbp:
    """Return how a reduction of a FULL value lies."""
    name, is_row = instruction.op, axis < call.num_leading
    if isinstance(word, Partial):
        if axis >= 0 or word != _REDUCTIONS[name]:
            raise _LostError
        return word
    if axis < 0 or (name == "column_sum") is not is_row:
        return word
    # A value that all have is repeated along the axis: each rank adds up its own repetitions.
    return _REDUCTIONS[name]


def _position(call: ProgramCall, axis: int, instruction: Instruction, way: _Way) -> Sbp:
    """Return how the numbers of rows or columns lie."""
    is_row = instruction.op == "row_index"
    if axis < 0 or is_row is not (axis < call.num_leading):
        return BROADCAST
    way.reads_position = True
    return Split(axis)


def _linear(program: FusedProgram, instruction: Instruction, words: Sequence[Sbp]) -> Sbp | None:
    """Return how a linear function of shares lies; None where it is none."""
    name, operands = instruction.op, instruction.operands
    if name in ("max", "min") and operands[0] == operands[1]:
        return words[0]  # a copy
    if name == "cast":
        # Shares may be larger than their sum: rounded to fewer digits they would lose its own.
        target, source = instruction.dtype, program.dtype_of(operands[0])
        is_kept = target.is_float and (target.itemsize >= source.itemsize or not source.is_float)
        return words[0] if is_kept else None
    if name == "select":
        either = [
            w for v, w in zip(operands[1:], words[1:], strict=True) if not _is_zero(program, v)
        ]
        is_alike = words[0] == BROADCAST and len({*either}) == 1
        is_zero = len(either) < 2 and either != [PARTIAL]  # a largest share is none beside 0
        return either[0] if is_alike and not is_zero else None
    if name in _EXTREMES:
        return _EXTREMES[name] if {*words} <= {BROADCAST, _EXTREMES[name]} else None
    is_linear = {
        "neg": words[:1] == [PARTIAL],
        "add": words == [PARTIAL, PARTIAL],
        "sub": words == [PARTIAL, PARTIAL],
        "mul": {*words} == {PARTIAL, BROADCAST},
        "div": words == [PARTIAL, BROADCAST],
    }
    return PARTIAL if is_linear.get(name, False) else None


def _is_zero(program: FusedProgram, value: int) -> bool:
    """Whether a value is the number 0, which is a share of every sum."""
    number = value - len(program.inputs)
    maker = program.instructions[number] if number >= 0 else None
    return maker is not None and maker.op == "constant" and maker.constants == (0,)


def _candidate(
    call: ProgramCall, axis: int, way: _Way, inputs: Types, outputs: Types
) -> CandidateSignature:
    """Return the signature of a way."""
    frame, program = call.frame, call.program
    ins = [
        _word(way.words[i], frame, aligned, axis, t.shape)
        for i, (aligned, t) in enumerate(zip(frame.inputs, inputs, strict=True))
    ]
    outs = [
        _word(way.words[v], frame, aligned, axis, t.shape)
        for v, aligned, t in zip(program.outputs, frame.outputs, outputs, strict=True)
    ]
    signature = SbpSignature(tuple(ins), tuple(outs))
    return CandidateSignature(signature, tuple(way.whole), way.reads_position)


def _word(walked: Sbp, frame: IterationDomain, aligned: Shape, axis: int, shape: Shape) -> Sbp:
    """Return the word for an operand or result, whose axes of one element may have been added."""
    if isinstance(walked, Partial):
        return walked
    if axis < 0 or not _has(frame, aligned, axis):
        return BROADCAST
    # Axes of one element may be missing in either shape, so that the others are counted.
    place = _long_axes(aligned).index(axis - (len(frame.shape) - len(aligned)))
    return Split(_long_axes(shape)[place])


def walked_sbp(frame: IterationDomain, inputs: Types, signature: SbpSignature) -> Sbp:
    """Return the word of the walked tensor: of its axis that a split operand of a call has."""
    for aligned, type_, word in zip(frame.inputs, inputs, signature.inputs, strict=False):
        if isinstance(word, Split):
            place = _long_axes(type_.shape).index(word.axis)
            axis = _long_axes(aligned)[place] + len(frame.shape) - len(aligned)
            if _has(frame, aligned, axis):
                return Split(axis)
    return BROADCAST


def _long_axes(shape: Shape) -> list[int]:
    """Return the axes of more or less than one element."""
    return [axis for axis, extent in enumerate(shape) if extent != 1]
