"""Attention and its gradient by our own kernels on tensor cores, in one call or two (`flash.cuh`).

Scores never go through memory. Taken are bfloat16 and float16, causal or not, with heads of 8n
numbers, up to `MOST_WIDTH`, that begin at multiples of 16 bytes, on any GPU from sm_80 on. A mask
is read where it lies. Dropout and all else are composed (`cuda.attention`).

The gradient computes scores twice, once for dq and once for dk and dv: 7 products instead of the
5 of kernels whose blocks add to dq in the order in which they run. So every run gives the same
bits, without scratch but for two numbers of each query.

What a causal mask hides from a query changes nothing of it, be it NaN. A query that sees a key
or value that is not finite, and meets it in the tiles through which the diagonal passes, gets NaN:
of y in the columns of that value, of dq in all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    Operand,
    Operands,
    Piece,
    equal_operands,
    flag,
    number,
    size_bytes,
)
from actors.kernels.common.strides import MAX_OUTER, Axis, collapse_axes
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel, Word
from actors.kernels.cuda.kernel import DeviceView, Gpu, PlacedView, carve, on_device
from compiler.contract.errors import InternalError
from compiler.contract.types import HALVES, DType

MOST_WIDTH = 128
"""Wider heads have more sums than a thread has registers."""

_FORWARD = ("q", "k", "v", "y", "lse")
_GRADIENT = ("dy", "q", "k", "v", "y", "lse", "dq", "dk", "dv")
_QUERIES = ("dy", "q", "k", "v", "y", "lse", "dq")
_KEYS = ("dy", "q", "k", "v", "dk", "dv")
_MASK = "mask"
_KERNELS = ("attend", "queries", "keys")

_THREADS, _ALIGNMENT = 128, 16
_WIDTHS = 16, 32, 64, 80, 96, 128
"""Of texts; others are filled up with zeros. Some for 48 and 112 would spill registers."""

_WIDE = 64
"""Up to here a warp has 32 rows of a block, beyond it 16."""

_OLDEST = (8, 0)
_SUMS_BYTES = 8

_RATES = {8: (0.6, 0.4), 9: (0.3, 0.26), 10: (0.2, 0.11), 12: (0.6, 0.4)}
"""By generation, of the rate of products: attention and its gradient, whose 7 products count as 5.
Hopper's are what an H100 took, timed by hand, for 64 x 12 causal heads of 1,024 x 64: 218 and 190
TFLOP/s; a step of GPT-2 has 169 of the second. The others are estimates. From Hopper on the library
has instructions that are faster than those of here."""

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

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 128 if self.width <= _WIDE and not self.masked else 64

    def shared_bytes(self, kernel: str) -> int:
        """Return what a block of a kernel asks for at launch."""
        tiles = 1 if kernel == "attend" else 2
        size = 2 * (tiles * self.rows + 4 * self.columns) * (self.width + 8)
        sums = 0 if kernel == "attend" else _SUMS_BYTES * max(self.rows, 2 * self.columns)
        return size + sums

    @property
    def most_shared_bytes(self) -> int:
        """What a block of the gradient has, with what the device and the text take."""
        return self.shared_bytes("keys") + 2048


@dataclass(frozen=True, slots=True)
class FlashCall:
    """A call that is taken; heads of all operands in row-major order, and their extents."""

    shape: FlashShape
    axes: tuple[Axis, ...]
    operands: Mapping[str, Operand | DeviceView]
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
        """Scratch of the gradient: two numbers of each query, of whole blocks."""
        size = self.heads * self._num_blocks(self.rows) * self.shape.rows * _SUMS_BYTES
        return (Piece((size,), np.dtype(np.uint8)),)

    def duration_ns(self, gpu: Gpu, *, is_gradient: bool) -> float:
        """Return the time of the products, or of the bytes."""
        shift = max(self.columns - self.rows, 0)
        # Of the keys behind its own, a query that sees `shift` more misses all.
        hidden = sum_below(self.columns - shift - 1, self.rows) if self.shape.causal else 0
        visible = self.rows * self.columns - hidden
        width, out = self.operands["q"].shape[-1], self.operands["v"].shape[-1]
        num_products = 3 * width + 2 * out if is_gradient else width + out
        flops = 2.0 * self.heads * visible * num_products
        rate = _RATES.get(gpu.capability[0], _RATES[9])[is_gradient]
        moved = sum([x.type.size_bytes for x in self.operands.values()])
        work = max(gpu.product_ns(self.shape.dtype, flops) / rate, gpu.bytes_ns(moved))
        return work + (2 if is_gradient else 1) * gpu.call_ns

    def run(self, kernel: str, names: tuple[str, ...], more: Sequence[Word]) -> RunKernel:
        """Return the call of a kernel on some operands; `more` words stand behind them."""
        rows, columns = self.rows, self.columns
        num_blocks = self._num_blocks(columns if kernel == "keys" else rows)
        width, out = self.operands["q"].shape[-1], self.operands["v"].shape[-1]
        extents = (rows, columns, width, out, num_blocks, max(columns - rows, 0))
        words = (
            *(len(self.axes), *_padded([axis.extent for axis in self.axes])),
            *[word for name in (*names, _MASK) for word in self._tensor(name)],
            *(
                *more,
                *extents,
                self._mask_step,
                *map(_bits, (self.scale, self.scale * math.log2(math.e))),
            ),
        )
        text = flash_text(self.shape)
        name = text.kernels[_KERNELS.index(kernel)]
        shared_bytes = self.shape.shared_bytes(kernel)
        return RunKernel(text, name, self.heads * num_blocks, _THREADS, words, shared_bytes)

    def _num_blocks(self, rows: int) -> int:
        return -(-rows // self.shape.rows)

    @property
    def _mask_step(self) -> int:
        """Bytes from a key to the next in the mask."""
        mask = self.operands.get(_MASK)
        return mask.strides_bytes[-1] if mask is not None and mask.shape[-1] > 1 else 0

    def _tensor(self, name: str) -> list[Word]:
        if name not in self.operands:
            return [0] * (2 + MAX_OUTER)
        x = self.operands[name]
        if not isinstance(x, DeviceView):
            raise InternalError(f"{name} of attention is bound without an address")
        axis = -1 if name == "lse" else -2
        row_step = x.strides_bytes[axis] if x.shape[axis] > 1 else 0
        place = list(self.operands).index(name)
        return [x.address, row_step, *_padded([axis.steps[place] for axis in self.axes])]


def _bits(x: float) -> int:
    """Return the bits of a number in float32."""
    return int(np.float32(x).view(np.uint32))


def sum_below(first: int, count: int) -> int:
    """Return first + (first - 1) + ..., of `count` terms at most, down to 1."""
    count = max(0, min(count, first))
    return count * (2 * first - count + 1) // 2


def _padded(column: list[int]) -> list[int]:
    return [*column, *[0] * (MAX_OUTER - len(column))]


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """`attention`: attrs scale, causal."""

    gpu: Gpu
    name: str = "cuda.flash_attention"
    op: str = "attention"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take 16-bit heads without dropout; there is no scratch."""
        call = _asked(self.gpu, attrs, _FORWARD, (*inputs, *outputs))
        if call is None:
            return None
        return KernelNeeds(0, duration_ns=call.duration_ns(self.gpu, is_gradient=False))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the call."""
        call = _bound(self.gpu, attrs, _FORWARD, on_device((*inputs, *outputs)))
        return (call.run("attend", _FORWARD, ()),)


@dataclass(frozen=True, slots=True)
class FlashAttentionGrad:
    """`attention_grad`: attrs scale, causal."""

    gpu: Gpu
    name: str = "cuda.flash_attention_grad"
    op: str = "attention_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take 16-bit heads without dropout; scratch is two numbers of each query.

        dq may lie over y, of which a block reads its own rows before it writes any; so may dk and
        dv over k or v, when dq is done.
        """
        call = _asked(self.gpu, attrs, _GRADIENT, (*inputs, *outputs))
        if call is None:
            return None
        free = [(0, 4), (1, 2), (1, 3), (2, 3), (2, 2)]
        pairs = [pair for pair in free if pair in equal_operands(pair[0], outputs, inputs)]
        duration_ns = call.duration_ns(self.gpu, is_gradient=True)
        needs = KernelNeeds(size_bytes(call.pieces), duration_ns=duration_ns)
        return replace(needs, in_place=tuple(pairs))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the calls: for dq, which leaves the sums of queries, and for dk and dv."""
        call = _bound(self.gpu, attrs, _GRADIENT, on_device((*inputs, *outputs)))
        (sums,) = carve(workspace, call.pieces)
        sums_of_head = call.pieces[0].size_bytes // _SUMS_BYTES // call.heads
        return (
            call.run("queries", _QUERIES, (sums,)),
            call.run("keys", _KEYS, (sums, sums_of_head)),
        )


def _asked(gpu: Gpu, attrs: Attrs, names: tuple[str, ...], operands: Operands) -> FlashCall | None:
    """Return a call that is planned, or None for one that is not taken."""
    if any([operand.offset_bytes % _ALIGNMENT for operand in operands]):
        return None
    return _call(gpu, attrs, names, operands)


def _bound(
    gpu: Gpu, attrs: Attrs, names: tuple[str, ...], views: tuple[DeviceView, ...]
) -> FlashCall:
    call = _call(gpu, attrs, names, views)
    # A copy of 16 bytes from another address would be a fault of the device.
    is_even = not any([x.address % _ALIGNMENT for x in views if x.dtype in HALVES])
    if call is None or not is_even:
        types = ", ".join([f"{x.type} at {x.address}" for x in views])
        raise InternalError(f"flash attention does not take {types}")
    return call


def _call(
    gpu: Gpu, attrs: Attrs, names: tuple[str, ...], operands: Sequence[Operand | DeviceView]
) -> FlashCall | None:
    named = _named(names, operands)
    if named is None or gpu.capability < _OLDEST:
        return None
    dtype = named["q"].type.dtype
    matrices = {name: x for name, x in named.items() if name not in ("lse", _MASK)}
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
    shapes = [FlashShape(dtype, width, columns, causal, is_masked) for columns in (64, 32)]
    shape = next((s for s in shapes if s.most_shared_bytes <= gpu.shared_bytes), None)
    if shape is None or len(axes) > MAX_OUTER or math.prod(batch) * _most(named) >= 1 << 31:
        return None
    return FlashCall(shape, axes, named, number(attrs, "scale"))


def _named(
    names: tuple[str, ...], operands: Sequence[Operand | DeviceView]
) -> dict[str, Operand | DeviceView] | None:
    """Return operands by name, the mask last; None where there is dropout."""
    more = len(operands) - len(names)
    if more not in (0, 1):
        return None
    # Inputs, which a mask is the last of, end where outputs begin.
    place = len(names) - (2 if names is _FORWARD else 3)
    rest = (*operands[:place], *operands[place + more :])
    masks = zip((_MASK,) * more, operands[place : place + more], strict=True)
    return dict((*zip(names, rest, strict=True), *masks))


def _steps(x: Operand | DeviceView, num_axes: int) -> tuple[int, ...]:
    """Return the strides of leading axes, 0 where one element stands for all."""
    pairs = zip(x.shape[:num_axes], x.strides_bytes[:num_axes], strict=True)
    return tuple([step if extent > 1 else 0 for extent, step in pairs])


def _most(named: Mapping[str, Operand | DeviceView]) -> int:
    """Return the larger of a head's queries and keys: blocks are counted in 32 bits."""
    return max(named["q"].shape[-2], named["k"].shape[-2])


def _is_even(x: Operand | DeviceView) -> bool:
    """Whether rows are dense, and begin and end at multiples of 16 bytes."""
    *outer, inner = x.strides_bytes
    steps = [step for step, extent in zip(outer, x.shape, strict=False) if extent > 1]
    is_dense = inner == x.type.dtype.itemsize or x.shape[-1] == 1
    ends = x.shape[-1] * x.type.dtype.itemsize
    return is_dense and not any([step % _ALIGNMENT for step in (*steps, ends)])


BODY = "\n".join(
    [
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("flash.cuh", "flash_gradient.cuh")
    ]
)
"""What texts have in common."""


@functools.cache
def flash_text(shape: FlashShape, body: str = BODY) -> KernelText:
    """Return the kernels for a shape."""
    multiply, pair, read, infinite = _WORDS[shape.dtype]
    defined = {
        "WIDTH": str(shape.width),
        "ROWS": str(shape.rows),
        "COLUMNS": str(shape.columns),
        "CAUSAL": str(int(shape.causal)),
        "MASKED": str(int(shape.masked)),
        "MULTIPLY": multiply,
        "PAIR": pair,
        "FROM": read,
        "INFINITE": infinite,
    }
    lines = [f"#define NAME_{name} {meaning}" for name, meaning in defined.items()]
    kernels = tuple([f"NAME_{kernel}" for kernel in _KERNELS])
    about = f"attention of {shape.dtype.value} on tensor cores, {shape.width} wide"
    return KernelText.of("af_flash", "\n".join([*lines, body]), kernels, about)
