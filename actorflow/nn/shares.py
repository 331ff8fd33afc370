"""A block of layers whose inner width ranks share: heads of attention, hidden columns of an MLP.

The first layer of the block is cut by what it makes, and the last one by what it reads, so that
between the two no rank needs what others have, and their terms meet in one sum (Shoeybi et al.,
Megatron-LM, 2019).
"""

from __future__ import annotations

import math

from actorflow.layouts import Words, layout_of
from actorflow.nn.parameter import Parameter
from actorflow.trace.tracer import current_trace, find_source
from compiler.errors import CompileError
from compiler.sbp.words import BROADCAST, Sbp, Split


def shares(sbp: Words | None, layer: str, what: str) -> tuple[Words | None, Words | None]:
    """Return the layouts of the weights [out, in] of the first and the last layers of a block.

    `what` is what its ranks share, such as heads. Raises CompileError with the user's line for
    another word than af.split(0) or af.broadcast.
    """
    if sbp is None:
        return None, None
    first = dict(layout_of(sbp, f"sbp of {layer}"))
    for word in first.values():
        if word not in (Split(0), BROADCAST):
            raise CompileError(
                f"{find_source()}: sbp of {layer} shares {what}, which is af.split(0), or has all"
                f" of them on each rank, af.broadcast; got {word}"
            )
    last: dict[str, Sbp] = {
        axis: Split(1) if word == Split(0) else word for axis, word in first.items()
    }
    return first, last


def check_heads(heads: int, first: object) -> None:
    """Raise CompileError where a head would lie on two ranks of the job that is traced.

    `first` makes them: its rows are split, and not its heads. A tensor in the place of a parameter
    has no layout of its own.
    """
    trace, words = current_trace(), first.sbp if isinstance(first, Parameter) else {}
    if not words or trace is None or trace.mesh is None:
        return
    mesh = trace.mesh
    extents = dict(zip(mesh.names, mesh.shape, strict=True))
    parts = math.prod([extents.get(axis, 1) for axis, word in words.items() if word == Split(0)])
    if heads % parts:
        raise CompileError(
            f"{find_source()}: {parts} ranks cannot share {heads} heads (the mesh is {mesh}): their"
            " number must divide that of the heads"
        )
