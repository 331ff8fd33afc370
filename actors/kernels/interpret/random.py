"""Dropout whose mask is a pure function of (seed, step, key, element index).

The mapping, so that another device can reproduce it. Philox4x64-10 (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3") with

    key     = (seed mod 2^64, key attribute mod 2^64)
    counter = (1 + e div 8, 0, step mod 2^64, 0)        for element e in row-major order

gives four 64-bit words; element e takes word (e mod 8) div 2, its low half when e is even, its
high half when odd. With r the top 24 bits of that half, the element is kept when r >= ceil(p *
2^24). A kept element is multiplied by 1 / (1 - p), rounded to the tensor's type. Elements are
numbered over the whole tensor, so neither blocks nor the dtype change the mask. It is numpy's own
stream (`Generator.random` in float32 from `Philox`), which counts up before it draws: hence the
1.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from actors.protocol import Array

_WORD = (1 << 64) - 1


class Rewind(Protocol):
    """Sets a generator to an element of a step, a multiple of 8."""

    def __call__(self, element: int = 0) -> None:
        """Set it."""


def rewound_generator(seed: Array, step: Array, key: int) -> tuple[Rewind, np.random.Generator]:
    """Return a generator and what sets it to an element of a step."""
    bits = np.random.Philox(key=0)
    state = bits.state
    counter, keys = state["state"]["counter"], state["state"]["key"]
    counter[:] = 0
    keys[1] = key & _WORD

    def rewind(element: int = 0) -> None:
        counter[0] = element // 8
        keys[0] = int(seed) & _WORD
        counter[2] = int(step) & _WORD
        bits.state = state

    return rewind, np.random.Generator(bits)


def draw_rows(
    rewind: Rewind,
    generator: np.random.Generator,
    out: Array,
    firsts: Array,
    step: int,
    first: int,
    line: Array,
) -> None:
    """Draw the numbers of a block of rows, each of which begins anywhere in a tensor.

    Args:
        rewind: What sets the generator.
        generator: What draws.
        out: The block.
        firsts: The element that each row begins at, or the first of them alone.
        step: The elements from row to row that are added to that.
        first: What is added throughout.
        line: Scratch of a row and 8 elements.
    """
    count = out.shape[1]
    for row, mine in enumerate(out):
        element = int(firsts[row % len(firsts)]) + row * step + first
        skipped = element % 8
        rewind(element - skipped)
        drawn: Any = line[: skipped + count]
        generator.random(dtype=np.float32, out=drawn)
        mine[...] = drawn[skipped:]
