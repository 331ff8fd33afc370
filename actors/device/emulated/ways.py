"""Ways to do the same on a GPU that is acted: all of them run, and a fixed rule picks one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from actors.device.cuda.driver import CudaDriver, CudaError, TriedWays
from actors.device.cuda.faults import is_out_of_memory


def tried(
    driver: CudaDriver, key: str, trial: Callable[[], AbstractContextManager[TriedWays]]
) -> int:
    """Run all ways on their scratch, and return the number of one. Raises CudaError.

    No time is measured: the number follows from the key, and of many keys about as many fall to
    each way.
    """
    stream = driver.make_stream("trial")
    try:
        with trial() as ways:
            for run in (ways.fill, *ways.runs):
                run(stream)
                driver.synchronize()
            return hashlib.blake2b(key.encode()).digest()[0] % len(ways.runs)
    except CudaError as error:
        if not is_out_of_memory(error):
            raise
        return 0
