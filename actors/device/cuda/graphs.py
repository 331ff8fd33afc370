"""Launches of a CUDA device, and chains of them: a graph for each slot phase, or call by call.

A launch is made ready once: its argument blocks, its products' choices, its status cell. A chain
becomes a graph when it is bound, by capture: nothing runs then, so no variable changes. A firing is
one call of the driver, and builds nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from actors.device.cuda.driver import CudaDriver, CudaError
from actors.device.cuda.memory import capturing
from actors.device.cuda.status import ArgumentBlock, StatusCell, argument_block
from actors.device.cuda.streams import CudaContext, CudaStream
from actors.kernels.cuda.calls import (
    CopyBytes,
    DeviceCall,
    DeviceCalls,
    FillBytes,
    RunCudnn,
    RunKernel,
    RunProduct,
)
from actors.protocol import Launch
from compiler.errors import InternalError

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
    """

    __slots__ = ("_calls", "_context", "_current", "_puts", "cells")

    def __init__(self, context: CudaContext, current: Current) -> None:
        self.cells: tuple[StatusCell, ...] = ()
        self._context = context
        self._current = current
        self._calls: tuple[PreparedCall, ...] = ()
        self._puts: tuple[Put, ...] = ()

    def prepare(self, calls: DeviceCalls) -> None:
        """Say what the launch does, before it is first put on a stream."""
        self._calls = tuple([(call, self._prepared(call)) for call in calls])

    def _prepared(self, call: DeviceCall) -> ArgumentBlock | int:
        if not isinstance(call, RunKernel) or call.status is None:
            return prepared(self._context, call)
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
    raise InternalError(f"a launch asks for {call!r}, which no CUDA device can do")


class WholeChain:
    """A chain that a firing puts on its stream at once: a graph, or a few calls."""

    __slots__ = ("_is_counted", "_launches", "_num_launches", "_puts", "_stream")

    def __init__(
        self,
        stream: CudaStream,
        launches: tuple[CudaLaunch, ...],
        puts: tuple[Put, ...],
        *,
        is_counted: bool,
    ) -> None:
        self._stream = stream
        self._launches = launches  # whose argument blocks are read when they are put on the stream
        self._num_launches = len(launches)
        self._puts = puts
        self._is_counted = is_counted

    def __call__(self) -> None:
        """Put all launches on the stream. Raises DeviceFault."""
        stream = self._stream
        if self._is_counted:
            stream.count_firing()
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


def bind_whole(
    context: CudaContext, stream: CudaStream, launches: tuple[CudaLaunch, ...]
) -> WholeChain:
    """Return a chain as a graph where that pays. Raises CudaError where it cannot be captured."""
    driver = context.kept.driver
    is_counted = any([launch.cells for launch in launches])
    count = partial(_kernel_put, driver, stream.handle)
    puts: list[Put] = [count(*stream.count_call)] if is_counted else []
    for index, launch in enumerate(launches):
        puts.extend(launch.puts_on(stream, index))
    if len(puts) >= _LEAST_GRAPH:
        graph = _capture(context, stream, puts)
        puts = [partial(driver.graph_later, graph, stream.handle)]
    return WholeChain(stream, launches, tuple(puts), is_counted=is_counted)


def _capture(context: CudaContext, stream: CudaStream, puts: list[Put]) -> int:
    driver = context.kept.driver
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


def _kernel_put(driver: CudaDriver, stream: int, call: RunKernel, block: ArgumentBlock) -> Put:
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
