"""What a launch does, in quantities that no machine changes.

A kernel describes a call as passes over bytes of its result, matrix products and calls of numpy;
`cost` turns that into time with the rates of a machine. So what is known of a kernel is written
once, beside the kernel, and holds for the planner's fixed rates and for measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from actors.kernels.interpret.blocks import BLOCK_BYTES

CALLS_PER_PRODUCT = 2
"""numpy's way to BLAS is twice as long as to a loop of its own (1.6 against 0.8 us)."""


NATIVE_CALLS = 0.1
"""What a call from C costs, in calls of numpy."""


class BytePass(Enum):
    """A sort of pass over bytes in cache; all of one sort cost about the same per byte."""

    SIMPLE = "simple"
    """Copies, and sums and products with a scalar: one array is read."""
    PLAIN = "plain"
    """Sums, products and comparisons of two arrays."""
    DIVIDE = "divide"
    ROOT = "root"
    EXP = "exp"
    """Exponentials and logarithms."""
    TANH = "tanh"
    POWER = "power"
    """Powers, sines and cosines."""
    REDUCE = "reduce"
    """numpy's own reductions; per byte of the operand."""
    STRIDED = "strided"
    """Passes whose innermost step is not one element."""
    GATHER = "gather"
    """Rows taken by index."""
    SCATTER = "scatter"
    """Elements added by index."""
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`count` products of a matrix [m, k] with one [k, n] in float32."""

    count: float
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.count * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class CWork:
    """What one launch in C does on one thread, and in how many pieces threads share it.

    `passes` pairs a sort with bytes: SIMPLE are those that are moved to and from memory, the others
    those of the elements that an instruction of the sort makes, in float32. `products` have the
    extents of one call of a library, and `attentions` those of what the visible scores take:
    `forward` ones first, then those of gradients. `openings`: how often the pool is opened.
    `reduces_rows`: a row is walked several times, each time after the one before has ended.
    """

    passes: tuple[tuple[BytePass, float], ...] = ()
    products: tuple[MatrixProduct, ...] = ()
    forward: tuple[MatrixProduct, ...] = ()
    backward: tuple[MatrixProduct, ...] = ()
    pieces: float = 1.0
    openings: float = 1.0
    reduces_rows: bool = False

    def then(self, other: CWork) -> CWork:
        """Return the work of both, cut like the one with more pieces."""
        return CWork(
            (*self.passes, *other.passes),
            (*self.products, *other.products),
            (*self.forward, *other.forward),
            (*self.backward, *other.backward),
            max(self.pieces, other.pieces),
            self.openings + other.openings,
            self.reduces_rows or other.reduces_rows,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does.

    `calls` of numpy; `loops` are inner loops beyond one per call, which broadcasting and strides
    cause; `passes` pairs a sort of pass with the bytes it goes over; `unswept` are operands
    (inputs, then outputs) that are not read as a whole. `in_c` tells what C does of a native
    launch: the planner prices the other fields, whoever simulates this machine asks for it.
    """

    calls: float = 1.0
    loops: float = 0.0
    passes: tuple[tuple[BytePass, float], ...] = ()
    products: tuple[MatrixProduct, ...] = ()
    unswept: tuple[int, ...] = ()
    in_c: Callable[[], CWork] | None = field(default=None, compare=False)

    def then(self, other: Work) -> Work:
        """Return the work of both; `unswept` are this one's."""
        return Work(
            self.calls + other.calls,
            self.loops + other.loops,
            (*self.passes, *other.passes),
            (*self.products, *other.products),
            self.unswept,
            self.in_c and other.in_c and partial(_both, self.in_c, other.in_c),
        )


def _both(one: Callable[[], CWork], other: Callable[[], CWork]) -> CWork:
    return one().then(other())


def item_weight(itemsize: int) -> float:
    """Return how many products of float32 take the time of one of a wider type."""
    return itemsize / 4


def over_blocks(
    elements: int,
    itemsize: int,
    passes: Mapping[BytePass, float],
    *,
    small_calls: float = 0.0,
    loops: float = 0.0,
    products: tuple[MatrixProduct, ...] = (),
) -> Work:
    """Return the work of passes over a tensor that is cut into blocks.

    `small_calls` are calls per block on operands far smaller than the block. Each entry of
    `products` is spread over the blocks.
    """
    size = elements * itemsize
    num_blocks = max(1, -(-size // BLOCK_BYTES))
    calls = sum(passes.values()) + small_calls + CALLS_PER_PRODUCT * len(products)
    swept = tuple([(sort, count * size) for sort, count in passes.items()])
    return Work(num_blocks * calls, loops, swept, products)


def over_operands(
    shape: tuple[int, ...],
    strides: Sequence[tuple[int, ...]],
    itemsizes: Sequence[int],
    sort: BytePass | None = None,
) -> Work:
    """Return the work of one call over operands of a shape, given by their strides, output last.

    `sort` is for what is slower than an addition. numpy walks the axes in the order of the output's
    strides and joins those that it can; what is left costs a loop each.
    """
    elements = math.prod(shape)
    if not elements:
        return Work()
    axes = [axis for axis, extent in enumerate(shape) if extent > 1]
    axes.sort(key=lambda axis: -abs(strides[-1][axis]))
    inner = 1
    for axis in reversed(axes):
        if axis != axes[-1] and any(own[axis] != own[axes[-1]] * inner for own in strides):
            break
        inner *= shape[axis]
    is_dense = not axes or all(
        own[axes[-1]] in (0, item) for own, item in zip(strides, itemsizes, strict=True)
    )
    if sort is None:
        sort = BytePass.SIMPLE if len(strides) < 3 else BytePass.PLAIN
        sort = sort if is_dense else BytePass.STRIDED
    return Work(1.0, elements // inner - 1.0, ((sort, float(elements * max(itemsizes))),))
