"""The trace of a run, where ACTORFLOW_TRACE asks for one: every firing and every launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from actorflow.compile.gpus import is_cuda
from actorflow.run.devices import devices_of
from actorflow.settings import SettingsError
from actors.launch_trace import LaunchTrace
from actors.table import MachineTable
from actors.timeline import Timeline, write_chrome_trace
from compiler.plan import Plan


class TraceFile:
    """What is noted for a trace while a run goes on, and the file that it becomes.

    Each of several ranks has one, with its number in the name: trace.json, trace.rank1.json.

    Raises SettingsError, before anything runs, when the file could not be written.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        if not path.parent.is_dir():
            raise SettingsError(
                f"ACTORFLOW_TRACE={path}: there is no folder {path.parent}; make it, or choose"
                " another"
            )
        self.timeline = Timeline()
        self.launches = LaunchTrace()
        self._path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path

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
                title=_title(plan),
            )
        except OSError as error:
            warn(f"ACTORFLOW_TRACE: cannot write {self._path}: {error.strerror}")


def _title(plan: Plan) -> str:
    """Return what the times of a trace are of: on a GPU not those of an ordinary run."""
    devices = devices_of(plan)
    title = f"plan {plan.name!r} on {', '.join(map(str, devices))}"
    if not any([is_cuda(device) for device in devices]):
        return title
    return f"{title}: launches of a GPU one by one, each waited for, without graphs"
