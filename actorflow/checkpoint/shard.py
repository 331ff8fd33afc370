"""Tensor files: the safetensors format, written and read in chunks and hashed on the way.

A file holds *pieces*: boxes of tensors, each with its offset in the whole. A single process writes
one piece of each tensor, one of several ranks writes what it has. A piece that is all of a tensor
has the tensor's name in the file, any other one the name with its ranges: "w[0:2,0:3]".

safetensors itself carries no checksum (every flipped payload bit loads silently wrong) and its
numpy writer permutes the values of arrays that are not C-contiguous, besides building the whole
file in memory. So the writer is our own; the files load bit for bit with
`safetensors.numpy.load_file`.

A shard's header is a function of its `ShardSpec` alone. A reader that knows the spec from the
manifest therefore never parses a header: it compares bytes. Format:
github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError
from actorflow.checkpoint.fs import Fs, is_safe_name, read_up_to, write_all
from compiler.contract.codec import Bounds, Text, text_where
from compiler.contract.host_arrays import aligned_empty
from memory.report import format_bytes

Array = NDArray[np.generic]
Groups = Mapping[str, Mapping[str, Array]]
"""Tensors by name by group; group "model" becomes files `model-00001.safetensors` and on."""

CHUNK_BYTES = 8 << 20
MAX_SHARD_BYTES = 1 << 30
FORMAT_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""numpy's name of a dtype -> the name in the file."""

EXCHANGE_DTYPES = {**FORMAT_DTYPES, "bfloat16": "BF16"}
"""The same with bfloat16, whose arrays hold the bits as uint16: of weights, not of checkpoints."""

MODEL_GROUP = "model"
"""The group of what a model keeps, whose files begin so."""

# Hints of what a manifest names: it may come from anywhere.

MAX_SIZE = (1 << 62) - 1

FileName = Annotated[str, text_where(is_safe_name, "a permitted file name")]
Digest = Annotated[str, text_where(re.compile("[0-9a-f]{32}").fullmatch, "32 hexadecimal digits")]
DtypeName = Annotated[str, text_where(FORMAT_DTYPES.__contains__, "a dtype of this format")]
Extent = Annotated[int, Bounds(0, MAX_SIZE)]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One shard as it was written: its size and the hash of all its bytes."""

    name: FileName
    size_bytes: Extent
    xxh3_128: Digest


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as a whole; `dtype` is numpy's name. Its bytes are row-major, little-endian."""

    name: Text
    dtype: DtypeName
    shape: tuple[Extent, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A box of a tensor as a manifest lists it: where it begins, its extents, and its bytes' hash.

    `tensor` and `file` are names. Before the bytes are written the hash is empty.
    """

    tensor: Text
    offset: tuple[Extent, ...]
    extents: tuple[Extent, ...]
    file: Text
    xxh3_128: Digest


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor and what is known of it; `xxh3_128` is empty before it is written."""

    tensor: TensorEntry
    offset: tuple[int, ...]
    extents: tuple[int, ...]
    xxh3_128: str = ""

    @classmethod
    def of_whole(cls, tensor: TensorEntry) -> TensorPiece:
        """Return the piece that is all of a tensor."""
        return cls(tensor, (0,) * len(tensor.shape), tensor.shape)

    @property
    def key(self) -> str:
        """Its name in a file: that of the tensor, with ranges where it is not all of it."""
        if self.extents == self.tensor.shape:
            return self.tensor.name
        ends = zip(self.offset, self.extents, strict=True)
        return f"{self.tensor.name}[{','.join([f'{at}:{at + size}' for at, size in ends])}]"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.tensor.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense piece."""
        return math.prod(self.extents) * self.itemsize


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One file: its name and its pieces, in any order; on disk the widest dtype comes first.

    The order keeps every piece aligned to its element, which lets other readers map the file.
    `format` is what the file says of itself.
    """

    name: str
    pieces: tuple[TensorPiece, ...]
    format: str = "actorflow"

    def in_file_order(self) -> tuple[TensorPiece, ...]:
        """Return the pieces as their bytes follow each other."""
        return tuple(sorted(self.pieces, key=lambda p: (-p.itemsize, p.key)))

    def header(self) -> bytes:
        """Return every byte of the file before the first piece."""
        entries: dict[str, Any] = {"__metadata__": {"format": self.format}}
        offset = 0
        for piece in self.in_file_order():
            end = offset + piece.size_bytes
            entries[piece.key] = {
                "dtype": EXCHANGE_DTYPES[piece.tensor.dtype],
                "shape": list(piece.extents),
                "data_offsets": [offset, end],
            }
            offset = end
        # No spaces and a fixed order, so the header is the same bytes for a reader that only
        # compares.
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the payload starts aligned
        # The format: 8 bytes of length, little-endian, then the JSON, then the pieces without
        # gaps.
        return struct.pack("<Q", len(text)) + text

    def size_bytes(self) -> int:
        """Return the size of the file."""
        return len(self.header()) + sum([piece.size_bytes for piece in self.pieces])


Parts = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""By name of a tensor of which an array is a part: the shape of the whole, the part's offset."""


def plan_shards(
    groups: Groups, max_bytes: int = MAX_SHARD_BYTES, *, parts: Parts | None = None
) -> tuple[ShardSpec, ...]:
    """Return which piece goes into which file; pure, whatever the order of the mappings.

    A file is closed when the next piece would take it over `max_bytes`; a piece above that has a
    file of its own. A group without tensors has no file. What is not among `parts` is whole.

    Raises:
        CheckpointError: a name is not permitted or used twice, a value is not an array, or its
            dtype cannot be stored.
    """
    owner: dict[str, str] = {}
    shards: list[ShardSpec] = []
    # Sorted groups and `in_file_order` make the files a function of the tensors, not of dict order.
    for group in sorted(groups):
        if not is_safe_name(f"{group}-00001.safetensors"):
            raise CheckpointError(
                f"checkpoint group {group!r}: expected lower-case letters, digits, '.', '_' or '-'"
            )
        values = groups[group]
        pieces = [_piece_of(group, name, values[name], owner, parts or {}) for name in values]
        ordered = ShardSpec("", tuple(pieces)).in_file_order()
        for number, filled in enumerate(fill_shards(ordered, max_bytes), start=1):
            shards.append(ShardSpec(f"{group}-{number:05d}.safetensors", filled))
    return tuple(shards)


def _piece_of(
    group: str, name: str, value: object, owner: dict[str, str], parts: Parts
) -> TensorPiece:
    where = f"checkpoint tensor {name!r} of group {group!r}"
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise CheckpointError(f"{where}: expected a name that is not empty or reserved")
    if name in owner:
        raise CheckpointError(
            f"{where}: group {owner[name]!r} has a tensor of this name too; names are unique"
        )
    owner[name] = group
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise CheckpointError(f"{where}: expected a numpy array, got {type(value).__name__}")
    if value.dtype.name not in FORMAT_DTYPES:
        raise CheckpointError(
            f"{where}: dtype {value.dtype} cannot be stored; expected one of "
            f"{', '.join(FORMAT_DTYPES)}"
        )
    shape, offset = parts.get(name, (value.shape, (0,) * value.ndim))
    return TensorPiece(TensorEntry(name, value.dtype.name, shape), offset, value.shape)


def fill_shards(ordered: tuple[TensorPiece, ...], max_bytes: int) -> list[tuple[TensorPiece, ...]]:
    """Return the pieces of each file: one is closed when the next piece would take it too far."""
    files: list[tuple[TensorPiece, ...]] = []
    current: list[TensorPiece] = []
    used = 0
    for piece in ordered:
        # `current`: a piece above the limit still goes into a file, alone.
        if current and used + piece.size_bytes > max_bytes:
            files.append(tuple(current))
            current, used = [], 0
        current.append(piece)
        used += piece.size_bytes
    return [*files, tuple(current)] if current else files


def tensor_hash(array: Array) -> str:
    """Return the xxh3_128 of an array's bytes as a shard holds them."""
    hasher = xxhash.xxh3_128()
    for chunk in _chunks(array):
        hasher.update(_bytes_of(chunk))
    return str(hasher.hexdigest())


@dataclass(frozen=True, slots=True)
class WrittenPieces:
    """What one process has written of a checkpoint; `has_nan` says whether a float of it is NaN."""

    files: tuple[FileEntry, ...]
    pieces: tuple[PieceEntry, ...]
    has_nan: bool


def write_pieces(
    fs: Fs, directory: Path, shards: tuple[ShardSpec, ...], arrays: Mapping[str, Array]
) -> WrittenPieces:
    """Write files and make their bytes durable; their names are not yet. Return what is in them.

    Needs no memory beyond a copy of one piece, and that only if it is not contiguous
    little-endian. Raises OSError.
    """
    written = [_write_shard(fs, directory, shard, arrays) for shard in shards]
    return WrittenPieces(
        tuple([one.files[0] for one in written]),
        tuple([piece for one in written for piece in one.pieces]),
        any([one.has_nan for one in written]),
    )


def _write_shard(
    fs: Fs, directory: Path, spec: ShardSpec, arrays: Mapping[str, Array]
) -> WrittenPieces:
    file_hash = xxhash.xxh3_128()
    entries: list[PieceEntry] = []
    has_nan = False
    fd = fs.create(directory / spec.name)
    try:
        header = spec.header()
        file_hash.update(header)
        write_all(fs, fd, memoryview(header))
        for piece in spec.in_file_order():
            hasher = xxhash.xxh3_128()
            for chunk in _chunks(arrays[piece.tensor.name]):
                has_nan = has_nan or holds_nan(chunk)
                content = _bytes_of(chunk)
                file_hash.update(content)
                hasher.update(content)
                write_all(fs, fd, content)
            name, digest = piece.tensor.name, hasher.hexdigest()
            entries.append(PieceEntry(name, piece.offset, piece.extents, spec.name, digest))
        # Through the descriptor that wrote: Linux reports a write-back error to it for certain.
        fs.fsync(fd)
    finally:
        fs.close(fd)
    file = FileEntry(spec.name, spec.size_bytes(), file_hash.hexdigest())
    return WrittenPieces((file,), tuple(entries), has_nan)


def _chunks(array: Array) -> list[Array]:
    # The one place where layout and byte order become the file's: row-major and little-endian.
    dense = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    # Whole elements a chunk, so that each can be looked at for NaN.
    step = CHUNK_BYTES // dense.itemsize
    return [dense[first : first + step] for first in range(0, dense.size, step)]


def _bytes_of(chunk: Array) -> memoryview:
    return chunk.view(np.uint8).data


def holds_nan(array: Array) -> bool:
    """Whether an element is NaN; False for what is not of a float type, or has no element."""
    if array.dtype.kind != "f" or not array.size:
        return False
    with np.errstate(invalid="ignore"):
        return bool(np.isnan(np.min(array)))  # min hands NaN on, and needs no temporary array


# What a reader wants of a tensor is a box of it, too: all of the tensor in one process, the rank's
# part on one of several. A piece is read if any of it is wanted, and is then read whole, because
# its hash is of the whole.

Box = tuple[slice, ...]
"""A range along each axis of a tensor; none for a scalar."""


def overlap(piece: TensorPiece, box: Box) -> tuple[Box, Box] | None:
    """Return the elements that a piece and a box share: as ranges in the piece, and in the box.

    None where they share none.
    """
    shared: list[tuple[slice, slice]] = []
    for at, extent, wanted in zip(piece.offset, piece.extents, box, strict=True):
        first, last = max(at, wanted.start), min(at + extent, wanted.stop)
        if first >= last:
            return None
        own, there = slice(first - at, last - at), slice(first - wanted.start, last - wanted.start)
        shared.append((own, there))
    return tuple([own for own, _ in shared]), tuple([there for _, there in shared])


class WantedTensors:
    """The arrays that a reader fills, each made when the first bytes of it are there.

    Args:
        boxes: what is wanted of each tensor, by name; None for all of every tensor.
    """

    def __init__(self, boxes: Mapping[str, Box] | None = None) -> None:
        self._boxes = boxes
        self.arrays: dict[str, Array] = {}

    def place(self, piece: TensorPiece) -> tuple[Array, Box] | None:
        """Return where a piece belongs, and which box of it; None where nothing is wanted."""
        box = self.box(piece.tensor)
        shared = None if box is None else overlap(piece, box)
        if box is None or shared is None:
            return None
        own, there = shared
        # The ellipsis has an array without axes give a view as well.
        rows: tuple[Any, ...] = (*there, ...)
        return self.array(piece.tensor, box)[rows], own

    def has(self, piece: TensorPiece) -> bool:
        """Whether anything of a piece is wanted, or it has no element and is of a wanted tensor."""
        box = self.box(piece.tensor)
        return box is not None and (not piece.size_bytes or overlap(piece, box) is not None)

    def box(self, tensor: TensorEntry) -> Box | None:
        """Return what is wanted of a tensor."""
        if self._boxes is not None:
            return self._boxes.get(tensor.name)
        return tuple([slice(0, extent) for extent in tensor.shape])

    def array(self, tensor: TensorEntry, box: Box) -> Array:
        """Return the array of a tensor."""
        array = self.arrays.get(tensor.name)
        if array is None:
            shape = [rows.stop - rows.start for rows in box]
            array = self.arrays[tensor.name] = aligned_empty(shape, tensor.dtype)
        return array


def open_shard(fs: Fs, directory: Path, spec: ShardSpec) -> int:
    """Open a file that has the size of its spec. Raises CheckpointDamaged, and OSError."""
    fd = fs.open_read(directory, spec.name)
    try:
        # By the descriptor: the name may lead to another file by now.
        size_bytes, found_bytes = spec.size_bytes(), fs.stat_open(fd).size_bytes
        if size_bytes != found_bytes:
            raise CheckpointDamaged(
                f"{directory / spec.name}: expected {size_bytes} bytes"
                f" ({format_bytes(size_bytes)}), found {found_bytes}"
            )
    except BaseException:
        fs.close(fd)
        raise
    return fd


def read_shard(
    fs: Fs,
    directory: Path,
    file: FileEntry,
    spec: ShardSpec,
    wanted: WantedTensors | None = None,
) -> None:
    """Read one file once, check each byte that is read, and fill what is `wanted` of it.

    Without `wanted` all of the file is checked; with it, the header and the pieces of which
    something is wanted, and the file's own hash where these are all. Memory: what is wanted, and
    1 MiB, or one row of a piece where that is larger. Sizes are compared before anything is
    allocated, so a lying manifest cannot ask for more than the file has.

    Raises:
        CheckpointDamaged: size, header, a piece's hash or the file's hash is another.
        OSError: the file is missing, not regular, or cannot be read.
    """
    path = directory / spec.name
    fd = open_shard(fs, directory, spec)
    try:
        expected = spec.header()
        header = bytearray(len(expected))
        if read_up_to(fs, fd, memoryview(header)) < len(header) or header != expected:
            raise CheckpointDamaged(f"{path}: its header does not match the manifest")
        file_hash = xxhash.xxh3_128(header)
        begin, is_all_read = len(header), True
        for piece in spec.in_file_order():
            target = None if wanted is None else wanted.place(piece)
            if wanted is None or target is not None:
                if not is_all_read:
                    fs.seek(fd, begin)
                if _read_piece(fs, fd, piece, file_hash, target) != piece.xxh3_128:
                    raise CheckpointDamaged(
                        f"{path}: the bytes of tensor {piece.key!r} are damaged"
                    )
            elif piece.size_bytes:
                is_all_read = False
            begin += piece.size_bytes
    finally:
        fs.close(fd)
    if is_all_read and file_hash.hexdigest() != file.xxh3_128:
        raise CheckpointDamaged(f"{path}: its hash is {file_hash.hexdigest()}, not {file.xxh3_128}")


def _read_piece(
    fs: Fs, fd: int, piece: TensorPiece, whole: Any, target: tuple[Array, Box] | None
) -> str:
    """Read a piece, put what is wanted of it where it belongs, and return its hash."""
    hasher = xxhash.xxh3_128()

    def take(buffer: memoryview) -> bool:
        count = read_up_to(fs, fd, buffer)
        whole.update(buffer[:count])
        hasher.update(buffer[:count])
        return count == len(buffer)  # else the file shrank while it was read: the hash will tell

    size_bytes = piece.size_bytes
    if target is None:
        scratch = memoryview(bytearray(min(CHUNK_BYTES, size_bytes)))
        while size_bytes and take(scratch[:size_bytes]):
            size_bytes -= min(len(scratch), size_bytes)
    elif target[0].nbytes == size_bytes and target[0].flags.c_contiguous:
        # All of it is wanted and dense where it belongs: read there, front to back.
        rest = _bytes_of(target[0].reshape(-1))
        while rest and take(rest[:CHUNK_BYTES]):
            rest = rest[CHUNK_BYTES:]
    else:
        _read_rows(piece, *target, take)
    return str(hasher.hexdigest())


_ROWS_BYTES = 1 << 20
"""What is read at a time beside the array that it is for, where it does not go there at once."""


def _read_rows(
    piece: TensorPiece, place: Array, box: Box, take: Callable[[memoryview], bool]
) -> None:
    """Read a piece some rows at a time, and copy what lies in `box` into `place`."""
    num_rows = piece.extents[0]  # a scalar is dense, and so not read by rows
    step = min(num_rows, max(1, _ROWS_BYTES * num_rows // piece.size_bytes))
    chunk = np.empty((step, *piece.extents[1:]), piece.tensor.dtype)
    for first in range(0, num_rows, step):
        some = chunk[: num_rows - first]
        if not take(_bytes_of(some.reshape(-1))):
            return
        begin, end = max(first, box[0].start), min(first + len(some), box[0].stop)
        if begin < end:
            rows = some[(slice(begin - first, end - first), *box[1:])]
            place[begin - box[0].start : end - box[0].start] = rows
