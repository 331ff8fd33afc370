"""Products of few rows, as the steps of a recurrence have them: a way beside the library's.

The library gives such a product few blocks, each of which goes through the whole inner extent. In
an LSTM's step [20, 512] [512, 2048] took 11 us of an H100, for 4 MB that come from its cache.
"""

from __future__ import annotations

import functools

from actors.kernels.cuda.calls import KernelText, RunKernel, file_text
from actors.kernels.cuda.kernel import DeviceView, Gpu
from compiler.contract.types import DType

_MOST_ROWS, _LEAST_INNER, _LEAST_WEIGHTS = 24, 128, 1 << 16
"""Rows of a block at most; an inner extent and elements of the right side that are worth it."""

_WIDEST_BLOCK, _NARROWEST_BLOCK, _THREADS = 16, 4, 384
_EVEN, _TERMS, _WAITS = 16, 4, 5
"""Bytes of an even address; terms that a thread has at a time; waits before the first and after the
last of them."""


def few_rows_call(gpu: Gpu, a: DeviceView, b: DeviceView, out: DeviceView) -> RunKernel | None:
    """Return the kernel of a [rows, inner] b [inner, columns]; None for what it does not take.

    By types and layouts alone: addresses decide only how elements are loaded.
    """
    if not all([x.dtype is DType.FLOAT32 and len(x.shape) == 2 for x in (a, b, out)]):
        return None
    item = DType.FLOAT32.itemsize
    (rows, inner), columns = a.shape, b.shape[1]
    is_wide = inner >= _LEAST_INNER and inner * columns >= _LEAST_WEIGHTS
    if not (0 < rows <= _MOST_ROWS and is_wide):
        return None
    steps = [step for x in (a, b, out) for step in x.strides_bytes]
    if a.strides_bytes[1] != item or out.strides_bytes[1] != item or any([s % item for s in steps]):
        return None
    block = _block_columns(gpu, columns)
    is_even_a = a.address % _EVEN == a.strides_bytes[0] % _EVEN == 0
    is_even_b = b.strides_bytes[0] == item
    is_even_b = is_even_b and b.address % _EVEN == b.strides_bytes[1] % _EVEN == 0
    arguments = (
        *(a.address, b.address, out.address, a.strides_bytes[0] // item),
        *[step // item for step in (*b.strides_bytes, out.strides_bytes[0])],
        *(inner, columns, block, int(is_even_a), int(is_even_b)),
    )
    text = _text(rows)
    return RunKernel(text, text.kernels[0], -(-columns // block), _THREADS, arguments)


def few_rows_ns(gpu: Gpu, inner: int, columns: int) -> float:
    """Return an estimate: a thread waits for the cache each time that it goes on."""
    terms = _TERMS * _THREADS // _block_columns(gpu, columns)
    return gpu.call_ns + (_WAITS + -(-inner // terms)) * gpu.latency_ns


def _block_columns(gpu: Gpu, columns: int) -> int:
    """Return how many columns a block has: as few as leave a block for each multiprocessor."""
    block = _NARROWEST_BLOCK
    while block < _WIDEST_BLOCK and -(-columns // block) > gpu.num_sms:
        block *= 2
    return block


@functools.cache
def _text(rows: int) -> KernelText:
    text, about = file_text("few_rows.cuh", {"ROWS": rows}), f"a product of {rows} rows in float32"
    return KernelText.of("few_rows", text, ("NAME",), about)
