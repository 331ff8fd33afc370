"""From a plan to something that runs: bound launches on planned memory.

Every launch of every actor is bound for every *slot phase*: firing k works on the slots that follow
those of firing k-1, so after `num_phases` firings all ports of the actor are at their first slot
again. A launch that touches no register with several slots is bound once and shared by all phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, lcm
from types import MappingProxyType

from actors.device.executor import Executor, StreamHome
from actors.loop.bound import BoundPlan, PlanMemory, Views, tokens_of
from actors.loop.failure import place_of
from actors.machine.protocol import (
    Chain,
    Communicator,
    DeviceStore,
    HostPort,
    Launch,
    OpenDevice,
)
from actors.machine.table import MachineTable
from compiler.contract.collective import collective_of
from compiler.contract.errors import DeviceError, InternalError
from compiler.contract.placement import Device, DeviceKind
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED, Actor, ActorKind, Port, RegisterKind
from compiler.contract.plan_tables import Launch as PlannedLaunch
from compiler.contract.types import RegisterId

_EDGES = (RegisterKind.DATA, RegisterKind.CONTROL)


Watching = Callable[[int, Chain], Chain]
"""From an actor's number and chain to what its firings run."""

MakeExecutor = Callable[[MachineTable, Mapping[int, StreamHome]], Executor]
"""As `Executor`: from the graph of actors and where its streams are, by their numbers."""


def load(
    plan: Plan,
    ports: Mapping[str, HostPort],
    devices: Sequence[OpenDevice],
    *,
    table: MachineTable | None = None,
    watch: Watching | None = None,
    communicator: Communicator | None = None,
    make_executor: MakeExecutor = Executor,
    memory: PlanMemory | None = None,
) -> BoundPlan:
    """Allocate the arenas of a plan, fill its constants and bind all its launches.

    Args:
        plan: A verified plan.
        ports: A host port for every SOURCE and SINK actor, by name of the actor.
        devices: What the plan may run on.
        table: The graph of actors: with the tokens that registers hold before the first firing,
            and for one thread where its caller drives the loop; by default as in a new run.
        watch: Wraps the launches of an actor's bound chain, one by one, to time them; None lets
            the devices join several launches into one call.
        communicator: How this rank meets the others, for a plan with COMM actors. It is the
            caller's to have it `ready` before the first firing.
        make_executor: Makes what drives the actors on their devices, of the graph and its streams.
        memory: Where the arenas lie, also those of other plans that take turns; None for blocks of
            its own. What another plan works on meanwhile must be at rest.

    Raises:
        ValueError: A port is missing, or is there for no actor.
        DeviceError: The plan wants a device that is not among `devices`, or other ranks and there
            is no communicator, or a launch is refused, which is named with its op and line.
        InternalError: A kernel is missing, or the plan contradicts itself.
        OutOfMemory: A device does not give an arena's bytes.
    """
    opened = _devices_of(plan, devices)
    _check_names(plan, ports, opened)
    _check_ranks(plan, communicator)
    views = Views(plan, opened, communicator, PlanMemory() if memory is None else memory)
    views.fill()
    launches = [
        _bind_actor(plan, views, a, ports, opened[plan.streams[a.stream].device], communicator)
        for a in plan.actors
    ]
    if watch is not None:
        launches = [
            tuple([watch(actor, chain) for chain in phases])
            for actor, phases in enumerate(launches)
        ]
    streams = {int(s.id): StreamHome(s.name, opened[s.device]) for s in plan.streams}
    table = MachineTable.of(plan) if table is None else table
    executor = make_executor(table, streams)
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
    # Each port is at its first slot again after slots / gcd firings; all of them after the lcm.
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
    # The plan's order, so that `_store_of` finds the same device in every process.
    return {device: there[device] for device in wanted}


def _check_names(
    plan: Plan, ports: Mapping[str, HostPort], devices: Mapping[Device, OpenDevice]
) -> None:
    names = [actor.name for actor in plan.actors if actor.kind in PORTED]
    missing = [name for name in names if name not in ports]
    unknown = [name for name in ports if name not in names]
    if missing or unknown:
        raise ValueError(
            f"plan {plan.name!r} has the sources and sinks {names}; the ports lack {missing} and"
            f" name {unknown}, which it does not have"
        )
    for actor in plan.actors:
        stream = plan.streams[actor.stream]
        if actor.kind in PORTED and stream.device.kind is not DeviceKind.HOST:
            raise InternalError(
                f"{actor.kind.value} {actor.name!r} is on stream {stream.name!r} of"
                f" {stream.device}; a port runs on the host, and a copy actor transfers its data"
            )
        device = devices[stream.device]
        for launch in actor.launches:
            if not (_meets(actor, launch, device) or device.has_kernel(launch.kernel)):
                raise InternalError(
                    f"actor {actor.name!r} launches kernel {launch.kernel!r} for op {launch.op!r}"
                    f" at {plan.sources[launch.source]}; {stream.device} has no kernel of this"
                    " name"
                )


def _meets(actor: Actor, launch: PlannedLaunch, device: DeviceStore) -> bool:
    """Whether other ranks take part in a launch: one of a COMM actor, but for its poison."""
    return actor.kind is ActorKind.COMM and not device.has_kernel(launch.kernel)


def _check_ranks(plan: Plan, communicator: Communicator | None) -> None:
    """Check that there is a way to other ranks where a plan needs one. Raises DeviceError."""
    meeting = [actor for actor in plan.actors if actor.kind is ActorKind.COMM]
    if meeting and communicator is None:
        place = place_of(plan, meeting[0].id, 0)
        raise DeviceError(
            f"plan {plan.name!r} is for one of several ranks, and no communicator was given:"
            f" actor {meeting[0].name!r}, {place}, cannot run its collective. Start all ranks"
            " together, or compile the job without a mesh"
        )


def _ports_of(actor: Actor) -> tuple[Port, ...]:
    return actor.inputs + actor.outputs


def _bind_actor(
    plan: Plan,
    views: Views,
    actor: Actor,
    ports: Mapping[str, HostPort],
    device: DeviceStore,
    communicator: Communicator | None,
) -> tuple[Chain, ...]:
    phases = range(num_phases(plan, actor))
    if actor.kind in PORTED:
        rates = tuple([port.rate for port in _ports_of(actor)])
        return tuple(
            [
                (ports[actor.name].bind(tokens_of(plan, views, actor, phase, rates)),)
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
            # By slots, not by phase: launches that see the same bytes are one.
            if slots not in bound[index]:
                try:
                    bound[index][slots] = (
                        _bind(plan, views, device, launch, slots)
                        if communicator is None or not _meets(actor, launch, device)
                        else _bind_met(plan, views, communicator, actor, index, slots, phase)
                    )
                except DeviceError as error:
                    place = place_of(plan, actor.id, index)
                    raise DeviceError(f"actor {actor.name!r}, {place}: {error}") from error
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


def _bind(
    plan: Plan, views: Views, device: DeviceStore, launch: PlannedLaunch, slots: tuple[int, ...]
) -> Launch:
    operands = [*launch.inputs, *launch.outputs]
    arrays = [views.get(v, slot) for v, slot in zip(operands, slots, strict=False)]
    num_inputs = len(launch.inputs)
    workspace = None if launch.workspace is None else views.get(launch.workspace, slots[-1])
    return device.bind(
        launch.kernel,
        MappingProxyType(dict(launch.attrs)),
        tuple(arrays[:num_inputs]),
        tuple(arrays[num_inputs:]),
        workspace,
        tuple([plan.views[view].type for view in operands]),
    )


def _bind_met(
    plan: Plan,
    views: Views,
    communicator: Communicator,
    actor: Actor,
    index: int,
    slots: tuple[int, ...],
    phase: int,
) -> Launch:
    """Return a launch in which ranks meet."""
    launch = actor.launches[index]
    operands = [*launch.inputs, *launch.outputs]
    arrays = [views.get(v, slot) for v, slot in zip(operands, slots, strict=True)]
    num_inputs = len(launch.inputs)
    collective = collective_of(plan, actor, launch)
    return communicator.bind(collective, tuple(arrays[:num_inputs]), tuple(arrays[num_inputs:]))
