"""How one tensor lies on many ranks: split, broadcast or partial, along each axis of a mesh.

The tensor that the user sees is the *whole*; each rank holds a *part* of it, a dense tensor of its
own. Along one axis of the mesh, of p ranks,

- `Split(axis)`: the part is a slice of the whole; of n rows the first n mod p parts have one more;
- `BROADCAST`: the part is the whole, the same bits on each;
- `Partial(by)`: the whole is the sum of the parts, or the largest or least, element by element.

Each of these words is its own text: "S(0)" is what a user may write, what attributes of nodes
hold, and what is hashed and shown, so that nothing is converted on the way.

Over several axes of a mesh a tensor has a word for each, outermost first (`NdSbp`): the part of the
first axis is the whole of the second. A plan names of a part only the axes that split it, and no
rank (`ShardingSpec`): the slice follows from the mesh and a rank's number.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class _Word(str):
    """The text of a word; its class and slots say what it means."""

    __slots__: tuple[str, ...] = ()

    def __getnewargs__(self) -> tuple[object, ...]:  # type: ignore[override]  # not of the text
        return tuple([getattr(self, name) for name in self.__slots__])

    def __repr__(self) -> str:
        fields = ", ".join([f"{name}={getattr(self, name)!r}" for name in self.__slots__])
        return f"{type(self).__name__}({fields})"


class Split(_Word):
    """The part is a slice along an axis of the tensor."""

    __slots__ = ("axis",)
    axis: int

    def __new__(cls, axis: int) -> Split:
        """Return the word "S(axis)"."""
        word = super().__new__(cls, f"S({axis})")
        word.axis = axis
        return word


class Broadcast(_Word):
    """The part is the whole."""

    __slots__ = ()

    def __new__(cls) -> Broadcast:
        """Return the word "B"."""
        return super().__new__(cls, "B")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise CompileError: it is written without brackets, other than a split."""
        _refuse_call("af.broadcast")


class Partial(_Word):
    """The whole is the parts together."""

    __slots__ = ("by",)
    by: ReduceOp

    def __new__(cls, by: ReduceOp = ReduceOp.SUM) -> Partial:
        """Return the word "P", or "P(max)" and "P(min)"."""
        word = super().__new__(cls, "P" if by is ReduceOp.SUM else f"P({by.value})")
        word.by = by
        return word

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise CompileError, as a broadcast does."""
        _refuse_call("af.partial")


def _refuse_call(name: str) -> NoReturn:
    raise CompileError(f"{name} takes no arguments and cannot be called; write {name} without ()")


Sbp = Split | Broadcast | Partial
NdSbp = tuple[Sbp, ...]
"""One for each axis of a mesh."""

Layout = tuple[tuple[str, Sbp], ...]
"""Words by the names of axes of a mesh, as a user states them; axes that it does not name are
open. The attribute `sbp` of a node is one."""

BROADCAST = Broadcast()
PARTIAL = Partial()
PARTIAL_MAX = Partial(ReduceOp.MAX)
PARTIAL_MIN = Partial(ReduceOp.MIN)


def parse_sbp(text: str) -> Sbp:
    """Return the word of a text such as "S(1)", "B" or "P(max)". Raises ValueError for others."""
    named = (BROADCAST, PARTIAL, PARTIAL_MAX, PARTIAL_MIN)
    if text in named:
        return named[named.index(text)]
    number = text[2:-1]
    if text[:2] != "S(" or text[-1:] != ")" or not (number.isascii() and number.isdecimal()):
        listed = ", ".join([repr(str(word)) for word in named])
        raise ValueError(f'an SBP is "S(axis)", {listed}; got {text!r}')
    return Split(int(number))


def format_sbp(words: NdSbp) -> str:
    """Return a layout as text, such as "S(0), B"."""
    return ", ".join(words)


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
