"""Where values come from: inputs, variables and constants, which no launch makes; random numbers.

Random bits, and the masks of dropout, are made by a counter-based generator, so that backward needs
no copy of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.sbp import PARTIAL, Split, local_slices, splits_of
from compiler.contract.types import DType, ShardingSpec, TensorType, ValueId, decoded, encoded
from compiler.graph.columns import (
    Grads,
    LocalCall,
    SbpSignature,
    Values,
    gradient_of,
    project,
    reference_of,
    sbp_signatures,
)
from compiler.graph.graph import GraphBuilder, Node, simplify
from compiler.graph.program_builder import IterationDomain, ProgramBuilder, expand, frame
from compiler.graph.registry import (
    Array,
    Cost,
    OpTypeError,
    Types,
    cost,
    define,
    expect_float,
    expect_inputs,
    expect_type,
    infer_type,
    is_source,
    reference,
)

INPUT = define("input")
"""() -> x. A tensor of the batch. Attrs: name, dtype, shape; of a rank's part, whole and splits."""

VARIABLE = define("variable")
"""() -> x. Persistent state. Attrs: name, dtype, shape, role, init (pairs); of a rank's part, whole
(the extents of the whole tensor) and splits (pairs of an axis of the mesh and one of it)."""

CONSTANT = define("constant")
"""() -> x. Attrs: dtype, shape, data (bytes, dense and row-major)."""

SCRATCH = "scratch"
"""The role of a variable whose value means nothing between two steps: it is never saved."""

ROUNDED = "rounded"
"""The role of a variable that is another one, `of` its init, in bfloat16: it is never saved."""

PACKED = "packed"
"""The role of what a launch keeps of a variable, `of` its init, from step to step."""

NUMBERS = "numbers"
"""The role of a variable that holds 0, 1, 2, ...: of one rank's part of it the first says where the
rank's rows begin, so that ranks with equal graphs tell their rows apart. It is never saved."""

EVALUATED = "evaluated"
"""The role of the count of batches that a training has evaluated, by which the random numbers of an
evaluation go. It follows from the number of steps, and is never saved."""

OF_MODEL = ("parameter", "buffer")
"""Roles of what a model keeps itself: what is trained, and what is not."""

ROLES = (*OF_MODEL, "optimizer", "counter", SCRATCH, ROUNDED, PACKED, NUMBERS, EVALUATED)
"""What a variable is for: the model's, state of an optimizer, a count, scratch, or a copy."""

UNSAVED = (SCRATCH, ROUNDED, PACKED, NUMBERS, EVALUATED)
"""Roles of what is no state: it means nothing between two steps, or follows from another one."""

MOST_AT_FIRST = 1e30
"""What an initialiser's numbers stay below, so that what is drawn is finite."""

for _op in (INPUT, VARIABLE, CONSTANT):
    is_source.register(_op, True)


def constant(b: GraphBuilder, array: Array) -> ValueId:
    """Emit a constant that holds a copy of `array`."""
    return b.emit_one(
        CONSTANT, dtype=str(array.dtype), shape=tuple(array.shape), data=array.tobytes()
    )


def scalar(b: GraphBuilder, value: float, dtype: DType) -> ValueId:
    """Emit a constant of shape () and the given dtype."""
    return b.emit_one(CONSTANT, dtype=dtype.value, shape=(), data=encoded(np.array(value), dtype))


def constant_array(node: Node) -> Array:
    """Return what a constant node holds, as a read-only array; bfloat16 as float32."""
    return _held(node.attrs)


def _held(attrs: Attrs) -> Array:
    array = decoded(cast("bytes", attrs["data"]), declared_dtype(attrs))
    return array.reshape(attrs.ints("shape"))


def is_scalar_constant(b: GraphBuilder, value: ValueId, number: float) -> bool:
    """Whether `value` is a constant of one element with exactly these bits: 0.0 is not -0.0."""
    node = b.producer_of(value)
    if node.op is not CONSTANT or b.type_of(value).num_elements != 1:
        return False
    return node.attrs["data"] == encoded(np.array(number), b.type_of(value).dtype)


def declared_type(attrs: Attrs) -> TensorType:
    """Return the type that attrs `dtype` and `shape` declare. Raises OpTypeError."""
    shape = attrs.ints("shape")
    if any(extent < 0 for extent in shape):
        raise OpTypeError(f"needs extents of 0 or more, got shape {list(shape)}")
    return TensorType(declared_dtype(attrs), shape)


def declared_part(attrs: Attrs) -> ShardingSpec | None:
    """Return what attrs `whole` and `splits` declare of an input or variable of one rank."""
    if "whole" not in attrs:
        return None
    splits = cast("tuple[tuple[str, int], ...]", attrs["splits"])
    return ShardingSpec(attrs.ints("whole"), splits)


def declared_dtype(attrs: Attrs) -> DType:
    """Return the dtype that attr `dtype` names. Raises OpTypeError."""
    name = attrs.str_("dtype")
    try:
        return DType(name)
    except ValueError:
        names = ", ".join(dtype.value for dtype in DType)
        raise OpTypeError(f"knows no dtype {name!r}; one of: {names}") from None


@infer_type.of(INPUT)
def _input_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs)
    return (declared_type(attrs),)


@infer_type.of(VARIABLE)
def _variable_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs)
    if attrs["role"] not in ROLES:
        raise OpTypeError(f"knows no role {attrs['role']!r}; one of: {', '.join(ROLES)}")
    return (declared_type(attrs),)


@infer_type.of(CONSTANT)
def _constant_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs)
    type_ = declared_type(attrs)
    size_bytes = len(cast("bytes", attrs["data"]))
    if size_bytes != type_.size_bytes:
        raise OpTypeError(f"needs {type_.size_bytes} bytes of data for {type_}, got {size_bytes}")
    return (type_,)


@reference.of(CONSTANT)
def _constant_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    return (_held(attrs).copy(),)


@cost.of(INPUT, VARIABLE, CONSTANT)
def _no_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, 0.0)


@sbp_signatures.of(INPUT, VARIABLE, CONSTANT)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Have any slice: each rank is given its own. What sums over batches may sum shares."""
    splits = [SbpSignature((), (Split(axis),)) for axis in range(outputs[0].rank)]
    is_sum = attrs.get("role") == SCRATCH and outputs[0].dtype.is_float
    return [*splits, SbpSignature((), (PARTIAL,))] if is_sum else splits


@project.of(INPUT, VARIABLE)
def _own_part(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit a rank's part, which says of what it is one, but not whose: other ranks' look alike."""
    attrs = {name: value for name, value in call.node.attrs.items() if name != "sbp"}
    if splits := splits_of(call.output_sbp(), call.mesh):
        whole = call.whole_outputs[0].shape
        attrs |= {"shape": call.output_shape(), "whole": whole, "splits": splits}
    return b.emit(call.node.op, (), attrs)


@project.of(CONSTANT)
def _constant_of_part(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    array = constant_array(call.node)
    if call.output_shape() == array.shape:
        return b.emit(CONSTANT, (), call.node.attrs)
    own = local_slices(array.shape, call.output_sbp(), call.mesh.shape, call.coordinates)
    return (constant(b, np.ascontiguousarray(array[own])),)


# The generator is Philox4x64-10, as numpy.random.Philox has it (Salmon et al., Parallel Random
# Numbers: As Easy as 1, 2, 3, SC 2011).

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


def keep_threshold(p: float) -> int:
    """Return the least number of 24 bits by which an element is kept."""
    return math.ceil(p * 2**24)


def dropout_mask(seed: int, step: int, key: int, p: float, n: int, first: int = 0) -> Array:
    """Return which of `n` elements from `first` on are kept, as bool [n].

    The generator's key is (seed, key) and its counter starts at step * 2^128, all modulo 2^64.
    Every element takes 32 bits of the stream, the low half of a word first; it is kept when the
    upper 24 of them make a number of at least p * 2^24, which is how `Generator.random` makes a
    float32.
    """
    is_kept: Array = random_bits(seed, step, key, n, first) >= keep_threshold(p)
    return is_kept


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
    parts = [random_bits(int(seed), int(step), key, count, int(first)) for first in firsts]
    return np.concatenate([*parts, np.empty(0, np.int32)]).reshape(shape)


@infer_type.of(RANDOM_BITS)
def _bits_type(inputs: Types, attrs: Attrs) -> Types:
    state = expect_inputs(inputs, "seed", "step", *["first"] * (len(inputs) == 3))
    attrs.int_("key")
    _expect_state(state, attrs.ints("shape"))
    return (TensorType(DType.INT32, attrs.ints("shape")),)


@reference_of(RANDOM_BITS)
def _bits_reference(attrs: Attrs, *state: Array) -> Array:
    return numbers_of_part(state, attrs.int_("key"), attrs.ints("shape"))


@frame.of(RANDOM_BITS)
def _bits_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain | None:
    return _frame_of(outputs[0].shape, (), inputs)


def _frame_of(shape: Shape, given: Iterable[Shape], state: Types) -> IterationDomain:
    """Return the frame of numbers for a shape: rows with a first one each are rows there, too.

    One element has an axis here, which tells it from seed and step.
    """
    shape = shape or (1,)
    places = tuple([(*type_.shape, 1) if type_.shape else () for type_ in state])
    return IterationDomain(
        shape, (*given, *places), (shape,), 1 if any(places) else None, is_whole=True
    )


@expand.of(RANDOM_BITS)
def _bits(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    return (p.random_bits(values, attrs.int_("key")),)


@reference_of(DROPOUT)
def _dropout_reference(attrs: Attrs, x: Array, *state: Array) -> Array:
    p = attrs.float_("p")
    is_kept = numbers_of_part(state, attrs.int_("key"), x.shape) >= keep_threshold(p)
    return np.asarray(x * np.where(is_kept, 1 / (1 - p), 0.0).astype(x.dtype))


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
def _dropout_frame(inputs: Types, outputs: Types, attrs: Attrs) -> IterationDomain | None:
    """A mask belongs to the row-major index of an element, so x must be FULL."""
    return _frame_of(outputs[0].shape, (outputs[0].shape or (1,),), inputs[1:])


@expand.of(DROPOUT)
def _dropout(
    p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
) -> tuple[int, ...]:
    """Multiply, so that NaN stays NaN where the mask drops it, as in the reference."""
    x, *state = values
    rate = attrs.float_("p")
    mask = p.philox(tuple(state), attrs.int_("key"), rate)
    factor = p.op("select", mask, p.constant_like(1 / (1 - rate), x), p.constant_like(0, x))
    return (p.op("mul", x, factor),)
