"""Simulated devices: numpy's memory and the host's kernels, on streams that a schedule makes late.

Code that forgot a wait gives wrong numbers for some seed of the schedule. Memory begins as 0xFF,
which is NaN for floating point, so that what is read before it is written shows. `poison` fills
bytes that a plan calls free in the same way, so that who reads them too late is seen.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import Enum
from random import Random
from threading import Condition, Thread
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from actors.device.host import NO_KERNELS, HostKernels
from actors.kernels.common import host_memory
from actors.kernels.common.kernel import (
    Attrs,
    HostKernel,
    HostPlan,
    Kernel,
    KernelNeeds,
    KernelPlan,
    Operands,
)
from actors.kernels.cuda.calls import FillBytes, LaunchCalls
from actors.kernels.cuda.kernel import CudaKernel, CudaPlan, PlacedViews, Scratch, address_of
from actors.machine.protocol import (
    Array,
    Arrays,
    Chain,
    DeviceEvent,
    DeviceFault,
    DeviceStream,
    Launch,
)
from compiler.contract.errors import InternalError
from compiler.contract.placement import Device, DeviceKind, Memory
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    Register,
    RegisterKind,
    View,
)
from compiler.contract.plan_tables import (
    Launch as PlannedLaunch,
)
from compiler.contract.types import DType, RegisterId, TensorType

# A plan that is poisoned gets one more launch at the end of each chain on a device that the host
# acts: a simulated one, or an emulated GPU. It fills with 0xFF, which is NaN for floating point,
# what nobody may need when the firing ends: the chain's TEMPORARY registers, and every slot of an
# input that has no other consumer. A right plan gives the same numbers with it; and since it is a
# plan, `actors.race.race` proves that no poison hits what somebody else still uses.

_NAME = "poison"


def poison(plan: Plan, kinds: Collection[DeviceKind] = (DeviceKind.SIM,)) -> Plan:
    """Return the plan with poison at the end of each chain on devices of some kinds."""
    views = list(plan.views)
    num_consumers = Counter([port.register for actor in plan.actors for port in actor.inputs])
    actors = []
    for actor in plan.actors:
        if plan.streams[actor.stream].device.kind not in kinds:
            actors.append(actor)
            continue
        touched = [plan.registers[number] for number in _touched(plan, actor)]
        exclusive = [port.register for port in actor.inputs if num_consumers[port.register] == 1]
        free = [r for r in touched if r.kind is RegisterKind.TEMPORARY or r.id in exclusive]
        live = [r for r in touched if r not in free]
        targets = []
        for register in free:
            if not any([_overlap(register, other) for other in live]):
                type_ = TensorType(DType.UINT8, (register.size_bytes,))
                targets.append(len(views))
                views.append(View(register.id, 0, type_, (1,)))
        if targets:
            launch = PlannedLaunch(_NAME, _NAME, (), (), tuple(targets), None, "", 0, 0.0)
            actor = replace(actor, launches=(*actor.launches, launch))
        actors.append(actor)
    return replace(plan, views=tuple(views), actors=tuple(actors))


def _touched(plan: Plan, actor: Actor) -> tuple[RegisterId, ...]:
    """Return the registers of an actor's launches, each once, in order of first use."""
    views = [
        view
        for launch in actor.launches
        for view in (*launch.inputs, *launch.outputs, launch.workspace)
        if view is not None
    ]
    return tuple(dict.fromkeys([plan.views[view].register for view in views]))


def _overlap(one: Register, other: Register) -> bool:
    return one.arena == other.arena and any(
        [
            a < b + other.size_bytes and b < a + one.size_bytes
            for a in one.offsets_bytes
            for b in other.offsets_bytes
        ]
    )


def _plan_poison(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan:
    """Fill the outputs with 0xFF; no graph has this op."""

    def bind(inputs: Arrays, outputs: Arrays, workspace: Array | None) -> Launch:
        def scribble() -> None:
            for output in outputs:
                output[...] = np.uint8(0xFF)

        return scribble

    return KernelPlan(KernelNeeds(), bind)


def _plan_cuda_poison(attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan:
    """Do the same on a GPU."""
    return KernelPlan(KernelNeeds(), _fills)


def _fills(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
    return tuple([FillBytes(address_of(x), 0xFF, x.shape[0]) for x in outputs if x.shape[0]])


POISON_KERNELS: Mapping[str, HostKernel] = MappingProxyType(
    {_NAME: Kernel(_NAME, _NAME, _plan_poison)}
)
"""What a poisoned plan needs on simulated devices besides its own kernels."""

CUDA_POISON_KERNELS: Mapping[str, CudaKernel] = MappingProxyType(
    {_NAME: Kernel(_NAME, _NAME, _plan_cuda_poison)}
)
"""What a poisoned plan needs on emulated GPUs besides its own kernels."""


# How a schedule makes a device late: nothing put on a stream is executed by that. A scheduler takes
# the head of any stream that can go on whenever something else happens: a few after each call, and
# as many as it takes when the host waits. Streams have weights that change now and then, so that
# one lags far behind the others, then runs in a burst. Waits are CUDA's to the letter (see
# `actors.machine.protocol`): a wait keeps the record that was the event's latest when it was put on
# the stream. Devices with one schedule lag behind one another as their streams do, and wait for one
# another's events.
#
# With one host thread every seed can be replayed. Several host threads may use a device; a launch
# then runs on any of them, one at a time.
#
# A launch that raises is a fault of its device: later launches there are skipped, records and waits
# still happen, and every call from then on raises.
#
# Source: deterministic simulation testing, as in `actors.testing.oracle`.

_EAGERNESS = (0.0, 0.3, 0.6, 0.85)
"""How likely the device does one more operation after a call: 0 is as late as can be."""

_WEIGHTS = (0.001, 0.03, 1.0)
_CHANGE = 0.03
"""How likely a weight changes, per operation."""


class LateSchedule:
    """When the operations on the streams of some devices are executed.

    Args:
        rng: Where all its choices come from.
        eagerness: Chance in [0, 1) of each further operation after a call; drawn if None.
    """

    def __init__(self, rng: Random, *, eagerness: float | None = None) -> None:
        if eagerness is not None and not 0 <= eagerness < 1:
            raise ValueError(f"expected an eagerness in [0, 1), got {eagerness}")
        self._rng = rng
        self._eagerness = rng.choice(_EAGERNESS) if eagerness is None else eagerness
        self._streams: list[SimulatedStream] = []
        self._weights: list[float] = []
        self._num_events = 0
        # Notified when a launch that blocks has ended, and when something is put on a stream.
        self._lock = Condition()
        self._faults: dict[Device, _InjectedFault] = {}

    def make_stream(self, device: Device, name: str) -> SimulatedStream:
        """Return a new stream of a device."""
        stream = SimulatedStream(self, device, name)
        self._streams.append(stream)
        self._weights.append(self._rng.choice(_WEIGHTS))
        return stream

    def make_event(self, device: Device) -> SimulatedEvent:
        """Return a new event of a device."""
        self._num_events += 1
        return SimulatedEvent(self, device, self._num_events - 1)

    def synchronize(self, device: Device) -> None:
        """Execute all that was put on a device's streams, and what that waits for."""
        with self._lock:
            while any([stream.queue for stream in self._streams if stream.device == device]):
                self._step(f"the host waits for {device}")
            self.check(device)

    def check(self, device: Device) -> None:
        """Raise DeviceFault where a launch of the device has raised."""
        if device in self._faults:
            stream, launch, error = self._faults[device]
            raise DeviceFault(
                f"launch {launch} on stream {stream.name!r} raised {type(error).__name__}: {error}",
                stream=stream,
                launch=launch,
            ) from error

    # -- for streams and events ------------------------------------------------------------------

    def put(
        self,
        stream: SimulatedStream,
        kind: OperationKind,
        *,
        launch: Launch | None = None,
        event: SimulatedEvent | None = None,
    ) -> None:
        """Put an operation on a stream, and perhaps execute some."""
        with self._lock:
            self.check(stream.device)
            if kind is OperationKind.RECORD and event is not None:
                event.mark(stream.name)
            record = None if event is None else event.record
            if kind is OperationKind.BLOCKING:
                record = Record(-1, stream.num_executed, stream.name)
            stream.queue.append(Operation(kind, launch, record))
            self._lock.notify_all()
            while self._rng.random() < self._eagerness and self._ready():
                self._step("")

    def wait_for(self, event: SimulatedEvent) -> None:
        """Execute until the latest record of an event is done."""
        with self._lock:
            record = event.record
            while record is not None and not record.is_done:
                self._step(f"the host waits for {record}")
            self.check(event.device)

    # -- the scheduler ---------------------------------------------------------------------------

    def _ready(self) -> list[int]:
        """Return the streams whose head can be executed."""
        return [
            number
            for number, stream in enumerate(self._streams)
            if stream.queue and not stream.queue[0].is_held
        ]

    def _step(self, reason: str) -> None:
        """Execute one operation, whose stream is chosen by weight, or wait for one that blocks."""
        ready, rng = self._ready(), self._rng
        if not ready and any([s.queue and s.queue[0].is_blocking for s in self._streams]):
            # The lock is free meanwhile: another thread may put what other ranks wait for.
            self._lock.wait()
            return
        if not ready:
            heads = [
                f"stream {s.name!r} waits for {s.queue[0].record}" for s in self._streams if s.queue
            ]
            raise InternalError(
                f"the devices cannot continue: {reason};"
                f" {'; '.join(heads) or 'every stream is empty'}"
            )
        if rng.random() < _CHANGE:
            self._weights[rng.randrange(len(self._weights))] = rng.choice(_WEIGHTS)
        number = rng.choices(ready, [self._weights[n] for n in ready])[0]
        stream = self._streams[number]
        if stream.queue[0].kind is OperationKind.BLOCKING and self._begin(stream):
            return
        operation = stream.queue.popleft()
        if operation.kind is OperationKind.BLOCKING:
            stream.num_executed += 1
        elif operation.launch is not None:
            self._execute(stream, operation.launch)
        elif operation.kind is OperationKind.RECORD and operation.record is not None:
            operation.record.is_done = True

    def _begin(self, stream: SimulatedStream) -> bool:
        """Begin the launch at the head of a stream on a thread of its own.

        It stays there until it has ended, and then this returns False.
        """
        record, launch = stream.queue[0].record, stream.queue[0].launch
        if record is None or launch is None or record.is_begun:
            return False
        record.is_begun = True

        def run() -> None:
            failure: Exception | None = None
            try:
                launch()
            except Exception as error:
                failure = error
            with self._lock:
                if failure is not None and stream.device not in self._faults:
                    fault = _InjectedFault(stream, stream.num_executed, failure)
                    self._faults[stream.device] = fault
                record.is_done = True
                self._lock.notify_all()

        Thread(target=run, name=str(record), daemon=True).start()
        return True

    def _execute(self, stream: SimulatedStream, launch: Launch) -> None:
        stream.num_executed += 1
        if stream.device in self._faults:
            return
        try:
            # On whatever thread this is: overflow and NaN are ordinary values inside a kernel.
            with np.errstate(all="ignore"):
                launch()
        except Exception as error:
            self._faults[stream.device] = _InjectedFault(stream, stream.num_executed - 1, error)


class SimulatedStream:
    """A queue of operations. `num_executed` launches have been taken off it."""

    def __init__(self, schedule: LateSchedule, device: Device, name: str) -> None:
        self.name = name
        self.device = device
        self.queue: deque[Operation] = deque()
        self.num_executed = 0
        self._schedule = schedule

    def enqueue(self, launch: Launch) -> None:
        """Execute a launch after all that is on this stream."""
        self._schedule.put(self, OperationKind.LAUNCH, launch=launch)

    def record(self, event: DeviceEvent) -> None:
        """Make this place of the stream the latest record of an event."""
        self._schedule.put(self, OperationKind.RECORD, event=_own(event))

    def wait(self, event: DeviceEvent) -> None:
        """Hold this stream until what is now the latest record of an event is done."""
        self._schedule.put(self, OperationKind.WAIT, event=_own(event))


class SimulatedEvent:
    """A mark that can be set again. `record` is the latest, or None."""

    def __init__(self, schedule: LateSchedule, device: Device, number: int) -> None:
        self.number = number
        self.device = device
        self.record: Record | None = None
        self._schedule = schedule
        self._num_records = 0

    @property
    def is_done(self) -> bool:
        """Whether the latest record is done, or there is none."""
        return self.record is None or self.record.is_done

    def synchronize(self) -> None:
        """Execute until what is now the latest record is done."""
        self._schedule.wait_for(self)

    def mark(self, stream: str) -> None:
        """Make a new record, which is the latest from now on."""
        self.record = Record(self.number, self._num_records, stream)
        self._num_records += 1


class Record:
    """One record of an event: what a wait keeps; or how far a launch is that blocks."""

    __slots__ = ("event", "is_begun", "is_done", "number", "stream")

    def __init__(self, event: int, number: int, stream: str) -> None:
        self.event = event
        self.number = number
        self.stream = stream
        self.is_begun = self.is_done = False

    def __str__(self) -> str:
        return f"record {self.number} of event {self.event} on stream {self.stream!r}"


class OperationKind(Enum):
    """What a stream can be asked to do. A BLOCKING launch waits for other ranks."""

    LAUNCH = "launch"
    BLOCKING = "blocking"
    RECORD = "record"
    WAIT = "wait"


class Operation(NamedTuple):
    """What is on a queue. A launch has no record; a wait for an event never recorded neither."""

    kind: OperationKind
    launch: Launch | None
    record: Record | None

    @property
    def is_held(self) -> bool:
        """Whether this is a wait for something that is not done, or a launch that blocks."""
        is_pending = self.record is not None and not self.record.is_done
        return self.is_blocking or (self.kind is OperationKind.WAIT and is_pending)

    @property
    def is_blocking(self) -> bool:
        """Whether this is a launch that has begun, and waits for other ranks."""
        record = self.record
        is_begun = record is not None and record.is_begun and not record.is_done
        return self.kind is OperationKind.BLOCKING and is_begun


class _InjectedFault(NamedTuple):
    stream: SimulatedStream
    launch: int
    error: Exception


def _own(event: DeviceEvent) -> SimulatedEvent:
    if not isinstance(event, SimulatedEvent):
        raise InternalError(f"an event of {type(event).__name__} is not of a simulated device")
    return event


class SimulatedDevice(HostKernels):
    """Numpy's memory and kernels behind streams that a schedule makes late.

    Args:
        schedule: The same for all devices of a run.
        kernels: Its kernels, by name.
        index: Which simulated device this is.
    """

    is_asynchronous = True
    view = staticmethod(host_memory.view_on)
    read = staticmethod(host_memory.read)
    write = staticmethod(host_memory.write)

    def __init__(
        self, schedule: LateSchedule, kernels: Mapping[str, HostKernel] = NO_KERNELS, index: int = 0
    ) -> None:
        super().__init__({**kernels, **POISON_KERNELS})
        self.device = Device(DeviceKind.SIM, index)
        self._schedule = schedule

    def allocate(self, size_bytes: int, alignment: int, memory: Memory) -> Array:
        """Return a block of bytes that mean nothing; see `DeviceStore.allocate`."""
        block = host_memory.allocate(size_bytes, alignment, memory)
        block.fill(0xFF)
        return block

    def make_stream(self, name: str) -> SimulatedStream:
        """Return a new stream."""
        return self._schedule.make_stream(self.device, name)

    def make_event(self) -> SimulatedEvent:
        """Return a new event."""
        return self._schedule.make_event(self.device)

    def bind_chain(self, stream: DeviceStream, launches: Chain) -> Chain:
        """Return one call that puts all launches on the stream, one by one."""
        if not isinstance(stream, SimulatedStream):
            raise InternalError(f"a stream of {type(stream).__name__} is not a simulated device's")
        return (_EnqueuedChain(stream, launches),)

    def synchronize(self) -> None:
        """Execute all that was put on the streams."""
        self._schedule.synchronize(self.device)


class _EnqueuedChain:
    """Launches that are put on a stream one by one; `running` is the one that is being put."""

    __slots__ = ("_launches", "_stream", "running")

    def __init__(self, stream: SimulatedStream, launches: Chain) -> None:
        self._stream = stream
        self._launches = launches
        self.running = 0

    def __call__(self) -> None:
        for number, launch in enumerate(self._launches):
            self.running = number
            self._stream.enqueue(launch)
