"""Dropout and random bits by a counter-based generator, so that backward needs no copy of a mask.

Generator: Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), as
numpy.random.Philox has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import Frame, expand, frame
from compiler.graph import GraphBuilder, Node
from compiler.ops.rule import Grads, Values, array_of, gradient_of
from compiler.ops.signature import Array, Types, expect_float, expect_inputs, expect_type
from compiler.registry import Cost, OpTypeError, cost, define, infer_type
from compiler.rules import simplify
from compiler.types import DType, TensorType, ValueId

DROPOUT = define("dropout")
"""x, seed [], step [], first? -> x * mask / (1 - p). x floats, the others int64.

Attrs: p (0 <= p < 1), key (an int that tells the dropouts of a job apart). The mask depends only on
seed, step, key and the row-major index of the element. Where x is a part of a larger tensor, the
index is the one that the element has there: `first` is the index of x's first element, whose others
follow it; or of the first one of each row, of x's shape but for the last axis, of 2 or more.
"""

RANDOM_BITS = define("random_bits")
"""seed [], step [], first? -> 24 random bits for each element of a shape, int32. Attrs: shape, key.

The same stream as dropout's, so a pure function of seed, step, key and row-major index.
"""

_WORDS = 2**64

Shape = tuple[int, ...]


def _check(inputs: Types, attrs: Attrs) -> None:
    if not 0 <= attrs.float_("p") < 1:
        raise OpTypeError(f"needs 0 <= p < 1, got {attrs.float_('p')}")
    attrs.int_("key")


def _expect_state(given: Types, shape: Shape) -> None:
    """Check seed and step, and the numbers of first elements, for a tensor of a shape."""
    seed, step, *first = given
    for type_, name in ((seed, "seed"), (step, "step")):
        expect_type(type_, name, TensorType(DType.INT64, ()))
    if first and first[0].shape:
        expect_type(first[0], "first", TensorType(DType.INT64, shape[:-1]))
        if shape[-1] < 2:
            raise OpTypeError(f"needs rows of 2 elements or more, got shape {list(shape)}")
    elif first:
        expect_type(first[0], "first", TensorType(DType.INT64, ()))


@infer_type.of(DROPOUT)
def _dropout_type(inputs: Types, attrs: Attrs) -> Types:
    x, *state = expect_inputs(inputs, "x", "seed", "step", *["first"] * (len(inputs) == 4))
    expect_float(inputs, "x")
    _check(inputs, attrs)
    _expect_state(tuple(state), x.shape)
    return (x,)


def least_kept(p: float) -> int:
    """Return the least number of 24 bits by which an element is kept."""
    return math.ceil(p * 2**24)


def dropout_mask(seed: int, step: int, key: int, p: float, n: int, first: int = 0) -> Array:
    """Return which of `n` elements from `first` on are kept, as bool [n].

    The generator's key is (seed, key) and its counter starts at step * 2^128, all modulo 2^64.
    Every element takes 32 bits of the stream, the low half of a word first; it is kept when the
    upper 24 of them make a number of at least p * 2^24, which is how `Generator.random` makes a
    float32.
    """
    kept: Array = random_bits(seed, step, key, n, first) >= least_kept(p)
    return kept


def random_bits(seed: int, step: int, key: int, n: int, first: int = 0) -> Array:
    """Return the 24 bits of each of `n` elements from `first` on, int32 [n]; see `dropout_mask`."""
    counter = np.array([first // 8, 0, step % _WORDS, 0], np.uint64)
    keys = np.array([seed % _WORDS, key % _WORDS], np.uint64)
    generator = np.random.Philox(counter=counter, key=keys)
    skipped = first % 8
    words = generator.random_raw((skipped + n + 1) // 2).astype("<u8").view("<u4")
    return (words[skipped : skipped + n] >> 8).astype(np.int32)


def numbers_of_part(state: Sequence[Array], key: int, shape: Shape) -> Array:
    """Return the bits of a tensor that may be a part of another one, by seed, step and first."""
    seed, step, *rest = state
    firsts = rest[0].reshape(-1) if rest else np.zeros(1, np.int64)
    count = math.prod(shape) // max(firsts.size, 1)
    made = [random_bits(int(seed), int(step), key, count, int(first)) for first in firsts]
    return np.concatenate([*made, np.empty(0, np.int32)]).reshape(shape)


@infer_type.of(RANDOM_BITS)
def _bits_type(inputs: Types, attrs: Attrs) -> Types:
    state = expect_inputs(inputs, "seed", "step", *["first"] * (len(inputs) == 3))
    attrs.int_("key")
    _expect_state(state, attrs.ints("shape"))
    return (TensorType(DType.INT32, attrs.ints("shape")),)


@array_of(RANDOM_BITS)
def _bits_reference(attrs: Attrs, *state: Array) -> Array:
    return numbers_of_part(state, attrs.int_("key"), attrs.ints("shape"))


@frame.of(RANDOM_BITS)
def _bits_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    return _frame_of(outputs[0].shape, (), inputs)


def _frame_of(shape: Shape, given: Iterable[Shape], state: Types) -> Frame:
    """Return the frame of numbers for a shape: rows with a first one each are rows there, too.

    One element has an axis here, which tells it from seed and step.
    """
    shape = shape or (1,)
    places = tuple([(*type_.shape, 1) if type_.shape else () for type_ in state])
    return Frame(shape, (*given, *places), (shape,), 1 if any(places) else None, is_whole=True)


@expand.of(RANDOM_BITS)
def _bits(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    return (p.random_bits(values, attrs.int_("key")),)


@array_of(DROPOUT)
def _dropout_reference(attrs: Attrs, x: Array, *state: Array) -> Array:
    p = attrs.float_("p")
    kept = numbers_of_part(state, attrs.int_("key"), x.shape) >= least_kept(p)
    return np.asarray(x * np.where(kept, 1 / (1 - p), 0.0).astype(x.dtype))


@cost.of(DROPOUT)
def _dropout_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Ten rounds of about 12 integer operations make 8 elements' bits."""
    return Cost(16.0 * inputs[0].num_elements, 2.0 * inputs[0].size_bytes)


@gradient_of(DROPOUT)
def _dropout_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    _, *state = node.inputs
    return *b.emit(DROPOUT, (dy, *state), node.attrs), *[None] * len(state)


@simplify.of(DROPOUT)
def _simplify_dropout(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    return inputs[:1] if node.attrs.float_("p") == 0 else None


@frame.of(DROPOUT)
def _dropout_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    """A mask belongs to the row-major index of an element, so x must be FULL."""
    return _frame_of(outputs[0].shape, (outputs[0].shape or (1,),), inputs[1:])


@expand.of(DROPOUT)
def _dropout(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    """Multiply, so that NaN stays NaN where the mask drops it, as in the reference."""
    x, *state = values
    rate = attrs.float_("p")
    kept = p.philox(tuple(state), attrs.int_("key"), rate)
    factor = p.op("select", kept, p.constant_like(1 / (1 - rate), x), p.constant_like(0, x))
    return (p.op("mul", x, factor),)
