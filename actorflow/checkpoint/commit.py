"""The commit protocol: how a checkpoint comes to be, and how it goes.

Each line is there because a crash without it loses or spoils a checkpoint (the tests take the lines
away one by one, and find the crash):

    once     mkdir run directory; fsync its parent; lock; fsync it; remove leftovers
    save     check the free space
             mkdir .tmp-<step>-<attempt>
             write every shard, fsync it through the descriptor that wrote it
             write manifest.json, fsync it
             fsync the tmp directory           now the content is durable
             rename to step-<step>             now it is a checkpoint
             fsync the run directory           now the name is durable
             return                            the acknowledgement
    collect  rename step-<old> to .trash-...   now it is none
             fsync the run directory           else half of it could come back under a final name
             remove the tree

A step that exists already is kept if it says the same. Otherwise it steps aside just before the new
one gets its name, and is put back if that fails, even by a crash (`recover` does it then). After
the method of Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014): assume nothing
that POSIX does not promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from actorflow.checkpoint.fs import Fs, remove_tree, write_all
from actorflow.checkpoint.layout import (
    MANIFEST_NAME,
    any_step_of,
    aside_name,
    aside_step_of,
    is_leftover,
    new_attempt,
    step_name,
    step_of,
    tmp_name,
    trash_name,
)
from actorflow.checkpoint.manifest import Manifest, encode
from actorflow.checkpoint.shard import Array, FileEntry, ShardSpec, TensorEntry, write_shard


def make_durable(fs: Fs, directory: Path) -> None:
    """Create a directory with its missing parents, and sync the names that lead to it."""
    missing: list[Path] = []
    path = directory
    while not _exists(fs, path):
        missing.append(path)
        path = path.parent
    for path in reversed(missing):
        with suppress(FileExistsError):  # another process makes the same directory
            fs.mkdir(path)
        try:
            fs.fsync_dir(path.parent)
        except OSError:
            with suppress(OSError):  # else the next attempt would find it and take it for durable
                fs.rmdir(path)
            raise
    if not missing:
        with suppress(PermissionError):  # a parent that is not ours to read: somebody else made us
            fs.fsync_dir(directory.parent)


def _exists(fs: Fs, path: Path) -> bool:
    try:
        fs.stat(path)
    except FileNotFoundError:
        return False
    return True


def recover(fs: Fs, directory: Path) -> None:
    """Put back what was aside when a writer died, and delete what it left; needs the lock."""
    names = fs.listdir(directory)
    present = {step_of(name) for name in names}
    superseded = []
    for name in names:
        step = aside_step_of(name)
        if step is not None and step not in present:
            fs.rename(directory / name, directory / step_name(step))
            present.add(step)
        elif step is not None:
            superseded.append(name)
    # The process that died may have renamed without syncing; deleting below such a name and then
    # losing power would bring half of a checkpoint back under its final name.
    fs.fsync_dir(directory)
    discard(fs, directory, superseded)
    for name in names:
        if is_leftover(name):
            remove_tree(fs, directory / name)


def commit(
    fs: Fs,
    directory: Path,
    draft: Manifest,
    shards: tuple[ShardSpec, ...],
    arrays: Mapping[str, Array],
    *,
    is_there: bool,
    confirm: Callable[[], None],
) -> None:
    """Write a checkpoint and give it its final name; durable when this returns.

    Args:
        fs: the file system.
        directory: the run directory.
        draft: the manifest but for files, tensors and NaN flag.
        shards: which tensor goes into which file.
        arrays: the tensors by name.
        is_there: the final name is taken by a version to be replaced.
        confirm: raises if the directory is no longer ours. Asked when there is something in it,
            which a directory put in its place afterwards lacks, and before the final name.

    Raises:
        OSError: the system refused. Nothing has changed then, save that the new checkpoint may have
            its final name already: complete, but not known to outlive a power cut.
    """
    tmp = directory / tmp_name(draft.step, draft.attempt)
    final = directory / step_name(draft.step)
    aside = directory / aside_name(draft.step, draft.attempt)
    try:
        fs.mkdir(tmp)
        confirm()  # now: a directory that took the place of ours has no such entry
        _write_content(fs, tmp, draft, shards, arrays)
        # The names of the files must be on disk before the directory gets the name that says that
        # it is complete; POSIX orders nothing by itself.
        fs.fsync_dir(tmp)
        confirm()
        if is_there:  # a rename onto a directory that is not empty fails; `recover` knows `aside`
            fs.rename(final, aside)
        try:
            fs.rename(tmp, final)
        except BaseException:
            if is_there:
                fs.rename(aside, final)
            raise
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell; `recover` removes what stays
            remove_tree(fs, tmp)
        raise
    fs.fsync_dir(directory)


def _write_content(
    fs: Fs, tmp: Path, draft: Manifest, shards: tuple[ShardSpec, ...], arrays: Mapping[str, Array]
) -> None:
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    has_nan = False
    for shard in shards:
        file, entries, shard_has_nan = write_shard(fs, tmp, shard, arrays)
        has_nan = has_nan or shard_has_nan
        files.append(file)
        tensors += entries
    data = encode(replace(draft, files=tuple(files), tensors=tuple(tensors), has_nan=has_nan))
    fd = fs.create(tmp / MANIFEST_NAME)
    try:
        write_all(fs, fd, memoryview(data))
        fs.fsync(fd)
    finally:
        fs.close(fd)


def discard(fs: Fs, directory: Path, names: Iterable[str]) -> None:
    """Take final (or aside) names away durably, and only then delete what they led to."""
    trash = []
    for name in names:
        target = directory / trash_name(any_step_of(name), new_attempt())
        fs.rename(directory / name, target)
        trash.append(target)
    if trash:  # else a power cut could bring a name back that leads to half of a checkpoint
        fs.fsync_dir(directory)
    for target in trash:
        remove_tree(fs, target)
