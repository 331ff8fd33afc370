"""What is checked around a call of a library on the host: its operands before, guards after."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from actors.device.cuda.driver import CudaError
from actors.device.emulated.memory import INVALID_VALUE, EmulatedMemory

MISALIGNED_ADDRESS = 716
_WORKSPACE_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class LibraryOperand:
    """Bytes that a call of a library reads or writes."""

    name: str
    address: int
    size_bytes: int
    alignment: int

    def lies_over(self, other: LibraryOperand) -> bool:
        """Whether any byte is of both."""
        return (
            self.address < other.address + other.size_bytes
            and other.address < self.address + self.size_bytes
        )

    def __str__(self) -> str:
        wanted = f"should lie at a multiple of {self.alignment}"
        return f"{self.name} of a library's call, which {wanted},"


@contextmanager
def library_call(
    memory: EmulatedMemory,
    call: str,
    operands: Sequence[LibraryOperand],
    workspace: tuple[int, int],
    *,
    is_over: bool,
) -> Iterator[None]:
    """Make a call whose result may not lie over an operand (`is_over`). Raises CudaError.

    `workspace` is an address, 0 for none, and its bytes, which are full of 0xFF afterwards.
    """
    place, size_bytes = workspace
    scratch = LibraryOperand("the workspace", place, size_bytes, _WORKSPACE_ALIGNMENT)
    for operand in (*operands, *([scratch] if place else [])):
        if operand.address % operand.alignment:
            message = f"{operand} lies at {operand.address:#x}"
            raise CudaError(message, code=MISALIGNED_ADDRESS, call=call)
        memory.expect(operand.address, operand.size_bytes)
    if is_over:
        message = "a result of a library's call lies over an operand"
        raise CudaError(message, code=INVALID_VALUE, call=call)
    yield
    if place:
        ctypes.memset(place, 0xFF, size_bytes)
    memory.check_guards(call)
