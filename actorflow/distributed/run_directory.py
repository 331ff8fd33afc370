"""One run directory for all ranks: proven when a run begins, by what the first one wrote there.

Ranks may give other paths to one directory (a relative one, a link, another mount), and one path to
several (a disk of each host's own). So paths prove nothing: the first rank leaves a random text,
and each rank reads it through its own path. Each also writes a file there, so that a directory that
is read-only, or full, on one rank is an error before the first step.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from actorflow.checkpoint.errors import CheckpointError, os_text, writing
from actorflow.checkpoint.fs import Fs, new_attempt, nonce_name, read_up_to, write_all
from actorflow.distributed.process_group import ProcessGroup


def check_one_directory(fs: Fs, directory: Path, group: ProcessGroup) -> None:
    """Check that all ranks have one run directory, which exists, and write in it.

    All ranks call it at the same place; the first one holds the lock of its directory.

    Raises:
        CheckpointError: on every rank, and names the first that has another directory, or cannot
            write; on the first rank alone where that cannot write.
    """
    if group.is_alone:
        return
    host = "" if group.member is None else group.member.host
    where = f"rank {group.rank}" + (f" on host {host}" if host else "")
    name, nonce = "", ""
    if group.is_first:
        name, nonce = nonce_name(new_attempt()), new_attempt()
        with writing(directory, "write as rank 0", fs.free_bytes):
            _write(fs, directory / name, nonce)
    try:
        row = (str(directory), where, name, nonce)
        rows = group.all_gather_object("find one directory for checkpoints", row)
        first = cast("tuple[str, str, str, str]", rows[0])
        fault = _fault(fs, directory, where, first)
        faults = cast("list[Any]", group.all_gather_object("compare directories", fault))
    finally:
        if name:
            with suppress(OSError):  # the next writer removes it
                fs.unlink(directory / name)
    for text in faults:
        if text:
            raise CheckpointError(str(text))


def _fault(fs: Fs, directory: Path, where: str, first: tuple[str, str, str, str]) -> str:
    """Return what is wrong with the directory of a rank; `first` is the row of the first one."""
    there, first_where, name, nonce = first
    try:
        found = _read(fs, directory, name, len(nonce))
    except OSError as error:
        found = os_text(error)
    if found != nonce:
        return (
            f"{where} has another run directory than {first_where}: {directory} there, {there}"
            f" here, and what {first_where} wrote is not found in the former. Give all ranks one"
            " directory, on a disk that all hosts share"
        )
    probe = directory / nonce_name(new_attempt())
    try:
        _write(fs, probe, nonce)
        fs.unlink(probe)
    except OSError as error:
        with suppress(OSError):
            fs.unlink(probe)
        return f"{where} cannot write in the run directory {directory}: {os_text(error)}"
    return ""


def _write(fs: Fs, path: Path, text: str) -> None:
    fd = fs.create(path)
    try:
        write_all(fs, fd, memoryview(text.encode()))
    finally:
        fs.close(fd)


def _read(fs: Fs, directory: Path, name: str, num_bytes: int) -> str:
    fd = fs.open_read(directory, name)
    try:
        content = bytearray(num_bytes)
        return content[: read_up_to(fs, fd, memoryview(content))].decode("ascii", "replace")
    finally:
        fs.close(fd)
