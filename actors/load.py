"""From a plan to something that runs: bound launches on planned memory.

Every launch of every actor is bound for every *slot phase*: firing k works on the slots that follow
those of firing k-1, so after `num_phases` firings all ports of the actor are at their first slot
again. A launch that touches no register with several slots is bound once and shared by all phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd, lcm
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from actors.arena import Views
from actors.protocol import Array, Chain, HostPort, Launch, Token
from compiler.errors import ActorflowError, DeviceError, InternalError
from compiler.plan import PORTED, Actor, Constant, Plan, Port, RegisterKind
from compiler.plan import Launch as PlannedLaunch
from compiler.types import RegisterId

if TYPE_CHECKING:
    from actors.kernels.kernel import Kernel

_EDGES = (RegisterKind.DATA, RegisterKind.CONTROL)


Rework = Callable[[int, Chain], Chain]
"""From an actor's number and chain to what its firings run."""


class VariableMemory:
    """The variables of a bound plan, by name. Whoever has it keeps their memory.

    Nothing may write a variable meanwhile: ask between steps.
    """

    __slots__ = ("_arrays",)

    def __init__(self, plan: Plan, views: Views | None) -> None:
        self._arrays: dict[str, Array] = {}
        if views is not None:
            self._arrays = {v.name: views.get(v.view, 0) for v in plan.variables}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def read(self, name: str) -> Array:
        """Return a copy of a variable."""
        return np.array(self._arrays[name])

    def write(self, name: str, array: Array) -> None:
        """Give a variable new values: an array of its type, or one that broadcasts to it."""
        np.copyto(self._arrays[name], array)


class BoundPlan:
    """A plan with memory and launches.

    `chains[actor][phase]` is what firing k runs, with phase = k mod the number of phases.
    `variables` reads and writes the plan's state; `ports` are the host's, by name of their actor.
    """

    __slots__ = ("_views", "arena_bytes", "chains", "plan", "ports", "variables")

    def __init__(self, plan: Plan, ports: Mapping[str, HostPort], views: Views) -> None:
        self.plan = plan
        self.arena_bytes = sum([arena.size_bytes for arena in plan.arenas])
        self.ports = ports
        self._views = views
        self.variables = VariableMemory(plan, views)
        self.chains: tuple[tuple[Chain, ...], ...] = ()

    def bind_flush(self, actor: int, firing: int, num_tokens_per_input: tuple[int, ...]) -> Chain:
        """Return what the last firing of a flushed actor runs, with fewer tokens on its inputs.

        The launch of a sink is bound to the tokens that are there; a chain of kernels is the one of
        its phase, because its bytes do not depend on the number of tokens.
        """
        entry = self.plan.actors[actor]
        if entry.kind in PORTED:
            counts = num_tokens_per_input + tuple([port.rate for port in entry.outputs])
            tokens = _tokens(self.plan, self._views, entry, firing, counts)
            return (self.ports[entry.name].bind(tokens),)
        phases = self.chains[actor]
        return phases[firing % len(phases)]

    def synchronize(self) -> None:
        """Wait for nothing: on the host a launch is done when it returns."""

    def release(self) -> None:
        """Drop launches and views; the memory goes when nobody has `variables`. Idempotent."""
        self.chains = ()
        self.variables = VariableMemory(self.plan, None)
        self._views.release()


def load(
    plan: Plan,
    ports: Mapping[str, HostPort],
    kernels: Mapping[str, Kernel],
    rework: Rework | None = None,
) -> BoundPlan:
    """Allocate the arenas of a plan, fill its constants and bind all its launches.

    Args:
        plan: A verified plan.
        ports: A host port for every SOURCE and SINK actor, by name of the actor.
        kernels: Kernels by the name that launches use.
        rework: Makes of an actor's bound chain one that does the same, such as with neighbouring
            launches as one call; None leaves chains as they are, launch by launch.

    Raises:
        ValueError: A port is missing, or is there for no actor.
        InternalError: A kernel is missing, or the plan contradicts itself.
        OutOfMemory: The machine does not give an arena's bytes.
    """
    _check_names(plan, ports, kernels)
    views = Views(plan)
    for constant in plan.constants:
        _fill(views.get(constant.view, 0), constant)
    bound = BoundPlan(plan, ports, views)
    chains = [_bind_actor(plan, views, a, ports, kernels) for a in plan.actors]
    if rework is not None:
        chains = [
            tuple([rework(actor, chain) for chain in phases]) for actor, phases in enumerate(chains)
        ]
    bound.chains = tuple(chains)
    return bound


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


def _check_names(plan: Plan, ports: Mapping[str, HostPort], kernels: Mapping[str, Kernel]) -> None:
    wanted = [actor.name for actor in plan.actors if actor.kind in PORTED]
    missing = [name for name in wanted if name not in ports]
    unknown = [name for name in ports if name not in wanted]
    if missing or unknown:
        raise ValueError(
            f"plan {plan.name!r} has the sources and sinks {wanted}; the ports lack {missing} and"
            f" name {unknown}, which it does not have"
        )
    for actor in plan.actors:
        for launch in actor.launches:
            if launch.kernel not in kernels:
                raise InternalError(
                    f"actor {actor.name!r} launches kernel {launch.kernel!r} for op {launch.op!r}"
                    f" at {plan.sources[launch.source]}; this machine has no such kernel"
                )


def _fill(array: Array, constant: Constant) -> None:
    if array.nbytes != len(constant.data):
        raise InternalError(
            f"the constant of view {constant.view} needs {array.nbytes} bytes, the plan carries"
            f" {len(constant.data)}"
        )
    array[...] = np.frombuffer(constant.data, array.dtype).reshape(array.shape)


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
                tokens[i][field.name] = views.get(field.view, slot)
    return tuple([MappingProxyType(token) for token in tokens])


def _num_tokens(plan: Plan, actor: Actor, counts: tuple[int, ...]) -> int:
    data = [
        count
        for port, count in zip(_ports_of(actor), counts, strict=True)
        if plan.registers[port.register].kind is RegisterKind.DATA
    ]
    return max(data, default=0)
