"""Weights to exchange: safetensors files of any dtype, shards with an index, and checkpoints.

`load` returns tensors by name. Those of files are read when they are asked for, each straight into
an array of its own, so that no second copy is in memory. The bytes are read and not mapped: a
mapped file that somebody truncates ends the process by a signal. `save` writes what `load` and
the libraries of others read: one file, or shards beside an index as of Hugging Face's hub
(huggingface.co/docs/hub, "safetensors").

Headers come from anywhere. The safetensors library parses and checks them: sizes, overlaps, gaps.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError, reading, writing
from actorflow.checkpoint.fs import (
    MANIFEST_NAME,
    Fs,
    new_attempt,
    read_up_to,
    step_of,
    write_all,
)
from actorflow.checkpoint.manager import CheckpointManager, make_durable
from actorflow.checkpoint.manifest import Manifest
from actorflow.checkpoint.shard import (
    CHUNK_BYTES,
    EXCHANGE_DTYPES,
    MODEL_GROUP,
    Array,
    Box,
    ShardSpec,
    TensorEntry,
    TensorPiece,
    fill_shards,
    write_pieces,
)
from compiler.contract.codec import DecodeError, Text, from_json, from_object, text_where, to_json
from compiler.contract.files import open_regular, read_regular, user_path
from compiler.contract.host_arrays import aligned_empty, freeze
from compiler.contract.types import DType, from_bits, to_bits

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20

_DTYPES = {name: dtype for dtype, name in EXCHANGE_DTYPES.items()}
_FLOATS = {
    **{d.value: d.value for d in DType if d.is_float},
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
"""Names of dtypes that floats may be saved in -> ours."""

# Reading.


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file as it was when its header was read; a tensor is not read from any other."""

    path: Path
    size_bytes: int
    modified_ns: int
    inode: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies; `dtype` is our name, or that of the file where we have none."""

    file: FileFacts
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def read(self) -> Array:
        """Return the values: read-only, bfloat16 as float32.

        Raises CheckpointError where the dtype has no array here, the file changed, or no memory is
        left.
        """
        path = self.file.path
        if self.dtype not in EXCHANGE_DTYPES:
            raise CheckpointError(
                f"{path}: tensor {self.name!r} is {self.dtype}, which no array of actorflow holds;"
                f" expected one of {', '.join(_DTYPES)}. Convert it where the file was written"
            )
        is_half = self.dtype == DType.BFLOAT16.value
        try:
            array = aligned_empty(self.shape, np.float32 if is_half else self.dtype)
        except (MemoryError, ValueError) as error:  # numpy limits extents also of empty arrays
            raise CheckpointError(
                f"{path}: no memory for tensor {self.name!r}, {self}: {error}"
            ) from error
        with reading(path):
            fd = open_regular(path, os.O_RDONLY, is_link_followed=True)
            try:
                _check_same(fd, self.file)
                os.lseek(fd, self.offset_bytes, os.SEEK_SET)
                (_read_halves if is_half else _read_dense)(fd, array.reshape(-1), path)
                # After the read, too: what is written meanwhile shows in the time.
                _check_same(fd, self.file)
            finally:
                os.close(fd)
        freeze(array)
        return array


def _read_dense(fd: int, flat: Array, path: Path) -> None:
    rest = flat.view(np.uint8).data
    if read_up_to(Fs(), fd, rest) < len(rest):
        raise _changed(path)
    if sys.byteorder == "big":
        flat.byteswap(inplace=True)


def _read_halves(fd: int, flat: Array, path: Path) -> None:
    """Fill float32 numbers from the bits of bfloat16 ones, a chunk at a time."""
    step = CHUNK_BYTES // 2
    bits = np.empty(min(step, flat.size), "<u2")
    for first in range(0, flat.size, step):
        part = bits[: flat.size - first]
        _read_dense(fd, part.view(np.uint8), path)
        flat[first : first + part.size] = from_bits(part)


def _facts_of(fd: int, path: Path) -> FileFacts:
    found = os.fstat(fd)
    return FileFacts(path, found.st_size, found.st_mtime_ns, (found.st_dev, found.st_ino))


def _check_same(fd: int, file: FileFacts) -> None:
    if _facts_of(fd, file.path) != file:
        raise _changed(file.path)


def _changed(path: Path) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{path} changed while it was read; load it again when its writer has finished"
    )


class Weights(Mapping[str, Array]):
    """Tensors of files by name, each read at every access; `stored` says where and of which type.

    No file stays open. A file that changes after `load` is an error at the next access.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = dict(stored)

    def __getitem__(self, name: str) -> Array:
        return self.stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:  # that of Mapping would read the tensor
        return name in self.stored

    def __repr__(self) -> str:
        """The names with their types, as stored."""
        return "\n".join([f"{name} {stored}" for name, stored in self.stored.items()])


def load(path: str | os.PathLike[str], *, best: bool = False) -> Mapping[str, Array]:
    """Return the weights at a path, by name: read-only arrays, bfloat16 as float32.

    Args:
        path: a safetensors file; an index of shards (`model.safetensors.index.json`); a directory
            with one of these; or the directory of a run, or of one of its checkpoints, of which
            the model's values are returned, without optimizer state. Of a run it is the newest
            valid checkpoint, every byte of which is compared with its hash.
        best: take the checkpoint of a run with the best evaluation, which `fit(keep=af.Keep(
            best=...))` keeps, in place of the newest.

    Tensors of files are read at each access, one array at a time, and those of a checkpoint at
    once. Raises CheckpointError where there are no weights, or the file is damaged or hostile.
    """
    where = Path(user_path(path))
    if best:
        return _best_of_run(where)
    if where.is_dir():
        return _of_directory(where)
    if where.name.endswith(".json"):
        return Weights(_of_index(where))
    if where.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".npz", ".npy"):
        raise CheckpointError(
            f"{where}: expected a safetensors file, an index or a directory. A pickle can run code"
            " when it is read, so none is: write it with safetensors.torch.save_file(model."
            "state_dict(), 'model.safetensors'); for arrays of numpy give"
            " model.load(dict(np.load(path)))"
        )
    return Weights(_of_file(where))


def _of_directory(path: Path) -> Mapping[str, Array]:
    with reading(path):
        # A hidden one is what a save did not finish.
        names = sorted([name for name in os.listdir(path) if not name.startswith(".")])
    if MANIFEST_NAME in names and (step := step_of(path.resolve().name)) is not None:
        return _of_run(path.resolve().parent, step)
    if any([step_of(name) is not None for name in names]):
        return _of_run(path, None)
    choices = [n for n in names if n.endswith(SUFFIX)]
    # `save` removes a single file of the same stem last, so that is the newer one until then; and
    # shards are no choice, whether an index has them or a save was cut before it had removed them.
    indices = [n for n in names if n.endswith(INDEX_SUFFIX)]
    stems = [n.removesuffix(INDEX_SUFFIX) for n in indices] + [
        n.removesuffix(SUFFIX) for n in choices
    ]
    choices = [n for n in choices if not any([_is_shard(stem, n) for stem in stems])]
    choices += [n for n in indices if n.removesuffix(INDEX_SUFFIX) + SUFFIX not in choices]
    if len(choices) == 1:
        return load(path / choices[0])
    found = f"there are {', '.join(choices[:5])}; name one" if choices else "there is none"
    raise CheckpointError(
        f"{path}: expected one safetensors file, one index of shards, or checkpoints"
        f" (step-0000000500): {found}"
    )


def _is_shard(stem: str, name: str) -> bool:
    """Whether a file has the name of a shard of a stem: NAME-00001-of-00002.safetensors."""
    return (
        re.fullmatch(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}", name) is not None
    )


def _best_of_run(directory: Path) -> Mapping[str, Array]:
    steps = CheckpointManager(directory).best()
    if not steps:
        raise CheckpointError(
            f"{directory} has no checkpoint that was evaluated; train with"
            " fit(checkpoint=..., evaluation=..., keep=af.Keep(best=1, metric=...))"
        )
    return _of_run(directory, steps[0])


def _of_run(directory: Path, step: int | None) -> Mapping[str, Array]:
    reader = CheckpointManager(directory)
    if step is None:
        loaded = reader.latest(boxes=model_boxes)
    else:
        loaded = reader.load(step, boxes=model_boxes)
    if loaded is None:
        raise CheckpointError(f"{directory} has no checkpoint")
    for array in loaded.tensors.values():
        freeze(array)
    return loaded.tensors


def model_boxes(manifest: Manifest) -> Mapping[str, Box]:
    """Return all of each tensor of the model: what stands in files of its group."""
    names = {p.tensor for p in manifest.pieces if p.file.startswith(f"{MODEL_GROUP}-")}
    return {
        t.name: tuple([slice(0, extent) for extent in t.shape])
        for t in manifest.tensors
        if t.name in names
    }


def _of_file(path: Path) -> dict[str, StoredTensor]:
    """Return where the tensors of a file lie. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    with reading(path):
        fd = open_regular(path, os.O_RDONLY, is_link_followed=True)
        try:
            file = _facts_of(fd, path)
            # By the descriptor, since the name may lead to another file by now. What the library
            # has accepted has a header of less than 100 MB, and tensors without gaps.
            with safe_open(f"/dev/fd/{fd}", framework="numpy"):
                length = int.from_bytes(os.pread(fd, 8, 0), "little")
                header = from_json(os.pread(fd, length, 8))
            _check_same(fd, file)
        except (SafetensorError, DecodeError) as error:
            raise CheckpointDamaged(f"{path} is no safetensors file: {error}") from error
        finally:
            os.close(fd)
    return {
        name: StoredTensor(
            file,
            name,
            _DTYPES.get(entry["dtype"], entry["dtype"]),
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _is_file_beside(name: str) -> bool:
    """Whether a name leads to nothing but a file in the folder of whoever names it."""
    return name not in ("", ".", "..") and not any([c in name for c in "/\\\0"])


@dataclass(frozen=True, slots=True)
class _Index:
    """What an index says: the file of each tensor."""

    weight_map: Mapping[
        Text, Annotated[str, text_where(_is_file_beside, "a file name without a folder")]
    ]


def _read_index(path: Path) -> _Index:
    with reading(path):
        content = read_regular(path, MAX_INDEX_BYTES, is_link_followed=True)
    try:
        value = from_json(content)
        # The index may say more, such as the total size, which says nothing about a tensor.
        weight_map = value.get("weight_map") if isinstance(value, dict) else None
        return from_object(_Index, {"weight_map": weight_map})
    except DecodeError as error:
        raise CheckpointDamaged(f"{path} is no index of shards: {error}") from error


def _of_index(path: Path) -> dict[str, StoredTensor]:
    weight_map = _read_index(path).weight_map
    files = {file: _of_file(path.parent / file) for file in dict.fromkeys(weight_map.values())}
    for file, tensors in files.items():
        listed = {name for name, its in weight_map.items() if its == file}
        missing, unlisted = sorted(listed - tensors.keys()), sorted(tensors.keys() - listed)
        if missing or unlisted:
            raise CheckpointDamaged(
                f"{path} does not fit {file}: it lists {missing[:3] or 'nothing'} that the file"
                f" does not have, and the file has {unlisted[:3] or 'nothing'} that is not listed"
                " there. They may be of two saves: copy all files again"
            )
    return {name: files[file][name] for name, file in weight_map.items()}


# Writing.


class _Cast(Mapping[str, Array]):
    """Arrays as they are saved, each made when it is asked for."""

    def __init__(self, arrays: Mapping[str, Array], dtype: str | None) -> None:
        self._arrays = arrays
        # Once for all: the arrays may be read from a file at each access.
        self.entries = {
            name: TensorEntry(
                name, dtype if dtype is not None and a.dtype.kind == "f" else a.dtype.name, a.shape
            )
            for name, a in arrays.items()
        }

    def __getitem__(self, name: str) -> Array:
        array, dtype = self._arrays[name], self.entries[name].dtype
        if dtype == array.dtype.name:
            return array
        is_half = dtype == DType.BFLOAT16.value
        with np.errstate(over="ignore"):
            made = to_bits(array) if is_half else array.astype(dtype)
        numbers = from_bits(made) if is_half else made
        if bool((np.isinf(numbers) & ~np.isinf(array)).any()):
            raise CheckpointError(
                f"cannot save {name!r} as {dtype}, which does not hold its largest number,"
                f" {np.nanmax(np.abs(array[np.isfinite(array)])):g}; save it with another dtype"
            )
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def save(
    arrays: Mapping[str, Array],
    path: str | os.PathLike[str],
    dtype: str | None = None,
    shard_bytes: int | None = None,
    fs: Fs | None = None,
) -> Path:
    """Write weights durably, and return the file, or the index where there are shards.

    Until all bytes are on the disk every file has a temporary name; at no time is there an index
    beside shards of another save. Memory: a copy of one tensor where it is cast.

    Args:
        arrays: numpy arrays by name.
        path: a file `NAME.safetensors`, or a directory, which gets `model.safetensors`.
        dtype: that floats are cast to: "float32", "bfloat16" ("bf16"), "float16" or "float64".
        shard_bytes: the most bytes of tensors in one file, but for a single tensor of more. Above
            it there are shards, `NAME-00001-of-00002.safetensors`, and an index,
            `NAME.safetensors.index.json`.
        fs: the file system.

    Raises CheckpointError for wrong arguments, for numbers that `dtype` does not hold, and where
    the system refuses.
    """
    fs = fs or Fs()
    target = Path(os.path.abspath(user_path(path)))
    if target.suffix != SUFFIX:
        target /= f"model{SUFFIX}"
    if dtype is not None and dtype not in _FLOATS:
        raise CheckpointError(f"save: expected dtype= one of {', '.join(_FLOATS)}, got {dtype!r}")
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise CheckpointError(f"save: expected shard_bytes= of 1 or more, got {shard_bytes!r}")
    cast = _Cast(arrays, None if dtype is None else _FLOATS[dtype])
    # With the name by which readers of others know the layout of torch's weights.
    whole = ShardSpec(
        "", tuple([TensorPiece.of_whole(entry) for entry in cast.entries.values()]), "pt"
    )
    parts = fill_shards(whole.in_file_order(), sys.maxsize if shard_bytes is None else shard_bytes)
    stem, number = target.name.removesuffix(SUFFIX), len(parts)
    names = [f"{stem}-{i:05d}-of-{number:05d}{SUFFIX}" for i in range(1, number + 1)]
    shards = {n: replace(whole, pieces=p) for n, p in zip(names, parts, strict=True)}
    index = b""
    if number < 2:
        shards = {target.name: whole}
    else:
        weight_map = {piece.tensor.name: n for n, shard in shards.items() for piece in shard.pieces}
        total = sum([piece.size_bytes for piece in whole.pieces])
        index = to_json({"metadata": {"total_size": total}, "weight_map": weight_map})
    need_bytes = sum([shard.size_bytes() for shard in shards.values()])
    with writing(target.parent, f"write {target.name}", fs.free_bytes, need_bytes):
        make_durable(fs, target.parent)
        _replace(fs, target, shards, cast, index)
    return target.with_name(f"{stem}{INDEX_SUFFIX}") if index else target


def _replace(
    fs: Fs, target: Path, shards: Mapping[str, ShardSpec], arrays: Mapping[str, Array], index: bytes
) -> None:
    """Write files, and the index if there is one, under other names, and then give them theirs."""
    directory, prefix = target.parent, f".tmp-{new_attempt()}-"
    index_name = f"{target.name.removesuffix(SUFFIX)}{INDEX_SUFFIX}"
    names = [*shards, *([index_name] if index else [])]
    try:
        drafts = tuple([replace(spec, name=prefix + name) for name, spec in shards.items()])
        write_pieces(fs, directory, drafts, arrays)
        if index:
            _write_file(fs, directory / (prefix + index_name), index)
        former = _former_files(directory, index_name)
        if index and index_name in former:
            # Else a crash could leave the old index beside some of the new shards.
            fs.unlink(directory / index_name)
            fs.fsync_dir(directory)
        for name in names:
            fs.rename(directory / (prefix + name), directory / name)
        fs.fsync_dir(directory)
    except BaseException:
        for name in names:
            with suppress(OSError):  # the first error is the one to tell
                fs.unlink(directory / (prefix + name))
        raise
    # Last what readers take as long as it is there: a single file, which comes before an index.
    for name in sorted({*former, target.name} - {*names}, key=lambda n: (n == target.name, n)):
        with suppress(FileNotFoundError):
            fs.unlink(directory / name)


def _former_files(directory: Path, index_name: str) -> set[str]:
    """Return the index of an earlier save and its shards, of names that `save` gives."""
    stem = index_name.removesuffix(INDEX_SUFFIX)
    try:
        listed = {*_read_index(directory / index_name).weight_map.values()}
    except CheckpointError:
        listed = set()  # whatever lies there is replaced, or stays, by its name alone
    has_index = os.path.lexists(directory / index_name)
    return {name for name in listed if _is_shard(stem, name)} | (
        {index_name} if has_index else set()
    )


def _write_file(fs: Fs, path: Path, content: bytes) -> None:
    fd = fs.create(path)
    try:
        write_all(fs, fd, memoryview(content))
        fs.fsync(fd)
    finally:
        fs.close(fd)
