"""Keys of 32 bits sorted on the device, with where they were: stable, and without atomics."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel
from actors.kernels.scratch import Piece

KEY = np.dtype(np.uint32)
TILE = 1024
DIGITS = 256
"""As in sort.cuh."""

_TILES_PER_SEGMENT = 32
_MAX_SEGMENTS = 4


def sort_pieces(num: int) -> tuple[Piece, ...]:
    """Return scratch: keys twice, where they were twice, digits by tile, and their first places."""
    column = Piece((num,), KEY)
    return (*[column] * 4, Piece((_num_tiles(num), DIGITS), KEY), Piece((DIGITS,), KEY))


def sort_calls(pieces: tuple[int, ...], num: int, largest: int) -> tuple[DeviceCalls, int, int]:
    """Return the calls that sort keys up to `largest`, and where keys and their places then lie.

    The keys are in the first of the `pieces`, in their order; all are overwritten. A place is the
    number of a key as it came, a uint32. There is at least one key.
    """
    keys, spare, places, other, counts, bases = pieces
    text, num_tiles = _text(), _num_tiles(num)
    num_shifts = max(1, -(-largest.bit_length() // 8))
    if num_tiles == 1:
        words = (keys, 0, spare, places, counts, bases, num, num_tiles, 0, num_shifts)
        return (RunKernel(text, text.kernels[3], 1, DIGITS, words),), spare, places
    segments = min(_MAX_SEGMENTS, -(-num_tiles // _TILES_PER_SEGMENT))
    calls: list[RunKernel] = []
    given = 0
    for step in range(num_shifts):
        words = (keys, given, spare, places, counts, bases, num, num_tiles, 8 * step, num_shifts)
        calls += [
            RunKernel(text, text.kernels[0], num_tiles, DIGITS, words),
            RunKernel(text, text.kernels[1], 1, segments * DIGITS, words),
            RunKernel(text, text.kernels[2], num_tiles, DIGITS, words),
        ]
        keys, spare = spare, keys
        given, places, other = places, other, places
    return tuple(calls), keys, given


def _num_tiles(num: int) -> int:
    return -(-num // TILE)


@functools.cache
def _text() -> KernelText:
    text = (Path(__file__).parent / "sort.cuh").read_text(encoding="utf-8")
    names = ("NAME_count", "NAME_scan", "NAME_scatter", "NAME_tile")
    return KernelText.of("sort", text, names, "a stable sort of keys")
