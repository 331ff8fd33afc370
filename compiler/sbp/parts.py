"""Parts of whole tensors, as plans say them: which rank has which, and which of them is told.

A `PartOf` names axes of a mesh and no rank. With the mesh and a rank's number the slice follows, by
the rule of `compiler.sbp.words`: of n rows the first n mod p parts have one more.
"""

from __future__ import annotations

from compiler.mesh import Mesh
from compiler.sbp.words import NdSbp, Shape, Split, part_of
from compiler.types import PartOf

Splits = tuple[tuple[str, int], ...]
"""Pairs (axis of the mesh, axis of the tensor), outermost first."""


def splits_of(words: NdSbp, mesh: Mesh) -> Splits:
    """Return which axes of a mesh split a tensor; an axis of one rank splits nothing."""
    axes = zip(words, mesh.names, mesh.shape, strict=True)
    return tuple([(name, w.axis) for w, name, n in axes if isinstance(w, Split) and n > 1])


def own_part(part: PartOf, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Return where in the whole a rank's part lies. Raises ValueError for a rank of no mesh."""
    coordinates = mesh.coordinates(rank)
    found = [range(extent) for extent in part.shape]
    for name, axis in part.splits:
        number = mesh.axis(name)
        own = part_of(len(found[axis]), mesh.shape[number], coordinates[number])
        found[axis] = found[axis][own.start : own.stop]
    return tuple([slice(rows.start, rows.stop) for rows in found])


def is_part(part: PartOf, mesh: Mesh, shape: Shape) -> bool:
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
    return all([extent in found for extent, found in zip(shape, possible, strict=True)])
