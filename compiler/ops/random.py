"""Dropout and random bits by a counter-based generator, so that backward needs no copy of a mask.

Generator: Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), as
numpy.random.Philox has it.
"""

from __future__ import annotations

import math

import numpy as np

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expansion import Frame, expand, frame
from compiler.graph import GraphBuilder, Node
from compiler.ops.rule import Grads, Values, array_of, gradient_of
from compiler.ops.signature import Array, Types, expect_inputs, expect_type, typed
from compiler.registry import Cost, OpTypeError, cost, define, infer_type
from compiler.rules import simplify
from compiler.types import DType, TensorType, ValueId

DROPOUT = define("dropout")
"""x, seed [], step [] -> x * mask / (1 - p). x floats, seed and step int64.

Attrs: p (0 <= p < 1), key (an int that tells the dropouts of a job apart). The mask depends only on
seed, step, key and the row-major index of the element.
"""

RANDOM_BITS = define("random_bits")
"""seed [], step [] -> 24 random bits for each element of a shape, int32. Attrs: shape, key.

The same stream as dropout's, so a pure function of seed, step, key and row-major index.
"""

_WORDS = 2**64


def _check(inputs: Types, attrs: Attrs) -> None:
    if not 0 <= attrs.float_("p") < 1:
        raise OpTypeError(f"needs 0 <= p < 1, got {attrs.float_('p')}")
    attrs.int_("key")


typed(DROPOUT, "x: float, seed = int64, step = int64 -> x", _check)


def dropout_mask(seed: int, step: int, key: int, p: float, n: int) -> Array:
    """Return which of `n` elements are kept, as bool [n].

    The generator's key is (seed, key) and its counter starts at step * 2^128, all modulo 2^64.
    Every element takes 32 bits of the stream, the low half of a word first; it is kept when the
    upper 24 of them make a number of at least p * 2^24, which is how `Generator.random` makes a
    float32.
    """
    kept: Array = random_bits(seed, step, key, n) >= math.ceil(p * 2**24)
    return kept


def random_bits(seed: int, step: int, key: int, n: int) -> Array:
    """Return the 24 bits of each of `n` elements, int32 [n]; see `dropout_mask`."""
    counter = np.array([0, 0, step % _WORDS, 0], np.uint64)
    keys = np.array([seed % _WORDS, key % _WORDS], np.uint64)
    generator = np.random.Philox(counter=counter, key=keys)
    bits = generator.random_raw((n + 1) // 2).astype("<u8").view("<u4")[:n]
    return (bits >> 8).astype(np.int32)


@infer_type.of(RANDOM_BITS)
def _bits_type(inputs: Types, attrs: Attrs) -> Types:
    seed, step = expect_inputs(inputs, "seed", "step")
    for type_, name in ((seed, "seed"), (step, "step")):
        expect_type(type_, name, TensorType(DType.INT64, ()))
    attrs.int_("key")
    return (TensorType(DType.INT32, attrs.ints("shape")),)


@array_of(RANDOM_BITS)
def _bits_reference(attrs: Attrs, seed: Array, step: Array) -> Array:
    shape = attrs.ints("shape")
    bits = random_bits(int(seed), int(step), attrs.int_("key"), math.prod(shape))
    return bits.reshape(shape)


@frame.of(RANDOM_BITS)
def _bits_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    shape = outputs[0].shape or (1,)
    return Frame(shape, ((), ()), (shape,), is_whole=True)


@expand.of(RANDOM_BITS)
def _bits(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    seed, step = values
    return (p.random_bits(seed, step, attrs.int_("key")),)


@array_of(DROPOUT)
def _dropout_reference(attrs: Attrs, x: Array, seed: Array, step: Array) -> Array:
    p = attrs.float_("p")
    kept = dropout_mask(int(seed), int(step), attrs.int_("key"), p, x.size).reshape(x.shape)
    return np.asarray(x * np.where(kept, 1 / (1 - p), 0.0).astype(x.dtype))


@cost.of(DROPOUT)
def _dropout_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Ten rounds of about 12 integer operations make 8 elements' bits."""
    return Cost(16.0 * inputs[0].num_elements, 2.0 * inputs[0].size_bytes)


@gradient_of(DROPOUT)
def _dropout_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    _, seed, step = node.inputs
    return *b.emit(DROPOUT, (dy, seed, step), node.attrs), None, None


@simplify.of(DROPOUT)
def _simplify_dropout(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    return inputs[:1] if node.attrs.float_("p") == 0 else None


@frame.of(DROPOUT)
def _dropout_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    """A mask belongs to the row-major index of an element, so x must be FULL.

    One element has an axis here, which tells it from seed and step.
    """
    shape = outputs[0].shape or (1,)
    return Frame(shape, (shape, (), ()), (shape,), is_whole=True)


@expand.of(DROPOUT)
def _dropout(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    """Multiply, so that NaN stays NaN where the mask drops it, as in the reference."""
    x, seed, step = values
    rate = attrs.float_("p")
    kept = p.philox(seed, step, attrs.int_("key"), rate)
    factor = p.op("select", kept, p.constant_like(1 / (1 - rate), x), p.constant_like(0, x))
    return (p.op("mul", x, factor),)
