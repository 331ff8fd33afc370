"""A plan that runs: its memory, its launches and the tokens that its ports see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from actors.device.executor import Executor
from actors.kernels.common.host_memory import address
from actors.kernels.library.launch import NativeLaunch, PackedOperand
from actors.kernels.library.resident import refuse_huge_pages
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
from compiler.contract.types import numpy_dtype, to_bits

# The blocks, one per arena, are the only memory that the runtime allocates. Each is made by the
# device that the arena is on; pinned memory by the first device that copies from and to it, which
# may have to lock it; what ranks share by what they meet through.

_ALIGNMENT = 64


@dataclass(slots=True)
class PlanMemory:
    """The blocks of a plan's arenas, or of the arenas of several plans that take turns on them.

    Block n is that of arena n of each plan, allocated by the first one that is loaded, with
    `sizes_bytes` at least. The plans have their variables at the same addresses; all else of one
    is overwritten by the others. `communicator_beside` makes the end of a further plan's transport
    to the other ranks, for whom the blocks that are shared with them lie where they are.

    `borrowed` are values of variables, by name, that the plans read where they lie: dense arrays on
    the host into which nobody writes. The places of these variables in the blocks are never
    touched, so they take addresses and no memory. Of the borrowed ones those are `released` of
    which a plan has a packed form alone: no other plan can be opened on this memory then.
    """

    sizes_bytes: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    communicator_beside: Callable[[], Communicator] | None = None
    borrowed: dict[str, Array] = dataclasses.field(default_factory=dict)
    released: set[str] = dataclasses.field(default_factory=set)

    def has_room(self, plan: Plan) -> bool:
        """Whether each arena of a plan fits its block."""
        sizes = [arena.size_bytes for arena in plan.arenas]
        return all([size <= there for size, there in zip(sizes, self.sizes_bytes, strict=True)])

    def allocate(
        self, plan: Plan, stores: Sequence[DeviceStore], communicator: Communicator | None
    ) -> None:
        """Allocate the blocks for a plan, unless they are there. Raises OutOfMemory."""
        if communicator is not None and self.communicator_beside is None:
            self.communicator_beside = communicator.beside()
        if self.blocks:
            return
        least = self.sizes_bytes or (0,) * len(plan.arenas)
        arenas = [
            replace(arena, size_bytes=max(arena.size_bytes, size))
            for arena, size in zip(plan.arenas, least, strict=True)
        ]
        self.sizes_bytes = tuple([arena.size_bytes for arena in arenas])
        homes = zip(arenas, stores, strict=True)
        self.blocks = tuple([_allocate(plan, a, store, communicator) for a, store in homes])
        self._leave_borrowed(plan)

    def _leave_borrowed(self, plan: Plan) -> None:
        """Have no huge page come where borrowed variables would lie, beside what is touched."""
        views = [plan.views[v.view] for v in plan.variables if v.name in self.borrowed]
        registers = [plan.registers[view.register] for view in views]
        begins = [address(self.blocks[r.arena]) + r.offsets_bytes[0] for r in registers]
        sizes = [register.size_bytes for register in registers]
        # Neighbours as one: each place of its own would be a mapping of its own.
        places: list[tuple[int, int]] = []
        for begin, size in sorted(zip(begins, sizes, strict=True)):
            if places and begin - places[-1][1] < _ALIGNMENT:
                places[-1] = places[-1][0], begin + size
            else:
                places.append((begin, begin + size))
        for place in places:
            refuse_huge_pages(*place)


class Views:
    """The blocks of a plan and the views on them, each made once per slot."""

    __slots__ = ("_blocks", "_borrowed", "_made", "_plan", "_released", "_stores", "borrowed")

    def __init__(
        self,
        plan: Plan,
        devices: Mapping[Device, OpenDevice],
        communicator: Communicator | None,
        memory: PlanMemory,
    ) -> None:
        self._plan = plan
        self._stores = [_store_of(arena, devices) for arena in plan.arenas]
        memory.allocate(plan, self._stores, communicator)
        self._blocks = memory.blocks
        self.borrowed, self._released = memory.borrowed, memory.released
        """Values that lie outside of the blocks, by name of their variable."""
        self._borrowed = {
            plan.views[v.view].register: self.borrowed[v.name].reshape(-1).view(np.uint8)
            for v in plan.variables
            if v.name in self.borrowed
        }
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

    def fill(self) -> None:
        """Fill the constants. Raises InternalError for one of another size than its view."""
        for constant in self._plan.constants:
            type_ = self._plan.views[constant.view].type
            if type_.size_bytes != len(constant.data):
                raise InternalError(
                    f"the constant of view {constant.view} needs {type_.size_bytes} bytes, the plan"
                    f" carries {len(constant.data)}"
                )
            data = np.frombuffer(constant.data, numpy_dtype(type_.dtype))
            self.write(constant.view, data.reshape(type_.shape))

    def is_released(self, name: str) -> bool:
        """Whether a variable was borrowed, and is packed alone now."""
        return name in self._released

    def release(self, name: str) -> None:
        """Forget a borrowed variable, which no launch reads any more."""
        self._released.add(name)
        view = next(v.view for v in self._plan.variables if v.name == name)
        register = self._plan.views[view].register
        # Nothing where it was, so that a view on it is an error and no garbage.
        self._borrowed[register] = np.empty(0, np.uint8)
        views = self._plan.views
        self._made = {key: a for key, a in self._made.items() if views[key[0]].register != register}
        del self.borrowed[name]

    def arena_of(self, view: int) -> Arena:
        """Return where a view lies."""
        return self._plan.arenas[self._plan.registers[self._plan.views[view].register].arena]

    def _store(self, view: int) -> DeviceStore:
        return self._stores[self._plan.registers[self._plan.views[view].register].arena]

    def _make(self, index: int, slot: int) -> PlacedArray:
        view = self._plan.views[index]
        register = self._plan.registers[view.register]
        block, offset = self._blocks[register.arena], register.offsets_bytes[slot]
        if view.register in self._borrowed:
            block, offset = self._borrowed[view.register], 0
        offset += view.offset_bytes
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

    No step may run meanwhile: call it between steps. Those that the plan borrows are read as the
    arrays that they are, and cannot be given other values.
    """

    __slots__ = (
        "_executor", "_numbers", "_operands", "_own", "_packed", "_rounded", "_types", "_views",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        views: Views,
        executor: Executor,
        operands: Mapping[str, Sequence[PackedOperand]],
    ) -> None:
        # Those that launches read packed and in no other way.
        self._operands = operands
        self._types = {v.name: plan.views[v.view].type for v in plan.variables}
        self._numbers = {v.name: v.view for v in plan.variables}
        # A bfloat16 copy of a float32 variable, which kernels read: both must change together.
        source = {v.name: str(dict(v.init).get("of")) for v in plan.variables}
        rounded = [v for v in plan.variables if v.role == "rounded"]
        self._rounded = {source[v.name]: v.view for v in rounded}
        packed = [(source[v.name], v.view) for v in plan.variables if v.role == "packed"]
        # What launches keep of such a copy follows from the variable, too.
        copied = {v.name: source[v.name] for v in rounded}
        self._packed = [(copied.get(of, of), view) for of, view in packed]
        # What other plans on the same memory have not.
        self._own: dict[int, Array] = {}
        self._views = views
        self._executor = executor

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def read(self, name: str) -> Array:
        """Wait until the devices are idle and return a copy of a variable.

        Raises DeviceFailure or DeviceFault where one of them has failed.
        """
        # One look: another thread may release it meanwhile, which says so first.
        if (borrowed := self._views.borrowed.get(name)) is not None:
            return borrowed
        if self._views.is_released(name):
            array = np.empty(self._types[name].shape, numpy_dtype(self._types[name].dtype))
            self._operands[name][0].unpack(array)
            return array
        self._executor.synchronize()
        return self._views.read(self._numbers[name])

    def write(self, name: str, array: Array) -> None:
        """Give a variable new values: an array of its type, or one that broadcasts to it.

        Its bfloat16 copy gets them too, and what launches have packed of it is packed again.
        Waits and raises as `read` does; raises InternalError for other values of a borrowed one.
        """
        self._executor.synchronize()
        borrowed = self._views.borrowed.get(name)
        if borrowed is None and not self._views.is_released(name):
            self._views.write(self._numbers[name], array)
        elif borrowed is not array:
            raise InternalError(f"variable {name!r} lies in an array into which nobody writes")
        if name in self._rounded:
            self._views.write(self._rounded[name], to_bits(array))
        self._unpack([view for of, view in self._packed if of == name])

    def keep(self, name: str, array: Array) -> None:
        """Do what `write` does for a variable that no other plan on the same memory has."""
        self._own[self._numbers[name]] = array
        self.write(name, array)

    @property
    def packed(self) -> tuple[str, ...]:
        """The borrowed variables of which every launch that reads them has its own form by now."""
        borrowed = self._views.borrowed
        return tuple(
            [
                name
                for name, operands in self._operands.items()
                if name in borrowed and all([operand.is_packed for operand in operands])
            ]
        )

    def release(self, names: Iterable[str]) -> None:
        """Forget the arrays of some of `packed`: they are unpacked from now on where one is read.

        No other plan may be open on the same memory, nor be opened.
        """
        for name in names:
            self._views.release(name)
            for operand in self._operands[name]:
                operand.plain = None

    def refill(self) -> None:
        """Fill again what other plans on the same memory have overwritten: all but variables.

        Waits and raises as `read` does.
        """
        self._executor.synchronize()
        self._views.fill()
        for view, array in self._own.items():
            self._views.write(view, array)
        self._unpack([view for _, view in self._packed])

    def _unpack(self, views: Sequence[int]) -> None:
        for view in views:
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
        operands = _packed_operands(plan, launches)
        self._variables: VariableMemory | None = VariableMemory(plan, views, executor, operands)
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


def _packed_operands(
    plan: Plan, launches: Sequence[tuple[Chain, ...]]
) -> dict[str, list[PackedOperand]]:
    """Return the operands of launches by name of a variable, where all that read it pack it."""
    names = {plan.views[v.view].register: v.name for v in plan.variables}
    operands: dict[str, list[PackedOperand]] = {}
    others = {names[field.register] for field in plan.fields if field.register in names}
    for actor, phases in zip(plan.actors, launches, strict=True):
        for index, launch in enumerate(actor.launches):
            bound = [chain[index] for chain in phases]
            packed = [x.packed for x in bound if isinstance(x, NativeLaunch) and x.packed]
            for number, view in enumerate((*launch.inputs, *launch.outputs)):
                name = names.get(plan.views[view].register, "")
                mine = [operand for operand in packed if operand.number == number]
                if len(mine) == len(bound):
                    operands.setdefault(name, []).extend(mine)
                else:
                    others.add(name)
    return {name: found for name, found in operands.items() if name not in others}


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
