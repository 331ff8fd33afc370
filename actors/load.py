"""From a plan to something that runs: bound launches on planned memory.

Every launch of every actor is bound for every *slot phase*: firing k works on the slots that follow
those of firing k-1, so after `num_phases` firings all ports of the actor are at their first slot
again. A launch that touches no register with several slots is bound once and shared by all phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import gcd, lcm
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from actors.arena import Views
from actors.device.executor import Executor, StreamHome
from actors.device.protocol import DeviceFailure, DeviceFault, OpenDevice
from actors.protocol import Array, Chain, HostPort, Launch, Token
from actors.table import MachineTable
from compiler.errors import ActorflowError, DeviceError, InternalError
from compiler.placement import Device, DeviceKind
from compiler.plan import PORTED, Actor, Constant, Plan, Port, RegisterKind
from compiler.plan import Launch as PlannedLaunch
from compiler.types import RegisterId, numpy_dtype

if TYPE_CHECKING:
    from actors.kernels.kernel import Kernel

_EDGES = (RegisterKind.DATA, RegisterKind.CONTROL)


_NO_TOKENS: Mapping[str, int] = MappingProxyType({})

Watching = Callable[[int, Chain], Chain]
"""From an actor's number and chain to what its firings run."""


class VariableMemory:
    """The variables of a bound plan, by name. Whoever has it keeps their memory.

    Nothing may write a variable meanwhile: ask between steps.
    """

    __slots__ = ("_executor", "_numbers", "_views")

    def __init__(self, plan: Plan, views: Views, executor: Executor) -> None:
        self._numbers = {v.name: v.view for v in plan.variables}
        self._views = views
        self._executor = executor

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def read(self, name: str) -> Array:
        """Return a copy of a variable, when the devices have done all they were given.

        Raises DeviceFailure or DeviceFault where one of them has failed.
        """
        self._executor.synchronize()
        return self._views.read(self._numbers[name])

    def write(self, name: str, array: Array) -> None:
        """Give a variable new values: an array of its type, or one that broadcasts to it.

        Waits and raises as `read` does.
        """
        self._executor.synchronize()
        self._views.write(self._numbers[name], array)

    @property
    def lost_with(self) -> str:
        """What failed and took the values along: the device's words, or nothing."""
        with suppress(DeviceFault, DeviceFailure):
            self._executor.synchronize()
        return "" if self._executor.fault is None else str(self._executor.fault)


class BoundPlan:
    """A plan with memory and launches, driven through an executor.

    `chains[actor][phase]` is what firing k runs, with phase = k mod the number of phases.
    `variables` reads and writes the plan's state; `ports` are the host's, by name of their actor.
    """

    __slots__ = (
        "_executor", "_variables", "_views", "_whole", "arena_bytes", "chains", "plan", "ports",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        ports: Mapping[str, HostPort],
        views: Views,
        executor: Executor,
        launches: Sequence[tuple[Chain, ...]],
    ) -> None:
        self.plan = plan
        self.arena_bytes = sum([arena.size_bytes for arena in plan.arenas])
        self.ports = ports
        self._variables: VariableMemory | None = VariableMemory(plan, views, executor)
        self._views: Views | None = views
        self._executor = executor
        self._whole = tuple(
            [
                tuple([executor.bind_chain(actor, chain) for chain in phases])
                for actor, phases in enumerate(launches)
            ]
        )
        self.chains = tuple([executor.bind(a, phases) for a, phases in enumerate(self._whole)])

    def bind_flush(self, actor: int, firing: int, num_tokens_per_input: tuple[int, ...]) -> Chain:
        """Return what the last firing of a flushed actor runs, with fewer tokens on its inputs.

        The launch of a sink is bound to the tokens that are there; a chain of kernels is the one of
        its phase, because its bytes do not depend on the number of tokens.
        """
        entry = self.plan.actors[actor]
        phases = self._whole[actor]
        chain = phases[firing % len(phases)]
        if entry.kind in PORTED and self._views is not None:
            counts = num_tokens_per_input + tuple([port.rate for port in entry.outputs])
            tokens = _tokens(self.plan, self._views, entry, firing, counts)
            chain = self._executor.bind_chain(actor, (self.ports[entry.name].bind(tokens),))
        return self._executor.bind_flush(actor, num_tokens_per_input, chain)

    @property
    def variables(self) -> VariableMemory:
        """The plan's state. Raises InternalError after `release`."""
        if self._variables is None:
            raise InternalError(f"the memory of plan {self.plan.name!r} was given back")
        return self._variables

    def synchronize(self) -> None:
        """Wait until the devices have done all that the run enqueued: see `Executor.synchronize`.

        On the host a launch is done when it returns, so there is nothing to wait for.
        """
        self._executor.synchronize()

    def release(self) -> None:
        """Drop launches and views, when the devices are done; idempotent, raises nothing.

        The memory goes when nobody has `variables` any more. A device that has failed executes
        nothing more, so its memory can go, too.
        """
        if self.chains:
            with suppress(ActorflowError):
                self._executor.synchronize()
        self.chains = self._whole = ()
        self._variables = self._views = None


def load(
    plan: Plan,
    ports: Mapping[str, HostPort],
    devices: Sequence[OpenDevice],
    *,
    initial: Mapping[str, int] = _NO_TOKENS,
    max_ahead: int = 2,
    watch: Watching | None = None,
) -> BoundPlan:
    """Allocate the arenas of a plan, fill its constants and bind all its launches.

    Args:
        plan: A verified plan.
        ports: A host port for every SOURCE and SINK actor, by name of the actor.
        devices: What the plan may run on.
        initial: Tokens ready at the start, as in the loop that will run this.
        max_ahead: Steps that may be enqueued on asynchronous devices and not ended.
        watch: Makes of an actor's bound chain one that does the same and is seen doing it, launch
            by launch; None leaves chains to the devices, which may make one call of several.

    Raises:
        ValueError: A port is missing, or is there for no actor.
        DeviceError: The plan wants a device that is not among `devices`.
        InternalError: A kernel is missing, or the plan contradicts itself.
        OutOfMemory: A device does not give an arena's bytes.
    """
    opened = _devices_of(plan, devices)
    _check_names(plan, ports, opened)
    views = Views(plan, opened)
    for constant in plan.constants:
        _fill(plan, views, constant)
    launches = [
        _bind_actor(plan, views, a, ports, opened[plan.streams[a.stream].device].kernels)
        for a in plan.actors
    ]
    if watch is not None:
        launches = [
            tuple([watch(actor, chain) for chain in phases])
            for actor, phases in enumerate(launches)
        ]
    streams = {int(s.id): StreamHome(s.name, opened[s.device]) for s in plan.streams}
    executor = Executor(MachineTable.of(plan, initial), streams, max_ahead=max_ahead)
    return BoundPlan(plan, ports, views, executor, launches)


def num_phases(plan: Plan, actor: Actor) -> int:
    """Return the smallest number of firings after which all bytes of its ports repeat.

    CONTROL registers have no bytes, so however many credits they hold they add no phase.
    """
    ports = [
        (plan.registers[port.register].num_slots, port.rate)
        for port in _ports_of(actor)
        if plan.registers[port.register].kind is RegisterKind.DATA
    ]
    return lcm(*[slots // gcd(slots, rate) for slots, rate in ports])


def _devices_of(plan: Plan, devices: Sequence[OpenDevice]) -> dict[Device, OpenDevice]:
    """Return the devices of a plan in the order of its streams. Raises DeviceError."""
    there = {device.device: device for device in devices}
    wanted = dict.fromkeys([*[s.device for s in plan.streams], *[a.device for a in plan.arenas]])
    missing = [str(device) for device in wanted if device not in there]
    if missing:
        raise DeviceError(
            f"plan {plan.name!r} was compiled for {', '.join(map(str, wanted))}; this process has"
            f" {', '.join(map(str, there)) or 'no device'}, and no {', '.join(missing)}. Compile"
            " the job for a device that is here, or run the plan where its devices are"
        )
    return {device: there[device] for device in wanted}


def _check_names(
    plan: Plan, ports: Mapping[str, HostPort], devices: Mapping[Device, OpenDevice]
) -> None:
    wanted = [actor.name for actor in plan.actors if actor.kind in PORTED]
    missing = [name for name in wanted if name not in ports]
    unknown = [name for name in ports if name not in wanted]
    if missing or unknown:
        raise ValueError(
            f"plan {plan.name!r} has the sources and sinks {wanted}; the ports lack {missing} and"
            f" name {unknown}, which it does not have"
        )
    for actor in plan.actors:
        stream = plan.streams[actor.stream]
        if actor.kind in PORTED and stream.device.kind is not DeviceKind.HOST:
            raise InternalError(
                f"{actor.kind.value} {actor.name!r} is on stream {stream.name!r} of"
                f" {stream.device}; a port runs on the host, and a copy actor brings its data over"
            )
        kernels = devices[stream.device].kernels
        for launch in actor.launches:
            if launch.kernel not in kernels:
                raise InternalError(
                    f"actor {actor.name!r} launches kernel {launch.kernel!r} for op {launch.op!r}"
                    f" at {plan.sources[launch.source]}; {stream.device} has no such kernel here"
                )


def _fill(plan: Plan, views: Views, constant: Constant) -> None:
    type_ = plan.views[constant.view].type
    if type_.size_bytes != len(constant.data):
        raise InternalError(
            f"the constant of view {constant.view} needs {type_.size_bytes} bytes, the plan carries"
            f" {len(constant.data)}"
        )
    data = np.frombuffer(constant.data, numpy_dtype(type_.dtype))
    views.write(constant.view, data.reshape(type_.shape))


def _ports_of(actor: Actor) -> tuple[Port, ...]:
    return actor.inputs + actor.outputs


def _bind_actor(
    plan: Plan,
    views: Views,
    actor: Actor,
    ports: Mapping[str, HostPort],
    kernels: Mapping[str, Kernel],
) -> tuple[Chain, ...]:
    phases = range(num_phases(plan, actor))
    if actor.kind in PORTED:
        rates = tuple([port.rate for port in _ports_of(actor)])
        return tuple(
            [
                (ports[actor.name].bind(_tokens(plan, views, actor, phase, rates)),)
                for phase in phases
            ]
        )
    rates_of = {port.register: port.rate for port in _ports_of(actor)}
    bound: list[dict[tuple[int, ...], Launch]] = [{} for _ in actor.launches]
    chains: list[Chain] = []
    for phase in phases:
        chain: list[Launch] = []
        for index, launch in enumerate(actor.launches):
            operands = [*launch.inputs, *launch.outputs]
            if launch.workspace is not None:
                operands.append(launch.workspace)
            slots = tuple([_slot(plan, actor, rates_of, view, phase) for view in operands])
            if slots not in bound[index]:
                bound[index][slots] = _bind(views, kernels[launch.kernel], launch, slots)
            chain.append(bound[index][slots])
        chains.append(tuple(chain))
    return tuple(chains)


def _slot(
    plan: Plan, actor: Actor, rates_of: Mapping[RegisterId, int], view: int, phase: int
) -> int:
    """Return the slot that a launch of this phase sees through a view."""
    register = plan.registers[plan.views[view].register]
    if register.kind not in _EDGES:
        return 0
    rate = rates_of.get(register.id)
    if rate != 1:
        raise InternalError(
            f"a launch of actor {actor.name!r} touches register {register.name!r}, which "
            + (
                "is on none of its ports"
                if rate is None
                else f"moves {rate} tokens per firing; a launch sees one"
            )
        )
    return phase % register.num_slots


def _bind(views: Views, kernel: Kernel, launch: PlannedLaunch, slots: tuple[int, ...]) -> Launch:
    operands = [*launch.inputs, *launch.outputs]
    arrays = [views.get(v, slot) for v, slot in zip(operands, slots, strict=False)]
    num_inputs = len(launch.inputs)
    workspace = None if launch.workspace is None else views.get(launch.workspace, slots[-1])
    attrs = MappingProxyType(dict(launch.attrs))
    try:
        made = kernel.bind(attrs, tuple(arrays[:num_inputs]), tuple(arrays[num_inputs:]), workspace)
    except ActorflowError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DeviceError(f"{launch.kernel} cannot be bound for {launch.op}: {reason}") from error
    if not callable(made):
        raise DeviceError(f"{launch.kernel} was bound for {launch.op} to {made!r}, no launch")
    return made


def _tokens(
    plan: Plan, views: Views, actor: Actor, firing: int, counts: tuple[int, ...]
) -> tuple[Token, ...]:
    """Return the tokens of a port's firing, `counts` of them per port.

    Token i holds the fields of every DATA register that has an i-th token in this firing.
    """
    tokens: list[dict[str, Array]] = [{} for _ in range(_num_tokens(plan, actor, counts))]
    for port, count in zip(_ports_of(actor), counts, strict=True):
        register = plan.registers[port.register]
        for field in plan.fields:
            if field.register != port.register:
                continue
            for i in range(count):
                if field.name in tokens[i]:
                    raise InternalError(
                        f"actor {actor.name!r} sees two fields of the name {field.name!r}"
                    )
                slot = (firing * port.rate + i) % register.num_slots
                arena = views.arena_of(field.view)
                if arena.device.kind is not DeviceKind.HOST:
                    raise InternalError(
                        f"{actor.kind.value} {actor.name!r} reads or writes register"
                        f" {register.name!r} in {arena.place}; a port sees memory of the host only,"
                        " and a copy actor brings its data over"
                    )
                tokens[i][field.name] = views.get(field.view, slot)
    return tuple([MappingProxyType(token) for token in tokens])


def _num_tokens(plan: Plan, actor: Actor, counts: tuple[int, ...]) -> int:
    data = [
        count
        for port, count in zip(_ports_of(actor), counts, strict=True)
        if plan.registers[port.register].kind is RegisterKind.DATA
    ]
    return max(data, default=0)
