"""How convolutions by oneDNN are cut: into slices of channels, and runs of images, or of rows.

The cut follows from shapes alone, so that bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from actors.kernels.common.kernel import Attrs, integer, integers
from actors.kernels.library import onednn
from actors.kernels.library.convolution_onednn import (
    BlockedTensor,
    ConvolutionCalls,
    ConvolutionForm,
    PlainTensor,
    calls_of,
)
from actors.kernels.library.gemm_launch import ProductScratch, aligned
from actors.kernels.library.onednn import Primitive
from actors.machine.protocol import Array, Arrays
from compiler.contract.types import DType

_CALL_BYTES = 2 << 20
"""x and y of the images of a call, about: they stay in a core's cache."""

_CHUNKS = 8
"""A cut has about so many chunks, where there are so many images or channels."""

_SLICE = 16
"""Slices have multiples of so many channels, the library's blocks."""

_PRODUCT_SLICES = 4
"""Of a gradient of weights that is a product. Each reads all of x: 2 are faster, and 8 slower."""

_SUM_ITEM = 4
"""Gradients of weights are added up in float32."""

_DTYPES = {"float32": DType.FLOAT32, "uint16": DType.BFLOAT16}
"""By numpy's name of what holds it."""

_ROWS = 14
"""Runs of rows of few images: 56, 28 and 14 rows make as many alike. On one thread they take 1.03
of the time of all rows at once, 8 slices of channels 1.25; with 7 runs one core waits for others.
"""

_FEWEST_ROWS = 5
"""Of a run whose weights are brought in each call: with 3 the whole takes up to 1.4 of the time."""


@dataclass(frozen=True, slots=True)
class SomeImages:
    """Some images of a call: the first of them, and their primitives."""

    first: int
    calls: ConvolutionCalls


@dataclass(frozen=True, slots=True)
class SliceRun:
    """A run of images of a slice, or of rows: its x, weight and y, and which of its runs it is."""

    roles: Arrays
    images: tuple[SomeImages, ...]
    run: int


@dataclass(frozen=True, slots=True)
class ConvolutionCut:
    """All chunks, slice by slice, and where things lie in the scratch that they have, in bytes.

    First the weight of each slice, or the sums of all runs but the first; then of each chunk x, y,
    and the weight or its gradient. Weights that are `held` stay there.
    """

    op: str
    chunks: tuple[SliceRun, ...]
    num_runs: int
    is_held: bool

    @property
    def shares_weight(self) -> bool:
        """Whether the chunks of a slice read one weight, brought to the library's layout before."""
        is_one = self.is_held or self.num_runs == len(self.chunks)
        return self.op != "conv_weight_grad" and is_one

    @property
    def first(self) -> ConvolutionCalls:
        """The primitives of the first images."""
        return self.chunks[0].images[0].calls

    @property
    def sum_bytes(self) -> int:
        """The bytes of the sum of a run."""
        return aligned(self.chunks[0].roles[1].size * _SUM_ITEM)

    @property
    def is_narrow(self) -> bool:
        """Whether the gradient of a weight is rounded once all of it is added up."""
        return self.op == "conv_weight_grad" and self.chunks[0].roles[1].itemsize < _SUM_ITEM

    @property
    def shared_bytes(self) -> int:
        """What lies before the scratch of chunks."""
        if self.op == "conv_weight_grad":
            apart = [chunk for chunk in self.chunks if chunk.run or self.is_narrow]
            return self.sum_bytes * len(apart)
        slices = len(self.chunks) // self.num_runs
        return slices * kept_bytes(self.first.weight) if self.shares_weight else 0

    @property
    def x_bytes(self) -> int:
        """What x of a chunk takes; rows within an image have neighbours, those at its end none."""
        return max([kept_bytes(chunk.images[0].calls.x) for chunk in self.chunks])

    @property
    def ends_bytes(self) -> int:
        """What x and y of a chunk take."""
        return self.x_bytes + max([kept_bytes(chunk.images[0].calls.y) for chunk in self.chunks])

    @property
    def chunk_bytes(self) -> int:
        """The scratch of one chunk."""
        return self.ends_bytes + (0 if self.shares_weight else kept_bytes(self.first.weight))

    @property
    def moved_bytes(self) -> int:
        """What is brought to the library or back, weights aside."""
        each = [one.calls for chunk in self.chunks for one in chunk.images]
        return sum([kept_bytes(calls.x) + kept_bytes(calls.y) for calls in each])

    @property
    def scratch(self) -> ProductScratch:
        """The scratch of all."""
        each = [one.calls for chunk in self.chunks for one in chunk.images]
        used = {p for calls in each for p in _primitives(calls)}
        return ProductScratch(
            max([p.scratch_bytes for p in used]),
            self.shared_bytes + self.chunk_bytes * len(self.chunks),
        )


def kept_bytes(tensor: BlockedTensor) -> int:
    """Return what the library's own form of an operand takes; 0 where it lies so already."""
    return 0 if tensor.there is None else aligned(tensor.size_bytes)


def _primitives(calls: ConvolutionCalls) -> list[Primitive]:
    sides = [(t.there, t.back, t.adds) for t in (calls.x, calls.weight, calls.y)]
    return [calls.main, *[p for side in sides for p in side if p is not None]]


def cut_of(op: str, attrs: Attrs, roles: Arrays) -> ConvolutionCut | None:
    """Return how a call is cut; None for one that is not taken."""
    x, weight = roles[:2]
    types = {a.dtype.name for a in roles}
    is_known = onednn.is_available() and len(types) == 1 and types <= {*_DTYPES} and x.ndim <= 5
    if not is_known or 0 in [a.size for a in roles]:
        return None
    if min(*integers(attrs, "low"), *integers(attrs, "high")) < 0:
        return None
    is_odd = any([step % a.itemsize for a in roles for step in a.strides])
    # The library counts steps in elements; a weight of groups is reshaped, which must copy nothing.
    if is_odd or not weight.flags.c_contiguous:
        return None
    is_held = op == "conv" and attrs.get("held") is True
    cuts = _row_cuts(op, roles, integer(attrs, "groups"), is_held=is_held)
    cuts = [*cuts, _best_cut(op, roles, integer(attrs, "groups"))]
    product = _as_product(attrs, roles) if op == "conv_weight_grad" else None
    tries = [] if product is None else [(*product, (_PRODUCT_SLICES, 1))]
    for own_attrs, own_roles, cut in (*tries, *[(attrs, roles, cut) for cut in cuts]):
        convolution_cut = _cut_so(op, own_attrs, own_roles, cut, is_held=is_held)
        # The first that the library takes: they are tried best first.
        if convolution_cut is not None:
            return convolution_cut
    return None


def _as_product(attrs: Attrs, roles: Arrays) -> tuple[Attrs, Arrays] | None:
    """Return a gradient of weights as a product, on what its windows see; None where it is slower.

    They have one element each, and y, which the library turns around, is the smaller side or small.
    """
    x, weight, y = roles
    strides, low, high = [integers(attrs, name) for name in ("strides", "low", "high")]
    is_plain = {*weight.shape[2:]} == {1} and not (any(low) or any(high))
    are_last = x.strides[1] == y.strides[1] == _SUM_ITEM and integer(attrs, "groups") == 1
    (results, channels), places = weight.shape[:2], y.size // y.shape[1]
    is_faster = results >= _PRODUCT_SLICES * 64 and channels >= min(results, places)
    if not (is_plain and are_last and is_faster):
        return None
    windows = x[:, :, *[slice(None, None, step) for step in strides]]
    return {**attrs, "strides": (1,) * len(strides), "is_product": True}, (windows, weight, y)


def _cut_so(
    op: str, attrs: Attrs, roles: Arrays, cut: tuple[int, int], *, is_held: bool
) -> ConvolutionCut | None:
    """Return a cut into slices and runs; None where the library refuses calls of it."""
    num_slices, num_runs = cut
    x = roles[0]
    # Rounded up, so the last run may have fewer images, and there may be fewer runs.
    per_run = -(-len(x) // num_runs)
    chunks: list[SliceRun] = []
    for part in _slices(op, roles, num_slices):
        if len(x) < num_runs:
            runs = _row_runs(op, attrs, part, num_runs // len(x))
        else:
            runs = [(attrs, part, begin) for begin in range(0, len(x), per_run)]
        for run, (own_attrs, own_part, begin) in enumerate(runs):
            end = min(begin + per_run, len(x))
            # A product adds up what it has itself, and writes over what is there.
            step = per_run if "is_product" in attrs else _at_once(op, own_part, per_run)
            tries = [
                (first, calls_of(_form(op, own_attrs, own_part, min(step, end - first))))
                for first in range(begin, end, step)
            ]
            images = tuple(
                [SomeImages(first, calls) for first, calls in tries if calls is not None]
            )
            if len(images) < len(tries):
                return None
            chunks.append(SliceRun(own_part, images, run))
    count = max([chunk.run for chunk in chunks]) + 1
    convolution_cut = ConvolutionCut(op, tuple(chunks), count, is_held)
    return convolution_cut if op == "conv_weight_grad" or _reads_alike(convolution_cut) else None


def _row_runs(op: str, attrs: Attrs, part: Arrays, count: int) -> list[tuple[Attrs, Arrays, int]]:
    """Return a convolution as several, each of some rows of an image of what it computes.

    The gradient of weights has rows of y. Where a run would see nothing but padding there is one.
    """
    x, weight, y = part
    if len(x) > 1:
        ones = [(x[i : i + 1], weight, y[i : i + 1]) for i in range(len(x))]
        return [run for image in ones for run in _row_runs(op, attrs, image, count)]
    is_spread = op == "conv_input_grad"
    total = (x if is_spread else y).shape[2]
    count, runs = min(count, total), []
    for number in range(count):
        own = (total * number // count, total * (number + 1) // count)
        run = _rows_of_x(attrs, part, own) if is_spread else _rows_of_y(attrs, part, own)
        if run is None:
            return [(attrs, part, 0)]
        runs.append((*run, 0))
    return runs


def _rows_of_y(attrs: Attrs, part: Arrays, own: tuple[int, int]) -> tuple[Attrs, Arrays] | None:
    """Return the convolution whose windows are those rows of y; None where none has an element."""
    x, weight, y = part
    step, low, span = _first_axis(attrs, weight)
    first, last = own[0] * step - low, (own[1] - 1) * step - low + span
    # Rows of padding that this run still sees at its top and at its bottom.
    above, below = max(0, -first), max(0, last - x.shape[2])
    if first + above >= last - below:
        return None
    x_rows = x[:, :, first + above : last - below]
    return _padded(attrs, above, below), (x_rows, weight, y[:, :, slice(*own)])


def _rows_of_x(attrs: Attrs, part: Arrays, own: tuple[int, int]) -> tuple[Attrs, Arrays] | None:
    """Return the convolution whose windows have elements in those rows of x; None without any."""
    x, weight, y = part
    step, low, span = _first_axis(attrs, weight)
    first = max(0, -(-(own[0] + low - span + 1) // step))
    last = min(y.shape[2] - 1, (own[1] - 1 + low) // step)
    # How far the first window begins above these rows, and the last one ends below them.
    above, below = low + own[0] - first * step, last * step - low + span - own[1]
    if first > last or below < 0 or above < 0:
        return None
    x_rows, y_rows = x[:, :, slice(*own)], y[:, :, first : last + 1]
    return _padded(attrs, above, below), (x_rows, weight, y_rows)


def _first_axis(attrs: Attrs, weight: Array) -> tuple[int, int, int]:
    """Return step, padding at the low end, and span of windows along the first axis of space."""
    step, dilation, low = [integers(attrs, name)[0] for name in ("strides", "dilation", "low")]
    return step, low, (weight.shape[2] - 1) * dilation + 1


def _padded(attrs: Attrs, above: int, below: int) -> Attrs:
    low, high = integers(attrs, "low"), integers(attrs, "high")
    return {**attrs, "low": (above, *low[1:]), "high": (below, *high[1:])}


def _reads_alike(found: ConvolutionCut) -> bool:
    """Whether all calls that share a weight read it in one layout."""
    lead = found.first
    for chunk in found.chunks:
        if not (chunk.run and found.shares_weight):
            lead = chunk.images[0].calls
        if not all([onednn.pack_alike(lead.main, one.calls.main) for one in chunk.images]):
            return False
    return True


def _at_once(op: str, part: Arrays, most: int) -> int:
    """Return how many images a call has.

    They stay in a core's cache; but each call of a sum moves all of the sum, which is to be less.
    """
    x, weight, y = part
    image_bytes = (x.nbytes + y.nbytes) // len(x)
    call_bytes = _CALL_BYTES
    if op == "conv_weight_grad":
        call_bytes = max(4 * _CALL_BYTES, 4 * weight.size * _SUM_ITEM)
    return max(1, min(most, call_bytes // image_bytes))


def _best_cut(op: str, roles: Arrays, groups: int) -> tuple[int, int]:
    """Return slices and runs so that the fewest bytes are brought to the library and back.

    Each slice brings what has all channels, and each run its sum, or the weight of its slice; one
    weight for all is brought by one thread.
    """
    x, weight, y = [a.size for a in roles]
    channels = roles[1].shape[op == "conv_input_grad"]
    # With channels last the library reads an operand where it lies.
    moved_x, moved_y = [0 if plain_of(a).is_channels_last else a.size for a in roles[::2]]
    whole = moved_y if op == "conv_input_grad" else moved_x
    best, least = (1, 1), math.inf
    for slices in (1, 2, 4, 8):
        if slices > 1 and (groups > 1 or channels < slices * _SLICE):
            break
        runs = min(len(roles[0]), -(-_CHUNKS // slices))
        if slices > 1:  # the other one is brought by the slice, however it lies
            moved_bytes = float(slices * whole + (x if op == "conv_input_grad" else y))
        else:
            moved_bytes = float(moved_x + moved_y)
        if op == "conv_weight_grad":
            moved_bytes += 1.5 * runs * weight
        else:
            moved_bytes += weight * (runs if slices > 1 else 2)
        if slices * runs < _CHUNKS:  # cores that have nothing to do
            moved_bytes += 16.0 * (x + y + weight) * (_CHUNKS - slices * runs) / _CHUNKS
        if moved_bytes < least:
            best, least = (slices, runs), moved_bytes
    return best


def _row_cuts(op: str, roles: Arrays, groups: int, *, is_held: bool) -> list[tuple[int, int]]:
    """Return slices and runs of rows to try for few images, the best first.

    Rows of an image, for slices of channels share none of what they read; but few rows are worse.
    Gradients of weights have none: each run would add up all of them.
    """
    x, weight, y = roles
    if not is_held:
        rows = (x if op == "conv_input_grad" else y).shape[2]
        num_runs = len(x) * min(_ROWS // len(x), rows // _FEWEST_ROWS)
        is_cut = op != "conv_weight_grad" and len(x) < _CHUNKS <= num_runs
        return [(1, num_runs)] if is_cut else []
    if len(x) > 1 and (len(x) > _ROWS or y.shape[2] < _ROWS // 2):
        return []
    few = (4, 1) if groups == 1 and len(weight) >= 4 * _SLICE else (1, 1)
    return [few] if y.shape[2] < _ROWS // 2 else [(1, _ROWS), few]


def _slices(op: str, roles: Arrays, count: int) -> list[Arrays]:
    """Return x, weight and y of slices of the channels that a call makes, or of its results."""
    x, weight, y = roles
    if count == 1:
        return [roles]
    axis = int(op == "conv_input_grad")
    width = -(-weight.shape[axis] // count // _SLICE) * _SLICE
    parts: list[Arrays] = []
    for begin in range(0, weight.shape[axis], width):
        part = slice(begin, begin + width)
        ends = (x[:, part], weight[:, part], y) if axis else (x, weight[part], y[:, part])
        parts.append(ends)
    return parts


def _form(op: str, attrs: Attrs, roles: Arrays, count: int) -> ConvolutionForm:
    x, weight, y = roles
    groups = integer(attrs, "groups")
    if groups > 1:
        # The library wants groups as an axis of their own, the first one.
        weight = weight.reshape(groups, len(weight) // groups, *weight.shape[1:])
    strides, dilation, low, high = [
        integers(attrs, name) for name in ("strides", "dilation", "low", "high")
    ]
    weight_tensor = wide_of(weight) if op == "conv_weight_grad" else plain_of(weight)
    ends = plain_of(x[:count]), weight_tensor, plain_of(y[:count])
    return ConvolutionForm(op, *ends, strides, dilation, low, high, "is_product" in attrs)


def wide_of(weight: Array) -> PlainTensor:
    """Return a weight as its gradient is added up."""
    return replace(plain_of(weight), dtype=DType.FLOAT32)


def plain_of(array: Array) -> PlainTensor:
    """Return an array as the library describes it."""
    steps = [step // array.itemsize for step in array.strides]
    if len(array) == 1:  # rows of an image lie as an image does: nothing steps to a next one
        steps[0] = math.prod(array.shape[1:])
    return PlainTensor(array.shape, tuple(steps), _DTYPES[array.dtype.name])
