"""`actorflow runs | resume`: what runs were started with, how they stand, and where they differ.

    actorflow runs ls runs                 the runs in a folder, the newest start first
    actorflow runs compare runs/a runs/b   what differs: options, data, code, versions, results
    actorflow runs export runs/a a.safetensors   weights, and a.json with what they were made by
    actorflow resume runs/a                run the command of its newest start again

A folder may come from anywhere: a file that is damaged or hostile is one line, and what it says is
shown as text alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from actorflow.cli.inspect import add_json, export_weights
from actorflow.cli.top import is_alive, note
from actorflow.environment.settings import ENVIRONMENT
from actorflow.run.progress import number_text
from actorflow.run.report import METRICS_FILE, RESERVED, read_metrics
from actorflow.run.run_record import RECORD_FILE, RunRecord, RunRecordError, read_record
from actorflow.run.status import STATUS_FILE, Status, StatusError, read_status
from compiler.contract.codec import printable
from compiler.contract.errors import ActorflowError, CompileError
from compiler.contract.files import user_path

_MOST_RUNS = 10_000
_UNCUT = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `actorflow runs`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the runs in a folder, the newest start first")
    listing.add_argument("directory", nargs="?", default="runs", help="default: runs")
    add_json(listing)
    listing.set_defaults(command=_list)
    comparing = actions.add_parser("compare", help="show in what runs differ")
    comparing.add_argument("runs", nargs="+", metavar="RUN")
    comparing.add_argument("--all", action="store_true", help="show what is equal as well")
    add_json(comparing)
    comparing.set_defaults(command=_compare)
    export = actions.add_parser("export", help="write the weights, and how they were made")
    export.add_argument("directory", metavar="RUN")
    export.add_argument("file", metavar="FILE.safetensors", help="the file to make")
    export.add_argument("--step", type=int, help="of this step, not the newest")
    export.set_defaults(command=_export)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow resume`."""
    parser.add_argument("directory", metavar="RUN", help="folder of the run (fit's checkpoint=)")
    parser.add_argument("--print", action="store_true", help="print the command, and run nothing")


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: what its record and status say, and `problem` where that cannot be read."""

    name: str
    record: RunRecord | None
    status: Status | None
    problem: str = ""

    @property
    def state(self) -> str:
        """How it stands; a process that was killed leaves "running" behind."""
        if self.status is None:
            return "unknown"
        is_gone = note(self.status, time.time(), is_alive).startswith("stale")
        return "killed" if is_gone else self.status.state

    @property
    def started_at_s(self) -> float:
        """The newest start, in seconds since 1970; 0 where none is known."""
        return self.record.starts[-1].started_at_s if self.record and self.record.starts else 0.0


def run_row(folder: Path) -> RunRow:
    """Return what the folder of a run says of it."""
    problems: list[str] = []
    record, status = None, None
    try:
        record = read_record(folder)
    except RunRecordError as error:
        problems.append(str(error))
    try:
        status = read_status(folder)
    except StatusError as error:
        problems.append(str(error))
    # "." has no name.
    name = os.path.basename(os.path.abspath(folder))
    return RunRow(printable(name), record, status, "; ".join(problems))


def run_folders(directory: str) -> Iterator[Path]:
    """Yield the folders of runs: a folder itself, or those in it, in the order of their names."""
    top = Path(user_path(directory))
    if not top.is_dir():
        raise FileNotFoundError(2, "no such directory", directory)
    if _is_run(top):
        yield top
        return
    names = sorted(os.listdir(top))
    if len(names) > _MOST_RUNS:
        raise CompileError(f"{directory} has {len(names):,} entries, more than {_MOST_RUNS:,}")
    for name in names:
        folder = top / name
        if folder.is_dir() and not folder.is_symlink() and _is_run(folder):
            yield folder


FileStamps = tuple[tuple[int, int, int] | None, ...]


def stamps_of(folder: Path, *names: str) -> FileStamps:
    """Return what differs when one of these files has changed; None of one that is not there."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in names:
        try:
            facts = os.lstat(folder / name)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(stamps)


def _is_run(folder: Path) -> bool:
    return any([os.path.lexists(folder / name) for name in (RECORD_FILE, STATUS_FILE)])


def _list(options: argparse.Namespace) -> int:
    rows = [run_row(folder) for folder in run_folders(options.directory)]
    rows.sort(key=lambda row: -row.started_at_s)
    if options.json:
        print(json.dumps([asdict(row) | {"state": row.state} for row in rows]))
        return 0 if rows else 1
    if not rows:
        print(f"no runs in {options.directory}")
        return 1
    width = max([3, *[len(row.name) for row in rows]])
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNCUT
    lines = [f"{'run':<{width}}  {'state':<8}  {'step':>15}  {'loss':>9}  {'started':<19}  job"]
    lines += [_line(row, width) for row in rows]
    print("\n".join([line[:columns].rstrip() for line in lines]))
    return 0


def _line(row: RunRow, width: int) -> str:
    status, record = row.status, row.record
    total = "" if status is None or status.total_steps is None else f"/{status.total_steps}"
    step = "-" if status is None else f"{status.step}{total}"
    loss = "-" if status is None or status.loss is None else number_text(status.loss)
    job = record.job if record else row.problem
    started = time_text(row.started_at_s)
    return f"{row.name:<{width}}  {row.state:<8}  {step:>15}  {loss:>9}  {started:<19}  {job}"


def time_text(seconds: float) -> str:
    """Return seconds since 1970 as local date and time; "-" for 0, and for what is no time."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "seconds") if seconds else "-"
    except (ValueError, OverflowError, OSError):  # a file's time may be any number
        return "-"


def facts_of(row: RunRow) -> dict[str, str]:
    """Return what can be compared of a run: each fact by a name, and "-" for none.

    Raises RunRecordError for a run without a record.
    """
    if row.record is None:
        raise RunRecordError(row.problem)
    record, start = row.record, row.record.newest
    facts = {"job": record.job, "parameters": f"{record.num_parameters:,}"}
    facts |= {f"job option {name}": text for name, text in record.options.items()}
    facts |= {f"fit option {name}": text for name, text in record.asked.items()}
    facts |= {
        "data": record.data,
        "data fingerprint": record.data_fingerprint,
        "ranks": str(record.num_ranks),
        "plan": record.plan,
        "command": printable(shlex.join(start.command[1:])),
        "commit": start.git_commit or "-",
        "changed files": {True: "yes", False: "no", None: "-"}[start.has_changes],
        "host": start.host,
        "processor": start.processor,
        "starts": str(len(record.starts)),
    }
    facts |= {f"version of {name}": text for name, text in start.versions.items()}
    facts |= {name: printable(text) for name, text in start.environment.items()}
    if row.status is not None:
        facts |= {"state": row.state, "steps done": str(row.status.step)}
    return facts


def _results(folder: Path) -> dict[str, str]:
    """Return the last value of each metric, by name; none of a run without metrics."""
    last: dict[str, str] = {}
    with suppress(FileNotFoundError):
        for line in read_metrics(folder / METRICS_FILE):
            last |= {name: f"{v:.6g}" for name, v in line.items() if isinstance(v, (int, float))}
    return {printable(name): text for name, text in last.items() if name not in RESERVED}


def _compare(options: argparse.Namespace) -> int:
    folders = [Path(user_path(run)) for run in options.runs]
    rows = [run_row(folder) for folder in folders]
    sides = [
        facts_of(row) | {f"result {name}": value for name, value in _results(folder).items()}
        for row, folder in zip(rows, folders, strict=True)
    ]
    names = list(dict.fromkeys([name for side in sides for name in side]))
    table = {name: [side.get(name, "-") for side in sides] for name in names}
    shown = {name: row for name, row in table.items() if options.all or len({*row}) > 1}
    if options.json:
        print(json.dumps({"runs": options.runs, "facts": shown}))
        return 0
    if not shown:
        print(f"{len(folders)} runs, and nothing differs")
        return 0
    print("\n".join(_columns({"": [row.name for row in rows], **shown})))
    return 0


def _columns(table: Mapping[str, list[str]]) -> list[str]:
    """Return rows as lines of columns as wide as they need, at most a share of the screen."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNCUT
    name_width = max([len(name) for name in table])
    count = len(next(iter(table.values())))
    most = max(12, (columns - name_width) // count - 2)
    widths = [min(most, max([len(row[i]) for row in table.values()])) for i in range(count)]
    return [
        f"{name:<{name_width}}  "
        + "  ".join([f"{cell[:w]:<{w}}" for cell, w in zip(row, widths, strict=True)]).rstrip()
        for name, row in table.items()
    ]


def _export(options: argparse.Namespace) -> int:
    record = read_record(options.directory)
    described = Path(options.file).with_suffix(".json")
    if os.path.lexists(described):
        raise FileExistsError(17, "is there already; remove it, or name another", str(described))
    code = export_weights(options.directory, options.file, options.step)
    if code == 0:
        row = asdict(record) | {"results": _results(Path(user_path(options.directory)))}
        with described.open("x", encoding="utf-8") as file:
            json.dump(row, file, indent=2)
        print(f"how they were made: {described}")
    return code


def resume(options: argparse.Namespace) -> int:
    """Replace this process by the command of the newest start, in its folder.

    Raises RunRecordError where there is no command, and ActorflowError where it cannot be run.
    """
    record = read_record(options.directory)
    start = record.newest
    if not start.command:
        raise RunRecordError(
            f"run {options.directory} was started by lines that a person typed, as in a notebook:"
            " there is no command to repeat; call fit again with the same checkpoint="
        )
    text = printable(shlex.join(start.command))
    if options.print:
        print(f"cd {printable(shlex.quote(start.folder))} && {text}")
        return 0
    print(f"actorflow: in {printable(start.folder)}: {text}", file=sys.stderr, flush=True)
    names = {variable.name for variable in ENVIRONMENT}
    environment = {name: v for name, v in start.environment.items() if name in names}
    try:
        os.chdir(start.folder)
        os.execve(start.command[0], list(start.command), {**os.environ, **environment})
    except (OSError, ValueError) as error:
        raise ActorflowError(
            f"run {options.directory} cannot be resumed here: {error}; it was started on"
            f" {start.host} in {printable(start.folder)}. Start its script by hand, with the same"
            " checkpoint="
        ) from None
