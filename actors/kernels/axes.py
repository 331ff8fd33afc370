"""The axes of a walk over several operands at once, as few of them as their strides allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.protocol import Array

MAX_OUTER = 6
"""Axes besides the innermost two that a C kernel can walk."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its extent, and the step of every operand in bytes."""

    extent: int
    steps: tuple[int, ...]


def walk(
    shape: tuple[int, ...], strides: Sequence[tuple[int, ...]], *, in_order: bool
) -> tuple[Axis, ...]:
    """Return the axes that are left when those of extent 1 go and even neighbours are joined.

    Outermost first. `in_order` keeps the row-major order of elements; without it the axes are
    sorted by the step of the first operand, largest first. No axis is left of a single element.
    """
    axes = [
        Axis(extent, tuple([own[index] for own in strides]))
        for index, extent in enumerate(shape)
        if extent != 1
    ]
    if not in_order:
        axes.sort(key=lambda axis: -abs(axis.steps[0]))
    joined: list[Axis] = []
    for axis in axes:
        even = tuple([step * axis.extent for step in axis.steps])
        if joined and joined[-1].steps == even:
            axis = Axis(joined.pop().extent * axis.extent, axis.steps)
        joined.append(axis)
    return tuple(joined)


def walk_arrays(*arrays: Array, in_order: bool) -> tuple[Axis, ...]:
    """Return the walk over arrays of one shape."""
    return walk(arrays[0].shape, [array.strides for array in arrays], in_order=in_order)


def columns_of(axes: Sequence[Axis], num_operands: int, size: int = MAX_OUTER) -> list[int]:
    """Return the number of axes, their extents, and each operand's steps, padded to `size`.

    The form in which C has them: `int64_t num, extents[size], steps[size]...`.
    """
    columns = [[axis.extent for axis in axes]]
    columns += [[axis.steps[operand] for axis in axes] for operand in range(num_operands)]
    words = [len(axes)]
    for column in columns:
        words += [*column, *[0] * (size - len(axes))]
    return words
