"""Streams of a CUDA device, and what goes on them: events, launches, and chains of launches.

A launch is made ready once: its argument blocks, its products' choices, its status cell. A chain
becomes a graph for each slot phase when it is bound, by capture: nothing runs then, so no variable
changes. A firing is one call of the driver, and builds nothing. Chains too short for a graph, and
chains whose every launch is waited for, go call by call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial

from actors.device.cuda.driver import (
    CudaDriver,
    CudaError,
    DriverGraphs,
    DriverKernels,
    TimedAlternatives,
    fault_by,
    fault_of,
    is_of_library,
)
from actors.device.cuda.memory import (
    ArgumentBlock,
    KeptDriver,
    Known,
    StatusCell,
    StatusMemory,
    StatusReports,
    argument_block,
    capturing,
    counting,
)
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    CopyBytes,
    CudnnCall,
    DeviceCall,
    DeviceCalls,
    FillBytes,
    LaunchCalls,
    LtProduct,
    RunCollective,
    RunCudnn,
    RunKernel,
    RunProduct,
)
from actors.machine.protocol import DeviceEvent, Launch
from compiler.contract.errors import InternalError
from compiler.contract.placement import Device

_NUM_FIRSTS = 4096
"""Counted firings of a stream that are told apart: more than can be ahead of the device."""


class CudaContext:
    """What all parts of an open device share: its driver, and what kernels report.

    `is_deterministic`: products are computed by a fixed rule, not as was measured to be fastest.
    """

    __slots__ = ("_choices", "_is_deterministic", "_ways", "device", "kept", "reports", "status")

    def __init__(
        self,
        kept: KeptDriver,
        device: Device,
        reports: StatusReports,
        *,
        is_deterministic: bool = False,
    ) -> None:
        self._is_deterministic = is_deterministic
        self.reports = reports
        self.kept = kept
        self.device = device
        self.status = StatusMemory(kept, reports)
        # By record and bytes of workspace: equal products of a plan are timed once.
        self._choices: dict[tuple[LtProduct | CudnnCall, int], int] = {}
        self._ways: dict[str, int] = {}

    def choose(self, call: LtProduct | CudnnCall, workspace_bytes: int) -> int:
        """Return how a call of a library is computed; equal ones are chosen once."""
        if isinstance(call, LtProduct) and self._is_deterministic:
            # Part of the key, so that timed and fixed choices of one product never mix.
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

    def choose_way(
        self, key: str, trial: Callable[[], AbstractContextManager[TimedAlternatives]]
    ) -> int:
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
        supported_calls: list[DeviceCall | AlternativeCalls] = []
        for call in calls:
            if not isinstance(call, AlternativeCalls):
                supported_calls.append(call)
                continue
            ways = self._supported_ways(call)
            # What was fastest may differ from run to run, and with it the order of sums.
            if len(ways) == 1 or self._is_deterministic:
                supported_calls += ways[0]
            else:
                supported_calls.append(AlternativeCalls(ways))
        return tuple(supported_calls)

    def _supported_ways(self, call: AlternativeCalls) -> tuple[DeviceCalls, ...]:
        ways, failure = [], None
        for way in call.alternatives:
            try:
                for step in way:
                    if isinstance(step, RunProduct | RunCudnn):
                        library_call = step.product if isinstance(step, RunProduct) else step.record
                        self.choose(library_call, step.workspace_bytes)
            except CudaError as error:
                # A GPU that has failed is no reason to take another way.
                if not is_of_library(error):
                    raise
                failure = error
            else:
                ways.append(way)
        if not ways and failure is not None:
            raise failure
        return tuple(ways)

    def check(self, known: Known | None = None) -> None:
        """Raise DeviceFault where a kernel has reported anything; any thread may ask.

        Only for launches that `known` says were waited for; for all, if it is None.
        """
        if self.reports.given_up is not None:
            raise fault_by(self.reports.given_up, self.device)
        if not self.reports.has_something:
            return
        if known is not None and not any([c.is_within(known) for c in self.reports.raised_cells()]):
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
        cuda_event = _own(event)
        try:
            self._record(cuda_event.handle, self.handle)
        except CudaError as error:
            raise self.fault(error) from error
        if self._reports.has_cells:
            # Vector clocks: an event carries how many launches of each stream come before it. Only
            # where a kernel can report, so that other plans pay nothing per record.
            self._known[self.number] = self.num_launches
            cuda_event.known.update(self._known)

    def wait(self, event: DeviceEvent) -> None:
        """Hold this stream until the event's latest record is done."""
        cuda_event = _own(event)
        try:
            self._wait(self.handle, cuda_event.handle)
        except CudaError as error:
            raise self.fault(error) from error
        if self._reports.has_cells:
            clock = self._known
            for number, count in cuda_event.known.items():
                if count > clock.get(number, 0):
                    clock[number] = count

    def count_firing(self) -> None:
        """Remember how many launches there were before the firing that comes now."""
        # A ring: a report is looked at while its firing is still among the last few thousand.
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
            # is_done never raises; the fault is told by whoever waits.
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


_LEAST_GRAPH = 3
"""Calls from which on a graph costs less than to put them on the stream one by one."""

Put = Callable[[], object]
"""One prepared call of the driver."""

PreparedCall = tuple[DeviceCall, ArgumentBlock | int]


class Current:
    """The stream on which a launch that is called by itself goes, and its place in the chain."""

    __slots__ = ("index", "stream")

    def __init__(self) -> None:
        self.stream: CudaStream | None = None
        self.index = 0


class CudaLaunch:
    """The calls of one launch, ready to be put on a stream.

    Called by itself, as a trace does, it goes on the stream of the chain that runs, and has ended
    when it returns.

    `is_prepared`: whether it is known what it does; a collective is prepared when its ranks meet.
    """

    __slots__ = ("_calls", "_context", "_current", "_puts", "cells", "is_prepared")

    def __init__(self, context: CudaContext, current: Current) -> None:
        self.cells: tuple[StatusCell, ...] = ()
        self._context = context
        self._current = current
        self._calls: tuple[PreparedCall, ...] = ()
        self._puts: tuple[Put, ...] = ()
        self.is_prepared = False

    def prepare(self, calls: DeviceCalls) -> None:
        """Say what the launch does, before it is first put on a stream."""
        self.is_prepared = True
        self._calls = tuple([(call, self._prepared(call)) for call in calls])

    @property
    def is_collective(self) -> bool:
        """Whether it does something together with other ranks."""
        return any([isinstance(call, RunCollective) for call, _ in self._calls])

    @property
    def calls(self) -> DeviceCalls:
        """What the launch does, of alternatives the one that was taken; none before `prepare`."""
        return tuple([call for call, _ in self._calls])

    def _prepared(self, call: DeviceCall) -> ArgumentBlock | int:
        if not isinstance(call, RunKernel) or call.status is None:
            return prepared(self._context, call)
        # A copy with the cell's address: records of kernels are shared by launches.
        words = [*call.words]
        cell = self._context.status.add_cell(call.status)
        self.cells = (*self.cells, cell)
        words[call.status.word] = cell.address
        return argument_block(words)

    def puts_on(self, stream: CudaStream, index: int) -> tuple[Put, ...]:
        """Return the prepared calls of this launch on a stream; its texts must be loaded.

        `index` is its place in the chain, for whoever reads what it reports.
        """
        for cell in self.cells:
            cell.put_on(stream, index)
        driver = self._context.kept.driver
        return tuple([put_on(driver, stream.handle, *call) for call in self._calls])

    def __call__(self) -> None:
        """Run on the stream of the chain that is on, to the end."""
        stream = self._current.stream
        if stream is None:
            raise InternalError("a launch of a CUDA device was called outside of any chain")
        if not self._puts:
            self._puts = self.puts_on(stream, self._current.index)
        for put in self._puts:
            put()
        self._context.kept.driver.synchronize()


def prepared(context: CudaContext, call: DeviceCall) -> ArgumentBlock | int:
    """Return a kernel's argument block, or how a library computes."""
    if isinstance(call, RunProduct):
        return context.choose(call.product, call.workspace_bytes)
    if isinstance(call, RunCudnn):
        return context.choose(call.record, call.workspace_bytes)
    return argument_block([*call.words]) if isinstance(call, RunKernel) else 0


def put_on(driver: CudaDriver, stream: int, call: DeviceCall, made: ArgumentBlock | int) -> Put:
    """Return a call of the driver with all its arguments, for a stream by its handle."""
    match call, made:
        case RunKernel(), ctypes.Array():
            return _kernel_put(driver, stream, call, made)
        case CopyBytes(target, source, size), _:
            return partial(driver.copy_later, target, source, size, stream)
        case FillBytes(target, value, size), _:
            return partial(driver.fill_later, target, value, size, stream)
        case RunProduct(_, a, b, c, d, workspace), int():
            return partial(driver.product_later, made, a, b, c, d, workspace, stream)
        case RunCudnn(_, addresses, workspace), int():
            return partial(driver.cudnn_later, made, addresses, workspace, stream)
        case RunCollective(), _:
            return partial(driver.collective_later, call, stream)
    raise InternalError(f"a launch asks for {call!r}, which no CUDA device can do")


class WholeChain:
    """A chain that a firing puts on its stream at once: a graph, or a few calls.

    Its launches are prepared before the first firing, and then it is finished.
    """

    __slots__ = ("_context", "_is_counted", "_launches", "_num_launches", "_puts", "_stream")

    def __init__(
        self, context: CudaContext, stream: CudaStream, launches: tuple[CudaLaunch, ...]
    ) -> None:
        self._context = context
        self._stream = stream
        self._launches = launches  # whose argument blocks are read when they are put on the stream
        self._num_launches = len(launches)
        self._puts: tuple[Put, ...] = ()
        self._is_counted = any([launch.cells for launch in launches])

    def finish(self) -> None:
        """Make a graph of it where that pays. Raises CudaError where it cannot be captured."""
        driver, stream = self._context.kept.driver, self._stream
        puts: list[Put] = []
        if self._is_counted:
            puts.append(_kernel_put(driver, stream.handle, *stream.count_call))
        for index, launch in enumerate(self._launches):
            puts.extend(launch.puts_on(stream, index))
        # All ranks capture a collective, or none: how many calls there are may differ by rank.
        if len(puts) >= _LEAST_GRAPH or any([launch.is_collective for launch in self._launches]):
            graph = _capture(driver, stream, puts)
            puts = [partial(driver.graph_later, graph, stream.handle)]
        self._puts = tuple(puts)

    def __call__(self) -> None:
        """Put all launches on the stream. Raises DeviceFault."""
        stream = self._stream
        # A graph may hold calls of a communicator that is gone.
        if self._context.reports.given_up is not None:
            self._context.check()
        if self._is_counted:
            stream.count_firing()
        # Before the calls: a report of one of these is numbered from what was there before.
        stream.num_launches += self._num_launches
        try:
            for put in self._puts:
                put()
        except CudaError as error:
            raise stream.fault(error) from error


class StepwiseChain:
    """Launches that are put on a stream one by one, each waited for; `running` is the one on."""

    __slots__ = ("_context", "_count", "_current", "_launches", "_stream", "running")

    def __init__(
        self,
        context: CudaContext,
        current: Current,
        stream: CudaStream,
        launches: tuple[Launch, ...],
    ) -> None:
        self._context = context
        self._current = current
        self._stream = stream
        self._launches = launches
        self.running = 0
        # Of launches that are watched nobody sees which may report: where any may, all are counted.
        is_counted = bool(context.status.cells)
        driver = context.kept.driver
        self._count = _kernel_put(driver, stream.handle, *stream.count_call) if is_counted else None

    def __call__(self) -> None:
        """Run all launches, each to its end. Raises DeviceFault, which names one."""
        stream, current = self._stream, self._current
        first = stream.num_launches
        try:
            if self._count is not None:
                stream.count_firing()
                self._count()
        except CudaError as error:
            raise stream.fault(error) from error
        stream.num_launches += len(self._launches)
        current.stream = stream
        for number, launch in enumerate(self._launches):
            self.running = current.index = number
            try:
                launch()
            except CudaError as error:
                raise stream.fault(error, first + number) from error
            self._context.check()


def _capture(driver: DriverGraphs, stream: CudaStream, puts: list[Put]) -> int:
    with capturing():
        driver.begin_capture(stream.handle)
        try:
            for put in puts:
                put()
        except BaseException:
            with suppress(CudaError):  # the stream would stay in capture
                driver.end_capture(stream.handle)
            raise
        return driver.end_capture(stream.handle)


def _kernel_put(driver: DriverKernels, stream: int, call: RunKernel, block: ArgumentBlock) -> Put:
    """Return a kernel's launch; whoever calls it keeps the block."""
    return partial(
        driver.launch_later,
        driver.function(call.text, call.name),
        call.num_blocks,
        call.num_threads,
        call.shared_bytes,
        ctypes.addressof(block),
        len(block),
        stream,
    )
