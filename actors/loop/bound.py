"""A plan that runs: its memory, its launches and the tokens that its ports see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import numpy as np

from actors.device.executor import Executor
from actors.machine.protocol import (
    Array,
    Block,
    Chain,
    Communicator,
    DeviceFailure,
    DeviceFault,
    DeviceStore,
    FullDevice,
    HostPort,
    OpenDevice,
    PlacedArray,
    Token,
)
from actors.machine.table import MachineTable
from compiler.contract.accounting import largest_tensor
from compiler.contract.errors import ActorflowError, InternalError, OutOfMemory
from compiler.contract.placement import Device, DeviceKind, Memory
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED, Actor, Arena, RegisterKind
from compiler.contract.types import to_bits

# The blocks, one per arena, are the only memory that the runtime allocates. Each is made by the
# device that the arena is on; pinned memory by the first device that copies from and to it, which
# may have to lock it; what ranks share by what they meet through.

_ALIGNMENT = 64


class Views:
    """The blocks of a plan and the views on them, each made once per slot."""

    __slots__ = ("_blocks", "_made", "_plan", "_stores")

    def __init__(
        self,
        plan: Plan,
        devices: Mapping[Device, OpenDevice],
        communicator: Communicator | None = None,
    ) -> None:
        self._plan = plan
        self._stores = [_store_of(arena, devices) for arena in plan.arenas]
        self._blocks: list[Block] = [
            _allocate(plan, arena, store, communicator)
            for arena, store in zip(plan.arenas, self._stores, strict=True)
        ]
        self._made: dict[tuple[int, int], PlacedArray] = {}

    def get(self, view: int, slot: int) -> PlacedArray:
        """Return a view on one slot of its register."""
        key = (view, slot)
        array = self._made.get(key)
        if array is None:
            array = self._made[key] = self._make(view, slot)
        return array

    def read(self, view: int) -> Array:
        """Return a copy of what a register of one slot holds."""
        return self._store(view).read(self.get(view, 0))

    def write(self, view: int, array: Array) -> None:
        """Fill a register of one slot from an array of its type, or one that broadcasts to it."""
        self._store(view).write(self.get(view, 0), array)

    def arena_of(self, view: int) -> Arena:
        """Return where a view lies."""
        return self._plan.arenas[self._plan.registers[self._plan.views[view].register].arena]

    def _store(self, view: int) -> DeviceStore:
        return self._stores[self._plan.registers[self._plan.views[view].register].arena]

    def _make(self, index: int, slot: int) -> PlacedArray:
        view = self._plan.views[index]
        register = self._plan.registers[view.register]
        offset = register.offsets_bytes[slot] + view.offset_bytes
        block = self._blocks[register.arena]
        try:
            return self._store(index).view(block, offset, view.type, view.strides_bytes)
        except ValueError as error:
            raise InternalError(
                f"view {index} ({view.type}, strides {view.strides_bytes}) of register"
                f" {register.name!r} at byte {offset} leaves its arena of"
                f" {self._plan.arenas[register.arena].size_bytes} bytes: {error}"
            ) from error


def _store_of(arena: Arena, devices: Mapping[Device, OpenDevice]) -> DeviceStore:
    if arena.memory is Memory.PINNED:
        for device in devices.values():
            # Only a device that copies beside the host needs its memory locked; it has to lock it
            # itself.
            if device.is_asynchronous:
                return device
    return devices[arena.device]


def _allocate(
    plan: Plan, arena: Arena, store: DeviceStore, communicator: Communicator | None
) -> Block:
    alignment = max(_ALIGNMENT, arena.alignment)
    try:
        if arena.memory is Memory.SHARED and communicator is not None:
            return communicator.allocate(arena.size_bytes, alignment)
        return store.allocate(arena.size_bytes, alignment, arena.memory)
    except FullDevice as error:
        raise OutOfMemory(
            f"plan {plan.name!r} needs {_size(arena.size_bytes)} on {arena.device}, of which"
            f" {_size(error.free_bytes)} are free; set a smaller memory budget or batch, or stop"
            " other processes on the device"
        ) from error
    except MemoryError as error:
        raise OutOfMemory(
            f"plan {plan.name!r} needs {_size(arena.size_bytes)} on {arena.device}, which the"
            f" machine cannot allocate{largest_tensor(plan)}; set a smaller memory budget or"
            " batch"
        ) from error


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.4g} {units[0]}"


class VariableMemory:
    """The variables of a bound plan, by name. A reference to it keeps their memory alive.

    No step may run meanwhile: call it between steps.
    """

    __slots__ = ("_executor", "_numbers", "_packed", "_rounded", "_views")

    def __init__(self, plan: Plan, views: Views, executor: Executor) -> None:
        self._numbers = {v.name: v.view for v in plan.variables}
        # A bfloat16 copy of a float32 variable, which kernels read: both must change together.
        rounded = [v for v in plan.variables if v.role == "rounded"]
        self._rounded = {dict(v.init)["of"]: v.view for v in rounded}
        packed = [v for v in plan.variables if v.role == "packed"]
        self._packed = [(dict(v.init)["of"], v.view) for v in packed]
        self._views = views
        self._executor = executor

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def read(self, name: str) -> Array:
        """Wait until the devices are idle and return a copy of a variable.

        Raises DeviceFailure or DeviceFault where one of them has failed.
        """
        self._executor.synchronize()
        return self._views.read(self._numbers[name])

    def write(self, name: str, array: Array) -> None:
        """Give a variable new values: an array of its type, or one that broadcasts to it.

        Its bfloat16 copy gets them too, and what launches have packed of it is packed again.
        Waits and raises as `read` does.
        """
        self._executor.synchronize()
        self._views.write(self._numbers[name], array)
        if name in self._rounded:
            self._views.write(self._rounded[name], to_bits(array))
        for of, view in self._packed:
            if of == name:
                # Zeros mean that nothing is packed yet: the next launch packs the new values.
                self._views.write(view, np.zeros((), np.uint8))

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
        "_executor", "_variables", "_views", "_whole", "chains", "plan", "ports",
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
        chain = self.begun(actor, firing)
        if entry.kind in PORTED and self._views is not None:
            counts = num_tokens_per_input + tuple([port.rate for port in entry.outputs])
            tokens = tokens_of(self.plan, self._views, entry, firing, counts)
            chain = self._executor.bind_chain(actor, (self.ports[entry.name].bind(tokens),))
        return self._executor.bind_flush(actor, num_tokens_per_input, chain)

    def begun(self, actor: int, firing: int) -> Chain:
        """Return the chain of a firing that has already waited for its devices."""
        phases = self._whole[actor]
        return phases[firing % len(phases)]

    @property
    def table(self) -> MachineTable:
        """The graph of actors, with the tokens that are there at the start."""
        return self._executor.table

    @property
    def variables(self) -> VariableMemory:
        """The plan's state. Raises InternalError after `release`."""
        if self._variables is None:
            raise InternalError(f"the memory of plan {self.plan.name!r} was released")
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
            # A device that has failed executes nothing more: its memory may go.
            with suppress(ActorflowError):
                self._executor.synchronize()
        self.chains = self._whole = ()
        self._variables = self._views = None


def tokens_of(
    plan: Plan, views: Views, actor: Actor, firing: int, counts: tuple[int, ...]
) -> tuple[Token, ...]:
    """Return the tokens of a port's firing, `counts` of them per port.

    Token i holds the fields of every DATA register that has an i-th token in this firing.
    """
    tokens: list[dict[str, Array]] = [{} for _ in range(_num_tokens(plan, actor, counts))]
    for port, count in zip(actor.inputs + actor.outputs, counts, strict=True):
        register = plan.registers[port.register]
        for field in plan.fields:
            if field.register != port.register:
                continue
            for i in range(count):
                if field.name in tokens[i]:
                    raise InternalError(
                        f"actor {actor.name!r} sees two fields of the name {field.name!r}"
                    )
                # Slots are used in turn, `rate` of them per firing: no bookkeeping is needed.
                slot = (firing * port.rate + i) % register.num_slots
                arena = views.arena_of(field.view)
                if arena.device.kind is not DeviceKind.HOST:
                    raise InternalError(
                        f"{actor.kind.value} {actor.name!r} reads or writes register"
                        f" {register.name!r} in {arena.place}; a port accesses host memory only,"
                        " and a copy actor transfers its data"
                    )
                tokens[i][field.name] = views.get(field.view, slot)
    return tuple([MappingProxyType(token) for token in tokens])


def _num_tokens(plan: Plan, actor: Actor, counts: tuple[int, ...]) -> int:
    data = [
        count
        for port, count in zip(actor.inputs + actor.outputs, counts, strict=True)
        if plan.registers[port.register].kind is RegisterKind.DATA
    ]
    return max(data, default=0)
