"""List, verify and load checkpoints. Needs no lock, creates nothing, trusts nothing on the disk.

The newest checkpoint whose every byte is right is the one to resume from; a damaged one is reported
and skipped. Steps without a valid one among them are an error, never a fresh start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from actorflow.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointUnfit,
    NoValidCheckpoint,
    os_text,
    reading,
)
from actorflow.checkpoint.fs import (
    MANIFEST_NAME,
    MAX_STEP,
    Fs,
    aside_step_of,
    is_leftover,
    read_up_to,
    step_name,
    step_of,
)
from actorflow.checkpoint.manifest import MAX_MANIFEST_BYTES, Expected, Manifest, decode
from actorflow.checkpoint.shard import Array, Box, WantedTensors, open_shard, read_shard
from memory.report import format_bytes

EVALUATION, BEST_BY = "evaluation", "best_by"
"""Keys of a manifest's configuration: the means of the evaluation of these values, before callbacks
of the training wrote to them; the metric and mode by which checkpoints are the best."""


def best_first(measured: Mapping[int, float], mode: str) -> tuple[int, ...]:
    """Return steps by their metric, the best first, of equal ones the earlier; `mode` "max": large.

    `measured` has the metric by step.
    """
    sign = -1.0 if mode == "max" else 1.0
    return tuple(sorted(measured, key=lambda step: (sign * measured[step], step)))


Boxes = Mapping[str, Box] | Callable[[Manifest], Mapping[str, Box]]
"""What is wanted of each tensor, by name."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint in memory: fresh, writable arrays by tensor name.

    Of each tensor they hold the box that was wanted, or all of it.
    """

    manifest: Manifest
    tensors: dict[str, Array]


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One line of a listing, from the manifest alone; `problem` is empty if that can be read.

    `modified_ns` is the file system's time of the manifest in nanoseconds since 1970, 0 if unknown.
    """

    step: int
    path: Path
    size_bytes: int
    num_tensors: int
    num_pieces: int
    num_ranks: int
    modified_ns: int
    has_nan: bool
    problem: str


class CheckpointReader:
    """The checkpoints of one run directory, for any number of readers.

    Args:
        fs: the file system.
        directory: the run directory; none of its checkpoints where it does not exist.
        report: is told what is skipped.

    `fs` and `directory` are attributes.
    """

    def __init__(self, fs: Fs, directory: Path, report: Callable[[str], None]) -> None:
        self.directory = directory
        self.fs = fs
        self._report = report

    def steps(self) -> tuple[int, ...]:
        """Return the steps that have a final name, ascending, valid or not."""
        return tuple(step for name in self._names() if (step := step_of(name)) is not None)

    def verify(self, step: int) -> Manifest:
        """Read every byte of a checkpoint and compare; return its manifest.

        Memory: one chunk of 8 MiB. Raises CheckpointDamaged, naming the file, where something is
        missing or differs.
        """
        manifest, path = self.manifest(step), self.directory / step_name(step)
        with reading(path):
            for file, spec in manifest.shards():
                read_shard(self.fs, path, file, spec)
        return manifest

    def load(
        self,
        step: int,
        expected: Expected | None = None,
        boxes: Boxes | None = None,
    ) -> LoadedCheckpoint:
        """Read, verify and return a checkpoint, in one pass over its files.

        Args:
            step: which one.
            expected: what its tensors must be.
            boxes: what is wanted of each tensor, by name, or a function that says so of a manifest;
                None for all of every tensor. Only pieces of which something is wanted are read and
                verified.

        Raises:
            CheckpointDamaged: something is missing or differs; the message names the file.
            CheckpointUnfit: it is not what was expected; then no tensor was read.
        """
        manifest = self.manifest(step)
        if expected is not None:
            expected.check(manifest)
        tensors = self._read(manifest, boxes(manifest) if callable(boxes) else boxes)
        if expected is not None:
            expected.check_values(manifest, tensors)
        return LoadedCheckpoint(manifest, tensors)

    def latest(
        self,
        expected: Expected | None = None,
        boxes: Boxes | None = None,
        *,
        at_most: int = MAX_STEP,
        report: Callable[[str], None] | None = None,
    ) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that is valid and as expected; None if there never was one.

        Each other one is reported and skipped, and nothing of its size is reserved. One that a
        writer removes meanwhile is passed over. Those after step `at_most` are not looked at;
        `expected` and `boxes` are those of `load`; `report` takes the place of the reader's own.

        Raises:
            NoValidCheckpoint: there are checkpoints, and none can be used.
            CheckpointUnfit: the same, and all are whole: they are of another model or optimizer.
            CheckpointError: the system refuses to read, which says nothing about the checkpoint.
        """
        loaded, problems = None, []
        unfit: list[str] = []
        for step in reversed([step for step in self.steps() if step <= at_most]):
            try:
                loaded = self.load(step, expected, boxes)
                break
            except CheckpointUnfit as error:
                unfit.append(f"the checkpoint of step {step} does not fit this job: {error}")
                problems.append(f"{unfit[-1]}; it is not used")
            except CheckpointDamaged as error:
                if step not in self.steps():
                    # A writer removed it meanwhile, so there is a newer one: look again.
                    return self.latest(expected, boxes, at_most=at_most, report=report)
                problems.append(f"checkpoint of step {step} is damaged and not used: {error}")
        if unfit and len(unfit) == len(problems) and loaded is None:
            raise CheckpointUnfit(
                f"{self.directory}: {unfit[0]}. Use another checkpoint directory, or the model and"
                " optimizer that wrote this one"
            )
        for problem in problems:
            (report or self._report)(problem)
        if loaded is not None:
            return loaded
        asides = [name for name in self._names() if aside_step_of(name) is not None]
        if problems or asides:
            listing = "".join(f"\n  {text}" for text in [*problems, *asides])
            raise NoValidCheckpoint(
                f"{self.directory} has checkpoints, but no valid one:{listing}\nRestore one from"
                " a copy, or choose another directory for a new run"
            )
        return None

    def newest_sound(self, step: int) -> int | None:
        """Return the newest step up to one whose manifest says that it holds no NaN, or None."""
        for candidate in reversed([s for s in self.steps() if s <= step]):
            try:
                if not self.manifest(candidate).has_nan:
                    return candidate
            except CheckpointDamaged:
                continue
        return None

    def measured(self, metric: str) -> dict[int, float]:
        """Return by step a mean of the evaluations of the checkpoints, of those that have it."""
        values: dict[int, float] = {}
        for step in self.steps():
            try:
                means = self.manifest(step).config.get(EVALUATION)
            except CheckpointDamaged:
                continue
            value = means.get(metric) if isinstance(means, Mapping) else None
            if isinstance(value, (int, float)):
                values[step] = float(value)
        return values

    def best(self) -> tuple[int, ...]:
        """Return the measured steps, the best first, by the rule of the newest checkpoint.

        Nothing where it has no rule, or none was measured.
        """
        for step in reversed(self.steps()):
            try:
                rule = self.manifest(step).config.get(BEST_BY)
            except CheckpointDamaged:
                continue
            if not isinstance(rule, Mapping):
                return ()
            return best_first(self.measured(str(rule.get("metric"))), str(rule.get("mode")))
        return ()

    def hidden(self) -> tuple[str, ...]:
        """Return the names of versions set aside, unfinished or half removed, which take space."""
        return tuple(n for n in self._names() if is_leftover(n) or aside_step_of(n) is not None)

    def describe(self) -> tuple[CheckpointRow, ...]:
        """Return one row per step, ascending, without reading the tensors."""
        return tuple(self._row(step) for step in self.steps())

    def _names(self) -> list[str]:
        try:
            return self.fs.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot list {self.directory}: {os_text(error)}") from error

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a step, checked against its own hash and its directory's name.

        Raises CheckpointDamaged where it is missing, damaged, or of another step.
        """
        fs, path = self.fs, self.directory / step_name(step)
        with reading(path):
            fd = fs.open_read(path, MANIFEST_NAME)
            try:
                size_bytes = fs.stat_open(fd).size_bytes
                if size_bytes > MAX_MANIFEST_BYTES:
                    raise CheckpointDamaged(
                        f"{path}: a manifest of {size_bytes} bytes is too large"
                    )
                content = bytearray(size_bytes)
                count = read_up_to(fs, fd, memoryview(content))
            finally:
                fs.close(fd)
        try:
            manifest = decode(bytes(content[:count]))
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{path}: {error}") from error
        if manifest.step != step:
            raise CheckpointDamaged(f"{path}: its manifest belongs to step {manifest.step}")
        return manifest

    def _read(self, manifest: Manifest, boxes: Mapping[str, Box] | None) -> dict[str, Array]:
        path, fs = self.directory / step_name(manifest.step), self.fs
        wanted = WantedTensors(boxes)
        try:
            with reading(path):
                shards = [
                    (file, spec)
                    for file, spec in manifest.shards()
                    if any([wanted.has(piece) for piece in spec.pieces])
                ]
                # All sizes before the first array is made: its tensor may lie in several files.
                for _, spec in shards:
                    fs.close(open_shard(fs, path, spec))
                for file, spec in shards:
                    read_shard(fs, path, file, spec, wanted)
            for tensor in manifest.tensors:
                box = wanted.box(tensor)
                if box is not None:
                    wanted.array(tensor, box)  # also of one without elements
        except MemoryError as error:
            size = format_bytes(sum(file.size_bytes for file in manifest.files))
            raise CheckpointError(
                f"there is no memory to read {path}: its tensors take {size}"
            ) from error
        return wanted.arrays

    def _row(self, step: int) -> CheckpointRow:
        path = self.directory / step_name(step)
        try:
            manifest = self.manifest(step)
            with reading(path):
                modified_ns = self.fs.stat(path / MANIFEST_NAME).modified_ns
        except CheckpointError as error:
            return CheckpointRow(step, path, 0, 0, 0, 0, 0, has_nan=False, problem=str(error))
        size_bytes = sum(file.size_bytes for file in manifest.files)
        num_tensors, num_pieces = len(manifest.tensors), len(manifest.pieces)
        return CheckpointRow(
            step,
            path,
            size_bytes,
            num_tensors,
            num_pieces,
            manifest.num_ranks,
            modified_ns,
            manifest.has_nan,
            "",
        )
