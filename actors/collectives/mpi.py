"""Messages between ranks on any hosts, by MPI: it moves bytes, and does nothing else.

One communicator, that of all ranks, serves all plans of a process. What keeps their lanes apart are
tags, because another communicator is made by a call that blocks, and no call that blocks is made
here: sends and receives are begun, asked for and given up. A rank that was killed is never noticed
by MPI. The coordinator notices it, and then whoever waits here gives up.

mpi4py is imported late: a job on one host needs none. Of the libraries that it can use mpich alone
asks for its process manager by PMI-1 (`pmi`).
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from typing import Any

from actors.collectives import pmi
from actors.machine.protocol import AllGatherObject, Array
from compiler.contract.errors import DeviceError, InternalError, PeerFailed

MEND = "install the extra: pip install 'actorflow[mpi]'"

_THREAD_MULTIPLE = 3


class MpiTransport:
    """The messages of this process; see `TaggedTransport`. Any thread may call it."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        # Else an error would end the process.
        self._world.Set_errhandler(mpi.ERRORS_RETURN)
        self._most_tag: int = self._world.Get_attr(mpi.TAG_UB)
        self._lock = threading.Lock()
        self._abandoned: list[Any] = []
        self.next_tag, self.bytes_sent = 0, 0

    def claim_tags(self, first: int, count: int) -> None:
        """Use these from now on. Raises DeviceError where there are none left."""
        if first + count > self._most_tag:
            raise DeviceError(
                f"MPI has {self._most_tag} tags, of which plans that were loaded before took"
                f" {first}, and this one needs {count}; start the job anew"
            )
        self.next_tag = first + count

    def isend(self, data: Array, peer: int, tag: int) -> Any:
        """Begin to send; see `PointToPoint`."""
        with self._lock:
            self.bytes_sent += data.nbytes
            return self._begin(self._world.Isend, data, peer, tag)

    def irecv(self, data: Array, peer: int, tag: int) -> Any:
        """Begin to receive; see `PointToPoint`."""
        with self._lock:
            return self._begin(self._world.Irecv, data, peer, tag)

    def _begin(self, call: Any, data: Array, peer: int, tag: int) -> Any:
        try:
            return _Request(call([data, self._mpi.BYTE], peer, tag), data, peer)
        except self._mpi.Exception as error:
            raise _failure(peer, error) from error

    def is_done(self, request: Any) -> bool:
        """Whether a request is done; see `PointToPoint`."""
        with self._lock:
            try:
                return bool(request.mpi.Test())
            except self._mpi.Exception as error:
                raise _failure(request.peer, error) from error

    def abandon(self, request: Any) -> None:
        """Give up a request. Its buffer is kept: MPI may write there as long as the process is."""
        with self._lock:
            self._abandoned.append(request)


class _Request:
    """A request of MPI with what it works on, and the rank at the other end."""

    __slots__ = ("data", "mpi", "peer")

    def __init__(self, mpi: Any, data: Array, peer: int) -> None:
        self.mpi, self.data, self.peer = mpi, data, peer


def _failure(peer: int, error: Exception) -> PeerFailed:
    return PeerFailed(f"MPI cannot exchange messages with rank {peer}: {error}", rank=peer)


_transport: MpiTransport | None = None


def connect(rank: int, num_ranks: int, gather: AllGatherObject) -> MpiTransport:
    """Return this process's messages to all ranks of the job; see `Connect`.

    MPI starts with the first call and once per process. Raises DeviceError on all ranks where one
    has no mpi4py with mpich, and PeerFailed.
    """
    global _transport  # MPI is one per process
    library, reason = None, ""
    if _transport is None:
        try:
            library = load()
        except DeviceError as error:
            reason = str(error)
    # All ranks ask, or a rank without MPI would leave the others in its start.
    rows = gather("start messages between hosts", (secrets.token_hex(8), reason))
    tokens = []
    for number, row in enumerate(rows):
        token, text = row if isinstance(row, tuple) and len(row) == 2 else (None, None)
        if not (isinstance(token, str) and isinstance(text, str)):
            raise PeerFailed(f"rank {number} starts messages with {row!r}, no texts", rank=number)
        if text:
            raise DeviceError(f"rank {number} cannot exchange tensors with other hosts: {text}")
        tokens.append(token)
    if _transport is not None:
        return _transport
    if library is None:
        raise InternalError("MPI was neither started nor found missing")
    # The first rank's: one name for all, and a new one for each start of the ranks.
    manager = pmi.ProcessManager(rank, num_ranks, f"actorflow.{tokens[0]}", gather)
    mpi, functions = library
    level = ctypes.c_int()

    def init() -> int:
        # By ctypes, which lets other threads run: one of them answers.
        return int(functions.MPI_Init_thread(None, None, _THREAD_MULTIPLE, ctypes.byref(level)))

    pmi.start(manager, rank, num_ranks, init)
    if level.value < _THREAD_MULTIPLE:
        raise DeviceError(f"MPI of rank {rank} serves one thread alone, level {level.value} of 3")
    _transport = MpiTransport(mpi)
    return _transport


def load() -> tuple[Any, ctypes.CDLL]:
    """Return mpi4py's module, not initialised, and the functions of its library.

    Raises DeviceError where it is absent, or of another library than mpich.
    """
    try:
        import mpi4py

        # Read when MPI is imported: MPI starts with the ranks, and ends with the process.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    # Without its library mpi4py raises RuntimeError.
    except (ImportError, RuntimeError) as error:
        raise DeviceError(
            f"ranks on several hosts exchange tensors by mpi4py with mpich, which cannot be loaded"
            f" ({error}); {MEND}"
        ) from None
    vendor = MPI.get_vendor()[0]
    if vendor != "MPICH":
        raise DeviceError(
            f"mpi4py uses the library of {vendor}, and ranks start that of MPICH alone; {MEND}"
        )
    if MPI.Is_initialized():
        raise DeviceError(
            "the program has started MPI itself, without the other ranks; import nothing of"
            " mpi4py.MPI in a script of several hosts"
        )
    # It finds those of the library that mpi4py is linked to.
    return MPI, ctypes.CDLL(MPI.__file__)
