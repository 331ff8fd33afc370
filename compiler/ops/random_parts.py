"""Random numbers on many ranks: a part of a tensor has those that its elements have in the whole.

Ranks that have different rows of a batch drop different elements of it, and all of them together
those that one rank would.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.fusion.products import GraphEmitter
from compiler.graph import GraphBuilder
from compiler.ops.attention import ATTENTION, ATTENTION_GRAD
from compiler.ops.binary import MUL, WHERE
from compiler.ops.random import DROPOUT, RANDOM_BITS, least_kept
from compiler.ops.shape import reshape_to
from compiler.ops.signature import Types
from compiler.ops.slicing import SLICE
from compiler.ops.sources import scalar
from compiler.sbp.positions import PartPlace, first_numbers, row_major_numbers
from compiler.sbp.project import LocalCall, project
from compiler.sbp.signatures import SbpSignature, sbp_signatures
from compiler.sbp.words import BROADCAST, Split
from compiler.types import DType, ValueId


@sbp_signatures.of(RANDOM_BITS)
def _bits_signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Draw any slice of the numbers."""
    state = (BROADCAST,) * len(inputs)
    return [SbpSignature(state, (Split(axis),)) for axis in range(outputs[0].rank)]


def bits_of_part(
    b: GraphBuilder, state: tuple[ValueId, ...], key: int, place: PartPlace
) -> ValueId:
    """Emit the bits of a part of a tensor, as they are there; `state` is seed and step."""
    own = place.own
    if place.is_whole or 0 in own:
        return b.one(RANDOM_BITS, *state, shape=own, key=key)
    if place.is_contiguous or own[-1] > 1:
        first = first_numbers(b, place)
        return b.one(RANDOM_BITS, *state, first, shape=own, key=key)
    if place.shape[-1] == 1:
        return reshape_to(b, bits_of_part(b, state, key, place.without_last()), own)
    # A kernel counts along rows, which have one element here: so whole rows are drawn.
    last = len(own) - 1
    wide = bits_of_part(b, state, key, place.widened(last))
    rows, steps = place.part[last], (1,) * len(own)
    starts, stops = (*[0] * last, rows.start), (*own[:last], rows.stop)
    return b.one(SLICE, wide, starts=starts, stops=stops, steps=steps)


def kept_by(b: GraphBuilder, bits: ValueId, p: float) -> ValueId:
    """Emit whether elements with these bits are kept."""
    return GraphEmitter(b).op("ge", bits, scalar(b, least_kept(p), DType.INT32))


@project.of(RANDOM_BITS)
def _own_bits(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    key = call.node.attrs.int_("key")
    return (bits_of_part(b, call.inputs, key, PartPlace.of_output(call)),)


@project.of(ATTENTION, ATTENTION_GRAD)
def _own_heads(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit attention of the rank's heads, of whose weights are dropped those of the whole."""
    attrs, op = call.node.attrs, call.node.op
    heads = PartPlace.of_output(call)
    axes = range(len(heads.shape) - 2)
    is_whole = all([heads.own[axis] == heads.shape[axis] for axis in axes])
    if "p" not in attrs or is_whole:
        return b.emit(op, call.inputs, attrs)
    q, k = [type_.shape for type_ in call.whole_inputs[1 if op is ATTENTION_GRAD else 0 :][:2]]
    step = scalar(b, q[-2] * k[-2], DType.INT64)
    first = b.one(MUL, row_major_numbers(b, heads, axes), step)
    return b.emit(op, (*call.inputs, first), {**attrs, "numbered": True})


@project.of(DROPOUT)
def _own_dropout(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit dropout of the rank's part, with the mask that it has in the whole."""
    attrs, place = call.node.attrs, PartPlace.of_output(call)
    x, *state = call.inputs
    if place.is_whole:
        return b.emit(DROPOUT, call.inputs, attrs)
    if place.is_contiguous or place.own[-1] > 1:
        return b.emit(DROPOUT, (*call.inputs, first_numbers(b, place)), attrs)
    p, dtype = attrs.float_("p"), b.type_of(x).dtype
    bits = bits_of_part(b, tuple(state), attrs.int_("key"), place)
    kept = kept_by(b, bits, p)
    factor = b.one(WHERE, kept, scalar(b, 1 / (1 - p), dtype), scalar(b, 0.0, dtype))
    return (b.one(MUL, x, factor),)
