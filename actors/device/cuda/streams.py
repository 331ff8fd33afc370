"""Streams and events of a CUDA device: thin objects over the driver's handles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from actors.device.cuda.driver import CudaError, TriedWays
from actors.device.cuda.faults import fault_of, is_of_library
from actors.device.cuda.memory import KeptDriver
from actors.device.cuda.status import Known, Reports, StatusMemory, counting
from actors.device.protocol import DeviceEvent
from actors.kernels.cuda.calls import (
    DeviceCall,
    DeviceCalls,
    LaunchCalls,
    OneOf,
    RunCudnn,
    RunProduct,
)
from actors.kernels.cuda.cudnn_records import CudnnCall
from actors.kernels.cuda.product import LtProduct
from compiler.errors import InternalError
from compiler.placement import Device

_NUM_FIRSTS = 4096
"""Counted firings of a stream that are told apart: more than can be ahead of the device."""


class CudaContext:
    """What all parts of an open device share: its driver, and what kernels report.

    `is_deterministic`: products are computed by a fixed rule, not as was measured to be fastest.
    """

    __slots__ = ("_choices", "_is_deterministic", "_ways", "device", "kept", "reports", "status")

    def __init__(
        self, kept: KeptDriver, device: Device, reports: Reports, *, is_deterministic: bool = False
    ) -> None:
        self._is_deterministic = is_deterministic
        self.reports = reports
        self.kept = kept
        self.device = device
        self.status = StatusMemory(kept, reports)
        self._choices: dict[tuple[LtProduct | CudnnCall, int], int] = {}
        self._ways: dict[str, int] = {}

    def choose(self, call: LtProduct | CudnnCall, workspace_bytes: int) -> int:
        """Return how a call of a library is computed; equal ones are chosen once."""
        if isinstance(call, LtProduct) and self._is_deterministic:
            call = replace(call, is_deterministic=True)
        key = call, workspace_bytes
        if key not in self._choices:
            driver = self.kept.driver
            self._choices[key] = (
                driver.make_product(call, workspace_bytes)
                if isinstance(call, LtProduct)
                else driver.make_cudnn(call, workspace_bytes)
            )
        return self._choices[key]

    def choose_way(self, key: str, trial: Callable[[], AbstractContextManager[TriedWays]]) -> int:
        """Return which way is taken; for a key it stays, or a launch that runs again would differ.

        Raises CudaError.
        """
        if key not in self._ways:
            self._ways[key] = self.kept.driver.choose_way(key, trial)
        return self._ways[key]

    def supported(self, calls: LaunchCalls) -> LaunchCalls:
        """Return calls without ways of which a library does not compute a call.

        A deterministic device takes the first of those that are left. Raises CudaError for none.
        """
        found: list[DeviceCall | OneOf] = []
        for call in calls:
            if not isinstance(call, OneOf):
                found.append(call)
                continue
            ways = self._supported_ways(call)
            if len(ways) == 1 or self._is_deterministic:
                found += ways[0]
            else:
                found.append(OneOf(ways))
        return tuple(found)

    def _supported_ways(self, call: OneOf) -> tuple[DeviceCalls, ...]:
        ways, failed = [], None
        for way in call.ways:
            try:
                for step in way:
                    if isinstance(step, RunProduct | RunCudnn):
                        wanted = step.product if isinstance(step, RunProduct) else step.record
                        self.choose(wanted, step.workspace_bytes)
            except CudaError as error:
                if not is_of_library(error):
                    raise
                failed = error
            else:
                ways.append(way)
        if not ways and failed is not None:
            raise failed
        return tuple(ways)

    def check(self, known: Known | None = None) -> None:
        """Raise DeviceFault where a kernel has reported anything; any thread may ask.

        Only for launches that `known` says were waited for; for all, if it is None.
        """
        if not self.reports.has_something:
            return
        if known is not None and not any([c.is_within(known) for c in self.reports.told()]):
            return
        try:
            # What is told does not depend on how far the device has come.
            self.kept.driver.synchronize()
        except CudaError as error:
            raise fault_of(error, self.device) from error
        fault = self.reports.fault()
        raise fault from fault.__cause__


class CudaStream:
    """A stream that knows how many launches it was given."""

    __slots__ = (
        "_context", "_firsts", "_known", "_num_counted", "_record", "_reports", "_wait",
        "count_address", "count_call", "handle", "name", "num_launches", "number",
    )  # fmt: skip

    def __init__(self, context: CudaContext, name: str) -> None:
        driver = context.kept.driver
        self.name = name
        self.handle = driver.make_stream(name)
        self.num_launches = 0
        self.count_address = context.status.add_count()
        self.count_call = counting(self.count_address)
        self.number = context.reports.add_stream()
        self._known: dict[int, int] = {}
        self._context = context
        self._reports = context.reports
        self._record, self._wait = driver.record, driver.wait
        self._firsts = [0] * _NUM_FIRSTS
        self._num_counted = 0

    def record(self, event: DeviceEvent) -> None:
        """Mark the end of all that is on this stream."""
        own = _own(event)
        try:
            self._record(own.handle, self.handle)
        except CudaError as error:
            raise self.fault(error) from error
        if self._reports.has_cells:
            self._known[self.number] = self.num_launches
            own.known.update(self._known)

    def wait(self, event: DeviceEvent) -> None:
        """Hold this stream until the event's latest record is done."""
        own = _own(event)
        try:
            self._wait(self.handle, own.handle)
        except CudaError as error:
            raise self.fault(error) from error
        if self._reports.has_cells:
            known = self._known
            for number, count in own.known.items():
                if count > known.get(number, 0):
                    known[number] = count

    def count_firing(self) -> None:
        """Remember how many launches there were before the firing that comes now."""
        self._firsts[self._num_counted % _NUM_FIRSTS] = self.num_launches
        self._num_counted += 1

    def first_launch(self, firing: int) -> int | None:
        """Return how many launches there were before a counted firing; None if it is long ago."""
        is_known = self._num_counted - _NUM_FIRSTS <= firing < self._num_counted
        return self._firsts[firing % _NUM_FIRSTS] if is_known else None

    def fault(self, error: CudaError, launch: int | None = None) -> Exception:
        """Return what to raise for a call that failed."""
        return fault_of(error, self._context.device, stream=self, launch=launch)


class CudaEvent:
    """An event; waiting for it also looks at what kernels before it have reported.

    `known` is of its latest record; one stream records an event, so that it only grows.
    """

    __slots__ = ("_check", "_context", "_synchronize", "handle", "known")

    def __init__(self, context: CudaContext) -> None:
        driver = context.kept.driver
        self.handle = driver.make_event()
        self._context = context
        self._synchronize: Callable[[int], object] = driver.synchronize_event
        self._check = context.check
        self.known: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        """Whether the latest record is done; never, on a device that has failed."""
        try:
            return self._context.kept.driver.is_done(self.handle)
        except CudaError:
            return False

    def synchronize(self) -> None:
        """Block this thread until the latest record is done. Raises DeviceFault."""
        try:
            self._synchronize(self.handle)
        except CudaError as error:
            raise fault_of(error, self._context.device) from error
        self._check(self.known)


def _own(event: DeviceEvent) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise InternalError(f"an event of {type(event).__name__} is not of a CUDA device")
    return event
