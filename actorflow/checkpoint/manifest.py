"""What a checkpoint says about itself: `manifest.json`, its encoder and its strict parser.

The file is one line of JSON, a newline, and the xxh3_128 of the line. The hash finds damage; it
does not prove an author. So the parser trusts nothing: every field has a type and a range, every
file name is checked before it is opened, unknown and repeated keys are refused. `Expected` holds a
manifest against the variables of the job that is to go on from it.

Format 2 lists tensors as wholes, and the pieces that they consist of; that each element of each
tensor is in one piece, and in no second one, is proven when a manifest is parsed. Format 1 had
whole tensors, one in each entry with its file and hash: it is read as tensors of one piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import xxhash

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointUnfit
from actorflow.checkpoint.fs import MANIFEST_NAME, MAX_STEP
from actorflow.checkpoint.shard import (
    MAX_SIZE,
    Array,
    Digest,
    DtypeName,
    Extent,
    FileEntry,
    PieceEntry,
    ShardSpec,
    TensorEntry,
    TensorPiece,
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

FORMAT_VERSION = 2
WHOLE_VERSION = 1
"""The format of whole tensors, which is read and no longer written."""
MAX_MANIFEST_BYTES = 64 << 20
"""Of the file. A piece takes some 250 bytes; what is parsed may take twenty times the text."""
MAX_RANKS = 1 << 20

_HASH_BYTES = 32
_MAX_RANK = 32


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a resumed run has to know.

    `attempt` is unique per save. `config`, `data_state` and `versions` hold JSON values only.
    `data_state` is the position after the last batch that a saved step consumed; None for a source
    without one. `num_ranks` wrote it.
    """

    format_version: int
    attempt: Digest
    step: Annotated[int, Bounds(0, MAX_STEP)]
    seed: Annotated[int, Bounds(0, (1 << 128) - 1)]
    plan_hash: Text
    config: JsonObject
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    pieces: tuple[PieceEntry, ...]
    num_ranks: Annotated[int, Bounds(1, MAX_RANKS)]
    data_state: JsonObject | None
    data_fingerprint: Text
    versions: Mapping[Text, Text]
    has_nan: bool

    def shards(self) -> tuple[tuple[FileEntry, ShardSpec], ...]:
        """Return each file with its pieces."""
        # Files first, so that one without pieces is there as well.
        pieces: dict[str, list[TensorPiece]] = {file.name: [] for file in self.files}
        tensors = {tensor.name: tensor for tensor in self.tensors}
        for one in self.pieces:
            piece = TensorPiece(tensors[one.tensor], one.offset, one.extents, one.xxh3_128)
            pieces[one.file].append(piece)
        return tuple((file, ShardSpec(file.name, tuple(pieces[file.name]))) for file in self.files)


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
    if type(version) is int and version not in (WHOLE_VERSION, FORMAT_VERSION):
        raise CheckpointDamaged(
            f"{MANIFEST_NAME} has format version {version}; this actorflow reads {WHOLE_VERSION}"
            f" and {FORMAT_VERSION}"
        )
    is_whole = type(version) is int and version == WHOLE_VERSION
    manifest = from_object(Manifest, _of_wholes(value) if is_whole else value)
    names = {file.name for file in manifest.files}
    if len(names) != len(manifest.files) or MANIFEST_NAME in names:
        raise DecodeError("are listed twice, or name the manifest itself", "files")
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    if len(tensors) != len(manifest.tensors):
        raise DecodeError("is listed twice", "a tensor")
    for index, tensor in enumerate(manifest.tensors):
        _check_tensor(tensor, f"tensors[{index}]")
    for index, piece in enumerate(manifest.pieces):
        _check_piece(piece, tensors, names, f"pieces[{index}]")
    _check_files(manifest)
    boxes: dict[str, list[Extents]] = {name: [] for name in tensors}
    for piece in manifest.pieces:
        boxes[piece.tensor].append((piece.offset, piece.extents))
    for name, tensor in tensors.items():
        if wrong := cover_fault(tensor.shape, boxes[name]):
            raise DecodeError(wrong, f"tensor {name!a:.80}")
    return manifest


@dataclass(frozen=True, slots=True)
class _WholeTensor:
    """A tensor of format 1."""

    name: Text
    file: Text
    dtype: DtypeName
    shape: tuple[Extent, ...]
    xxh3_128: Digest


@dataclass(frozen=True, slots=True)
class _WholeTensors:
    """What format 1 has instead of tensors and pieces."""

    tensors: tuple[_WholeTensor, ...]


def _of_wholes(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest of format 1 as one of format 2, neither of which is checked yet."""
    tensors = from_object(_WholeTensors, {"tensors": value.get("tensors")}).tensors
    pieces = [PieceEntry(t.name, (0,) * len(t.shape), t.shape, t.file, t.xxh3_128) for t in tensors]
    wholes = [TensorEntry(t.name, t.dtype, t.shape) for t in tensors]
    twice = [key for key in ("pieces", "num_ranks") if key in value]
    if twice:
        raise DecodeError("is a field that format 1 does not have", twice[0])
    rows = {"tensors": [to_object(t) for t in wholes], "pieces": [to_object(p) for p in pieces]}
    # Through JSON, as if it had been read.
    return {**value, "format_version": FORMAT_VERSION, "num_ranks": 1, **from_json(to_json(rows))}


def _check_tensor(tensor: TensorEntry, where: str) -> None:
    if tensor.name in ("", "__metadata__"):
        raise DecodeError(f"is {tensor.name!r}, which names no tensor", f"{where}.name")
    # Extents of an empty array count too: numpy refuses them although no byte is needed.
    size = math.prod([max(n, 1) for n in tensor.shape]) * np.dtype(tensor.dtype).itemsize
    if len(tensor.shape) > _MAX_RANK or size > MAX_SIZE:
        raise DecodeError(f"is {tensor.shape!s:.80}, larger than any memory", f"{where}.shape")


def _check_piece(
    piece: PieceEntry, tensors: Mapping[str, TensorEntry], files: set[str], where: str
) -> None:
    tensor = tensors.get(piece.tensor)
    if tensor is None:
        raise DecodeError(f"is {piece.tensor!a:.80}, which is not there", f"{where}.tensor")
    if piece.file not in files:
        raise DecodeError(f"is {piece.file!a:.80}, which is not there", f"{where}.file")
    is_within = len(piece.offset) == len(piece.extents) == len(tensor.shape) and all(
        [
            at + extent <= whole
            for at, extent, whole in zip(piece.offset, piece.extents, tensor.shape, strict=True)
        ]
    )
    if not is_within:
        raise DecodeError(
            f"is {piece.offset!s:.80} with extents {piece.extents!s:.80}, which is no box of a"
            f" tensor of shape {tensor.shape!s:.80}",
            f"{where}.offset",
        )


def _check_files(manifest: Manifest) -> None:
    for file, spec in manifest.shards():
        if len({piece.key for piece in spec.pieces}) != len(spec.pieces):
            raise DecodeError("has two pieces of one name", file.name)
        if spec.size_bytes() != file.size_bytes:
            raise DecodeError(
                f"is listed with {file.size_bytes} bytes, its tensors make {spec.size_bytes()}",
                file.name,
            )


Extents = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extents of a box."""


def cover_fault(shape: tuple[int, ...], boxes: Sequence[Extents]) -> str:
    """Return what is wrong with boxes (offset, extents) as parts of a whole, "" for nothing.

    Each element of the whole is to be in one box, and in no second one. Boxes lie within it.
    """
    num_elements = sum([math.prod(extents) for _, extents in boxes])
    if num_elements != math.prod(shape):
        return f"has {math.prod(shape)} elements, and its pieces have {num_elements}"
    filled = sorted([box for box in boxes if math.prod(box[1])])
    # As many elements as the whole has: they cover it exactly if no two boxes overlap.
    return "has pieces that overlap, or lie in no grid" if _overlap(filled, 0) else ""


_MOST_CUTS = 64
"""How many intervals a box may extend over, on average: those of a grid extend over one."""


def _overlap(boxes: Sequence[Extents], axis: int) -> bool:
    """Whether two boxes overlap that share an interval along each axis before `axis`.

    Boxes that are cut into too many intervals count as well: a hostile manifest could take any time
    otherwise.
    """
    if len(boxes) < 2:
        return False
    if axis == len(boxes[0][0]):
        return True
    # Cut at every end along this axis: boxes of one interval there share it, and differ later on.
    ends = sorted({at[axis] for at, _ in boxes} | {at[axis] + n[axis] for at, n in boxes})
    number = {end: index for index, end in enumerate(ends)}
    num_cuts = sum([number[at[axis] + n[axis]] - number[at[axis]] for at, n in boxes])
    if num_cuts > _MOST_CUTS * len(boxes):
        return True
    cells: list[list[Extents]] = [[] for _ in ends]
    for box in boxes:
        first, last = number[box[0][axis]], number[box[0][axis] + box[1][axis]]
        for cell in range(first, last):
            cells[cell].append(box)
    return any([_overlap(cell, axis + 1) for cell in cells])


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
        # A rank of a stage may have no such variable.
        if self.counter in tensors and int(tensors[self.counter]) != manifest.step:
            raise CheckpointUnfit(
                f"its variable {self.counter!r} is {int(tensors[self.counter])}, and its name"
                f" says step {manifest.step}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{[name[:200] for name in names[:_SHOWN]]}{more}" if names else "nothing"
