"""Casts from and to bfloat16, which numpy holds as the uint16 of its bits.

Up is a shift. Down rounds to the nearest, ties to even, in integers: half of what falls away is
added to the bits, less one where the result would else be odd; the carry runs up into the exponent,
past the largest number to infinity, as it should. A NaN keeps its sign and gets its quiet bit.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from actors.kernels import scratch
from actors.kernels.interpret.blocks import block_elements, cut
from actors.kernels.kernel import Operands
from actors.kernels.scratch import Piece
from actors.kernels.work import BytePass, Work, over_blocks
from actors.protocol import Array, Arrays, Launch
from compiler.types import HALVES, DType

_BITS = np.dtype(np.uint32)
_FLOAT = np.dtype(np.float32)

BLOCK = block_elements(_BITS.itemsize)
"""Elements that are cast at a time."""

_ONE, _SIXTEEN, _QUIET, _ALMOST_HALF = (np.array(n, _BITS) for n in (1, 16, 0x40, 0x7FFF))


def has_bfloat16(operands: Operands) -> bool:
    """Return whether an operand is bfloat16, which arithmetic on its uint16 would get wrong."""
    return any([operand.type.dtype is DType.BFLOAT16 for operand in operands])


def has_halves(operands: Operands) -> bool:
    """Return whether an operand is of 16-bit floats, in which numpy is slow or at a loss."""
    return any([operand.type.dtype in HALVES for operand in operands])


def widening(bits: Array, out: Array) -> list[Launch]:
    """Return the launches that cast bfloat16 to float32."""
    calls: list[Launch] = []
    for low, wide in cut((bits, out.view(_BITS)), out.ndim, BLOCK):
        calls.append(partial(np.copyto, wide, low))
        calls.append(partial(np.left_shift, wide, _SIXTEEN, out=wide))
    return calls


def widening_work(elements: int) -> Work:
    """Return what `widening` does."""
    return over_blocks(elements, _BITS.itemsize, {BytePass.SIMPLE: 2})


def narrowing(x: Array, out: Array, flats: Arrays) -> list[Launch]:
    """Return the launches that cast float32 to bfloat16; `flats` as in `narrowing_pieces`."""
    flat, flat_mask = flats
    calls: list[Launch] = []
    for block, low in cut((x, out), out.ndim, BLOCK):
        t, bits = scratch.window(flat, low.shape), block.view(_BITS)
        mask = scratch.window(flat_mask, low.shape)
        calls += [
            partial(np.right_shift, bits, _SIXTEEN, out=t),
            partial(np.bitwise_and, t, _ONE, out=t),
            partial(np.add, t, _ALMOST_HALF, out=t),
            partial(np.add, t, bits, out=t),
            partial(np.right_shift, t, _SIXTEEN, out=t),
            partial(np.copyto, low, t, casting="unsafe"),
            partial(np.not_equal, block, block, out=mask),
            partial(_keep_nan, bits, t, mask, low),
        ]
    return calls


def _keep_nan(bits: Array, t: Array, mask: Array, low: Array) -> None:
    """Mend the elements that are NaN, if there are any: the carry may have made them numbers."""
    if mask.any():
        np.right_shift(bits, _SIXTEEN, out=t)
        np.bitwise_or(t, _QUIET, out=t)
        np.copyto(low, t, casting="unsafe", where=mask)


def narrowing_pieces(elements: int) -> tuple[Piece, ...]:
    """Return the scratch of `narrowing`: a block of bits and one of booleans."""
    shape = (min(elements, BLOCK),)
    return Piece(shape, _BITS), Piece(shape, np.dtype(np.bool_))


def narrowing_work(elements: int) -> Work:
    """Return what `narrowing` does where nothing is NaN."""
    return over_blocks(elements, _BITS.itemsize, {BytePass.SIMPLE: 6, BytePass.PLAIN: 2})
