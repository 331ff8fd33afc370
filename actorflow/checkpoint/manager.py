"""Writing checkpoints: the commit protocol, and `CheckpointManager`, what a run asks of them."""

from __future__ import annotations

import functools
import os
import platform
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from actorflow.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointSpaceError,
    writing,
)
from actorflow.checkpoint.fs import (
    MANIFEST_NAME,
    MAX_STEP,
    ONLY_TERM,
    Fs,
    WriterLock,
    WriterTerm,
    any_step_of,
    aside_name,
    aside_step_of,
    is_leftover,
    new_attempt,
    remove_tree,
    step_name,
    step_of,
    tmp_name,
    trash_name,
    write_all,
)
from actorflow.checkpoint.manifest import FORMAT_VERSION, Manifest, encode
from actorflow.checkpoint.reader import CheckpointReader
from actorflow.checkpoint.shard import (
    Array,
    Groups,
    Parts,
    ShardSpec,
    TensorEntry,
    WrittenPieces,
    plan_shards,
    tensor_hash,
    write_pieces,
)
from compiler.contract.codec import plain_json
from compiler.contract.files import user_path

# The commit protocol. Each line is there because a crash without it loses or spoils a checkpoint
# (the tests take the lines away one by one, and find the crash):
#
#     once     mkdir run directory; fsync its parent; lock; fsync it; remove leftovers, those under
#              way by another name: who still writes there can give them no final name any more
#     begin    check the free space
#              mkdir .tmp-<step>-<attempt>
#              tell its name to the other ranks
#     write    each rank: write every file of its own, fsync it through the descriptor that wrote it
#              vote: the files and pieces with their sizes and hashes, or why there are none
#     commit   with the votes of all ranks:
#              write manifest.json, fsync it
#              fsync the tmp directory           now the content is durable
#              rename to step-<step>             now it is a checkpoint
#              fsync the run directory           now the name is durable
#              return, tell the other ranks      the acknowledgement
#     drop     else: remove the tmp directory, tell the other ranks the first reason
#     collect  rename step-<old> to .trash-...   now it is none
#              fsync the run directory           else half of it could come back under a final name
#              remove the tree
#
# The first rank begins, commits and collects; alone it also writes all, and nobody is told. How
# ranks vote is said in actorflow/distributed/sharded_save.py.
#
# A step that exists already is kept if it says the same. Otherwise it steps aside just before the
# new one gets its name, and is put back if that fails, even by a crash (`recover` does it then).
# After the method of Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014): assume
# nothing that POSIX does not promise.


def make_durable(fs: Fs, directory: Path) -> None:
    """Create a directory with its missing parents, and sync the names that lead to it."""
    missing: list[Path] = []
    path = directory
    while not _exists(fs, path):
        missing.append(path)
        path = path.parent
    # Outermost first, each name synced in its parent before anything is made below it.
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
    # Only this error: a path that cannot be looked at is no missing one, and must not be made.
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
        # The writer died between its two renames: the older version is the only one of this step.
        if step is not None and step not in present:
            fs.rename(directory / name, directory / step_name(step))
            present.add(step)
        elif step is not None:
            superseded.append(name)
    # The process that died may have renamed without syncing; deleting below such a name and then
    # losing power would bring half of a checkpoint back under its final name.
    fs.fsync_dir(directory)
    begun = [name for name in names if is_leftover(name) and any_step_of(name) >= 0]
    discard(fs, directory, [*superseded, *begun])
    for name in names:
        if is_leftover(name) and name not in begun:
            remove_tree(fs, directory / name)


def commit(
    fs: Fs,
    directory: Path,
    manifest: Manifest,
    *,
    is_there: bool,
    confirm: Callable[[], None],
) -> None:
    """Give a checkpoint whose files are durable its manifest and its final name, durably.

    Args:
        fs: the file system.
        directory: the run directory.
        manifest: of the checkpoint, whose step and attempt name the directory that it is in.
        is_there: the final name is taken by a version to be replaced.
        confirm: raises if the directory is no longer ours. Asked before the final name.

    Raises:
        OSError: the system refused. Nothing has changed then, save that the new checkpoint may have
            its final name already: complete, but not known to outlive a power cut.
    """
    draft_path = directory / tmp_name(manifest.step, manifest.attempt)
    final = directory / step_name(manifest.step)
    aside = directory / aside_name(manifest.step, manifest.attempt)
    fd = fs.create(draft_path / MANIFEST_NAME)
    try:
        write_all(fs, fd, memoryview(encode(manifest)))
        fs.fsync(fd)
    finally:
        fs.close(fd)
    # The names of the files must be on disk before the directory gets the name that says that
    # it is complete; POSIX orders nothing by itself.
    fs.fsync_dir(draft_path)
    # Again: writing took long enough for the directory to be replaced.
    confirm()
    if is_there:  # a rename onto a directory that is not empty fails; `recover` knows `aside`
        fs.rename(final, aside)
    try:
        fs.rename(draft_path, final)
    except BaseException:
        if is_there:
            # Also after a ^C: between the two renames the step has no name.
            fs.rename(aside, final)
        raise
    fs.fsync_dir(directory)


def drop(fs: Fs, draft_path: Path) -> None:
    """Remove what there is of a checkpoint that is not to be; `recover` removes what stays."""
    with suppress(OSError):  # the first error is the one to tell
        remove_tree(fs, draft_path)


def discard(fs: Fs, directory: Path, names: Iterable[str]) -> None:
    """Take final (or aside) names away durably, and only then delete what they led to.

    One that cannot be removed does not keep the others; the first such error is raised at the end.
    """
    trash: list[Path] = []
    errors: list[OSError] = []
    for name in names:
        target = directory / trash_name(any_step_of(name), new_attempt())
        try:
            fs.rename(directory / name, target)
            trash.append(target)
        except OSError as error:
            errors.append(error)
    if trash:  # else a power cut could bring a name back that leads to half of a checkpoint
        fs.fsync_dir(directory)
    for target in trash:
        try:
            remove_tree(fs, target)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


_BLOCK_BYTES = 4 << 10
"""What a file system may round a file or directory up to."""


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class SavedFacts:
    """What a resumed run reads besides the tensors; the arguments of `CheckpointManager.save`."""

    seed: int
    plan_hash: str
    config: Mapping[str, Any]
    data_state: Mapping[str, Any] | None
    data_fingerprint: str


class KeepRule(Protocol):
    """What says which checkpoints stay besides the newest: `af.Keep`."""

    @property
    def metric(self) -> str:
        """The mean by which the best are chosen."""

    def kept(self, steps: Sequence[int], measured: Mapping[int, float]) -> Collection[int]:
        """Return which of some steps stay, ascending; `measured` has the metric of some."""
        ...


class CheckpointManager(CheckpointReader):
    """The checkpoints of one run directory: a reader that may also become its one writer.

    Writing needs `open()` or a `with` block. Not thread-safe: one thread saves.

    Args:
        directory: the run directory; created, with its parents, by `open`.
        keep_last: how many checkpoints stay, counted back from the one just saved; the newest
            without NaN stays besides, for none of those that hold NaN leads anywhere.
        keep: says which others stay; None for none.
        report: is told what went wrong without failing the call; warns by default.
        fs: the file system; the real one by default.
        term: of the launch that this is a rank of; see `WriterLock`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 3,
        keep: KeepRule | None = None,
        report: Callable[[str], None] = _warn,
        fs: Fs | None = None,
        term: WriterTerm = ONLY_TERM,
    ) -> None:
        if type(keep_last) is not int or keep_last < 1:
            raise CheckpointError(f"keep_last: expected an int of 1 or more, got {keep_last!r}")
        # Real path: a name is made durable by syncing the directory that truly holds it.
        super().__init__(fs or Fs(), Path(os.path.realpath(user_path(directory))), report)
        self._keep_last, self._keep, self._term = keep_last, keep, term
        self._lock: WriterLock | None = None

    def open(self) -> Self:
        """Become the writer: create the directory durably, take the lock, remove what a crash left.

        Raises:
            CheckpointLocked: another manager, in this process or another, is the writer.
            CheckpointError: the directory cannot be created or cleaned.
        """
        fs = self.fs
        with writing(self.directory, "open the run directory", fs.free_bytes):
            make_durable(fs, self.directory)
            lock = WriterLock(fs, self.directory, self._term)
            try:
                recover(fs, self.directory)
            except BaseException:
                lock.release()
                raise
            self._lock = lock
        return self

    def close(self) -> None:
        """Stop being the writer; harmless if it is none."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_writer(self) -> bool:
        """Whether this manager holds the lock, and the path still leads to it. Any thread."""
        lock = self._lock
        try:
            if lock is not None:
                lock.check()
        except (OSError, CheckpointError):
            return False
        return lock is not None

    def save(
        self,
        step: int,
        groups: Groups,
        *,
        seed: int,
        plan_hash: str,
        config: Mapping[str, Any],
        data_state: Mapping[str, Any] | None,
        data_fingerprint: str,
    ) -> Path:
        """Write a checkpoint and return its directory once it is durable; then collect old ones.

        Blocks for the writing and syncing. The arrays are read, not kept; nobody may change them
        meanwhile. If old checkpoints cannot be removed, that is reported and the save still counts.

        Args:
            step: updates done; names the directory.
            groups: tensors by name by group; tensor names are unique over all groups.
            seed: key of the counter-based generator.
            plan_hash: fingerprint of the plan that made the state.
            config: the effective configuration, JSON values.
            data_state: state of the data source after the last batch consumed, JSON values.
            data_fingerprint: identity of the data source.

        Raises:
            CheckpointSpaceError: the disk is too full, found before or while writing.
            CheckpointLockLost: the directory or its lock was moved, removed or replaced.
            CheckpointError: an argument cannot be stored, or the system refuses. Earlier
                checkpoints are untouched in every case, and nothing half-written stays under a
                final name.
        """
        shards = plan_shards(groups)
        arrays = {n: a for tensors in groups.values() for n, a in tensors.items()}
        facts = SavedFacts(seed, plan_hash, config, data_state, data_fingerprint)
        pieces = [piece for shard in shards for piece in shard.pieces]
        tensors = tuple([piece.tensor for piece in pieces])
        size_bytes = sum([shard.size_bytes() for shard in shards])
        draft = self.draft(step, facts, tensors)
        need_bytes = self.need_bytes(draft, size_bytes, len(shards), len(pieces))
        lock = self._check_writer("save")
        with self._saving(step, lock, need_bytes):
            is_kept = step in self.steps() and self._holds_the_same(draft, shards, arrays)
            if is_kept:
                self.fs.fsync_dir(self.directory)  # its rename may not have been synced
        if not is_kept:
            path = self.begin(draft, need_bytes)
            try:
                with self._saving(step, lock, need_bytes):
                    written = write_pieces(self.fs, path, shards, arrays)
            except BaseException:
                self.drop(draft)
                raise
            self.commit(draft, (written,), need_bytes)
        self.collect(step)
        return self.directory / step_name(step)

    def draft(
        self, step: int, facts: SavedFacts, tensors: tuple[TensorEntry, ...], num_ranks: int = 1
    ) -> Manifest:
        """Return the manifest of a new attempt, without files and pieces.

        Raises CheckpointError for what cannot be stored, before the disk is touched.
        """
        self._check_writer("save")
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise CheckpointError(f"step: expected an int in [0, {MAX_STEP}], got {step!r}")
        draft = Manifest(
            FORMAT_VERSION, new_attempt(), step, facts.seed, facts.plan_hash, facts.config, (),
            tensors, (), num_ranks, facts.data_state, facts.data_fingerprint, _versions(),
            has_nan=False,
        )  # fmt: skip
        encode(replace(draft, tensors=()))
        return draft

    def need_bytes(self, draft: Manifest, size_bytes: int, num_files: int, num_pieces: int) -> int:
        """Return what a checkpoint takes on the disk whose files have so many bytes in all."""
        head_bytes = len(encode(replace(draft, tensors=())))
        # 256 bytes cover a manifest's entry; the margin is a block for each file, the manifest and
        # the directory, and 1/64.
        margin_bytes = _BLOCK_BYTES * (num_files + 2) + size_bytes // 64
        entries = num_files + num_pieces + len(draft.tensors)
        return size_bytes + head_bytes + 256 * entries + margin_bytes

    def begin(self, draft: Manifest, need_bytes: int) -> Path:
        """Make the directory into which the files of an attempt are written; return it.

        Raises as `save`.
        """
        lock = self._check_writer("save")
        path = self.directory / tmp_name(draft.step, draft.attempt)
        with self._saving(draft.step, lock, need_bytes):
            self._require_space(need_bytes)
            try:
                self.fs.mkdir(path)
                lock.check()  # now: a directory that took the place of ours has no such entry
            except BaseException:
                drop(self.fs, path)
                raise
        return path

    def write(self, step: int, attempt: str, groups: Groups, parts: Parts) -> WrittenPieces:
        """Write files of an attempt that the writer of the directory, here or elsewhere, has begun.

        Their bytes are durable afterwards, their names are not. Needs no lock.

        Args:
            step: of the attempt.
            attempt: its id.
            groups: arrays by tensor name by group.
            parts: where in the whole each array lies, by name; what is not there is whole.

        Raises:
            CheckpointError: as `save`, and for what is no attempt.
        """
        name = tmp_name(step, attempt)
        if not is_leftover(name):
            raise CheckpointError(f"attempt: expected 32 hexadecimal digits, got {attempt[:80]!r}")
        shards = plan_shards(groups, parts=parts)
        arrays = {n: a for tensors in groups.values() for n, a in tensors.items()}
        size_bytes = sum([shard.size_bytes() for shard in shards])
        with writing(self.directory, f"save step {step}", self.fs.free_bytes, size_bytes):
            return write_pieces(self.fs, self.directory / name, shards, arrays)

    def commit(
        self, draft: Manifest, written: Sequence[WrittenPieces], need_bytes: int = 0
    ) -> None:
        """Make a checkpoint of an attempt that all ranks have written; it is durable afterwards.

        Raises as `save`, also where what was written does not make up the tensors of the draft. The
        attempt is dropped then.
        """
        manifest = replace(
            draft,
            files=tuple([file for one in written for file in one.files]),
            pieces=tuple([piece for one in written for piece in one.pieces]),
            has_nan=any([one.has_nan for one in written]),
        )
        try:
            lock = self._check_writer("save")
            with self._saving(draft.step, lock, need_bytes):
                is_there = draft.step in self.steps()
                commit(self.fs, self.directory, manifest, is_there=is_there, confirm=lock.check)
        except BaseException:
            # Where it has its final name already, there is nothing here that could be removed.
            self.drop(draft)
            raise

    def drop(self, draft: Manifest) -> None:
        """Remove what was written of an attempt that is not to be a checkpoint."""
        drop(self.fs, self.directory / tmp_name(draft.step, draft.attempt))

    @contextmanager
    def _saving(self, step: int, lock: WriterLock, need_bytes: int) -> Iterator[None]:
        """Raise what goes wrong with the disk as errors of this family."""
        with writing(self.directory, f"save step {step}", self.fs.free_bytes, need_bytes):
            try:
                yield
            except OSError:
                lock.check()  # if it was lost, that is the cause
                raise

    def _check_writer(self, what: str) -> WriterLock:
        if self._lock is None:
            raise CheckpointError(
                f"cannot {what} in {self.directory}: this manager is not its writer; call open(), "
                "or use it in a `with` block"
            )
        with writing(self.directory, what, self.fs.free_bytes):
            self._lock.check()
        return self._lock

    def _require_space(self, need_bytes: int) -> None:
        free_bytes = self.fs.free_bytes(self.directory)
        if free_bytes < need_bytes:
            raise CheckpointSpaceError(self.directory, need_bytes, free_bytes)

    def _holds_the_same(
        self, draft: Manifest, shards: tuple[ShardSpec, ...], arrays: Mapping[str, Array]
    ) -> bool:
        """Whether the checkpoint of this step is whole and says the same.

        What it says is compared first: one of another state may claim to be of any size, and
        reading it would hold up the save.
        """
        try:
            manifest = self.manifest(draft.step)
            # Cheapest first: facts and types of the manifest, then hashes of the arrays, then the
            # files.
            is_same = (
                _resume_facts(manifest) == _resume_facts(draft)
                and len(manifest.files) == len(shards)
                and {piece.tensor for shard in shards for piece in shard.pieces}
                == {*manifest.tensors}
                and len(manifest.pieces) == len(manifest.tensors)
                and all([p.xxh3_128 == tensor_hash(arrays[p.tensor]) for p in manifest.pieces])
            )
            if is_same:
                self.verify(draft.step)
        except CheckpointDamaged as error:
            self._report(f"replacing the damaged checkpoint of step {draft.step}: {error}")
            return False
        if not is_same:
            self._report(f"replacing the checkpoint of step {draft.step}, which has another state")
        return is_same

    def collect(self, step: int) -> None:
        """Remove what is older than the last ones that stay; `step` is the one just saved.

        After the acknowledgement is due: an error here does not undo the save, and is only
        reported.
        """
        fs, directory = self.fs, self.directory
        try:
            self._check_writer("remove checkpoints")
            # Newer steps are not counted: after a fall-back they are damaged, and must not push out
            # the one just saved.
            steps = [s for s in self.steps() if s <= step]
            # The newest without NaN stays although it may be older than `keep_last`.
            kept = {*steps[-self._keep_last :], self.newest_sound(step)}
            if self._keep is not None:
                measured = self.measured(self._keep.metric)
                kept |= {*self._keep.kept(steps, {s: measured[s] for s in steps if s in measured})}
            victims = [step_name(s) for s in steps if s not in kept]
            victims += [n for n in fs.listdir(directory) if aside_step_of(n) is not None]
            leftovers = [n for n in fs.listdir(directory) if is_leftover(n)]
            discard(fs, directory, victims)
            for name in leftovers:  # what an earlier collection, or a failed save, could not remove
                remove_tree(fs, directory / name)
        except (OSError, CheckpointError) as error:
            self._report(
                f"step {step} is saved in {directory}, but older checkpoints cannot be removed: "
                f"{error}"
            )


def _resume_facts(manifest: Manifest) -> tuple[Any, ...]:
    # Plan and configuration may differ harmlessly.
    data_state = plain_json(manifest.data_state)
    return (manifest.seed, data_state, manifest.data_fingerprint)


@functools.cache
def _versions() -> dict[str, str]:
    from importlib import metadata  # 16 ms that only a save needs

    try:
        version = metadata.version("actorflow")
    except metadata.PackageNotFoundError:
        version = "source tree"
    return {"actorflow": version, "numpy": np.__version__, "python": platform.python_version()}
