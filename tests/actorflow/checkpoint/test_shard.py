import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiers
from disks import LogFs
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from actorflow.checkpoint import shard as shard_module
from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError
from actorflow.checkpoint.fs import Fs
from actorflow.checkpoint.shard import (
    FORMAT_DTYPES,
    ShardSpec,
    WantedTensors,
    plan_shards,
    read_shard,
    tensor_hash,
    write_pieces,
)

DTYPES = sorted(FORMAT_DTYPES)


def write_and_read(fs, directory, tensors):
    (spec,) = plan_shards({"model": tensors})
    written = write_pieces(fs, directory, (spec,), tensors)
    (file,), wanted = written.files, WantedTensors()
    spec = with_hashes(spec, written)
    read_shard(fs, directory, file, spec)
    read_shard(fs, directory, file, spec, wanted)
    for piece in spec.pieces:
        wanted.array(piece.tensor, wanted.box(piece.tensor))
    return wanted.arrays, written.has_nan


def with_hashes(spec, written):
    hashes = {(p.tensor, p.offset): p.xxh3_128 for p in written.pieces}
    pieces = [replace(p, xxh3_128=hashes[p.tensor.name, p.offset]) for p in spec.pieces]
    return ShardSpec(spec.name, tuple(pieces))


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], array)


def samples():
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        for shape in [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 4)]:
            yield f"{dtype}{shape}", rng.integers(0, 2, shape).astype(dtype)


def test_every_dtype_and_shape_loads_bit_for_bit_with_the_safetensors_library(tmp_path):
    tensors = dict(samples())
    found, has_nan = write_and_read(Fs(), tmp_path, tensors)
    assert_same(found, tensors)
    assert_same(load_file(tmp_path / "model-00001.safetensors"), tensors)
    assert not has_nan


def test_arrays_of_any_memory_layout_keep_their_values(tmp_path):
    base = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    tensors = {
        "transposed": base.T,
        "axes": base.transpose(1, 0, 2),
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::3],
        "reversed": base[:, ::-1],
        "broadcast": np.broadcast_to(base[0, 0], (6, 5)),
        "big_endian": base.astype(">f4"),
        "big_endian_int": np.arange(9).astype(">i8").reshape(3, 3).T,
    }
    found, _ = write_and_read(Fs(), tmp_path, tensors)
    assert_same(found, tensors)
    assert_same(load_file(tmp_path / "model-00001.safetensors"), tensors)
    for name, array in tensors.items():
        dense = np.array(array, dtype=array.dtype.newbyteorder("<"), order="C")
        assert tensor_hash(array) == tensor_hash(dense), name


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(shard_module, "CHUNK_BYTES", 64)


def test_tensors_longer_than_a_chunk_are_whole(tmp_path, small_chunks):
    tensors = {f"t{n}": np.arange(n, dtype=np.float64) for n in (1, 7, 8, 9, 16, 17, 100)}
    found, _ = write_and_read(Fs(), tmp_path, tensors)
    assert_same(found, tensors)
    assert_same(load_file(tmp_path / "model-00001.safetensors"), tensors)


def test_short_writes_are_continued():
    fs = LogFs(Path("/disk"), max_write_bytes=13)
    tensors = {"w": np.arange(100.0), "b": np.arange(3, dtype=np.int8)}
    found, _ = write_and_read(fs, Path("/disk"), tensors)
    assert_same(found, tensors)


def test_a_write_that_takes_nothing_is_an_error_and_not_an_endless_loop():
    fs = LogFs(Path("/disk"), max_write_bytes=0)
    with raises(OSError):
        write_and_read(fs, Path("/disk"), {"w": np.arange(3.0)})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_nan_anywhere_is_noticed(tmp_path, dtype, small_chunks):
    array = np.full(1000, np.inf, dtype)
    assert not write_and_read(LogFs(tmp_path), tmp_path, {"w": array})[1]
    array[777] = np.nan
    assert write_and_read(LogFs(tmp_path), tmp_path, {"a": array[:3], "w": array})[1]


def test_what_has_no_element_or_no_nan_to_hold_holds_none():
    for array in (np.zeros(0, np.float32), np.zeros((3, 0)), np.arange(3), np.array(True)):
        assert not shard_module.holds_nan(array)
    assert shard_module.holds_nan(np.array(np.nan))


@settings(max_examples=tiers.examples(60), deadline=None)
@given(
    sizes=st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 40), max_size=12),
    max_bytes=st.integers(1, 200),
)
def test_shards_hold_every_tensor_once_and_no_two_that_would_not_fit(sizes, max_bytes):
    tensors = {n: np.zeros(s, np.int8 if s % 2 else np.float64) for n, s in sizes.items()}
    tensors.pop("__metadata__", None)
    shards = plan_shards({"g": tensors}, max_bytes)
    reordered = plan_shards({"g": dict(reversed(list(tensors.items())))}, max_bytes)
    assert shards == reordered
    placed = [p.tensor.name for shard in shards for p in shard.pieces]
    assert sorted(placed) == sorted(tensors)
    assert [s.name for s in shards] == [f"g-{i + 1:05d}.safetensors" for i in range(len(shards))]
    for shard in shards:
        total = sum(math.prod(p.extents) * p.itemsize for p in shard.pieces)
        assert total <= max_bytes or len(shard.pieces) == 1


@pytest.mark.parametrize(
    "groups",
    [
        {"Model": {}},
        {"../model": {}},
        {"": {}},
        {"m": {"": np.zeros(1)}},
        {"m": {"__metadata__": np.zeros(1)}},
        {"m": {"w": np.zeros(1)}, "o": {"w": np.zeros(1)}},
        {"m": {"w": 1.0}},
        {"m": {"w": np.float32(1)}},
        {"m": {"w": np.zeros(1, complex)}},
        {"m": {"w": np.array([{}])}},
        {"m": {"w": np.array(["a"])}},
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(groups):
    with raises(CheckpointError):
        plan_shards(groups)


def test_tensor_names_are_data_and_never_paths(tmp_path):
    tensors = {"../../x": np.arange(3.0), "/etc/y": np.arange(2.0), "naïve ☃": np.arange(1.0)}
    found, _ = write_and_read(Fs(), tmp_path, tensors)
    assert_same(found, tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["model-00001.safetensors"]


def test_a_file_that_shrinks_while_it_is_read_is_damaged():
    class Shrinking(LogFs):
        def readinto(self, fd, buffer):
            return super().readinto(fd, buffer) if len(buffer) < 500 else 0

    fs = Shrinking(Path("/disk"))
    with raises(CheckpointDamaged):
        write_and_read(fs, Path("/disk"), {"w": np.arange(100.0)})
