"""Element types, tensor types and the dense ids of graph and plan.

A `TensorType` is a dtype and a static shape; nothing in the engine is dynamic. Ids are `NewType`s
over int, dense from 0, so that a fact about every value is a tuple indexed by id. numpy has no
bfloat16: constants and references hold such numbers as bits, or as float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NewType

import numpy as np

from compiler.contract.codec import Bounds

Extent = Annotated[int, Bounds(0, 1 << 48)]
Axis = Annotated[int, Bounds(0, 31)]

MOST_ELEMENTS = 10**12 - 1
"""The limit of a tensor and of an axis, also for one that is never whole: hours of computing."""

ValueId = NewType("ValueId", int)
NodeId = NewType("NodeId", int)
ActorId = NewType("ActorId", int)
RegisterId = NewType("RegisterId", int)
StreamId = NewType("StreamId", int)
Version = NewType("Version", int)


class DType(Enum):
    """Element type; the value is numpy's name of it.

    Only bfloat16 is unknown to numpy: `numpy_dtype` says what holds it.
    """

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"

    __hash__ = object.__hash__  # a member is equal to itself alone; Enum's own is not in C

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through values of this type."""
        return self in _FLOATS

    @property
    def is_integer(self) -> bool:
        """Whether values of this type may index an axis."""
        return self.value.startswith(("int", "uint"))

    def __str__(self) -> str:
        return str(self._value_)  # `value` is a descriptor in Python, five times as slow


class Phase(Enum):
    """Which part of a step a node or launch belongs to.

    Autodiff tells forward, backward and update apart; recompute is what runs once more so that its
    bytes could be free in between.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    RECOMPUTE = "recompute"

    __hash__ = object.__hash__


_FLOATS = frozenset([d for d in DType if d.value.startswith(("float", "bfloat"))])

_ITEMSIZE = {
    # Digits of the name are bits: int("16") // 8. `bool` has none.
    d: 1 if d is DType.BOOL else int("".join(c for c in d.value if c.isdigit())) // 8
    for d in DType
}

HALVES = (DType.BFLOAT16, DType.FLOAT16)
"""Floats of 16 bits: kernels compute them in float32."""

_NUMPY = {d: np.dtype(np.uint16 if d is DType.BFLOAT16 else d.value) for d in DType}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the dtype of arrays that hold such elements: uint16, the bits, for bfloat16."""
    return _NUMPY[dtype]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and static shape of a value."""

    dtype: DType
    shape: tuple[Extent, ...]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        """Product of the extents; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def is_possible(self) -> bool:
        """Whether no extent is negative, and there are not too many elements for any machine."""
        # The product may be 0 though one extent is far too large: both are looked at.
        if not self.shape:
            return True
        least = min(self.shape)
        largest = self.num_elements if least > 0 else max(self.shape)
        return least >= 0 and largest <= MOST_ELEMENTS

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense copy."""
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The part of a whole tensor that one rank holds; other ranks of the mesh hold the others.

    `shape` is that of the whole. `splits` are pairs (name of an axis of the mesh, axis of the
    tensor), outermost first: the part of one is the whole of the next. Which part a rank has
    follows from its place in the mesh (`compiler.contract.sbp.shard_slices`), so ranks whose parts
    are as large say the same here.
    """

    shape: tuple[Extent, ...]
    splits: tuple[tuple[str, Axis], ...]

    def __str__(self) -> str:
        by = ", ".join([f"axis {axis} by {name!r}" for name, axis in self.splits])
        return f"{list(self.shape)} split along {by or 'no axis'}"


@functools.lru_cache(1 << 12)  # a graph has few distinct shapes
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a dense row-major array of `shape`."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        # An empty axis counts as one element, so that strides stay positive.
        step *= max(extent, 1)
    return tuple(reversed(strides))


def runs_of(
    shape: tuple[int, ...], strides_bytes: tuple[int, ...], itemsize: int
) -> tuple[int, int] | None:
    """Return the bytes of a run of elements and the distance of two runs.

    None where the elements do not lie in runs at one distance. A place in a register has to.
    """
    run, period, count = itemsize, 0, 1
    axes = [a for a in zip(strides_bytes, shape, strict=True) if a[1] != 1]
    # Smallest stride first: elements join into a run, then runs into rows at one distance.
    for stride, length in sorted(axes):
        if count == 1 and stride == run:
            run *= length
        elif count == 1 and stride > run:
            period, count = stride, length
        elif count > 1 and stride == period * count:
            count *= length
        else:
            return None
    return run, period or run


# bfloat16 is the upper half of a float32: eight bits of exponent, seven of fraction (Kalamkar et
# al., A Study of BFLOAT16 for Deep Learning Training, 2019). References take and give float32 (or
# wider) arrays that hold bfloat16 values; whoever stores such a result in bfloat16 rounds it.

Array = np.ndarray[Any, np.dtype[Any]]

_LOW_BITS = np.uint32(16)
"""Bits of a float32 that a bfloat16 lacks. Typed: before numpy 2 a Python number made int64 of a
uint32 of rank 0."""


def to_bits(x: Array) -> Array:
    """Return the nearest bfloat16 of numbers, ties to even, as uint16; a NaN keeps its sign.

    Numbers of another type become float32 first.
    """
    with np.errstate(over="ignore"):
        bits = np.asarray(x).astype(np.float32).view(np.uint32)
        high = bits >> _LOW_BITS
        # Half a unit less one, plus the lowest bit that stays: a tie rounds to even.
        nearest = (bits + (np.uint32(0x7FFF) + (high & np.uint32(1)))) >> _LOW_BITS
    # A NaN with a fraction of low bits alone would become infinite: its quiet bit is set.
    return np.where(np.isnan(x), high | np.uint32(0x40), nearest).astype(np.uint16)


def from_bits(bits: Array) -> Array:
    """Return the float32 values of bfloat16 bits (uint16)."""
    return (np.asarray(bits).astype(np.uint32) << _LOW_BITS).view(np.float32)


def rounded(x: Array) -> Array:
    """Return numbers rounded to bfloat16 values, as float32."""
    return from_bits(to_bits(x))


def encoded(array: Array, dtype: DType) -> bytes:
    """Return the bytes of a dense value of a dtype that holds these numbers."""
    if dtype is DType.BFLOAT16:
        return to_bits(array).tobytes()
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(numpy_dtype(dtype)).tobytes()


def decoded(data: bytes, dtype: DType) -> Array:
    """Return the numbers in the bytes of a dense value, flat: float32 ones for bfloat16."""
    array = np.frombuffer(data, numpy_dtype(dtype))
    return from_bits(array) if dtype is DType.BFLOAT16 else array
