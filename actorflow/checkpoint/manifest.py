"""What a checkpoint says about itself: `manifest.json`, its encoder and its strict parser.

The file is one line of JSON, a newline, and the xxh3_128 of the line. The hash finds damage; it
does not prove an author. So the parser trusts nothing: every field has a type and a range, every
file name is checked before it is opened, unknown and repeated keys are refused. `Expected` holds a
manifest against the variables of the job that is to go on from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import xxhash

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointUnfit
from actorflow.checkpoint.fs import MANIFEST_NAME, MAX_STEP, is_safe_name
from actorflow.checkpoint.shard import FORMAT_DTYPES, Array, FileEntry, ShardSpec, TensorEntry

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
"""Of the file. A tensor takes some 250 bytes; what is parsed may take twenty times the text."""

_HASH = re.compile(r"[0-9a-f]{32}\Z")
_HASH_BYTES = 32
_MAX_SIZE = 1 << 62
_MAX_SEED = 1 << 128
_MAX_RANK = 32
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a resumed run has to know.

    `attempt` is unique per save. `config`, `data_state` and `versions` hold JSON values only.
    `data_state` is the position after the last batch that a saved step consumed; None for a source
    without one.
    """

    format_version: int
    attempt: str
    step: int
    seed: int
    plan_hash: str
    config: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    data_state: Mapping[str, Any] | None
    data_fingerprint: str
    versions: Mapping[str, str]
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
    # These two may hold anything, and asdict would copy it before `plain_json` has looked.
    fields = asdict(replace(manifest, config={}, data_state=None))
    fields["config"] = plain_json(manifest.config, "config")
    fields["data_state"] = plain_json(manifest.data_state, "data_state")
    try:
        body = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
        # Read back by the reader's own rules: what it would refuse is never written.
        _manifest_of(json.loads(body))
    except (ValueError, CheckpointDamaged) as error:
        raise CheckpointError(f"the checkpoint's manifest cannot be written: {error}") from error
    if len(body) + 1 + _HASH_BYTES > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the checkpoint's manifest would have {len(body):,} bytes, more than the"
            f" {MAX_MANIFEST_BYTES:,} that a reader takes; keep less in the data source's state"
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
        raise CheckpointDamaged(f"{MANIFEST_NAME} is not a body, a newline and a hash: cut short?")
    if digest != xxhash.xxh3_128_hexdigest(body).encode():
        raise CheckpointDamaged(f"{MANIFEST_NAME} does not match its own hash")
    try:
        value = json.loads(body, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate could not be printed
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is not JSON: {error}") from error
    manifest = _manifest_of(value)
    try:
        plain_json(manifest.config, "config")
        plain_json(manifest.data_state, "data_state")
    except CheckpointError as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME}: {error}") from error
    return manifest


def plain_json(value: object, where: str, depth: int = 0) -> Any:
    """Return a copy made of dict, list, str, int, float, bool and None, which JSON keeps exactly.

    Tuples become lists. Keys must be text: JSON would turn them into text without a word, and a
    data source would get back another state than it gave.

    Raises:
        CheckpointError: a value has no place in JSON; the message names its path below `where`.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: expected keys of type str, got {key!r}")
        return {str(k): plain_json(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where}: JSON has no {value}; store it as text or None")
    # bool first: it is an int as well. Numbers of numpy that derive from float become plain.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is not None:
        raise CheckpointError(
            f"{where}: expected a JSON value (dict, list, str, int, float, bool or None), "
            f"got {type(value).__module__}.{type(value).__qualname__}"
        )
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return fields


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _manifest_of(value: Any) -> Manifest:
    # Before the fields: another version may have others, and is to be named as such.
    version = value.get("format_version") if isinstance(value, dict) else None
    # type() and not isinstance: true is no version.
    if type(version) is int and version != FORMAT_VERSION:
        raise CheckpointDamaged(
            f"{MANIFEST_NAME} has format version {version}; this actorflow reads {FORMAT_VERSION}"
        )
    fields = _Fields(value, MANIFEST_NAME, Manifest.__slots__)
    files = tuple(_file_of(v, f"files[{i}]") for i, v in enumerate(fields.items("files")))
    tensors = tuple(_tensor_of(v, f"tensors[{i}]") for i, v in enumerate(fields.items("tensors")))
    _check_names(files, tensors)
    versions = fields.mapping("versions")
    if not all(isinstance(v, str) for v in versions.values()):
        raise CheckpointDamaged(f"{MANIFEST_NAME}: versions holds something other than text")
    manifest = Manifest(
        format_version=fields.integer("format_version", FORMAT_VERSION + 1),
        attempt=fields.digest("attempt"),
        step=fields.integer("step", MAX_STEP + 1),
        seed=fields.integer("seed", _MAX_SEED),
        plan_hash=fields.text("plan_hash"),
        config=fields.mapping("config"),
        files=files,
        tensors=tensors,
        data_state=None if value["data_state"] is None else fields.mapping("data_state"),
        data_fingerprint=fields.text("data_fingerprint"),
        versions=versions,
        has_nan=fields.boolean("has_nan"),
    )
    for file, spec in manifest.shards():
        if spec.size_bytes() != file.size_bytes:
            raise CheckpointDamaged(
                f"{MANIFEST_NAME}: {file.name} is listed with {file.size_bytes} bytes, "
                f"its tensors make {spec.size_bytes()}"
            )
    return manifest


def _file_of(value: Any, where: str) -> FileEntry:
    fields = _Fields(value, where, FileEntry.__slots__)
    name = fields.text("name")
    if not is_safe_name(name) or name == MANIFEST_NAME:
        raise CheckpointDamaged(f"{where}: {name!r} is not a permitted file name")
    return FileEntry(name, fields.integer("size_bytes", _MAX_SIZE), fields.digest("xxh3_128"))


def _tensor_of(value: Any, where: str) -> TensorEntry:
    fields = _Fields(value, where, TensorEntry.__slots__)
    dtype, shape = fields.text("dtype"), fields.items("shape")
    if dtype not in FORMAT_DTYPES:
        raise CheckpointDamaged(f"{where}: {dtype!r} is not a dtype of this format")
    if len(shape) > _MAX_RANK or not all(type(n) is int and 0 <= n < _MAX_SIZE for n in shape):
        raise CheckpointDamaged(f"{where}: {str(shape)[:80]} is not a shape")
    # Extents of an empty array count too: numpy refuses them although no byte is needed.
    if math.prod(max(n, 1) for n in shape) * np.dtype(dtype).itemsize >= _MAX_SIZE:
        raise CheckpointDamaged(f"{where}: shape {str(shape)[:80]} is larger than any memory")
    name = fields.text("name")
    if not name or name == "__metadata__":
        raise CheckpointDamaged(f"{where}: {name!r} is not a permitted tensor name")
    return TensorEntry(name, fields.text("file"), dtype, tuple(shape), fields.digest("xxh3_128"))


def _check_names(files: tuple[FileEntry, ...], tensors: tuple[TensorEntry, ...]) -> None:
    names = {file.name for file in files}
    if len(names) != len(files) or len({t.name for t in tensors}) != len(tensors):
        raise CheckpointDamaged(f"{MANIFEST_NAME}: a file or a tensor is listed twice")
    for tensor in tensors:
        if tensor.file not in names:
            raise CheckpointDamaged(
                f"{MANIFEST_NAME}: tensor {tensor.name!r} is in {tensor.file!r}, which is not there"
            )


class _Fields:
    """Typed access to an untrusted JSON object with exactly these keys."""

    def __init__(self, value: Any, where: str, keys: Any) -> None:
        # Exactly these keys: a field that is not known might change what the others mean.
        if not isinstance(value, dict) or set(value) != set(keys):
            raise CheckpointDamaged(f"{where}: expected an object with {', '.join(keys)}")
        self._value = value
        self._where = where

    def _take(self, key: str, kind: type, is_valid: bool = True) -> Any:
        value = self._value[key]
        if type(value) is not kind or not is_valid:
            raise CheckpointDamaged(
                f"{self._where}: {key} is {str(value)[:80]!r}, expected a valid {kind.__name__}"
            )
        return value

    def text(self, key: str) -> str:
        return str(self._take(key, str))

    def integer(self, key: str, end: int) -> int:
        """Return an int in [0, end)."""
        value = self._value[key]
        return int(self._take(key, int, type(value) is int and 0 <= value < end))

    def boolean(self, key: str) -> bool:
        return bool(self._take(key, bool))

    def items(self, key: str) -> list[Any]:
        return list(self._take(key, list))

    def mapping(self, key: str) -> dict[str, Any]:
        return dict(self._take(key, dict))

    def digest(self, key: str) -> str:
        value = self._value[key]
        return str(self._take(key, str, isinstance(value, str) and _HASH.match(value) is not None))


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
                f"it lacks {_listed(missing)} and has {_listed(unknown)} too many; another model"
                " or optimizer wrote it"
            )
        for name, expected in self.tensors.items():
            if types.get(name, expected) != expected:
                raise CheckpointUnfit(f"{name!r} is {types[name]} there, {expected} here")

    def check_values(self, manifest: Manifest, tensors: Mapping[str, Array]) -> None:
        """Raise CheckpointUnfit when the state is not that of the manifest's step."""
        if self.counter and int(tensors[self.counter]) != manifest.step:
            raise CheckpointUnfit(
                f"its {self.counter!r} is {int(tensors[self.counter])}, its name says"
                f" {manifest.step}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{[name[:200] for name in names[:_SHOWN]]}{more}" if names else "nothing"
