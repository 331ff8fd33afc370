"""A CUDA device: arenas, streams, events and kernels of a plan, over a driver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from actors.device.cuda import memory
from actors.device.cuda.driver import (
    SCRATCH_BYTE,
    CudaDriver,
    CudaError,
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
    bind_whole,
    prepared,
    put_on,
)
from actors.kernels.common import host_memory
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    CopyBytes,
    DeviceCall,
    DeviceCalls,
    FillBytes,
    KernelText,
    LaunchCalls,
    RunKernel,
    RunProduct,
    every_call,
)
from actors.kernels.cuda.kernel import CudaKernel, DeviceView, PlacedView
from actors.machine.protocol import Array, Chain, DeviceStream, FullDevice
from compiler.contract.attrs import AttrValue
from compiler.contract.errors import ActorflowError, DeviceError, InternalError
from compiler.contract.placement import Device, DeviceKind, Memory

# Of several ways to do the same a launch takes the fastest: each is timed once at load. For that
# its kernel binds it a second time, to scratch that lies as its operands do: what the plan has in
# memory by now is neither read nor written. The driver keeps which way was the fastest beside the
# algorithms of products, by what the ways do.

_ALIGNMENT = 256
"""Addresses are told apart up to here; memory of a driver begins at a multiple."""

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
    bind: Callable[[Placed], LaunchCalls]

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
            call = context.supported(self.bind(operands))[number]
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

    def __init__(self, driver: CudaDriver, held: ExitStack) -> None:
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

    # -- memory ----------------------------------------------------------------------------------

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
    ) -> CudaLaunch:
        """Return the launch of a kernel; see `DeviceStore.bind`.

        Its texts are loaded when the first chain is bound, all of a plan's at once.
        """
        self._kept.check_process()
        try:
            bind = partial(_bound, self._kernels[kernel], attrs)
            operands = (inputs, outputs, workspace)
            calls = self._context.supported(bind(operands))
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

    def _launch(
        self, calls: LaunchCalls, operands: Placed, bind: Callable[[Placed], LaunchCalls]
    ) -> CudaLaunch:
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
            return (bind_whole(self._context, stream, cuda_launches),)
        except CudaError as error:
            raise explained(error, self.device) from error

    def synchronize(self) -> None:
        """Block this thread until every stream is empty. Raises DeviceFault."""
        self._kept.check_process()
        try:
            self._kept.driver.synchronize()
        except CudaError as error:
            raise fault_of(error, self.device) from error
        self._context.check()


def _bound(kernel: CudaKernel, attrs: Mapping[str, AttrValue], operands: Placed) -> LaunchCalls:
    return kernel.bind(attrs, *operands)


def _aligned(block: Array, alignment: int) -> Array:
    """Return the bytes of a block that is `alignment` too long, from an aligned one on."""
    # In Python a remainder is never negative: the bytes up to the next multiple.
    start = -block.ctypes.data % alignment
    return block[start : len(block) - alignment + start]
