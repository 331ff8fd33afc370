"""Neighbouring native launches as one call: C walks a table of functions and argument blocks.

A launch costs nanoseconds then, and the interpreter is free for other threads from the first to the
last. The table is made once at load. While it runs, `running` tells from any thread which launch
is on; after a failure it tells which one failed.
"""

from __future__ import annotations

import ctypes

from actors.kernels.native import runtime
from actors.kernels.native.launch import NativeLaunch
from actors.protocol import Chain, Launch

_RUNNER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class _CCall(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class _CChain(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.POINTER(_CCall)),
        ("num_calls", ctypes.c_int64),
        ("where", ctypes.c_int64),
        ("durations_ns", ctypes.POINTER(ctypes.c_int64)),
    )


class JoinedLaunches:
    """Native launches in order, as one launch.

    `address` is the argument block, for who makes the call of `runtime.chain_runner` himself.
    """

    __slots__ = ("_call", "_calls", "_chain", "address", "launches")

    def __init__(self, launches: tuple[NativeLaunch, ...]) -> None:
        self.launches = launches
        self._calls = (_CCall * len(launches))(*[_CCall(x.function, x.arguments) for x in launches])
        self._chain = _CChain(ctypes.cast(self._calls, ctypes.POINTER(_CCall)), len(launches), 0)
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
            self._chain.durations_ns = None
        return tuple(durations)


def join(chain: Chain) -> Chain:
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
    return tuple(run) if len(run) < 2 else (JoinedLaunches(tuple(run)),)
