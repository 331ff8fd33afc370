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

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import integer, number
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.blocks import block_elements, cut
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, equal_operands, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, over_blocks
from actors.protocol import Array, Launch

_WORD = (1 << 64) - 1
_UNIFORM = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class DropoutKernel:
    """`dropout`(x, seed [], step []): attrs p, key. Its gradient is the same op on dy."""

    name: str = "numpy.dropout"
    op: str = "dropout"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take floats; scratch is a block of uniforms, booleans and factors. y may lie over x."""
        x = inputs[0]
        if not x.type.dtype.is_float or has_bfloat16(inputs):
            return None
        passes = {Pass.RANDOM: 1, Pass.SIMPLE: 3, Pass.PLAIN: 1}
        return cost.needs(
            inputs,
            outputs,
            over_blocks(x.type.num_elements, x.dtype.itemsize, passes),
            scratch.size_bytes(_pieces(x.type.num_elements, x.dtype)),
            equal_operands(0, outputs, inputs[:1]),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the launch: rewind the generator, then draw and multiply block by block."""
        (x, seed, step), (out,) = inputs, outputs
        p = number(attrs, "p")
        uniforms, kept, factors = scratch.carve(workspace, _pieces(x.size, x.dtype))
        threshold = np.array(math.ceil(p * 2.0**24) * 2.0**-24, _UNIFORM)
        scale = np.array(1.0 / (1.0 - p), x.dtype)
        rewind, generator = rewound_generator(seed, step, integer(attrs, "key"))
        calls: list[Launch] = [rewind]
        # Blocks follow row-major order, so drawing on continues the numbering of elements.
        for rows, result in cut((x, out), x.ndim, block_elements(x.itemsize)):
            u = scratch.window(uniforms, rows.shape)
            mask = scratch.window(kept, rows.shape)
            factor = scratch.window(factors, rows.shape)
            calls += [
                partial(generator.random, out=u, dtype=_UNIFORM),
                partial(np.greater_equal, u, threshold, out=mask),
                partial(np.copyto, factor, mask),
                partial(np.multiply, factor, scale, out=factor),
                partial(np.multiply, rows, factor, out=result),
            ]
        return in_sequence(calls)


def rewound_generator(seed: Array, step: Array, key: int) -> tuple[Launch, np.random.Generator]:
    """Return a generator and the launch that sets it to the first element of a step."""
    bits = np.random.Philox(key=0)
    state = bits.state
    counter, keys = state["state"]["counter"], state["state"]["key"]
    counter[:] = 0
    keys[1] = key & _WORD

    def rewind() -> None:
        keys[0] = int(seed) & _WORD
        counter[2] = int(step) & _WORD
        bits.state = state

    return rewind, np.random.Generator(bits)


def _pieces(elements: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    shape = (min(elements, block_elements(dtype.itemsize)),)
    return (Piece(shape, _UNIFORM), Piece(shape, np.dtype(np.bool_)), Piece(shape, dtype))


RANDOM_KERNELS = (DropoutKernel(),)
