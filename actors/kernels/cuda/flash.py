"""Attention and its gradient by our own kernels on tensor cores, in one call or two (`flash.cuh`).

Scores never go through memory. Taken are bfloat16 and float16, causal or not, with heads of 8n
numbers, up to `MOST_WIDTH`, that begin at multiples of 16 bytes, on any GPU from sm_80 on. A mask
is read where it lies. Dropout and all else are composed (`cuda.attention`).

The gradient computes scores twice, once for dq and once for dk and dv: 7 products instead of the
5 of kernels whose blocks add to dq in the order in which they run. So every run gives the same
bits, without scratch but for three numbers of each query.

Of few heads a call has fewer blocks than the GPU has multiprocessors, and takes as long as its
longest block. There blocks of the gradient have half the rows, and several groups of warps that
share the tiles of the other side; the first adds up the sums of all in the order of groups. Whether
a call is one of these follows from its shapes and from how many multiprocessors the GPU is
described with: nothing is measured, so all cards of a kind give the same bits. An H100 computes the
gradient of 12 causal heads of 1,024 x 64 in 42 us so, and in 70 without. The forward pass took 16
us so and 15 without, and has no groups.

What a causal mask hides from a query changes nothing of it, be it NaN. A query that sees a key
or value that is not finite, and meets it in the tiles through which the diagonal passes, gets NaN:
of y in the columns of that value, of dq in all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    equal_operands,
    flag,
    number,
    size_bytes,
)
from actors.kernels.common.strides import MAX_OUTER, Axis, collapse_axes
from actors.kernels.cuda.calls import (
    KernelText,
    LaunchCalls,
    RunKernel,
    Word,
    file_text,
    with_definitions,
)
from actors.kernels.cuda.kernel import (
    CudaPlan,
    Gpu,
    PlacedViews,
    Scratch,
    carve,
    on_device,
)
from compiler.contract.errors import InternalError
from compiler.contract.types import HALVES, DType

MOST_WIDTH = 128
"""Wider heads have more sums than a thread has registers."""

_STATISTICS = "lse", "tail"
_FORWARD = ("q", "k", "v", "y", *_STATISTICS)
_GRADIENT = ("dy", "q", "k", "v", "y", *_STATISTICS, "dq", "dk", "dv")
_QUERIES = ("dy", "q", "k", "v", "y", *_STATISTICS, "dq")
_KEYS = ("dy", "q", "k", "v", "dk", "dv")
_MASK = "mask"
_KERNELS = ("attend", "queries", "keys")

_ALIGNMENT = 16
_WIDTHS = 16, 32, 64, 80, 96, 128
"""Of texts; others are filled up with zeros. Some for 48 and 112 would spill registers."""

_WIDE = 64
"""Up to here a warp has 32 rows of a block, beyond it 16."""

_OLDEST = (8, 0)
_SUMS_BYTES = 16

_RATES = {8: (0.6, 0.4), 9: (0.3, 0.26), 10: (0.2, 0.11), 12: (0.6, 0.4)}
"""By generation, of the rate of products: attention and its gradient, whose 7 products count as 5.
Hopper's are what an H100 took for 64 x 12 causal heads of 1,024 x 64: 224 and 195 TFLOP/s alone,
169 of the second in a step of GPT-2; with a tail of lse 207, 185 and 155 (section `rates` of
benchmarks/gpu). The others are estimates. From Hopper on the library has instructions that are
faster than those of here."""

_GROUPS_RATE = 0.7
"""Of that rate, where several groups of warps share a block: 12 such heads took 42 us there."""

_WORDS = {
    DType.BFLOAT16: ("AF_MULTIPLY_BF16", "AF_PAIR_BF16", "af_from_bf16", "0x7f80u"),
    DType.FLOAT16: ("AF_MULTIPLY_F16", "AF_PAIR_F16", "af_from_f16", "0x7c00u"),
}


@dataclass(frozen=True, slots=True)
class FlashShape:
    """What a text is made for: `width` is a multiple of 16, `columns` those of a tile."""

    dtype: DType
    width: int
    columns: int
    causal: bool
    masked: bool = False
    exact: bool = False
    """Whether scaling rounds nothing: it is by a power of 2, and no mask is added."""
    groups: int = 1
    """Of warps in a block, which share each tile: more than one where blocks are few."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels of the text."""
        return _KERNELS if self.groups == 1 else _KERNELS[1:]

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 128 if self.tiles == 2 and self.groups == 1 else 64

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows of a warp."""
        return 2 if self.width <= _WIDE and not self.masked else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 2 * self.rows // self.tiles * self.groups

    @property
    def split(self) -> FlashShape:
        """The shape of gradients of few blocks."""
        groups = 2 * self.tiles
        return replace(self, groups=groups, columns=self.columns * groups // 2)

    def shared_bytes(self, kernel: str) -> int:
        """Return what a block of a kernel asks for at launch."""
        tiles = 1 if kernel == "attend" else 2
        size = 2 * (tiles * self.rows + 4 * self.columns) * (self.width + 8)
        sums = 0 if kernel == "attend" else _SUMS_BYTES * max(self.rows, 2 * self.columns)
        return size + sums

    def fits(self, gpu: Gpu) -> bool:
        """Whether a block of the gradient has space, with what the device and the text take."""
        # Groups hand over a thread's sums where tiles were.
        numbers = self.tiles * self.width // 2 * self.threads // self.groups
        has_place = 4 * numbers * (self.groups - 1) <= 8 * self.columns * (self.width + 8)
        return has_place and self.shared_bytes("keys") + 2048 <= gpu.shared_bytes


@dataclass(frozen=True, slots=True)
class FlashCall:
    """A call that is taken; heads of all operands in row-major order, and their extents."""

    shape: FlashShape
    axes: tuple[Axis, ...]
    operands: Mapping[str, Operand]
    scale: float

    @property
    def heads(self) -> int:
        """How many matrices there are."""
        return math.prod([axis.extent for axis in self.axes])

    @property
    def rows(self) -> int:
        """Queries of a head."""
        return self.operands["q"].shape[-2]

    @property
    def columns(self) -> int:
        """Keys of a head."""
        return self.operands["k"].shape[-2]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch of the gradient: what it knows of each query, of whole blocks."""
        size = self.heads * self._num_blocks(self.rows) * self.shape.rows * _SUMS_BYTES
        return (Piece((size,), np.dtype(np.uint8)),)

    def duration_ns(self, gpu: Gpu, *, is_gradient: bool) -> float:
        """Return the time of the products, or of the bytes; of few blocks that of the longest."""
        scores = self.heads * self._visible(self.rows)
        if _has_few_blocks(gpu, self.heads, self.rows, self.shape):
            # A multiprocessor has one block at a time, and the longest ones begin first.
            longest = self._visible(min(self.rows, self.shape.rows))
            scores = max(scores, gpu.num_sms * longest)
        width, out = self.operands["q"].shape[-1], self.operands["v"].shape[-1]
        num_products = 3 * width + 2 * out if is_gradient else width + out
        flops = 2.0 * scores * num_products
        rate = _RATES.get(gpu.capability[0], _RATES[9])[is_gradient]
        rate *= _GROUPS_RATE if self.shape.groups > 1 else 1.0
        moved = sum([x.type.size_bytes for x in self.operands.values()])
        work = max(gpu.product_ns(self.shape.dtype, flops) / rate, gpu.bytes_ns(moved))
        return work + (2 if is_gradient else 1) * gpu.call_ns

    def places(self, views: PlacedViews) -> Mapping[str, int]:
        """Return the addresses of the operands. Raises InternalError for an odd one."""
        placed = dict(zip(self.operands, on_device(views), strict=True))
        # A copy of 16 bytes from another address would be a fault of the device.
        if any([x.address % _ALIGNMENT for x in placed.values() if x.dtype in HALVES]):
            types = ", ".join([f"{x.type} at {x.address}" for x in placed.values()])
            raise InternalError(f"flash attention does not take {types}")
        return {name: x.address for name, x in placed.items()}

    def run(
        self,
        kernel: str,
        names: tuple[str, ...],
        places: Mapping[str, int],
        more: Sequence[Word],
    ) -> RunKernel:
        """Return the call of a kernel on some operands; `more` words stand behind them."""
        rows, columns = self.rows, self.columns
        num_blocks = self._num_blocks(columns if kernel == "keys" else rows)
        width, out = self.operands["q"].shape[-1], self.operands["v"].shape[-1]
        extents = (rows, columns, width, out, num_blocks, max(columns - rows, 0))
        words = (
            *(len(self.axes), *_padded([axis.extent for axis in self.axes])),
            *[word for name in (*names, _MASK) for word in self._tensor(name, places)],
            *(
                *more,
                *extents,
                self._mask_step,
                _bits(self.scale),
            ),
        )
        text = flash_text(self.shape)
        name = text.kernels[self.shape.kernels.index(kernel)]
        shared_bytes = self.shape.shared_bytes(kernel)
        threads = self.shape.threads
        return RunKernel(text, name, self.heads * num_blocks, threads, words, shared_bytes)

    def _visible(self, count: int) -> int:
        """Return how many scores the last queries of a head have."""
        shift = max(self.columns - self.rows, 0)
        # Of the keys behind its own, a query that sees `shift` more misses all.
        first = self.columns - shift - 1 - (self.rows - count)
        return count * self.columns - (sum_below(first, count) if self.shape.causal else 0)

    def _num_blocks(self, rows: int) -> int:
        return -(-rows // self.shape.rows)

    @property
    def _mask_step(self) -> int:
        """Bytes from a key to the next in the mask."""
        mask = self.operands.get(_MASK)
        return mask.strides_bytes[-1] if mask is not None and mask.shape[-1] > 1 else 0

    def _tensor(self, name: str, places: Mapping[str, int]) -> list[Word]:
        if name not in self.operands:
            return [0] * (2 + MAX_OUTER)
        x = self.operands[name]
        axis = -1 if name in _STATISTICS else -2
        row_step = x.strides_bytes[axis] if x.shape[axis] > 1 else 0
        place = list(self.operands).index(name)
        return [places[name], row_step, *_padded([axis.steps[place] for axis in self.axes])]


def _bits(x: float) -> int:
    """Return the bits of a number in float32."""
    return int(np.float32(x).view(np.uint32))


def sum_below(first: int, count: int) -> int:
    """Return first + (first - 1) + ..., of `count` terms at most, down to 1."""
    count = max(0, min(count, first))
    return count * (2 * first - count + 1) // 2


def _padded(column: list[int]) -> list[int]:
    return [*column, *[0] * (MAX_OUTER - len(column))]


def plan_attention(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `attention`: attrs scale, causal.

    It takes 16-bit heads without dropout; there is no scratch.
    """
    call = _call(gpu, attrs, _FORWARD, (*inputs, *outputs))
    if call is None:
        return None

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        return (call.run("attend", _FORWARD, call.places((*inputs, *outputs)), ()),)

    needs = KernelNeeds(duration_ns=call.duration_ns(gpu, is_gradient=False))
    return KernelPlan(needs, bind)


def plan_gradient(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `attention_grad`: attrs scale, causal.

    It takes 16-bit heads without dropout; scratch is three numbers of each query.

    dq may lie over y, of which a block reads its own rows before it writes any; so may dk and
    dv over k or v, when dq is done.
    """
    call = _call(gpu, attrs, _GRADIENT, (*inputs, *outputs))
    if call is None:
        return None

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        places = call.places((*inputs, *outputs))
        (sums,) = carve(workspace, call.pieces)
        sums_of_head = call.pieces[0].size_bytes // _SUMS_BYTES // call.heads
        # That for dq leaves the sums of queries, which that for dk and dv reads.
        return (
            call.run("queries", _QUERIES, places, (sums,)),
            call.run("keys", _KEYS, places, (sums, sums_of_head)),
        )

    free = [(0, 4), (1, 2), (1, 3), (2, 3), (2, 2)]
    pairs = [pair for pair in free if pair in equal_operands(pair[0], outputs, inputs)]
    duration_ns = call.duration_ns(gpu, is_gradient=True)
    return KernelPlan(KernelNeeds(size_bytes(call.pieces), tuple(pairs), duration_ns), bind)


def _call(gpu: Gpu, attrs: Attrs, names: tuple[str, ...], operands: Operands) -> FlashCall | None:
    """Return a call on some operands, or None for one that is not taken."""
    if any([operand.offset_bytes % _ALIGNMENT for operand in operands]):
        return None
    named = _named(names, operands)
    if named is None or gpu.capability < _OLDEST:
        return None
    dtype = named["q"].type.dtype
    matrices = {name: x for name, x in named.items() if name not in (*_STATISTICS, _MASK)}
    widths = [x.shape[-1] for x in matrices.values()]
    if dtype not in HALVES or not all([_is_even(x) for x in matrices.values()]):
        return None
    if not 0 < min(widths) <= max(widths) <= MOST_WIDTH:
        return None
    if not all([x.type.num_elements for x in operands]):
        return None
    batch = named["lse"].shape[:-1]
    strides = [_steps(x, len(batch)) for x in named.values()]
    axes = collapse_axes(batch, strides, in_order=True)
    causal = flag(attrs, "causal")
    width = next(width for width in _WIDTHS if width >= max(widths))
    is_masked = _MASK in named
    scale = number(attrs, "scale")
    # Of wider heads, whose scale is seldom one, the texts would spill registers.
    exact = not is_masked and width <= _WIDE and _is_power_of_2(scale)
    shapes = [FlashShape(dtype, width, columns, causal, is_masked, exact) for columns in (64, 32)]
    is_few = _has_few_blocks(gpu, math.prod(batch), named["q"].shape[-2], shapes[0])
    if names is _GRADIENT and is_few:
        shapes[:0] = [shape.split for shape in shapes]
    shape = next((s for s in shapes if s.fits(gpu)), None)
    if shape is None or len(axes) > MAX_OUTER or math.prod(batch) * _most(named) >= 1 << 31:
        return None
    return FlashCall(shape, axes, named, scale)


def _has_few_blocks(gpu: Gpu, heads: int, rows: int, shape: FlashShape) -> bool:
    """Whether some multiprocessors have no block of a call whose blocks are not split."""
    return heads * -(-rows // replace(shape, groups=1).rows) < gpu.num_sms


def _is_power_of_2(scale: float) -> bool:
    return scale > 0 and math.frexp(scale)[0] == 0.5


def _named(names: tuple[str, ...], operands: Operands) -> dict[str, Operand] | None:
    """Return operands by name, one more as the mask; None where there is dropout."""
    more = len(operands) - len(names)
    if more not in (0, 1):
        return None
    # Inputs, which a mask is the last of, end where outputs begin.
    place = len(names) - 3
    return dict(zip((*names[:place], *[_MASK] * more, *names[place:]), operands, strict=True))


def _steps(x: Operand, num_axes: int) -> tuple[int, ...]:
    """Return the strides of leading axes, 0 where one element stands for all."""
    pairs = zip(x.shape[:num_axes], x.strides_bytes[:num_axes], strict=True)
    return tuple([step if extent > 1 else 0 for extent, step in pairs])


def _most(named: Mapping[str, Operand]) -> int:
    """Return the larger of a head's queries and keys: blocks are counted in 32 bits."""
    return max(named["q"].shape[-2], named["k"].shape[-2])


def _is_even(x: Operand) -> bool:
    """Whether rows are dense, and begin and end at multiples of 16 bytes."""
    *outer, inner = x.strides_bytes
    steps = [step for step, extent in zip(outer, x.shape, strict=False) if extent > 1]
    is_dense = inner == x.type.dtype.itemsize or x.shape[-1] == 1
    ends = x.shape[-1] * x.type.dtype.itemsize
    return is_dense and not any([step % _ALIGNMENT for step in (*steps, ends)])


BODY = "\n".join([file_text(name) for name in ("flash.cuh", "flash_gradient.cuh")])
"""What texts have in common."""


@functools.cache
def flash_text(shape: FlashShape, body: str = BODY) -> KernelText:
    """Return the kernels for a shape."""
    multiply, pair, read, infinite = _WORDS[shape.dtype]
    defined = {
        "WIDTH": shape.width,
        "ROWS": shape.rows,
        "TILES": shape.tiles,
        "GROUPS": shape.groups,
        "COLUMNS": shape.columns,
        "CAUSAL": int(shape.causal),
        "MASKED": int(shape.masked),
        "EXACT": int(shape.exact),
        "MULTIPLY": multiply,
        "PAIR": pair,
        "FROM": read,
        "INFINITE": infinite,
    }
    kernels = tuple([f"NAME_{kernel}" for kernel in shape.kernels])
    about = f"attention of {shape.dtype.value} on tensor cores, {shape.width} wide"
    # The bound of a kernel is read from its text, too, and there it must be a number.
    body = body.replace("NAME_THREADS", str(shape.threads))
    return KernelText.of("af_flash", with_definitions(body, defined), kernels, about)
