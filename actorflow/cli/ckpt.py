"""`actorflow ckpt ls | verify`: the checkpoints of a run, or one of them."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from pathlib import Path

from actorflow.checkpoint.layout import step_of
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.checkpoint.reader import CheckpointRow
from compiler.errors import ActorflowError
from memory.report import format_bytes

_WHERE = "directory of a run, or of one checkpoint in it (RUN/step-0000000500)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two actions."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the checkpoints of a run")
    listing.add_argument("directory", help=_WHERE)
    listing.set_defaults(command=_list)
    verify = actions.add_parser("verify", help="check every file and tensor against its hash")
    verify.add_argument("directory", help=_WHERE)
    verify.add_argument("--step", type=int, help="of a run: only this step")
    verify.set_defaults(command=_verify)


def _chosen(directory: str) -> tuple[CheckpointManager, int | None]:
    """Return the run of a directory, and the step if it is that of one checkpoint."""
    if not Path(directory).is_dir():
        raise FileNotFoundError(2, "no such directory", directory)
    path = Path(os.path.abspath(directory))
    manager, step = CheckpointManager(path), step_of(path.name)
    if step is None or manager.steps():
        return manager, None
    return CheckpointManager(path.parent), step


def _list(options: argparse.Namespace) -> int:
    manager, step = _chosen(options.directory)
    rows = [row for row in manager.describe() if step in (None, row.step)]
    if not rows:
        print(f"no checkpoints in {options.directory}")
        return 1
    print(f"{'step':>10}  {'size':>10}  {'tensors':>7}  {'saved':<19}  notes")
    for row in rows:
        print(_listed(row))
    return 0


def _listed(row: CheckpointRow) -> str:
    """Return the line of one checkpoint; `saved` is local time."""
    if row.problem:
        return f"{row.step:>10}  {'-':>10}  {'-':>7}  {'-':<19}  {row.problem}"
    try:
        saved = datetime.fromtimestamp(row.modified_ns / 1e9).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # a file's time may be any number
        saved = "-"
    size, note = format_bytes(row.size_bytes), "NaN" if row.has_nan else ""
    return f"{row.step:>10}  {size:>10}  {row.num_tensors:>7}  {saved:<19}  {note}".rstrip()


def _verify(options: argparse.Namespace) -> int:
    manager, step = _chosen(options.directory)
    asked = step if options.step is None else options.step
    steps = list(manager.steps()) if asked is None else [asked]
    if not steps:
        print(f"no checkpoints in {options.directory}")
        return 1
    damaged = 0
    for number in steps:
        try:
            manifest = manager.verify(number)
        except ActorflowError as error:
            damaged += 1
            print(f"step {number}: DAMAGED: {error}")
            continue
        size = sum(f.size_bytes for f in manifest.files)
        print(f"step {number}: valid, {len(manifest.tensors)} tensors, {format_bytes(size)}")
    return 1 if damaged else 0
