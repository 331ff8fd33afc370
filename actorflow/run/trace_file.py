"""The trace of a run: every firing and every launch, in a file that ACTORFLOW_TRACE names."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from actorflow.environment.host import is_cuda
from actorflow.environment.settings import SettingsError
from actorflow.run.devices import (
    devices_of,
)
from actors.loop.timeline import (
    LaunchTrace,
    Timeline,
    TraceProcess,
    shared_origin_ns,
    write_chrome_trace,
)
from actors.machine.table import MachineTable
from compiler.contract.plan import Plan


class TraceFile:
    """The trace of a run, where ACTORFLOW_TRACE asks for one: every firing and every launch.

    Each of several ranks has one, with its number in the name: trace.json, trace.rank1.json. Of
    plans on one memory each further one has one, with its hash: trace.5f0c3a1e.json.

    Raises SettingsError, before anything runs, when the file could not be written.
    """

    def __init__(self, path: Path, rank: int = 0, name: str = "") -> None:
        if not path.parent.is_dir():
            raise SettingsError(
                f"ACTORFLOW_TRACE={path}: there is no folder {path.parent}; make it, or choose"
                " another"
            )
        self.timeline = Timeline()
        self.launches = LaunchTrace()
        self._rank = rank
        parts = [path.stem, *[f"rank{rank}"] * (rank > 0), *[name] * bool(name)]
        self._path = path.with_name(f"{'.'.join(parts)}{path.suffix}")

    @classmethod
    def of(cls, path: Path | None, rank: int, plan: Plan, *, is_beside: bool) -> TraceFile | None:
        """Return the file of a run, or None where none is asked for."""
        name = plan.graph_hash[:8] if is_beside else ""
        return None if path is None else cls(path, rank, name)

    def write(self, plan: Plan, warn: Callable[[str], object]) -> None:
        """Write the file, when no launch runs any more; warn where that is not possible."""
        try:
            write_chrome_trace(
                self._path,
                self.timeline.rows(),
                MachineTable.of(plan),
                stream_names=tuple(stream.name for stream in plan.streams),
                has_arrows=True,
                more=partial(self.launches.events, plan),
                process=TraceProcess(_title(plan, self._rank), self._rank, shared_origin_ns()),
            )
        except OSError as error:
            warn(f"ACTORFLOW_TRACE: cannot write {self._path}: {error.strerror}")


def _title(plan: Plan, rank: int) -> str:
    """Return what the times of a trace are of: on a GPU not those of an ordinary run."""
    devices = devices_of(plan)
    of_rank = f"rank {rank} on {socket.gethostname()}, " if plan.mesh.num_ranks > 1 else ""
    title = f"{of_rank}plan {plan.name!r} on {', '.join(map(str, devices))}"
    if not any([is_cuda(device) for device in devices]):
        return title
    return f"{title}: launches of a GPU one by one, each waited for, without graphs"
