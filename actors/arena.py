"""The memory of a plan: one aligned block per arena, and the typed views on it.

The blocks are the only arrays that the runtime allocates.
"""

from __future__ import annotations

import numpy as np

from actors.protocol import Array
from compiler.errors import InternalError, OutOfMemory
from compiler.plan import Arena, Plan
from compiler.types import numpy_dtype

_ALIGNMENT = 64


class Views:
    """The blocks of a plan and the views on them, each made once per slot."""

    __slots__ = ("_blocks", "_made", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._blocks = [_allocate(plan, arena) for arena in plan.arenas]
        self._made: dict[tuple[int, int], Array] = {}

    def get(self, view: int, slot: int) -> Array:
        """Return a view on one slot of its register."""
        key = (view, slot)
        array = self._made.get(key)
        if array is None:
            array = self._made[key] = self._make(view, slot)
        return array

    def release(self) -> None:
        """Drop every block and view."""
        self._blocks = []
        self._made = {}

    def _make(self, index: int, slot: int) -> Array:
        view = self._plan.views[index]
        register = self._plan.registers[view.register]
        offset = register.offsets_bytes[slot] + view.offset_bytes
        dtype = numpy_dtype(view.type.dtype)
        try:
            return np.ndarray(
                view.type.shape, dtype, self._blocks[register.arena], offset, view.strides_bytes
            )
        except (TypeError, ValueError) as error:
            raise InternalError(
                f"view {index} ({view.type}, strides {view.strides_bytes}) of register"
                f" {register.name!r} at byte {offset} leaves its arena of"
                f" {self._plan.arenas[register.arena].size_bytes} bytes: {error}"
            ) from error


def _allocate(plan: Plan, arena: Arena) -> Array:
    alignment = max(_ALIGNMENT, arena.alignment)
    try:
        block = np.empty(arena.size_bytes + alignment, np.uint8)
    except (MemoryError, ValueError) as error:
        raise OutOfMemory(
            f"plan {plan.name!r} needs {_size(arena.size_bytes)} on {arena.device}, and the machine"
            " does not give them; set a smaller memory budget or batch"
        ) from error
    start = -block.ctypes.data % alignment
    return block[start : start + arena.size_bytes]


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.4g} {units[0]}"
