"""Which cores of the machine each rank has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise


def shares(cores: Sequence[int], num_ranks: int) -> list[tuple[int, ...]] | None:
    """Divide cores among ranks: neighbours to one rank, and the first ranks get one more.

    None where there are fewer cores than ranks: those had better be left to the system.
    """
    if len(cores) < num_ranks:
        return None
    each, more = divmod(len(cores), num_ranks)
    cuts = [rank * each + min(rank, more) for rank in range(num_ranks + 1)]
    ordered = sorted(cores)
    return [tuple(ordered[a:b]) for a, b in pairwise(cuts)]


@contextmanager
def on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """Let this thread, and so the processes that it starts, have these cores alone meanwhile."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
