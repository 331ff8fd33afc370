"""What a run was started with, as a file of its folder: `run.json`, and the plan beside it.

So a run explains itself later: which job and plan, on which data, by which command, from which
commit, with which versions. Each start adds itself, so a run that was resumed on another machine
says so. `actorflow runs` shows and compares records, `actorflow resume` repeats the newest command.
A record may come from anywhere, as a plan may: texts are shown by `printable` alone.
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from actorflow.environment.host import processor
from actorflow.environment.settings import ENVIRONMENT, STARTED_IN, __version__
from actorflow.options.run_spec import ENDLESS, RunSpec
from compiler.contract.codec import (
    Bounds,
    DecodeError,
    Text,
    from_json,
    from_object,
    printable,
    to_json,
    to_object,
)
from compiler.contract.errors import ActorflowError
from compiler.contract.files import read_regular, replace_regular, user_path
from compiler.contract.plan import Plan

if TYPE_CHECKING:
    from actorflow.options.job_options import JobOptions

RECORD_FILE = "run.json"
PLAN_FILE = "job.plan"
COMMAND = "ACTORFLOW_COMMAND"
"""The variable by which a launcher tells ranks the command that it was started by, as JSON."""

_FORMAT = 1
_MOST_BYTES = 16 << 20
_MOST_STARTS = 100
"""Of which the newest are kept."""
_GIT_SECONDS = 2.0
_ASKED = ("steps", "every", "seed", "keep", "keep_last", "resume", "on_nan", "on_save_error")
"""Options of `fit` that a record has."""
_PACKAGES = ("numpy", "msgpack", "safetensors", "onednn-cpu-gomp")

Label = Annotated[str, printable]
Quantity = Annotated[int, Bounds(0, (1 << 63) - 1)]
Measure = Annotated[float, Bounds(-1e18, 1e18)]


class RunRecordError(ActorflowError):
    """There is no record of a run, or it cannot be used; the message says how to mend it."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start: when (seconds since 1970), after which step, by which command, of which code.

    `command` is empty where there is none to repeat, as in a notebook. `directory` is where the
    run's folder was, in whole: it may have been moved or copied since. `has_changes` says whether
    files that git knows differed from `git_commit`; both say nothing outside of a repository.
    `data_fingerprint` is of what this start read. `environment` are the variables of actorflow that
    were set.
    """

    started_at_s: Measure
    first_step: Quantity
    command: tuple[Text, ...]
    folder: Text
    host: Label
    processor: Label
    versions: Mapping[Label, Label] = field(default_factory=dict)
    environment: Mapping[Label, Text] = field(default_factory=dict)
    directory: Text = ""
    data_fingerprint: Label = ""
    git_commit: Label = ""
    has_changes: bool | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run: `plan` is its fingerprint; `options` are of the job, `asked` of the call of `fit`."""

    job: Label
    plan: Label
    num_parameters: Quantity
    num_ranks: Quantity
    options: Mapping[Label, Label]
    asked: Mapping[Label, Label]
    data: Label
    data_fingerprint: Label
    starts: tuple[RunStart, ...] = ()
    format: int = _FORMAT

    @property
    def newest(self) -> RunStart:
        """The last start. Raises RunRecordError where there is none."""
        if not self.starts:
            raise RunRecordError(f"{RECORD_FILE} names no start of job {self.job!r}")
        return self.starts[-1]


def read_record(run: str | os.PathLike[str]) -> RunRecord:
    """Return the record of a run's folder. Raises RunRecordError."""
    path = Path(user_path(run)) / RECORD_FILE
    try:
        return from_object(RunRecord, from_json(read_regular(path, _MOST_BYTES)))
    except FileNotFoundError:
        raise RunRecordError(
            f"{path} is not there: give the folder that fit got as checkpoint=, of a run that was"
            " started by this version or a later one"
        ) from None
    except OSError as error:
        raise RunRecordError(f"{path} cannot be read: {error.strerror}") from None
    except DecodeError as error:
        raise RunRecordError(
            f"{path} is damaged or of another version ({error}); the next start writes it anew"
        ) from None


@dataclass(frozen=True, slots=True)
class RecordFolder:
    """Where a record goes; `is_ours` says whether the folder is still that of the run."""

    path: Path
    is_ours: Callable[[], bool]
    report: Callable[[str], object]


def write_record(
    folder: RecordFolder,
    plan: Plan,
    run_spec: RunSpec,
    options: JobOptions | None,
    first_step: int,
) -> None:
    """Write the record of a run that starts now, after those before it, and its plan.

    A folder that cannot be written is reported, and no reason to end a training.
    """
    if not folder.is_ours():
        return
    try:
        before = read_record(folder.path).starts
    except RunRecordError:
        before = ()
    parameters = [plan.views[v.view].type for v in plan.variables if v.role == "parameter"]
    asked = {name: str(getattr(run_spec, name)) for name in _ASKED}
    fingerprint = run_spec.data.fingerprint()
    if run_spec.total_steps == ENDLESS:
        asked["steps"] = "until the data ends"
    record = RunRecord(
        job=plan.name,
        plan=plan.fingerprint,
        num_parameters=sum([type_.num_elements for type_ in parameters]),
        num_ranks=plan.mesh.num_ranks,
        options={} if options is None else options.changed(),
        asked=asked,
        data=repr(run_spec.data),
        data_fingerprint=fingerprint,
        starts=(*before, _start(first_step, folder.path, fingerprint))[-_MOST_STARTS:],
    )
    try:
        replace_regular(folder.path / PLAN_FILE, plan.to_bytes())
        replace_regular(folder.path / RECORD_FILE, to_json(to_object(record)))
    except OSError as error:
        folder.report(
            f"{folder.path / RECORD_FILE} cannot be written ({error.strerror}); the run continues,"
            " and 'actorflow runs' does not know how it was started"
        )


def _start(first_step: int, directory: Path, data_fingerprint: str) -> RunStart:
    commit, has_changes = _git_state(STARTED_IN)
    return RunStart(
        started_at_s=time.time(),
        first_step=first_step,
        command=_command(),
        folder=STARTED_IN,
        host=socket.gethostname(),
        processor=processor(),
        versions=package_versions(),
        environment={
            variable.name: os.environ[variable.name]
            for variable in ENVIRONMENT
            if variable.name in os.environ
        },
        directory=os.path.realpath(directory),
        data_fingerprint=data_fingerprint,
        git_commit=commit,
        has_changes=has_changes,
    )


def _command() -> tuple[str, ...]:
    """Return what starts this program again; nothing where a person types its lines."""
    if text := os.environ.get(COMMAND):
        words = from_json(text.encode())
        return tuple([str(word) for word in words]) if isinstance(words, list) else ()
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return ()
    return command_of_process()


def command_of_process() -> tuple[str, ...]:
    """Return the command that this process was started by, with the Python that runs it."""
    return (sys.executable, *sys.orig_argv[1:])


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Return the versions of Python, of this package and of what its results depend on."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"actorflow": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@functools.cache
def _git_state(folder: str) -> tuple[str, bool | None]:
    """Return the commit of a folder, and whether files of it have changed since.

    Asked once by a process: its code is that of its start.
    """
    # A repository's own settings name programs that git would run.
    git = ("git", "-c", "core.fsmonitor=false", "-C", folder, "status", "--porcelain=v2")
    try:
        done = subprocess.run(
            [*git, "--branch", "--untracked-files=no"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            check=True,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return "", None
    lines = done.stdout.splitlines()
    named = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    commit = "".join(named[:1])
    if commit == "(initial)":
        return "", None
    return commit, any([not line.startswith("#") for line in lines])
