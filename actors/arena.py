"""The memory of a plan: one aligned block per arena, and the typed views on it.

The blocks are the only memory that the runtime allocates. Each is made by the device that the arena
is on; pinned memory by the first device that copies from and to it, which may have to lock it; what
ranks share by what they meet through.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.collectives.protocol import Communicator
from actors.device.protocol import Block, DeviceStore, FullDevice, OpenDevice, PlacedArray
from actors.protocol import Array
from compiler.accounting import largest_tensor
from compiler.errors import InternalError, OutOfMemory
from compiler.placement import Device, Memory
from compiler.plan import Arena, Plan

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
            f" {_size(error.free_bytes)} are free; set a smaller memory budget or batch, or end"
            " what else uses the device"
        ) from error
    except MemoryError as error:
        raise OutOfMemory(
            f"plan {plan.name!r} needs {_size(arena.size_bytes)} on {arena.device}, and the machine"
            f" does not give them{largest_tensor(plan)}; set a smaller memory budget or batch"
        ) from error


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.4g} {units[0]}"
