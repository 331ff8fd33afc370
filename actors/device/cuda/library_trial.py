"""Where calls of libraries are tried on a GPU: scratch, and a clock of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from actors.device.cuda.cublaslt import TRIALS, first_of_fastest
from actors.device.cuda.driver import SCRATCH_BYTE, CudaDriver, CudaError, TriedWays
from actors.device.cuda.faults import is_of_library

_NON_BLOCKING = 1


class LibraryTrial:
    """Memory and a clock on which libraries are tried; both go at the end of the `with`."""

    def __init__(self, driver: CudaDriver, ask: Callable[..., Any]) -> None:
        self._driver, self._ask = driver, ask
        self._blocks: list[int] = []

    def __enter__(self) -> LibraryTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self._free()

    def scratch(self, sizes_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return addresses of so many bytes each, until the next call."""
        self._free()
        for size in sizes_bytes:
            self._blocks.append(self._driver.allocate(max(size, 1)))
            self._ask("memset", self._blocks[-1], SCRATCH_BYTE, max(size, 1))
        self._ask("streamSynchronize", 0)  # a stream of ours would run beside the fill
        return tuple(self._blocks)

    def duration_ns(self, run: Callable[[int], None]) -> float:
        """Return what `run(stream)` takes on the device, by events around it."""
        ask = self._ask
        stream = ask("streamCreateWithFlags", _NON_BLOCKING)
        begin, end = ask("eventCreate"), ask("eventCreate")
        try:
            ask("eventRecord", begin, stream)
            run(stream)
            ask("eventRecord", end, stream)
            ask("eventSynchronize", end)
            return float(ask("eventElapsedTime", begin, end)) * 1e6
        finally:
            for name, handle in (("eventDestroy", begin), ("eventDestroy", end)):
                ask(name, handle)
            ask("streamDestroy", stream)

    def fastest_way(self, ways: TriedWays) -> int:
        """Return the number of the fastest; one that the library refuses as it runs is left out.

        Raises CudaError where that is each of them.
        """
        times: list[tuple[float, int]] = []
        failed: CudaError | None = None
        self.duration_ns(ways.fill)
        for number, run in enumerate(ways.runs):
            try:
                self.duration_ns(run)  # the first run loads what the library needs
                took = median([self.duration_ns(run) for _ in range(TRIALS)])
            except CudaError as error:
                if not is_of_library(error):
                    raise
                failed = error
            else:
                times.append((took, number))
        if not times and failed is not None:
            raise failed
        return first_of_fastest(times)

    def _free(self) -> None:
        while self._blocks:
            self._driver.free(self._blocks.pop())
