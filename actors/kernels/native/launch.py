"""A launch that C can make by itself: a function and its argument block.

A native launch is called like any other. What makes it native are its two addresses: the runner of
chains puts those of neighbouring launches into one table, and calls them without Python in between.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

from actors.protocol import Array

Word = int | float | ctypes.c_float
"""What an argument block holds: integers and addresses, doubles; `single` packs a float."""

Explain = Callable[[int], str]
"""The meaning of a status."""

_CALLER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class NativeError(Exception):
    """A native launch returned a status other than 0."""


class NativeLaunch:
    """A C function `int32_t f(void *)` with its argument block, made once at load.

    `keep` is what must live as long as the launch: arrays, handles, blocks that this one points to.
    `places` are the addresses of the words that say where each operand is, outputs after inputs, of
    a launch that asks nothing else where they are: a loop moves it by these from entry to entry.
    """

    __slots__ = ("_call", "_explain", "arguments", "function", "keep", "places")

    def __init__(
        self,
        function: int,
        arguments: int,
        keep: tuple[object, ...] = (),
        explain: Explain | None = None,
        places: tuple[int, ...] = (),
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.keep, self.places = keep, places
        self._explain = explain
        self._call = _CALLER(function)

    def __call__(self) -> None:
        """Run it. Raises NativeError for a status other than 0."""
        status = self._call(self.arguments)
        if status:
            raise self.error(status)

    def error(self, status: int) -> NativeError:
        """Return the error of a status."""
        meaning = f": {self._explain(status)}" if self._explain is not None else ""
        return NativeError(f"the native kernel returned status {status}{meaning}")


def native_launch(
    function: int,
    words: Sequence[Word],
    keep: tuple[object, ...] = (),
    explain: Explain | None = None,
) -> NativeLaunch:
    """Return the launch of a function on a block of words (see runtime.h)."""
    block = argument_block(words)
    return NativeLaunch(function, ctypes.addressof(block), (block, *keep), explain)


def argument_block(words: Sequence[Word]) -> ctypes.Array[ctypes.c_int64]:
    """Return words as C reads them: integers, doubles by their bits, `single(x)` in the low half.

    The block must be kept alive as long as its address is used.
    """
    return (ctypes.c_int64 * max(1, len(words)))(*[_bits(word) for word in words])


def single(value: float) -> ctypes.c_float:
    """Return a float32 for an argument block; C reads it as `word.f`."""
    return ctypes.c_float(value)


def address(array: Array | None) -> int:
    """Return where an array's first element is; 0 for None and for an array without elements."""
    if array is None or not array.size:
        return 0
    found: int = array.__array_interface__["data"][0]
    return found


def _bits(word: Word) -> int:
    if isinstance(word, ctypes.c_float):
        return int(struct.unpack("<i", struct.pack("<f", word.value))[0])
    if isinstance(word, float):
        return int(struct.unpack("<q", struct.pack("<d", word))[0])
    return int(word)
