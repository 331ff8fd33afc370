"""Which searches run, in which order, and for how many nodes.

How long a search takes depends on luck with the style and the preorder, over orders of magnitude.
So many short searches run before a long one: several styles with preorders that suit them, then
again with noise on the preorders. All limits count nodes and the noise has a fixed seed, so that
equal instances get equal packings on every machine.

The first capacity is the target. While nodes are left, the capacities between it and the best peak
are bisected. A search that ends without a packing proves that there is none; at one granule below
the best peak it proves that peak optimal. One that runs out of nodes proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memory.buffer_sets import BufferSets
from memory.liveness import IntArray
from memory.search import Outcome, Result, search
from memory.sections import Instance, SectionPacking, live_per_section
from memory.skyline import Style, Terrain

_ROUND = (
    (Style.UNDER_BEST, "WAT"),
    (Style.LEFT_TO_RIGHT, "TWA"),
    (Style.CORNERS, "WAT"),
    (Style.CORNERS, "TWA"),
    (Style.UNDER_BEST, "TWA"),
)
"""The searches of a round. Preorders: descending by lifespan W, area A, live bytes at the worst
section T. The first finds most graphs in one descent, the third most tight instances."""

_NOISE, _SEED = 88, 1
"""A noisy key is multiplied by 1024 + four integers up to +-_NOISE, which deviates by a tenth.
Integers, because such products are equal on every machine, and exponentials need not be."""


@dataclass(frozen=True, slots=True, eq=False)
class Improved:
    """The best packing, a bound proved for the peak of every packing, and the nodes visited."""

    packing: SectionPacking
    bound: int
    nodes: int


def node_work(num_buffers: int) -> int:
    """Return the work of one node in units of about 20 us; it grows with the sets of buffers."""
    return 1 + num_buffers // 500


def improve(instance: Instance, best: SectionPacking, target: int, max_nodes: int) -> Improved:
    """Search for a packing whose peak is at most `target`, or as near to it as nodes allow.

    Returns `best` itself where none better is found.
    """
    granule = int(np.gcd.reduce(instance.size))
    bound, nodes = instance.bound, 0
    # Capacities worth a try: multiples of the granule in [low, high].
    low = max(bound, target - target % granule)
    high = best.peak - granule
    capacity = low
    while low <= high and nodes < max_nodes and best.peak > target:
        # The last capacity gets all that is left, the others leave a third.
        left = max_nodes - nodes
        share = left if capacity == high else left * 2 // 3
        result = _search(instance, capacity, granule, max(share, 1))
        nodes += result.nodes
        if result.outcome is Outcome.PACKED:
            offsets = np.array(result.offsets, np.int64)
            best = SectionPacking(offsets, int((offsets + instance.size).max()), "branch and bound")
            high = best.peak - granule
        else:
            low = capacity + granule
            if result.outcome is Outcome.EXHAUSTED:
                bound = low
        capacity = low + (high - low) // granule // 2 * granule
    return Improved(best, bound, nodes)


def _search(instance: Instance, capacity: int, granule: int, max_nodes: int) -> Result:
    """Search at one capacity, by one style and preorder after the other; offsets are by buffer."""
    num_buffers = instance.size.size
    spare = (capacity - live_per_section(instance)).tolist()
    nodes = 0
    for style, order, factor in _schedule(instance):
        sets = BufferSets.build(instance, order)
        limit = min((num_buffers * 4 // 3 + 200) * factor, max_nodes - nodes)
        result = search(Terrain(sets, granule, style), spare, limit)
        nodes += result.nodes
        if result.outcome is not Outcome.OUT_OF_NODES or nodes >= max_nodes:
            break
    offsets = np.array(result.offsets, np.int64)
    if offsets.size:
        offsets[order] = offsets.copy()
    return Result(result.outcome, nodes, tuple(offsets.tolist()))


def _schedule(instance: Instance) -> Iterator[tuple[Style, IntArray, int]]:
    """Yield style, preorder and a factor for the nodes of ever more searches, without end."""
    generator = np.random.default_rng(_SEED)
    keys = _keys(instance)
    for number in range(1, 1 << 30):
        for style, names in _ROUND:
            columns = [keys[name] for name in names]
            if number > 1:
                num_buffers = instance.size.size
                shape = (len(columns), 4, num_buffers)
                noise = 1024 + generator.integers(-_NOISE, _NOISE + 1, shape).sum(axis=1)
                columns = [column * factor for column, factor in zip(columns, noise, strict=True)]
            yield style, np.lexsort([-column for column in reversed(columns)]), _luby(number)


def _keys(instance: Instance) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    live = live_per_section(instance)
    lifespan = instance.lifespan.astype(np.float64)
    spans = np.stack((instance.lower, instance.upper), axis=1).ravel()
    worst = np.maximum.reduceat(np.append(live, 0), spans)[::2]
    return {"W": lifespan, "A": lifespan * instance.size, "T": worst.astype(np.float64)}


def _luby(number: int) -> int:
    """Return term `number` >= 1 of 1, 1, 2, 1, 1, 2, 4, ... (Luby, Sinclair, Zuckerman 1993)."""
    while number + 1 & number:
        number -= (1 << number.bit_length() - 1) - 1
    return number + 1 >> 1
