"""Columns that say how an op becomes part of a fused program.

`frame` says how its operands lie around the tensor that it walks over, `expand` emits its
instructions. The two speak of shapes only: which rows and columns there are is the program's
choice, and an op whose frame leaves the columns open may become part of one that sees its tensor as
[rows, columns], as one value per row, per column, or as a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from compiler.attrs import Attrs
from compiler.fusion.builder import ProgramBuilder
from compiler.registry import OpAttr, Types
from compiler.target import KernelCall

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """How the operands of one node lie.

    `shape` is the tensor walked over. Each of `inputs` and `outputs` is the operand's shape with
    such axes of extent 1 put in that numpy's rule stretches it to `shape`. `num_trailing` is how
    many of the last axes make up the columns; None leaves that open. `is_whole` forbids any place
    in a program but that of a FULL value. `write_only` are outputs that no other instruction may
    read.
    """

    shape: Shape
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    num_trailing: int | None = None
    is_whole: bool = False
    write_only: tuple[int, ...] = ()


FrameOf = Callable[[Types, Types, Attrs], Frame | None]
"""The frame of a node from its types, or None where a fused kernel cannot compute it."""

Expand = Callable[[ProgramBuilder, Attrs, Types, tuple[int, ...]], tuple[int, ...]]
"""Emits the instructions of a node, and returns one value per output.

Takes the types of the node's inputs, and the inputs as values in the program, in the same order.
"""


def pointwise_frame(inputs: Types, outputs: Types, attrs: Attrs) -> Frame | None:
    """Return the frame of an op that acts on each element alone, with numpy's broadcasting."""
    return _pointwise(outputs[0].shape, tuple([t.shape for t in inputs]), len(outputs))


@lru_cache(maxsize=4096)  # a graph has few of them, and each is looked at in every pass
def _pointwise(shape: Shape, inputs: tuple[Shape, ...], num_outputs: int) -> Frame:
    return Frame(shape, inputs, (shape,) * num_outputs)


expand = OpAttr[Expand](
    "expand", "the op as instructions of a program; read by fuse, which leaves others alone"
)
stands_alone = OpAttr[Callable[[KernelCall, int], bool]](
    "stands_alone",
    "whether a kernel from elsewhere takes a node as it is, on a device; read by fuse",
)
frame = OpAttr[FrameOf](
    "frame", "how operands lie in a program's space; read by fuse", default=pointwise_frame
)
