"""A CUDA device: arenas, streams, events and kernels of a plan, over a driver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial

from actors.device import host_memory
from actors.device.cuda import memory
from actors.device.cuda.driver import CudaDriver, CudaError
from actors.device.cuda.faults import explained, fault_of, is_out_of_memory
from actors.device.cuda.graphs import CudaLaunch, Current, StepwiseChain, bind_whole
from actors.device.cuda.memory import DeviceBlock, KeptDriver, pinned_bytes
from actors.device.cuda.status import Reports
from actors.device.cuda.streams import CudaContext, CudaEvent, CudaStream
from actors.device.cuda.ways import OpenLaunch, Placed
from actors.device.protocol import DeviceStream, FullDevice
from actors.kernels.cuda.calls import KernelText, LaunchCalls, OneOf, RunKernel, every_call
from actors.kernels.cuda.kernel import CudaKernel
from actors.kernels.cuda.views import DeviceView, PlacedView
from actors.protocol import Array, Chain
from compiler.errors import ActorflowError, DeviceError, InternalError
from compiler.placement import Device, DeviceKind, Memory
from compiler.plan import AttrValue


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
        reports: Reports | None = None,
    ) -> None:
        self.device = Device(DeviceKind.CUDA, index)
        self._kept = KeptDriver(driver)
        try:
            self._context = CudaContext(
                self._kept, self.device, reports or Reports(), is_deterministic=is_deterministic
            )
        except CudaError as error:
            raise explained(error, self.device) from error
        self._kernels = kernels
        self._is_stepwise = is_stepwise
        self._current = Current()
        self._unloaded: dict[str, KernelText] = {}
        self._open: list[OpenLaunch] = []

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
                self._unloaded.setdefault(call.text.text, call.text)
        return launch

    def _launch(
        self, calls: LaunchCalls, operands: Placed, bind: Callable[[Placed], LaunchCalls]
    ) -> CudaLaunch:
        launch = CudaLaunch(self._context, self._current)
        single = tuple([call for call in calls if not isinstance(call, OneOf)])
        if len(single) == len(calls):
            launch.prepare(single)
        else:
            self._open.append(OpenLaunch(launch, calls, operands, bind))
        return launch

    def _load(self) -> None:
        """Load what was bound since the last time, and choose among the ways to do it."""
        texts, self._unloaded = tuple(self._unloaded.values()), {}
        self._kept.driver.load((*texts, *self._context.status.texts))
        settled, self._open = self._open, []
        for launch in settled:
            launch.settle(self._context)

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
        own = tuple([launch for launch in launches if isinstance(launch, CudaLaunch)])
        try:
            self._load()
            if self._is_stepwise or len(own) < len(launches):
                return (StepwiseChain(self._context, self._current, stream, launches),)
            return (bind_whole(self._context, stream, own),)
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
    start = -block.ctypes.data % alignment
    return block[start : len(block) - alignment + start]
