"""Which of several ways to do the same a launch takes: each is timed once at load, on scratch.

For that its kernel binds it a second time, to scratch that lies as its operands do: what the plan
has in memory by now is neither read nor written. The driver keeps which way was the fastest beside
the algorithms of products, by what the ways do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from actors.device.cuda.driver import SCRATCH_BYTE, CudaDriver, TriedWays
from actors.device.cuda.graphs import CudaLaunch, PreparedCall, prepared, put_on
from actors.device.cuda.memory import extent_of
from actors.device.cuda.streams import CudaContext
from actors.kernels.cuda.calls import (
    CopyBytes,
    DeviceCall,
    DeviceCalls,
    FillBytes,
    LaunchCalls,
    OneOf,
    RunKernel,
    RunProduct,
)
from actors.kernels.cuda.views import DeviceView, PlacedView
from compiler.errors import InternalError

_ALIGNMENT = 256
"""Addresses are told apart up to here; memory of a driver begins at a multiple."""

Placed = tuple[tuple[PlacedView, ...], tuple[PlacedView, ...], DeviceView | None]
"""Inputs, outputs and workspace of a launch."""


@dataclass(frozen=True, slots=True)
class OpenLaunch:
    """A launch with ways to choose from, whose texts may not be loaded yet.

    `calls` are supported; `bind` gives those of the same launch on other operands.
    """

    launch: CudaLaunch
    calls: LaunchCalls
    operands: Placed
    bind: Callable[[Placed], LaunchCalls]

    def settle(self, context: CudaContext) -> None:
        """Choose, and prepare the launch; its texts must be loaded. Raises CudaError."""
        found: list[DeviceCall] = []
        for number, call in enumerate(self.calls):
            if isinstance(call, OneOf):
                trial = partial(self._trial, context, number)
                found += call.ways[context.choose_way(_key(call), trial)]
            else:
                found.append(call)
        self.launch.prepare(tuple(found))

    @contextmanager
    def _trial(self, context: CudaContext, number: int) -> Iterator[TriedWays]:
        """Make the ways of one call runnable on scratch, which goes at the end of the `with`."""
        driver = context.kept.driver
        with ExitStack() as held:
            scratch = _TrialScratch(driver, held)
            inputs, outputs, workspace = self.operands
            moved = (
                tuple([scratch.beside(view) for view in inputs]),
                tuple([scratch.beside(view) for view in outputs]),
                None if workspace is None else scratch.moved(workspace),
            )
            call = context.supported(self.bind(moved))[number]
            if not isinstance(call, OneOf):
                raise InternalError(f"a launch has other calls on scratch: {call!r}")
            runs = [
                partial(_run, driver, tuple([(step, prepared(context, step)) for step in way]))
                for way in call.ways
            ]
            fills = tuple([(fill, 0) for fill in scratch.fills])
            yield TriedWays(partial(_run, driver, fills), tuple(runs))


class _TrialScratch:
    """Memory for one trial."""

    def __init__(self, driver: CudaDriver, held: ExitStack) -> None:
        self._driver, self._held = driver, held
        self.fills: list[FillBytes] = []

    def beside(self, view: PlacedView) -> PlacedView:
        """Return a window that lies as another one does; pinned memory stays where it is."""
        return self.moved(view) if isinstance(view, DeviceView) else view

    def moved(self, view: DeviceView) -> DeviceView:
        """Return a window on memory of its own, at an address as odd as the other one's."""
        first, size = extent_of(view)
        offset = first % _ALIGNMENT
        block = self._driver.allocate(offset + max(1, size))
        self._held.callback(self._driver.free, block)
        self.fills.append(FillBytes(block, SCRATCH_BYTE, offset + max(1, size)))
        return replace(view, address=view.address - first + block + offset)


def _run(driver: CudaDriver, calls: tuple[PreparedCall, ...], stream: int) -> None:
    for call in calls:
        put_on(driver, stream, *call)()


def _key(call: OneOf) -> str:
    """Return what a choice depends on: what each way does, but for addresses."""
    return "; or ".join(["; then ".join(_texts(way)) for way in call.ways])


def _texts(way: DeviceCalls) -> Iterator[str]:
    for call in way:
        match call:
            case RunProduct():
                yield f"{call.product.key}; in {call.workspace_bytes}"
            case RunKernel():
                yield f"{call.name} on {call.num_blocks} x {call.num_threads}"
            case CopyBytes() | FillBytes():
                yield f"{type(call).__name__} of {call.size_bytes}"
            case _:
                yield f"{call.record}; in {call.workspace_bytes}"
