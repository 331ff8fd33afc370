"""`CheckpointManager`: what a run asks of its checkpoints. The protocol is in `commit.py`."""

from __future__ import annotations

import functools
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from actorflow.checkpoint.commit import commit, discard, make_durable, recover
from actorflow.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointSpaceError,
    writing,
)
from actorflow.checkpoint.fs import Fs
from actorflow.checkpoint.layout import MAX_STEP, aside_step_of, new_attempt, step_name
from actorflow.checkpoint.lock import WriterLock
from actorflow.checkpoint.manifest import FORMAT_VERSION, Manifest, encode, plain_json
from actorflow.checkpoint.reader import CheckpointReader
from actorflow.checkpoint.shard import Array, Groups, ShardSpec, plan_shards, tensor_hash

_BLOCK_BYTES = 4 << 10
"""What a file system may round a file or directory up to."""


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class CheckpointManager(CheckpointReader):
    """The checkpoints of one run directory: a reader that may also become its one writer.

    Writing needs `open()` or a `with` block. Not thread-safe: one thread saves.

    Args:
        directory: the run directory; created, with its parents, by `open`.
        keep_last: how many checkpoints stay, counted back from the one just saved; the newest
            without NaN stays besides, for none of those that hold NaN leads anywhere.
        report: is told what went wrong without failing the call; warns by default.
        fs: the file system; the real one by default.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 3,
        report: Callable[[str], None] = _warn,
        fs: Fs | None = None,
    ) -> None:
        if type(keep_last) is not int or keep_last < 1:
            raise CheckpointError(f"keep_last: expected an int of 1 or more, got {keep_last!r}")
        # Real path: a name is made durable by syncing the directory that truly holds it.
        super().__init__(fs or Fs(), Path(os.path.realpath(directory)), report)
        self._keep_last = keep_last
        self._lock: WriterLock | None = None

    def open(self) -> Self:
        """Become the writer: create the directory durably, take the lock, remove what a crash left.

        Raises:
            CheckpointLocked: another manager, in this process or another, is the writer.
            CheckpointError: the directory cannot be created or cleaned.
        """
        fs = self._fs
        with writing(self.directory, "open the run directory", fs.free_bytes):
            make_durable(fs, self.directory)
            lock = WriterLock(fs, self.directory)
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
        lock = self._check_writer("save")
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise CheckpointError(f"step: expected an int in [0, {MAX_STEP}], got {step!r}")
        shards = plan_shards(groups)
        arrays = {n: a for tensors in groups.values() for n, a in tensors.items()}
        draft = Manifest(
            FORMAT_VERSION, new_attempt(), step, seed, plan_hash, config, (), (), data_state,
            data_fingerprint, _versions(), has_nan=False,
        )  # fmt: skip
        head_bytes = len(encode(draft))  # refuses what cannot be stored before the disk is touched
        entries = sum(1 + len(shard.tensors) for shard in shards)
        size_bytes = sum(shard.size_bytes() for shard in shards)
        margin_bytes = _BLOCK_BYTES * (len(shards) + 2) + size_bytes // 64
        need_bytes = size_bytes + head_bytes + 256 * entries + margin_bytes
        final = self.directory / step_name(step)
        with writing(self.directory, f"save step {step}", self._fs.free_bytes, need_bytes):
            is_there = step in self.steps()
            try:
                if is_there and self._holds_the_same(draft, shards, arrays):
                    self._fs.fsync_dir(self.directory)  # its rename may not have been synced
                else:
                    self._require_space(need_bytes)
                    commit(
                        self._fs, self.directory, draft, shards, arrays, is_there=is_there,
                        confirm=lock.check,
                    )  # fmt: skip
            except OSError:
                lock.check()  # if it was lost, that is the cause
                raise
        self._collect(step)
        return final

    def _check_writer(self, what: str) -> WriterLock:
        if self._lock is None:
            raise CheckpointError(
                f"cannot {what} in {self.directory}: this manager is not its writer; call open(), "
                "or use it in a `with` block"
            )
        with writing(self.directory, what, self._fs.free_bytes):
            self._lock.check()
        return self._lock

    def _require_space(self, need_bytes: int) -> None:
        free_bytes = self._fs.free_bytes(self.directory)
        if free_bytes < need_bytes:
            raise CheckpointSpaceError(self.directory, need_bytes, free_bytes)

    def _holds_the_same(
        self, draft: Manifest, shards: tuple[ShardSpec, ...], arrays: Mapping[str, Array]
    ) -> bool:
        try:
            found = self.verify(draft.step)
        except CheckpointDamaged as error:
            self._report(f"replacing the damaged checkpoint of step {draft.step}: {error}")
            return False
        ours = {
            t.name: replace(t, xxh3_128=tensor_hash(arrays[t.name]))
            for shard in shards
            for t in shard.tensors
        }
        is_same_state = ours == {t.name: t for t in found.tensors}
        return is_same_state and _resume_facts(found) == _resume_facts(draft)

    def _collect(self, step: int) -> None:
        fs, directory = self._fs, self.directory
        try:
            # Newer steps are not counted: after a fall-back they are damaged, and must not push out
            # the one just saved.
            done = [s for s in self.steps() if s <= step]
            sound = self.newest_sound(step)
            victims = [step_name(s) for s in done[: -self._keep_last] if s != sound]
            victims += [n for n in fs.listdir(directory) if aside_step_of(n) is not None]
            discard(fs, directory, victims)
        except (OSError, CheckpointError) as error:
            self._report(
                f"step {step} is saved in {directory}, but older checkpoints cannot be removed: "
                f"{error}"
            )


def _resume_facts(manifest: Manifest) -> tuple[Any, ...]:
    # What a resumed run reads besides the tensors; plan and configuration may differ harmlessly.
    data_state = plain_json(manifest.data_state, "data_state")
    return (manifest.seed, data_state, manifest.data_fingerprint)


@functools.cache
def _versions() -> dict[str, str]:
    from importlib import metadata  # 16 ms that only a save needs

    try:
        own = metadata.version("actorflow")
    except metadata.PackageNotFoundError:
        own = "source tree"
    return {"actorflow": own, "numpy": np.__version__, "python": platform.python_version()}
