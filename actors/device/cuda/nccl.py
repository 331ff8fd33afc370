"""NCCL through cupy: communicators between the GPUs of a host, one GPU a rank.

A call of the library on an aborted communicator, and the end of one whose peers are dead, may block
for ever. So joining and ending go on threads of their own, and nobody waits for the latter. A
communicator ends by an abort: the other way is for all ranks together, and these come to it when
their garbage collectors do. By then the graphs that have its calls must be gone, for it waits for
these.

Source: NCCL 2.28 (nccl.h.in: ncclDataType_t, ncclRedOp_t), CuPy 14 (cupy.cuda.nccl).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any

from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import CollectiveKind, RunCollective
from compiler.contract.errors import DeviceError
from compiler.contract.types import DType

INSTALL = "python -m pip install 'actorflow[cuda,nccl]'"

UNIQUE_ID_BYTES = 128

# Of integers of 16 bits NCCL has none.
_NUMBERS = {
    DType.INT8: 0,
    DType.UINT8: 1,
    DType.INT32: 2,
    DType.UINT32: 3,
    DType.INT64: 4,
    DType.UINT64: 5,
    DType.FLOAT16: 6,
    DType.FLOAT32: 7,
    DType.FLOAT64: 8,
    DType.BFLOAT16: 9,
}
_REDUCTIONS = {"sum": 0, "max": 2, "min": 3}

_NO_ANSWER = -1
"""The code of a rank that did not come, which NCCL itself has none for."""

_END_S = 2.0


class Nccl:
    """The library, for one GPU.

    Args:
        library: cupy's module, as `find_nccl` returns it.
        enter: Makes the GPU current in a thread.
    """

    def __init__(self, library: Any, enter: Callable[[], None]) -> None:
        self._library, self._enter = library, enter
        self._communicators: list[Any] = []
        self._ending: dict[int, threading.Thread] = {}

    def unique_id(self) -> bytes:
        """Return a new id."""
        return bytes(self._call("ncclGetUniqueId", self._library.get_unique_id))

    def join(self, unique_id: bytes, num_ranks: int, rank: int, deadline_s: float) -> int:
        """Return a communicator when all its ranks are there. Raises CudaError."""
        answer: list[Any] = []

        def join() -> None:
            try:
                self._enter()
                answer.append(self._library.NcclCommunicator(num_ranks, unique_id, rank))
            except Exception as error:
                answer.append(error)

        thread = threading.Thread(target=join, name="ncclCommInitRank", daemon=True)
        thread.start()
        thread.join(deadline_s)
        if not answer:
            message = f"not all of {num_ranks} ranks came within {deadline_s:g} s"
            raise CudaError(message, code=_NO_ANSWER, call="ncclCommInitRank")
        if isinstance(answer[0], Exception):
            raise _refusal("ncclCommInitRank", answer[0]) from answer[0]
        self._communicators.append(answer[0])
        return len(self._communicators) - 1

    def run(self, call: RunCollective, stream: int) -> None:
        """Put a call on a stream."""
        communicator = self._communicators[call.communicator]
        self._call(f"nccl {call.kind.value}", lambda: self._put(communicator, call, stream))

    def _put(self, communicator: Any, call: RunCollective, stream: int) -> None:
        kind, width = _NUMBERS[call.dtype], call.dtype.itemsize
        starts = [0, *accumulate(call.counts)]
        is_even = len({*call.counts}) == 1
        operands = (call.source, call.target)
        match call.kind:
            case CollectiveKind.ALL_REDUCE:
                by = _REDUCTIONS[call.by]
                communicator.allReduce(*operands, call.counts[0], kind, by, stream)
            case CollectiveKind.REDUCE_SCATTER if is_even:
                by = _REDUCTIONS[call.by]
                communicator.reduceScatter(*operands, call.counts[0], kind, by, stream)
            case CollectiveKind.ALL_GATHER if is_even:
                communicator.allGather(*operands, call.counts[0], kind, stream)
            case CollectiveKind.REDUCE_SCATTER:
                # Each part is reduced to its rank: only that one's target is written.
                with _GroupCall(self._library):
                    for root, (start, count) in enumerate(zip(starts, call.counts, strict=False)):
                        source, by = call.source + start * width, _REDUCTIONS[call.by]
                        communicator.reduce(source, call.target, count, kind, by, root, stream)
            case CollectiveKind.ALL_GATHER:
                with _GroupCall(self._library):
                    for root, (start, count) in enumerate(zip(starts, call.counts, strict=False)):
                        target = call.target + start * width
                        communicator.broadcast(call.source, target, count, kind, root, stream)
            case CollectiveKind.EXCHANGE:
                received = [0, *accumulate(call.received)]
                with _GroupCall(self._library):
                    for peer, (start, count) in enumerate(zip(starts, call.counts, strict=False)):
                        if count:
                            source = call.source + start * width
                            communicator.send(source, count, kind, peer, stream)
                    for peer, count in enumerate(call.received):
                        if count:
                            target = call.target + received[peer] * width
                            communicator.recv(target, count, kind, peer, stream)

    def check(self, communicator: int) -> None:
        """Raise CudaError where a call has failed."""
        if communicator not in self._ending:
            check = self._communicators[communicator].check_async_error
            self._call("ncclCommGetAsyncError", check)

    def abort(self, communicator: int) -> None:
        """End what waits, without waiting for that."""
        if communicator in self._ending:
            return

        def end() -> None:
            with suppress(Exception):  # whatever it says, this process uses it no more
                self._enter()
                self._communicators[communicator].abort()

        thread = threading.Thread(target=end, name="ncclCommAbort", daemon=True)
        self._ending[communicator] = thread
        thread.start()

    def close(self) -> None:
        """End all communicators, when there are no graphs any more."""
        for communicator in range(len(self._communicators)):
            self.abort(communicator)
        for thread in self._ending.values():
            thread.join(_END_S)

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._library.NcclError as error:
            raise _refusal(name, error) from error


class _GroupCall:
    """Calls that go together (ncclGroupStart)."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __enter__(self) -> None:
        self._library.groupStart()

    def __exit__(self, *exit_: object) -> None:
        self._library.groupEnd()


def _refusal(call: str, error: Exception) -> CudaError:
    return CudaError(str(error), code=getattr(error, "status", _NO_ANSWER), call=call)


def find_nccl(import_module: Callable[[str], Any] = importlib.import_module) -> Any:
    """Return cupy's module of NCCL. Raises DeviceError where there is none, or it is empty."""
    try:
        library = import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise DeviceError(f"several GPUs need NCCL, through cupy: {INSTALL} ({error})") from error
    # Without libnccl.so.2 the module is there, with nothing in it.
    if not getattr(library, "available", hasattr(library, "NcclCommunicator")):
        raise DeviceError(f"several GPUs need NCCL, and libnccl.so.2 is not found: {INSTALL}")
    return library
