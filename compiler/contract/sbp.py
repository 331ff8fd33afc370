"""How one tensor lies on many ranks: split, broadcast or partial, along each axis of a mesh.

The tensor that the user sees is the *whole*; each rank holds a *part* of it, a dense tensor of its
own. Along one axis of the mesh, of p ranks,

- `Split(axis)`: the part is a slice of the whole; of n rows the first n mod p parts have one more;
- `BROADCAST`: the part is the whole, the same bits on each;
- `Partial(by)`: the whole is the sum of the parts, or the largest or least, element by element.

Over several axes of a mesh a tensor has one of these for each, outermost first: the part of the
first axis is the whole of the second. A plan names of a part only the axes that split it, and no
rank (`ShardingSpec`): the slice follows from the mesh and a rank's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from compiler.contract.errors import CompileError
from compiler.contract.placement import Mesh
from compiler.contract.types import ShardingSpec

Shape = tuple[int, ...]


class ReduceOp(Enum):
    """What makes the whole of partial values."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Split:
    """The part is a slice along an axis of the tensor."""

    axis: int

    def __str__(self) -> str:
        return f"S({self.axis})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The part is the whole."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise CompileError: it is written without brackets, other than a split."""
        _refuse_call("af.broadcast")

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """The whole is the parts together."""

    by: ReduceOp = ReduceOp.SUM

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise CompileError, as a broadcast does."""
        _refuse_call("af.partial")

    def __str__(self) -> str:
        return "P" if self.by is ReduceOp.SUM else f"P({self.by.value})"


def _refuse_call(name: str) -> NoReturn:
    raise CompileError(
        f"{name} is called, and is a word by itself: an axis of the mesh has all of a tensor, or"
        f" terms of it, and no argument says more. Write {name} without ()"
    )


Sbp = Split | Broadcast | Partial
NdSbp = tuple[Sbp, ...]
"""One for each axis of a mesh."""

BROADCAST = Broadcast()
PARTIAL = Partial()
PARTIAL_MAX = Partial(ReduceOp.MAX)
PARTIAL_MIN = Partial(ReduceOp.MIN)


def parse_sbp(text: str) -> Sbp:
    """Return the word of a text such as "S(1)", "B" or "P(max)". Raises ValueError for others."""
    named: dict[str, Sbp] = {
        str(word): word for word in (BROADCAST, PARTIAL, PARTIAL_MAX, PARTIAL_MIN)
    }
    if text in named:
        return named[text]
    number = text[2:-1]
    if text[:2] != "S(" or text[-1:] != ")" or not (number.isascii() and number.isdecimal()):
        raise ValueError(f'a layout is "S(axis)", {", ".join(map(repr, named))}; got {text!r}')
    return Split(int(number))


def format_sbp(words: NdSbp) -> str:
    """Return a layout as text, such as "S(0), B"."""
    return ", ".join(map(str, words))


def shard_range(extent: int, parts: int, index: int) -> range:
    """Return which rows of an extent a part has. O(1)."""
    size, more = divmod(extent, parts)
    start = index * size + min(index, more)
    return range(start, start + size + (index < more))


def local_shape(shape: Shape, sbp: NdSbp, mesh: Sequence[int], coordinates: Sequence[int]) -> Shape:
    """Return the shape of the part that the rank at some coordinates of a mesh has."""
    extents = list(shape)
    for word, parts, index in zip(sbp, mesh, coordinates, strict=True):
        if isinstance(word, Split):
            extents[word.axis] = len(shard_range(extents[word.axis], parts, index))
    return tuple(extents)


def local_slices(
    shape: Shape, sbp: NdSbp, mesh: Sequence[int], coordinates: Sequence[int]
) -> tuple[slice, ...]:
    """Return where in the whole that part lies; for partial values it is all of it."""
    ranges = [range(extent) for extent in shape]
    for word, parts, index in zip(sbp, mesh, coordinates, strict=True):
        if isinstance(word, Split):
            rows = ranges[word.axis]
            shard = shard_range(len(rows), parts, index)
            ranges[word.axis] = rows[shard.start : shard.stop]
    return tuple([slice(rows.start, rows.stop) for rows in ranges])


Splits = tuple[tuple[str, int], ...]
"""Pairs (axis of the mesh, axis of the tensor), outermost first."""


def splits_of(words: NdSbp, mesh: Mesh) -> Splits:
    """Return which axes of a mesh split a tensor; an axis of one rank splits nothing."""
    axes = zip(words, mesh.names, mesh.shape, strict=True)
    return tuple([(name, w.axis) for w, name, n in axes if isinstance(w, Split) and n > 1])


def shard_slices(part: ShardingSpec, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Return where in the whole a rank's part lies. Raises ValueError for a rank of no mesh."""
    coordinates = mesh.coordinates(rank)
    ranges = [range(extent) for extent in part.shape]
    for name, axis in part.splits:
        number = mesh.axis(name)
        shard = shard_range(len(ranges[axis]), mesh.shape[number], coordinates[number])
        ranges[axis] = ranges[axis][shard.start : shard.stop]
    return tuple([slice(rows.start, rows.stop) for rows in ranges])


def is_part(part: ShardingSpec, mesh: Mesh, shape: Shape) -> bool:
    """Whether some rank of a mesh has a part of this shape. O(axes)."""
    names = [name for name, _ in part.splits]
    is_known = bool(names) and len({*names}) == len(names) and {*names} <= {*mesh.names}
    is_known = is_known and len(shape) == len(part.shape)
    if not is_known or any([not 0 <= axis < len(shape) for _, axis in part.splits]):
        return False
    # Each axis of the mesh splits one axis of the tensor: extents are possible one by one.
    possible = [{extent} for extent in part.shape]
    for name, axis in part.splits:
        parts = mesh.shape[mesh.axis(name)]
        possible[axis] = {size for n in possible[axis] for size in (n // parts, -(-n // parts))}
    return all([extent in extents for extent, extents in zip(shape, possible, strict=True)])
