"""A CUDA device: arenas, streams, events and kernels of a plan, over a driver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from actors.device.cuda import memory
from actors.device.cuda.driver import (
    SCRATCH_BYTE,
    CudaDriver,
    CudaError,
    DriverMemory,
    TimedAlternatives,
    explained,
    fault_of,
    is_out_of_memory,
)
from actors.device.cuda.memory import (
    DeviceBlock,
    KeptDriver,
    StatusReports,
    extent_of,
    pinned_bytes,
)
from actors.device.cuda.streams import (
    CudaContext,
    CudaEvent,
    CudaLaunch,
    CudaStream,
    Current,
    PreparedCall,
    StepwiseChain,
    WholeChain,
    prepared,
    put_on,
)
from actors.kernels.common import host_memory
from actors.kernels.common.kernel import require_plan
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    CollectiveKind,
    CopyBytes,
    DeviceCall,
    DeviceCalls,
    FillBytes,
    KernelText,
    LaunchCalls,
    RunCollective,
    RunKernel,
    RunProduct,
    every_call,
)
from actors.kernels.cuda.kernel import BindToViews, CudaKernel, DeviceView, PlacedView, operand_of
from actors.machine.protocol import Array, Chain, DeviceStream, FullDevice
from compiler.contract.attrs import AttrValue
from compiler.contract.errors import ActorflowError, DeviceError, InternalError
from compiler.contract.placement import Device, DeviceKind, Memory
from compiler.contract.types import DType, TensorType

# Of several ways to do the same a launch takes the fastest: each is timed once at load. For that
# its kernel binds it a second time, to scratch that lies as its operands do: what the plan has in
# memory by now is neither read nor written. The driver keeps which way was the fastest beside the
# algorithms of products, by what the ways do.

_ALIGNMENT = 256
"""Addresses are told apart up to here; memory of a driver begins at a multiple."""

T = TypeVar("T")

Placed = tuple[tuple[PlacedView, ...], tuple[PlacedView, ...], DeviceView | None]
"""Inputs, outputs and workspace of a launch."""


@dataclass(frozen=True, slots=True)
class UntunedLaunch:
    """A launch with ways to choose from, whose texts may not be loaded yet.

    `calls` are supported; `bind` gives those of the same launch on other operands.
    """

    launch: CudaLaunch
    calls: LaunchCalls
    operands: Placed
    bind: BindToViews

    def autotune(self, context: CudaContext) -> None:
        """Choose, and prepare the launch; its texts must be loaded. Raises CudaError."""
        calls: list[DeviceCall] = []
        for number, call in enumerate(self.calls):
            if isinstance(call, AlternativeCalls):
                trial = partial(self._trial, context, number)
                calls += call.alternatives[context.choose_way(_key(call), trial)]
            else:
                calls.append(call)
        self.launch.prepare(tuple(calls))

    @contextmanager
    def _trial(self, context: CudaContext, number: int) -> Iterator[TimedAlternatives]:
        """Make the ways of one call runnable on scratch, which goes at the end of the `with`."""
        driver = context.kept.driver
        with ExitStack() as stack:
            scratch = _TrialScratch(driver, stack)
            inputs, outputs, workspace = self.operands
            operands = (
                tuple([scratch.beside(view) for view in inputs]),
                tuple([scratch.beside(view) for view in outputs]),
                None if workspace is None else scratch.moved(workspace),
            )
            # The same place among the calls: layouts decide the calls, and those did not change.
            call = context.supported(self.bind(*operands))[number]
            if not isinstance(call, AlternativeCalls):
                raise InternalError(f"a launch has other calls on scratch: {call!r}")
            runs = [
                partial(_run, driver, tuple([(step, prepared(context, step)) for step in way]))
                for way in call.alternatives
            ]
            fills = tuple([(fill, 0) for fill in scratch.fills])
            yield TimedAlternatives(partial(_run, driver, fills), tuple(runs))


class _TrialScratch:
    """Memory for one trial."""

    def __init__(self, driver: DriverMemory, held: ExitStack) -> None:
        self._driver, self._held = driver, held
        self.fills: list[FillBytes] = []

    def beside(self, view: PlacedView) -> PlacedView:
        """Return a window that lies as another one does; pinned memory stays where it is."""
        return self.moved(view) if isinstance(view, DeviceView) else view

    def moved(self, view: DeviceView) -> DeviceView:
        """Return a window on memory of its own, at an address as odd as the other one's."""
        first, size = extent_of(view)
        # The library's choice depends on alignment: a trial elsewhere must be as odd.
        offset = first % _ALIGNMENT
        block = self._driver.allocate(offset + max(1, size))
        # Freed at the end of the trial, also where it fails.
        self._held.callback(self._driver.free, block)
        self.fills.append(FillBytes(block, SCRATCH_BYTE, offset + max(1, size)))
        return replace(view, address=view.address - first + block + offset)


def _run(driver: CudaDriver, calls: tuple[PreparedCall, ...], stream: int) -> None:
    for call in calls:
        put_on(driver, stream, *call)()


def _key(call: AlternativeCalls) -> str:
    """Return what a choice depends on: what each way does, but for addresses."""
    return "; or ".join(["; then ".join(_texts(way)) for way in call.alternatives])


def _texts(way: DeviceCalls) -> Iterator[str]:
    for call in way:
        match call:
            case RunProduct():
                yield f"{call.product.key}; in {call.workspace_bytes}"
            case RunKernel():
                yield f"{call.name} on {call.num_blocks} x {call.num_threads}"
            case CopyBytes() | FillBytes():
                yield f"{type(call).__name__} of {call.size_bytes}"
            case RunCollective():
                raise InternalError("what ranks do together is no alternative of one of them")
            case _:
                yield f"{call.record}; in {call.workspace_bytes}"


class CudaDevice:
    """One GPU, or what acts as one.

    Streams, events and memory are used by one thread at a time, but for waiting: a thread may wait
    for an event while another feeds a stream. All goes with the device and what it made.

    Args:
        driver: Opened for this device alone, and closed with it.
        kernels: By the name that launches use.
        index: Which CUDA device this is.
        is_stepwise: Whether every launch is waited for, so that one that fails is named.
        is_deterministic: Whether products are computed by a fixed rule, not as was measured to be
            fastest.
        reports: Shared by the devices of a run, one of which may bring out what another computes.
    """

    is_asynchronous = True
    view = staticmethod(memory.view_on)

    def __init__(
        self,
        driver: CudaDriver,
        kernels: Mapping[str, CudaKernel],
        index: int = 0,
        *,
        is_stepwise: bool = False,
        is_deterministic: bool = False,
        reports: StatusReports | None = None,
    ) -> None:
        self.device = Device(DeviceKind.CUDA, index)
        self._kept = KeptDriver(driver)
        try:
            self._context = CudaContext(
                self._kept,
                self.device,
                reports or StatusReports(),
                is_deterministic=is_deterministic,
            )
        except CudaError as error:
            raise explained(error, self.device) from error
        self._kernels = kernels
        self._is_stepwise = is_stepwise
        self._current = Current()
        self._unloaded: dict[str, KernelText] = {}
        self._open: list[UntunedLaunch] = []
        self._unfinished: list[WholeChain] = []

    # -- memory ----------------------------------------------------------------------------------

    @property
    def driver(self) -> CudaDriver:
        """The driver of its GPU."""
        return self._kept.driver

    def allocate(self, size_bytes: int, alignment: int, memory: Memory) -> DeviceBlock | Array:
        """Return a block; see `DeviceStore.allocate`."""
        self._kept.check_process()
        try:
            if memory is Memory.PINNED:
                return _aligned(pinned_bytes(self._kept, size_bytes + alignment), alignment)
            if memory is not Memory.DEVICE:
                raise InternalError(f"{self.device} was asked for {memory.value} memory")
            if size_bytes > self._kept.driver.free_bytes():
                gc.collect()  # a run that is over may still have its graphs
            free_bytes = self._kept.driver.free_bytes()
            if size_bytes > free_bytes:
                raise FullDevice(free_bytes)
            return DeviceBlock(self._kept, size_bytes)
        except CudaError as error:
            # Between the look and the call others may have taken what was free.
            if is_out_of_memory(error):
                raise MemoryError from error
            raise explained(error, self.device) from error

    def read(self, view: PlacedView) -> Array:
        """Return a copy of a window, when nothing works on it."""
        if not isinstance(view, DeviceView):
            return host_memory.read(view)
        self._kept.check_process()
        try:
            return memory.read(self._kept.driver, view)
        except CudaError as error:
            raise explained(error, self.device) from error

    def write(self, view: PlacedView, array: Array) -> None:
        """Fill a window, when nothing works on it."""
        if not isinstance(view, DeviceView):
            host_memory.write(view, array)
            return
        self._kept.check_process()
        try:
            memory.write(self._kept.driver, view, array)
        except CudaError as error:
            raise explained(error, self.device) from error

    # -- kernels ---------------------------------------------------------------------------------

    def has_kernel(self, name: str) -> bool:
        """Whether a launch of this kernel can be bound."""
        return name in self._kernels

    def bind(
        self,
        kernel: str,
        attrs: Mapping[str, AttrValue],
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
        types: tuple[TensorType, ...],
    ) -> CudaLaunch:
        """Return the launch of a kernel; see `DeviceStore.bind`.

        Its texts are loaded when the first chain is bound, all of a plan's at once.
        """
        self._kept.check_process()
        try:
            views, count = (*inputs, *outputs), len(inputs)
            lying = tuple([operand_of(x, t) for x, t in zip(views, types, strict=True)])
            bind = require_plan(self._kernels[kernel], attrs, lying[:count], lying[count:]).bind
            operands = (inputs, outputs, workspace)
            calls = self._context.supported(bind(*operands))
            launch = self._launch(calls, operands, bind)
        except ActorflowError:
            raise
        except CudaError as error:
            raise explained(error, self.device) from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DeviceError(f"{kernel} cannot be bound: {reason}") from error
        for call in every_call(calls):
            if isinstance(call, RunKernel):
                # Equal texts of many launches are compiled once.
                self._unloaded.setdefault(call.text.text, call.text)
        return launch

    def _launch(self, calls: LaunchCalls, operands: Placed, bind: BindToViews) -> CudaLaunch:
        launch = CudaLaunch(self._context, self._current)
        single = tuple([call for call in calls if not isinstance(call, AlternativeCalls)])
        if len(single) == len(calls):
            launch.prepare(single)
        else:
            self._open.append(UntunedLaunch(launch, calls, operands, bind))
        return launch

    def _load(self) -> None:
        """Load what was bound since the last time, and choose among the ways to do it."""
        texts, self._unloaded = tuple(self._unloaded.values()), {}
        self._kept.driver.load((*texts, *self._context.status.texts))
        settled, self._open = self._open, []
        for launch in settled:
            launch.autotune(self._context)

    # -- streams ---------------------------------------------------------------------------------

    def make_stream(self, name: str) -> CudaStream:
        """Return a new stream."""
        try:
            return CudaStream(self._context, name)
        except CudaError as error:
            raise explained(error, self.device) from error

    def make_event(self) -> CudaEvent:
        """Return a new event, never recorded."""
        try:
            return CudaEvent(self._context)
        except CudaError as error:
            raise explained(error, self.device) from error

    def bind_chain(self, stream: DeviceStream, launches: Chain) -> Chain:
        """Return one call that puts all launches on the stream, as a graph where that pays.

        Launches that somebody watches, and all of a stepwise device, are waited for one by one.
        """
        if not isinstance(stream, CudaStream):
            raise InternalError(f"a stream of {type(stream).__name__} is not a CUDA device's")
        cuda_launches = tuple([launch for launch in launches if isinstance(launch, CudaLaunch)])
        try:
            self._load()
            # A launch that a trace wraps is no CudaLaunch any more and cannot be captured.
            if self._is_stepwise or len(cuda_launches) < len(launches):
                return (StepwiseChain(self._context, self._current, stream, launches),)
            chain = WholeChain(self._context, stream, cuda_launches)
            if all([launch.is_prepared for launch in cuda_launches]):
                chain.finish()
            else:
                self._unfinished.append(chain)
            return (chain,)
        except CudaError as error:
            raise explained(error, self.device) from error

    # -- other ranks -----------------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator know it by. Raises DeviceError."""
        return self._asked(self._kept.driver.unique_id)

    def join_communicator(
        self, unique_id: bytes, num_ranks: int, rank: int, deadline_s: float
    ) -> int:
        """Return a communicator when all its ranks are there. Raises DeviceError."""
        join = self._kept.driver.join_communicator
        return self._asked(partial(join, unique_id, num_ranks, rank, deadline_s))

    def connect_neighbours(self, communicator: int, place: int) -> None:
        """Send a byte from the first of two ranks to the other one, and wait. Raises DeviceError.

        NCCL connects two ranks at their first transfer, and both wait for that. In a capture each
        would do so in the order of its own chains, in which two stages may cross.
        """
        driver = self._kept.driver
        counts, received = ((0, 0), (1, 0)) if place else ((0, 1), (0, 0))

        def send() -> None:
            block = driver.allocate(_ALIGNMENT)
            kind, dtype = CollectiveKind.EXCHANGE, DType.UINT8
            call = RunCollective(kind, communicator, block, block, counts, dtype, received=received)
            driver.collective_later(call, driver.make_stream("connect"))
            driver.synchronize()
            driver.free(block)

        self._asked(send)

    def make_collective(self) -> CudaLaunch:
        """Return a launch that is prepared once there are communicators."""
        return CudaLaunch(self._context, self._current)

    def finish_chains(self) -> None:
        """Make graphs of the chains whose launches are prepared by now. Raises DeviceError."""
        chains, self._unfinished = self._unfinished, []
        for chain in chains:
            self._asked(chain.finish)

    def check_communicator(self, communicator: int) -> None:
        """Raise DeviceError where a collective has failed; any thread may ask."""
        self._asked(partial(self._kept.driver.check_communicator, communicator))

    def give_up(self, communicators: Sequence[int], error: Exception) -> None:
        """End what waits for other ranks, and raise `error` in every later wait, as a fault.

        What ran behind it worked on bytes that mean nothing. From any thread, once.
        """
        # First the word, then the end: whoever is woken must not take what is there for results.
        self._context.reports.give_up(error)
        for communicator in communicators:
            with suppress(CudaError):  # a GPU that has failed waits for nobody
                self._kept.driver.abort_communicator(communicator)

    def _asked(self, call: Callable[[], T]) -> T:
        self._kept.check_process()
        try:
            return call()
        except CudaError as error:
            raise explained(error, self.device) from error

    # -- the end of all work ---------------------------------------------------------------------

    def synchronize(self) -> None:
        """Block this thread until every stream is empty. Raises DeviceFault."""
        self._kept.check_process()
        try:
            self._kept.driver.synchronize()
        except CudaError as error:
            raise fault_of(error, self.device) from error
        self._context.check()


def _aligned(block: Array, alignment: int) -> Array:
    """Return the bytes of a block that is `alignment` too long, from an aligned one on."""
    # In Python a remainder is never negative: the bytes up to the next multiple.
    start = -block.ctypes.data % alignment
    return block[start : len(block) - alignment + start]
