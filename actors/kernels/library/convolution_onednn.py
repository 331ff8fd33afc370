"""Convolutions by oneDNN, some images at a time, in the layouts that the library likes best.

Those are blocks of channels: 1.3 to 2 times as fast as plain tensors, also where elements are
brought there and back for each call, in planned scratch that stays in the caches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from actors.kernels.library import onednn
from actors.kernels.library.onednn import (
    DESTINATION,
    DESTINATION_GRAD,
    QUERY_OF,
    SOURCE,
    SOURCE_GRAD,
    WEIGHTS,
    WEIGHTS_GRAD,
    Matrix,
    Onednn,
    Primitive,
)
from compiler.contract.types import DType, contiguous_strides

_TRAINING, _DIRECT = 64, 1

ARGUMENTS = {
    "conv": (SOURCE, WEIGHTS, DESTINATION),
    "conv_input_grad": (SOURCE_GRAD, WEIGHTS, DESTINATION_GRAD),
    "conv_weight_grad": (SOURCE, WEIGHTS_GRAD, DESTINATION_GRAD),
}
"""Which arguments of the primitive of an op x, weight and y are."""

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """Extents, and steps in elements."""

    shape: Extents
    steps: Extents
    dtype: DType = DType.FLOAT32

    @property
    def is_channels_last(self) -> bool:
        """Whether the second axis is the innermost one of a dense tensor, with others to pass."""
        count, channels, *spatial = self.shape
        steps = contiguous_strides((count, *spatial, channels), 1)
        return channels > 1 and self.steps == (steps[0], 1, *steps[1:-1])


@dataclass(frozen=True, slots=True)
class ConvolutionForm:
    """A call: x and y of some images, the weight [groups, O / groups, C / groups, *kernel].

    All are of one type, but the gradient of a weight, a sum, is in float32.
    `is_product`: a gradient of weights that is a product of x and y as they lie, if they do.
    """

    op: str
    x: PlainTensor
    weight: PlainTensor
    y: PlainTensor
    strides: Extents
    dilation: Extents
    low: Extents
    high: Extents
    is_product: bool = False

    @property
    def reaches_beyond(self) -> bool:
        """Whether many windows of an input gradient lie beyond y, as where nothing is padded.

        With channels last the library makes that gradient as a convolution of y in a frame of
        zeros, which it multiplies like the rest: a 5 x 5 kernel from 10 x 10 to 14 x 14 took 870 us
        so, and 555 in blocks, with all that is brought there and back.
        """
        wide = math.prod(self.x.shape[2:])
        inside = math.prod(self.y.shape[2:]) * math.prod(self.strides)
        return self.op == "conv_input_grad" and 4 * wide > 5 * inside


@dataclass(frozen=True, slots=True)
class BlockedTensor:
    """How one operand goes to the library and back; its own layout takes `size_bytes`.

    `there` and `back` are the copies, `adds` the one back that adds; None where it lies so already.
    """

    size_bytes: int
    there: Primitive | None
    back: Primitive | None
    adds: Primitive | None


@dataclass(frozen=True, slots=True)
class ConvolutionCalls:
    """The primitive of a form, and what surrounds it.

    `arguments`: which of the primitive's x, weight and y are.
    """

    main: Primitive
    arguments: tuple[int, int, int]
    x: BlockedTensor
    weight: BlockedTensor
    y: BlockedTensor


def calls_of(form: ConvolutionForm) -> ConvolutionCalls | None:
    """Return the primitives of a form, made at the first call; None where one is refused."""
    # Kept whole: a net asks for the few forms that it has thousands of times.
    return onednn.shared(form, lambda: _calls(form))


def _calls(form: ConvolutionForm) -> ConvolutionCalls | None:
    if form.is_product:
        return _product(form)
    main = _primitive(form)
    if main is None:
        return None
    arguments = ARGUMENTS[form.op]
    operands = zip(arguments, (form.x, form.weight, form.y), strict=True)
    blocks = [_blocked(main, argument, plain) for argument, plain in operands]
    blocked = [tensor for tensor in blocks if tensor is not None]
    return ConvolutionCalls(main, arguments, *blocked) if len(blocked) == len(blocks) else None


def _product(form: ConvolutionForm) -> ConvolutionCalls | None:
    """Return dW [O, C] = y^T x of rows of places, x's brought together where they lie apart.

    The library's product writes weights as they are kept. None for channels that lie apart.
    """
    (count, channels, *spatial), results = form.x.shape, form.y.shape[1]
    places, real = count * math.prod(spatial), DType.FLOAT32
    dense = contiguous_strides((count, *spatial, channels), 1)
    rows = PlainTensor(form.x.shape, (dense[0], 1, *dense[1:-1]))
    x_step, y_step, there = _row_step(form.x), _row_step(form.y), None
    if y_step is None or form.x.steps[1] != 1:
        return None
    if x_step is None:
        library = onednn.require_library()
        with _described(library, form.x) as source, _described(library, rows) as target:
            there = _reorder(library, source, target)
        if there is None:
            return None
    main = onednn.matmul(
        Matrix(real, results, places, 1, y_step),
        Matrix(real, places, channels, x_step or channels, 1),
        Matrix(real, results, channels, channels, 1),
    )
    if main is None:
        return None
    x = BlockedTensor(places * channels * real.itemsize, there, None, None)
    as_it_is = BlockedTensor(0, None, None, None)
    # In the order x, weight, y: the product is y^T (source) times x (weights) into dW.
    return ConvolutionCalls(main, (WEIGHTS, DESTINATION, SOURCE), x, as_it_is, as_it_is)


def _row_step(plain: PlainTensor) -> int | None:
    """Return the step from place to place where it is one for all, with adjacent channels."""
    count, channels, *spatial = plain.shape
    first, step, *steps = plain.steps
    axes = [(n, s) for n, s in zip((count, *spatial), (first, *steps), strict=True) if n > 1]
    is_even = all([s == n * t for (_, s), (n, t) in itertools.pairwise(axes)])
    if step != 1 or not is_even:
        return None
    return axes[-1][1] if axes else channels


def reorder_primitive(one: PlainTensor, other: PlainTensor, *, adds: bool) -> Primitive | None:
    """Return the primitive that copies one plain tensor to another, or adds it to that."""

    def make() -> Primitive | None:
        library = onednn.require_library()
        with _described(library, one) as source, _described(library, other) as target:
            return _reorder(library, source, target, adds=adds)

    return onednn.shared(("between", one, other, adds), make)


def _primitive(form: ConvolutionForm) -> Primitive | None:
    library = onednn.require_library()
    ffi, calls, null = library.ffi, library.calls, library.ffi.NULL
    low, high, strides = [_extents(library, e) for e in (form.low, form.high, form.strides)]
    # The library counts the elements between two taps: 0 for neighbours.
    gaps = _extents(library, tuple([d - 1 for d in form.dilation]))
    ways = (strides, gaps, low, high)
    with onednn.one_thread(library), onednn.attributes(library) as attr:
        is_free = form.reaches_beyond
        x, y = [_described_or_free(library, t, is_free=is_free) for t in (form.x, form.y)]
        weight, w_read = [_free(library, w) for w in (form.weight, _as_read(form))]
        forward, backward = ffi.new("H *"), ffi.new("H *")
        try:
            engine, ends = library.engine, (x[0], weight[0])
            if calls.dnnl_convolution_forward_primitive_desc_create(
                forward, engine, _TRAINING, _DIRECT, x[0], w_read[0], null, y[0], *ways, attr
            ):
                return None
            if form.op == "conv":
                return onednn.create_primitive(library, forward[0])
            # The library chooses a gradient with the forward descriptor as its hint.
            hint = ffi.gc(forward[0], calls.dnnl_primitive_desc_destroy)
            if form.op == "conv_input_grad":
                status = calls.dnnl_convolution_backward_data_primitive_desc_create(
                    backward, engine, _DIRECT, *ends, y[0], *ways, hint, attr
                )
            else:
                status = calls.dnnl_convolution_backward_weights_primitive_desc_create(
                    backward, engine, _DIRECT, *ends, null, y[0], *ways, hint, attr
                )
            return None if status else onednn.create_primitive(library, backward[0])
        finally:
            for memory in (x, weight, w_read, y):
                calls.dnnl_memory_desc_destroy(memory[0])


def _as_read(form: ConvolutionForm) -> PlainTensor:
    """Return the weight of the convolution itself, which is of the type of x."""
    return replace(form.weight, dtype=form.x.dtype)


def _blocked(main: Primitive, argument: int, plain: PlainTensor) -> BlockedTensor | None:
    library = onednn.require_library()
    calls = library.calls
    block_desc = calls.dnnl_primitive_desc_query_md(main.descriptor, QUERY_OF[argument], 0)
    size = int(calls.dnnl_memory_desc_get_size(block_desc))
    with _described(library, plain) as here:
        # A gradient of weights is added up over runs, so it always needs a copy back that adds.
        if calls.dnnl_memory_desc_equal(block_desc, here) and argument != WEIGHTS_GRAD:
            return BlockedTensor(size, None, None, None)
        there = _reorder(library, here, block_desc)
        back = _reorder(library, block_desc, here)
        # Each primitive has code of its own, so none is made that nobody runs.
        is_sum = argument == WEIGHTS_GRAD
        adds = _reorder(library, block_desc, here, adds=True) if is_sum else None
    is_whole = None not in (there, back) and (adds is not None or not is_sum)
    return BlockedTensor(size, there, back, adds) if is_whole else None


@contextmanager
def _described(library: Onednn, plain: PlainTensor) -> Iterator[Any]:
    """Give the library's description of a tensor as it lies."""
    desc, real = library.ffi.new("H *"), onednn.TYPES[plain.dtype]
    extents, steps = [_extents(library, e) for e in (plain.shape, plain.steps)]
    if library.calls.dnnl_memory_desc_create_with_strides(
        desc, len(plain.shape), extents, real, steps
    ):
        raise onednn.LibraryError(f"oneDNN does not describe {plain}")
    try:
        yield desc[0]
    finally:
        library.calls.dnnl_memory_desc_destroy(desc[0])


def _reorder(library: Onednn, source: Any, target: Any, *, adds: bool = False) -> Primitive | None:
    desc, engine = library.ffi.new("H *"), library.engine
    with onednn.one_thread(library), onednn.attributes(library, adds) as attr:
        status = library.calls.dnnl_reorder_primitive_desc_create(
            desc, source, engine, target, engine, attr
        )
        return None if status else onednn.create_primitive(library, desc[0])


def _extents(library: Onednn, extents: Extents) -> Any:
    return library.ffi.new("int64_t[12]", list(extents))


def _described_or_free(library: Onednn, plain: PlainTensor, *, is_free: bool) -> Any:
    """Return the description of a tensor as it lies where that is channels last, else a free one.

    Such a one the library reads at the speed of blocks, and nothing is brought there and back.
    """
    if is_free or not plain.is_channels_last:
        return _free(library, plain)
    desc, real = library.ffi.new("H *"), onednn.TYPES[plain.dtype]
    extents, steps = [_extents(library, e) for e in (plain.shape, plain.steps)]
    library.calls.dnnl_memory_desc_create_with_strides(desc, len(plain.shape), extents, real, steps)
    return desc


def _free(library: Onednn, plain: PlainTensor) -> Any:
    """Return the description of a tensor in a layout of the library's choice."""
    desc, extents = library.ffi.new("H *"), _extents(library, plain.shape)
    library.calls.dnnl_memory_desc_create_with_tag(
        desc, len(plain.shape), extents, onednn.TYPES[plain.dtype], onednn.ANY
    )
    return desc
