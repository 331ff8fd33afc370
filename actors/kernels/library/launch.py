"""A launch that C can make by itself, and neighbouring ones as one call.

A native launch is called like any other. What makes it native are its two addresses, of a function
and of its argument block: the runner of chains puts those of neighbouring launches into one table,
and calls them without Python in between. `num_chunks` says where threads share a launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.kernels.library import runtime
from actors.machine.protocol import Array, Chain, Launch

Word = int | float | ctypes.c_float
"""What an argument block holds: integers and addresses, doubles; `single` packs a float."""

Explain = Callable[[int], str]
"""The meaning of a status."""

_CALLER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class NativeError(Exception):
    """A native launch returned a status other than 0."""


@dataclass(slots=True)
class PackedOperand:
    """An input that a launch keeps in a form of its own; see `KernelInfo.prepacked_input`.

    `number` is the input's, `note` begins with 0 until it is packed, and `unpack` writes it, as it
    was, into a dense array of its shape. `plain` keeps the input alive; once it is packed and will
    never be packed again, who has it set to None may free it.
    """

    number: int
    note: Array
    unpack: Callable[[Array], None]
    plain: Array | None

    @property
    def is_packed(self) -> bool:
        """Whether the launch does without the plain input."""
        return bool(self.note[0])


class NativeLaunch:
    """A C function `int32_t f(void *)` with its argument block, made once at load.

    `keep` is what must live as long as the launch: arrays, handles, blocks that this one points to.
    `places` are the addresses of the words that say where each operand is, outputs after inputs, of
    a launch that asks nothing else where they are: a loop moves it by these from entry to entry.
    `packed` is an input that it keeps in a form of its own, which is not among `keep`.
    """

    __slots__ = ("_call", "_explain", "arguments", "function", "keep", "packed", "places")

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
        self.packed: PackedOperand | None = None
        self._explain = explain
        # ctypes releases the interpreter lock in a call, so other threads run meanwhile.
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
    # The launch keeps the block: C has its address only.
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


def _bits(word: Word) -> int:
    if isinstance(word, ctypes.c_float):
        return int(struct.unpack("<i", struct.pack("<f", word.value))[0])
    if isinstance(word, float):
        return int(struct.unpack("<q", struct.pack("<d", word))[0])
    return int(word)


# A launch of a table costs nanoseconds, and the interpreter is free for other threads from the
# first to the last. While it runs, `running` tells from any thread which launch is on; after a
# failure it tells which one failed.

_RUNNER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class _CCall(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class _CChain(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.POINTER(_CCall)),
        ("num_calls", ctypes.c_int64),
        ("where", ctypes.c_int64),
        ("durations_ns", ctypes.POINTER(ctypes.c_int64)),
        ("max_workers", ctypes.c_int64),
    )


class NativeChain:
    """Native launches in order, as one launch, on at most the threads that may be used now.

    `address` is the argument block, for who makes the call of `runtime.chain_runner` himself.
    """

    __slots__ = ("_call", "_calls", "_chain", "address", "launches")

    def __init__(self, launches: tuple[NativeLaunch, ...]) -> None:
        self.launches = launches
        self._calls = (_CCall * len(launches))(*[_CCall(x.function, x.arguments) for x in launches])
        calls = ctypes.cast(self._calls, ctypes.POINTER(_CCall))
        self._chain = _CChain(calls, len(launches), 0, None, runtime.num_threads())
        self.address = ctypes.addressof(self._chain)
        self._call = _RUNNER(runtime.chain_runner())

    def __call__(self) -> None:
        """Run all of them. Raises NativeError for the first that fails; the rest do not run."""
        status = self._call(self.address)
        if status:
            raise self.launches[self.running].error(status)

    @property
    def num_launches(self) -> int:
        """How many launches of the plan this is."""
        return len(self.launches)

    @property
    def running(self) -> int:
        """The launch that runs now, or ran last, counted from 0."""
        return int(self._chain.where)

    def timed(self) -> tuple[int, ...]:
        """Run all of them once, and return the nanoseconds of each."""
        durations = (ctypes.c_int64 * len(self.launches))()
        self._chain.durations_ns = ctypes.cast(durations, ctypes.POINTER(ctypes.c_int64))
        try:
            self()
        finally:
            # A null pointer, so that ordinary calls take no times.
            self._chain.durations_ns = None
        return tuple(durations)


def merge_native_launches(chain: Chain) -> Chain:
    """Return a chain that does the same, with each run of native launches as one."""
    joined: list[Launch] = []
    run: list[NativeLaunch] = []
    for launch in chain:
        if isinstance(launch, NativeLaunch):
            run.append(launch)
        else:
            joined += [*_as_one(run), launch]
            run = []
    return (*joined, *_as_one(run))


def _as_one(run: list[NativeLaunch]) -> tuple[Launch, ...]:
    # A launch alone needs no runner, unless that limits its threads.
    is_chain = len(run) > 1 or (run and runtime.num_threads() < runtime.pool_threads())
    return (NativeChain(tuple(run)),) if is_chain else tuple(run)


# Launches are cut by shapes alone, never by the number of threads: so the order of every sum is the
# same on each machine. A chunk is worth 10 to 20 us, below which handing it to another thread costs
# more than it saves.

CHUNK_BYTES = 512 << 10
"""Bytes that a chunk reads and writes, at least."""

MAX_CHUNKS = 256

RUN_BYTES = 64 << 10
"""Where a dense run of one operand is cut, so that there is something to make chunks of."""

CACHED_BYTES = 1 << 20
"""What a second-level cache holds."""


def num_chunks(num_bytes: float) -> int:
    """Return how many chunks there are where so many bytes are moved."""
    return max(1, min(int(num_bytes) // CHUNK_BYTES, MAX_CHUNKS))


def units_per_chunk(num_units: int, num_bytes: int) -> int:
    """Return how many of equal units make a chunk, where all of them together move `num_bytes`."""
    return max(1, -(-num_units // max(1, min(num_chunks(num_bytes), num_units))))
