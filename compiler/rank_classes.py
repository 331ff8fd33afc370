"""Which ranks of a mesh have equal graphs, by looking at few of them.

What a rank's graph says of the rank's place along an axis of the mesh is which part of a tensor it
has: where the part begins, how long it is, whether it is the first. Of parts in their order each
begins later than the one before, and the longer ones come first (`compiler.sbp.words.part_of`): so
along an axis the first one and the last one are equal only where all are. An axis on which graphs
depend at one place of the others alone, as parts of uneven parts do, is found by looking at all
corners, and at all places along the axes on which graphs do depend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

Place = tuple[int, ...]
"""Coordinates of a rank."""


def representatives(
    shape: Sequence[int], graph_at: Callable[[Place], Hashable]
) -> dict[Place, Place]:
    """Return, for each place in a grid, the first one whose graph is told to be equal.

    `graph_at` returns what graphs can be told apart by. It is asked once for each place, and along
    an axis on which nothing depends for the first and the last one alone.
    """
    known: dict[Place, Hashable] = {}

    def seen(place: Place) -> Hashable:
        if place not in known:
            known[place] = graph_at(place)
        return known[place]

    def is_free(axis: int, corners: Sequence[Place]) -> bool:
        """Whether the first and the last place along an axis are equal, wherever they are."""
        pairs = [(p, (*p[:axis], 0, *p[axis + 1 :])) for p in corners]
        return all([seen(place) == seen(first) for place, first in pairs])

    # From the origin first: an axis that matters there need not be looked at from elsewhere.
    origin = (0,) * len(shape)
    free = [
        axis
        for axis, extent in enumerate(shape)
        if is_free(axis, [(*origin[:axis], extent - 1, *origin[axis + 1 :])])
    ]
    while True:
        ends = [(0, n - 1) if axis in free else range(n) for axis, n in enumerate(shape)]
        corners = list(itertools.product(*ends))
        still = [axis for axis in free if is_free(axis, corners)]
        if still == free:
            break
        free = still
    first: dict[Hashable, Place] = {}
    found: dict[Place, Place] = {}
    for place in itertools.product(*map(range, shape)):
        asked = tuple([0 if axis in free else own for axis, own in enumerate(place)])
        found[place] = first.setdefault(seen(asked), asked)
    return found
