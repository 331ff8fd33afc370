"""Import this module to register every op that ships with the compiler.

A new file of ops is named here. A third party's op is not: its own file registers it when it is
imported.
"""

from __future__ import annotations

from compiler.ops.families import (
    activation,
    along,
    arithmetic,
    attention,
    embedding,
    gradients,
    linear_algebra,
    loops,
    loss,
    normalisation,
    updates,
    weights,
)
from compiler.ops.language import program_ops
from compiler.ops.primitives import convolution, matmul, reduce, shape, slicing, sources, transfer

FAMILIES = (
    *(activation, along, arithmetic, attention, convolution, embedding, gradients),
    *(
        linear_algebra,
        loops,
        loss,
        matmul,
        normalisation,
        program_ops,
        reduce,
        shape,
        slicing,
        sources,
        transfer,
        updates,
        weights,
    ),
)
"""The files that register the ops, by name."""
