"""Tensor files: the safetensors format, written and read in chunks and hashed on the way.

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError
from actorflow.checkpoint.fs import Fs, is_safe_name, read_up_to, write_all
from compiler.contract.codec import Bounds, Text, text_where
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
    """One tensor of a shard: where it is, what it is, and the hash of its bytes.

    `dtype` is numpy's name. The bytes are row-major, little-endian; before they are written the
    hash is empty.
    """

    name: Text
    file: Text
    dtype: DtypeName
    shape: tuple[Extent, ...]
    xxh3_128: Digest = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One file: its name and its tensors, in any order; on disk the widest dtype comes first.

    The order keeps every tensor aligned to its element, which lets other readers map the file.
    """

    name: str
    tensors: tuple[TensorEntry, ...]

    def in_file_order(self) -> tuple[TensorEntry, ...]:
        """Return the tensors as their bytes follow each other."""
        return tuple(sorted(self.tensors, key=lambda t: (-np.dtype(t.dtype).itemsize, t.name)))

    def header(self) -> bytes:
        """Return every byte of the file before the first tensor."""
        entries: dict[str, Any] = {"__metadata__": {"format": "actorflow"}}
        offset = 0
        for tensor in self.in_file_order():
            end = offset + tensor.size_bytes
            entries[tensor.name] = {
                "dtype": FORMAT_DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        # No spaces and a fixed order, so the header is the same bytes for a reader that only
        # compares.
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the payload starts aligned
        # The format: 8 bytes of length, little-endian, then the JSON, then the tensors without
        # gaps.
        return struct.pack("<Q", len(text)) + text

    def size_bytes(self) -> int:
        """Return the size of the file."""
        return len(self.header()) + sum(t.size_bytes for t in self.tensors)


def plan_shards(groups: Groups, max_bytes: int = MAX_SHARD_BYTES) -> tuple[ShardSpec, ...]:
    """Return which tensor goes into which file; pure, whatever the order of the mappings.

    A file is closed when the next tensor would take it over `max_bytes`; a tensor above that has a
    file of its own. A group without tensors has no file.

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
        specs = [_spec_of(group, name, groups[group][name], owner) for name in groups[group]]
        ordered = ShardSpec("", tuple(specs)).in_file_order()
        for number, tensors in enumerate(_fill(ordered, max_bytes), start=1):
            file = f"{group}-{number:05d}.safetensors"
            shards.append(ShardSpec(file, tuple([replace(t, file=file) for t in tensors])))
    return tuple(shards)


def _spec_of(group: str, name: str, value: object, owner: dict[str, str]) -> TensorEntry:
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
    return TensorEntry(name, "", value.dtype.name, value.shape)


def _fill(ordered: tuple[TensorEntry, ...], max_bytes: int) -> list[tuple[TensorEntry, ...]]:
    files: list[tuple[TensorEntry, ...]] = []
    current: list[TensorEntry] = []
    used = 0
    for tensor in ordered:
        # `current`: a tensor above the limit still goes into a file, alone.
        if current and used + tensor.size_bytes > max_bytes:
            files.append(tuple(current))
            current, used = [], 0
        current.append(tensor)
        used += tensor.size_bytes
    return [*files, tuple(current)] if current else files


def tensor_hash(array: Array) -> str:
    """Return the xxh3_128 of an array's bytes as a shard holds them."""
    hasher = xxhash.xxh3_128()
    for chunk in _chunks(array):
        hasher.update(_bytes_of(chunk))
    return str(hasher.hexdigest())


def write_shard(
    fs: Fs, directory: Path, spec: ShardSpec, tensors: Mapping[str, Array]
) -> tuple[FileEntry, list[TensorEntry], bool]:
    """Write one file and make its bytes durable; return what is in it, and whether a float is NaN.

    Needs no memory beyond a copy of one tensor, and that only if it is not contiguous
    little-endian.
    """
    file_hash = xxhash.xxh3_128()
    entries: list[TensorEntry] = []
    has_nan = False
    fd = fs.create(directory / spec.name)
    try:
        header = spec.header()
        file_hash.update(header)
        write_all(fs, fd, memoryview(header))
        for tensor in spec.in_file_order():
            hasher = xxhash.xxh3_128()
            for chunk in _chunks(tensors[tensor.name]):
                has_nan = has_nan or _has_nan(chunk)
                content = _bytes_of(chunk)
                file_hash.update(content)
                hasher.update(content)
                write_all(fs, fd, content)
            entries.append(replace(tensor, xxh3_128=hasher.hexdigest()))
        # Through the descriptor that wrote: Linux reports a write-back error to it for certain.
        fs.fsync(fd)
    finally:
        fs.close(fd)
    return FileEntry(spec.name, spec.size_bytes(), file_hash.hexdigest()), entries, has_nan


def _chunks(array: Array) -> list[Array]:
    # The one place where layout and byte order become the file's: row-major and little-endian.
    dense = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    # Whole elements a chunk, so that each can be looked at for NaN.
    step = CHUNK_BYTES // dense.itemsize
    return [dense[first : first + step] for first in range(0, dense.size, step)]


def _bytes_of(chunk: Array) -> memoryview:
    return chunk.view(np.uint8).data


def _has_nan(chunk: Array) -> bool:
    if chunk.dtype.kind != "f":
        return False
    with np.errstate(invalid="ignore"):
        return bool(np.isnan(np.min(chunk)))  # min hands NaN on, and needs no temporary array


def read_shard(
    fs: Fs, directory: Path, file: FileEntry, spec: ShardSpec, *, is_kept: bool
) -> dict[str, Array]:
    """Read one file once, check every byte of it, and return its tensors if `is_kept` (else none).

    Memory: the tensors, or one chunk when they are not kept. Sizes are compared before anything is
    allocated, so a lying manifest cannot ask for more than the file has.

    Raises:
        CheckpointDamaged: size, header, a tensor's hash or the file's hash is another.
        OSError: the file is missing, not regular, or cannot be read.
    """
    path = directory / spec.name
    file_hash = xxhash.xxh3_128()
    arrays: dict[str, Array] = {}
    fd = fs.open_read(directory, spec.name)
    try:
        # By the descriptor: the name may lead to another file by now.
        size_bytes, found_bytes = spec.size_bytes(), fs.stat_open(fd).size_bytes
        if size_bytes != found_bytes:
            raise CheckpointDamaged(
                f"{path}: expected {size_bytes} bytes ({format_bytes(size_bytes)}), "
                f"found {found_bytes}"
            )
        expected = spec.header()
        header = bytearray(len(expected))
        if read_up_to(fs, fd, memoryview(header)) < len(header) or header != expected:
            raise CheckpointDamaged(f"{path}: its header does not match the manifest")
        file_hash.update(header)
        scratch = None if is_kept else memoryview(bytearray(min(CHUNK_BYTES, size_bytes)))
        for tensor in spec.in_file_order():
            if scratch is None:
                array: Array = np.empty(tensor.shape, tensor.dtype)
                arrays[tensor.name] = array
                digest = _read_tensor(fs, fd, tensor, file_hash, _bytes_of(array.reshape(-1)))
            else:
                digest = _read_tensor(fs, fd, tensor, file_hash, scratch)
            if digest != tensor.xxh3_128:
                raise CheckpointDamaged(f"{path}: the bytes of tensor {tensor.name!r} are damaged")
    finally:
        fs.close(fd)
    if file_hash.hexdigest() != file.xxh3_128:
        raise CheckpointDamaged(f"{path}: its hash is {file_hash.hexdigest()}, not {file.xxh3_128}")
    return arrays


def _read_tensor(fs: Fs, fd: int, tensor: TensorEntry, whole: Any, buffer: memoryview) -> str:
    # The buffer is the tensor itself, filled front to back, or a chunk that is used again and
    # again.
    hasher = xxhash.xxh3_128()
    bytes_left = tensor.size_bytes
    is_whole_tensor = len(buffer) == bytes_left
    bytes_done = 0
    while bytes_left:
        start = bytes_done if is_whole_tensor else 0
        part = buffer[start : start + min(CHUNK_BYTES, bytes_left)]
        count = read_up_to(fs, fd, part)
        whole.update(part[:count])
        hasher.update(part[:count])
        if count < len(part):
            break  # the file shrank while it was read: the hash will tell
        bytes_left -= count
        bytes_done += count
    return str(hasher.hexdigest())
