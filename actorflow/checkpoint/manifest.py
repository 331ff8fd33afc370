"""What a checkpoint says about itself: `manifest.json`, its encoder and its strict parser.

The file is one line of JSON, a newline, and the xxh3_128 of the line. The hash finds damage; it
does not prove an author. So the parser trusts nothing: every field has a type and a range, every
file name is checked before it is opened, unknown and repeated keys are refused. `Expected` holds a
manifest against the variables of the job that is to go on from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import xxhash

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointUnfit
from actorflow.checkpoint.fs import MANIFEST_NAME, MAX_STEP
from actorflow.checkpoint.shard import (
    MAX_SIZE,
    Array,
    Digest,
    FileEntry,
    ShardSpec,
    TensorEntry,
)
from compiler.contract.codec import (
    Bounds,
    DecodeError,
    JsonObject,
    Text,
    from_json,
    from_object,
    to_json,
    to_object,
)

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
"""Of the file. A tensor takes some 250 bytes; what is parsed may take twenty times the text."""

_HASH_BYTES = 32
_MAX_RANK = 32


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a resumed run has to know.

    `attempt` is unique per save. `config`, `data_state` and `versions` hold JSON values only.
    `data_state` is the position after the last batch that a saved step consumed; None for a source
    without one.
    """

    format_version: int
    attempt: Digest
    step: Annotated[int, Bounds(0, MAX_STEP)]
    seed: Annotated[int, Bounds(0, (1 << 128) - 1)]
    plan_hash: Text
    config: JsonObject
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    data_state: JsonObject | None
    data_fingerprint: Text
    versions: Mapping[Text, Text]
    has_nan: bool

    def shards(self) -> tuple[tuple[FileEntry, ShardSpec], ...]:
        """Return each file with its tensors."""
        # Files first, so that one without tensors is there as well.
        tensors: dict[str, list[TensorEntry]] = {file.name: [] for file in self.files}
        for tensor in self.tensors:
            tensors[tensor.file].append(tensor)
        return tuple((file, ShardSpec(file.name, tuple(tensors[file.name]))) for file in self.files)


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the file.

    Raises:
        CheckpointError: a field cannot be stored; the message names it.
    """
    try:
        body = to_json(to_object(manifest))
        # Read back by the reader's own rules: what it would refuse is never written.
        _manifest_of(body)
    except (ValueError, DecodeError, CheckpointDamaged) as error:
        raise CheckpointError(f"the checkpoint's manifest cannot be written: {error}") from error
    if len(body) + 1 + _HASH_BYTES > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest of the checkpoint has {len(body):,} bytes, and a reader accepts"
            f" {MAX_MANIFEST_BYTES:,} at most; store less in the state of the data source"
        )
    return body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode()


def decode(data: bytes) -> Manifest:
    """Return the manifest in the bytes of a file.

    Raises:
        CheckpointDamaged: the hash is wrong, or the text is not a manifest of this format.
    """
    # The hash comes last, so a file that was cut short cannot match.
    body, digest = data[: -_HASH_BYTES - 1], data[-_HASH_BYTES:]
    if data[-_HASH_BYTES - 1 : -_HASH_BYTES] != b"\n":
        raise CheckpointDamaged(
            f"{MANIFEST_NAME} does not end with a line that has its hash; it may be truncated"
        )
    if digest != xxhash.xxh3_128_hexdigest(body).encode():
        raise CheckpointDamaged(f"{MANIFEST_NAME} does not match its own hash")
    try:
        return _manifest_of(body)
    except DecodeError as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME}: {error}") from error


def _manifest_of(body: bytes) -> Manifest:
    value = from_json(body)
    # Before the fields: another version may have others, and is to be named as such.
    version = value.get("format_version") if isinstance(value, dict) else None
    # type() and not isinstance: true is no version.
    if type(version) is int and version != FORMAT_VERSION:
        raise CheckpointDamaged(
            f"{MANIFEST_NAME} has format version {version}; this actorflow reads {FORMAT_VERSION}"
        )
    manifest = from_object(Manifest, value)
    names = {file.name for file in manifest.files}
    if len(names) != len(manifest.files) or MANIFEST_NAME in names:
        raise DecodeError("are listed twice, or name the manifest itself", "files")
    if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
        raise DecodeError("is listed twice", "a tensor")
    for index, tensor in enumerate(manifest.tensors):
        _check_tensor(tensor, names, f"tensors[{index}]")
    for file, spec in manifest.shards():
        if spec.size_bytes() != file.size_bytes:
            raise DecodeError(
                f"is listed with {file.size_bytes} bytes, its tensors make {spec.size_bytes()}",
                file.name,
            )
    return manifest


def _check_tensor(tensor: TensorEntry, files: set[str], where: str) -> None:
    if tensor.name in ("", "__metadata__"):
        raise DecodeError(f"is {tensor.name!r}, which names no tensor", f"{where}.name")
    if tensor.file not in files:
        raise DecodeError(f"is {tensor.file!a:.80}, which is not there", f"{where}.file")
    # Extents of an empty array count too: numpy refuses them although no byte is needed.
    size = math.prod([max(n, 1) for n in tensor.shape]) * np.dtype(tensor.dtype).itemsize
    if len(tensor.shape) > _MAX_RANK or size > MAX_SIZE:
        raise DecodeError(f"is {tensor.shape!s:.80}, larger than any memory", f"{where}.shape")


# Hashes cannot say that somebody who computed them again meant what this job needs, so a manifest
# is held against the job before a byte of a tensor is reserved.

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Expected:
    """The types of tensors that a checkpoint must have, and the names of those it may lack or have.

    A type is a text, such as "float32[2, 3]". `counter` names the tensor that counts the steps,
    which must say what the manifest says.
    """

    tensors: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    counter: str = ""

    def check(self, manifest: Manifest) -> None:
        """Raise CheckpointUnfit when the tensors of a manifest are others."""
        types = {t.name: f"{t.dtype}{list(t.shape)}" for t in manifest.tensors}
        missing = [n for n in self.tensors if n not in types and n not in self.optional]
        unknown = [n for n in types if n not in self.tensors and n not in self.optional]
        if missing or unknown:
            raise CheckpointUnfit(
                f"tensors missing: {_listed(missing)}, unknown: {_listed(unknown)}; another model"
                " or optimizer wrote it"
            )
        for name, expected in self.tensors.items():
            if types.get(name, expected) != expected:
                raise CheckpointUnfit(
                    f"{name!r} is {types[name]} in the checkpoint and {expected} in the job"
                )

    def check_values(self, manifest: Manifest, tensors: Mapping[str, Array]) -> None:
        """Raise CheckpointUnfit when the state is not that of the manifest's step."""
        if self.counter and int(tensors[self.counter]) != manifest.step:
            raise CheckpointUnfit(
                f"its variable {self.counter!r} is {int(tensors[self.counter])}, and its name"
                f" says step {manifest.step}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{[name[:200] for name in names[:_SHOWN]]}{more}" if names else "nothing"
