"""MPI's start without mpiexec: a rank answers what MPI asks of its process manager.

MPI_Init of mpich speaks to its process manager by lines on a socket (PMI-1): it puts what others
shall know, meets all ranks in a barrier, and gets what they have put. Put, barrier and get are one
all-gather, which ranks have anyway. So no mpiexec is needed, ranks stay children of who started
them, and a rank that does not come is named as always.

MPI_Init runs on a thread of its own, and who waits for it serves the socket. Where another rank
fails meanwhile that thread stays where it is, until the process ends: MPI has no way to give its
start up, and ends the process by SIGSEGV where the socket is shut down.

What MPI is told:
- Messages go by libfabric's TCP, if the user names nothing else: `MPIR_CVAR_CH4_NETMOD=ofi` and
  `FI_PROVIDER=tcp`. By UCX, which mpich would take, a send to a rank that was killed ends the
  sender by SIGSEGV.
- Every rank is alone on its host (`PMI_process_mapping`), and where a user asks for UCX it takes no
  shared memory (`UCX_TLS=^sm`): between ranks of one host MPI has no use here, and hosts are told
  apart by name, also where containers share memory by mistake.
- The name of the job's keys is drawn anew for each start of the ranks. It names the file in
  /dev/shm that mpich makes, which is removed as soon as it is mapped, so that ranks that are killed
  leave none behind.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.machine.protocol import AllGatherObject
from compiler.contract.errors import DeviceError, PeerFailed

MOST_SILENT_S = 60.0
"""How long MPI_Init, which takes 0.2 s, may do without its process manager."""

_NOTHING = b"cmd=started"
_SHARED = "/dev/shm/mpich_shm_"
_DEFAULTS = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "UCX_TLS": "^sm"}


class ProcessManager:
    """Answers the lines of MPI_Init on one rank; `name` is that of the job, the same on all."""

    def __init__(self, rank: int, num_ranks: int, name: str, gather: AllGatherObject) -> None:
        self._rank, self._gather = rank, gather
        self._name = name
        self._own: list[tuple[str, str]] = []
        self._known = {"PMI_process_mapping": f"(vector,(0,{num_ranks},1))"}

    def answer(self, line: str) -> str:
        """Return the answer to a line. Raises PeerFailed where a rank does not come."""
        # Values come last and may hold anything, "=" and blanks as well.
        head, _, value = line.partition(" value=")
        words = dict([word.partition("=")[::2] for word in head.split()])
        key = words.get("key", "")
        match words.get("cmd"):
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                return "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"
            case "get_appnum":
                return "cmd=appnum rc=0 appnum=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname rc=0 kvsname={self._name}"
            case "put":
                self._own.append((key, value))
                return "cmd=put_result rc=0 msg=success"
            case "barrier_in":
                self._exchange()
                return "cmd=barrier_out rc=0"
            case "get":
                if key in self._known:
                    return f"cmd=get_result rc=0 msg=success value={self._known[key]}"
                return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            case "finalize":
                return "cmd=finalize_ack rc=0"
            case command:
                return f"cmd={command} rc=-1 msg=unknown_command"

    def _exchange(self) -> None:
        """Give what this rank has put to all, and take what they have."""
        rows = self._gather("start MPI", tuple(self._own))
        self._own = []
        for rank, row in enumerate(rows):
            for pair in row if isinstance(row, tuple) else (row,):
                if not (isinstance(pair, tuple) and len(pair) == 2):
                    raise PeerFailed(f"rank {rank} starts MPI with {pair!r}, no pair", rank=rank)
                key, value = pair
                # A line for each answer: what breaks it would answer another question.
                if not (isinstance(key, str) and isinstance(value, str)) or "\n" in key + value:
                    raise PeerFailed(f"rank {rank} starts MPI with {pair!r}, no texts", rank=rank)
                self._known[key] = value


def start(
    manager: ProcessManager,
    rank: int,
    num_ranks: int,
    init: Callable[[], int],
    most_silent_s: float = MOST_SILENT_S,
) -> None:
    """Run MPI_Init, `init`, and answer it; return when it has returned 0.

    Blocks as long as the gather of `manager` does. Raises PeerFailed, and DeviceError where MPI
    fails, or asks nothing and does not return for `most_silent_s`.
    """
    ours, theirs = socket.socketpair()
    own = {"PMI_FD": theirs.fileno(), "PMI_RANK": rank, "PMI_SIZE": num_ranks}
    ended: list[int] = []

    def run() -> None:
        ended.append(init())
        with suppress(OSError):
            theirs.sendall(_NOTHING + b"\n")

    with _environment({name: str(value) for name, value in own.items()}):
        # A daemon: see the docstring of this file.
        threading.Thread(target=run, name="MPI_Init", daemon=True).start()
        # Both sockets stay open as long as the process: MPI holds the number of its own.
        _kept.append((ours, theirs))
        try:
            for line in _lines(ours, rank, most_silent_s):
                if line == _NOTHING:
                    break
                ours.sendall(manager.answer(line.decode("utf-8", "replace")).encode() + b"\n")
        finally:
            _remove_files()
    if ended != [0]:
        raise DeviceError(f"MPI_Init of rank {rank} failed with code {ended}, not 0; see stderr")


def _lines(ours: socket.socket, rank: int, most_silent_s: float) -> Iterator[bytes]:
    """Yield the lines that MPI_Init sends. Time in which this process is stopped does not count."""
    ours.settimeout(min(1.0, most_silent_s))
    pending, silent_s = b"", 0.0
    while True:
        line, end, rest = pending.partition(b"\n")
        if end:
            pending = rest
            yield line
            continue
        try:
            data = ours.recv(1 << 12)
        except TimeoutError:
            silent_s += min(1.0, most_silent_s)
            if silent_s < most_silent_s:
                continue
            raise DeviceError(
                f"MPI_Init of rank {rank} has neither returned nor asked for anything for"
                f" {most_silent_s:g} s; the network that it takes may be down: name one by"
                " FI_TCP_IFACE, or by FI_PROVIDER"
            ) from None
        if not data:
            return
        pending, silent_s = pending + data, 0.0


_kept: list[object] = []


@contextmanager
def _environment(own: dict[str, str]) -> Iterator[None]:
    """Show MPI its variables, and no other process manager's, until MPI has started."""
    changes: dict[str, str | None] = {
        name: None for name in os.environ if name.startswith(("PMI_", "PMIX_"))
    }
    changes |= {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    changes |= own
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _remove_files() -> None:
    """Remove the files of mpich that this process has mapped; the memory stays."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for path in {line[line.index(_SHARED) :] for line in maps.splitlines() if _SHARED in line}:
        with suppress(FileNotFoundError):
            os.unlink(path.removesuffix(" (deleted)"))
