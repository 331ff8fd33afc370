"""Files of weights: what other libraries wrote is read, and what is saved they read."""

import errno
import json
import os
import struct

import numpy as np
import pytest
from disks import FaultFs
from error_texts import raises
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError
from actorflow.checkpoint.fs import Fs
from actorflow.checkpoint.weights import Weights, load, save


def file_of(header, payload=b""):
    """The bytes of a file with a header, which may be text that is no header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def arrays(seed=0):
    draw = np.random.default_rng(seed)
    return {
        "a.weight": draw.standard_normal((5, 3)).astype(np.float32),
        "a.bias": draw.standard_normal(5),
        "b.weight": draw.standard_normal((4, 2)).astype(np.float16),
        "steps": np.array(7 + seed),
        "none": np.zeros((0, 3), np.float32),
        "mask": draw.integers(0, 2, 4).astype(bool),
    }


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name
        assert found[name].shape == array.shape


def test_a_file_of_the_safetensors_library_is_read_and_one_of_ours_by_it(tmp_path):
    save_file(arrays(), tmp_path / "theirs.safetensors")
    found = load(tmp_path / "theirs.safetensors")
    assert_same(found, arrays())
    assert not found["a.bias"].flags.writeable
    path = save(found, tmp_path / "deep" / "ours.safetensors")
    assert_same(load_file(path), arrays())
    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert os.listdir(path.parent) == ["ours.safetensors"]


def test_arrays_that_are_not_dense_are_saved_by_value(tmp_path):
    wide = np.arange(24.0).reshape(4, 6)
    path = save({"t": wide.T, "s": wide[::2, ::3], "x": wide.astype(">f4")}, tmp_path)
    assert path == tmp_path / "model.safetensors"
    assert_same(load_file(path), {"t": wide.T.copy(), "s": wide[::2, ::3].copy(),
                                  "x": wide.astype(np.float32)})  # fmt: skip


def test_every_bfloat16_is_read_as_the_float32_of_its_bits(tmp_path):
    bits = np.arange(1 << 16, dtype="<u2")
    path = tmp_path / "w.safetensors"
    path.write_bytes(file_of({"w": entry("BF16", [1 << 16], 0, 1 << 17)}, bits.tobytes()))
    words = b"".join([b"\0\0" + struct.pack("<H", bit) for bit in range(1 << 16)])
    found = load(path)
    assert found["w"].tobytes() == words
    assert repr(found) == "w bfloat16[65536]"
    # A NaN has more than one pattern; a file of ours has those of quiet ones.
    numbers = ~np.isnan(found["w"])
    again = load(save(found, tmp_path / "again.safetensors", dtype="bf16"))
    assert again.stored["w"].dtype == "bfloat16"
    assert again["w"][numbers].tobytes() == found["w"][numbers].tobytes()
    assert np.isnan(again["w"][~numbers]).all()


def test_large_bfloat16_tensors_are_read_by_chunks(tmp_path):
    values = np.arange(5_000_000, dtype=np.float32) % 251  # of 8 bits: exact
    found = load(save({"w": values}, tmp_path, dtype="bfloat16"))
    np.testing.assert_array_equal(found["w"], values)


@pytest.mark.parametrize("dtype", ["float16", "fp32", "float64", "bf16"])
def test_floats_are_saved_in_the_dtype_that_is_asked_for_and_others_in_their_own(tmp_path, dtype):
    found = load(save(arrays(), tmp_path / "w.safetensors", dtype=dtype))
    assert found["steps"].dtype == np.int64
    assert found["mask"].dtype == bool
    for name in ("a.weight", "a.bias", "b.weight"):
        np.testing.assert_allclose(found[name], arrays()[name], rtol=2**-8)


def test_shards_have_the_names_and_the_index_of_the_hub_and_are_read_as_one(tmp_path):
    path = save(arrays(), tmp_path, shard_bytes=64)
    assert path == tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(set(index["weight_map"].values())) == names
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays().values())
    for where in (tmp_path, path):
        assert_same(load(where), arrays())
    joined = {k: v for name in names for k, v in load_file(tmp_path / name).items()}
    assert_same(joined, arrays())


def test_a_save_removes_the_files_of_the_one_before_and_nothing_else(tmp_path):
    (tmp_path / "model-notes.txt").write_text("mine")
    (tmp_path / "model-00007-of-00009.safetensors").write_bytes(b"mine, of no index")
    save(arrays(), tmp_path, shard_bytes=64)
    save(arrays(1), tmp_path, shard_bytes=100)
    assert_same(load(tmp_path / "model.safetensors.index.json"), arrays(1))
    assert len(os.listdir(tmp_path)) == 2 + 2 + 1
    save(arrays(2), tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        "model-00007-of-00009.safetensors", "model-notes.txt", "model.safetensors",
    ]  # fmt: skip
    assert_same(load(tmp_path / "model.safetensors"), arrays(2))


@pytest.mark.parametrize("before", [None, 64])
@pytest.mark.parametrize("after", [None, 64, 100])
def test_whatever_call_a_crash_cuts_the_files_are_of_one_save(tmp_path, before, after):
    k, outcomes = 0, set()
    while True:
        folder = tmp_path / str(k)
        save(arrays(), folder, shard_bytes=before)
        fs = FaultFs(Fs(), k, errno.EIO, is_sticky=True)
        try:
            save(arrays(1), folder, shard_bytes=after, fs=fs)
        except CheckpointError:
            outcomes.add("refused")
        try:
            found = load(folder)
        except CheckpointError:
            outcomes.add("none")
        else:
            outcomes.add(int(found["steps"]))
            assert_same(found, arrays(int(found["steps"]) - 7))
        if not fs.has_failed:
            break
        k += 1
    assert k > 8
    assert {7, 8} <= outcomes
    # Only where shards take the place of shards is there a moment without an index.
    assert ("none" in outcomes) == (before is not None and after is not None)


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": struct.pack("<Q", 0),
    "a header beyond the file": struct.pack("<Q", 1 << 20) + b"{}",
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "no JSON": file_of(b"{'a': 1}"),
    "NaN": file_of(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"\0" * 4),
    "a negative extent": file_of({"w": entry("F32", [-1], 0, 4)}, b"\0" * 4),
    "an extent of 2^64": file_of({"w": entry("F32", [1 << 64], 0, 4)}, b"\0" * 4),
    "extents that wrap": file_of({"w": entry("F32", [1 << 32, 1 << 32], 0, 0)}),
    "an offset beyond the file": file_of({"w": entry("F32", [2], 0, 8)}, b"\0" * 4),
    "offsets backwards": file_of({"w": entry("F32", [1], 4, 0)}, b"\0" * 4),
    "overlap": file_of(
        {"v": entry("F32", [2], 0, 8), "w": entry("F32", [2], 4, 12)}, b"\0" * 12
    ),
    "a gap": file_of({"v": entry("F32", [1], 0, 4), "w": entry("F32", [1], 8, 12)}, b"\0" * 12),
    "bytes at the end": file_of({"w": entry("F32", [1], 0, 4)}, b"\0" * 5),
    "a key twice": file_of(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    "an unknown dtype": file_of({"w": entry("X7", [1], 0, 4)}, b"\0" * 4),
    "deep": file_of(b"[" * 100_000),
    "a list": file_of(b"[]"),
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"w\.safetensors is no safetensors file: .+"):
        load(path)


def test_a_dtype_that_no_array_has_is_named_when_it_is_read_and_others_can_be(tmp_path):
    header = {"e": entry("F8_E4M3", [2], 0, 2), "v": entry("F16", [1], 2, 4)}
    path = tmp_path / "w.safetensors"
    path.write_bytes(file_of(header, b"\1\2" + np.float16(3).tobytes()))
    found = load(path)
    assert found["v"] == 3
    with raises(CheckpointError):
        found["e"]


def test_an_array_without_elements_that_numpy_refuses_is_an_error(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(file_of({"w": entry("F32", [0, 1 << 62, 4], 0, 0)}))
    with pytest.raises(CheckpointError, match=r"no memory for tensor 'w'|no safetensors file"):
        load(path)["w"]


@pytest.mark.parametrize("change", ["truncated", "rewritten", "replaced", "removed", "a folder"])
def test_a_file_that_changes_after_its_header_was_read_is_an_error(tmp_path, change):
    path = save(arrays(), tmp_path)
    found = load(path)
    if change == "truncated":
        os.truncate(path, path.stat().st_size - 8)
    elif change == "rewritten":
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        os.utime(path, ns=(1, 1))
    elif change == "replaced":
        save(arrays(), tmp_path)
    else:
        path.unlink()
    if change == "a folder":
        path.mkdir()
    with pytest.raises(CheckpointDamaged, match=r"changed while it was read|cannot read"):
        found["mask"]


@pytest.mark.parametrize(
    "weight_map",
    [
        {"w": "../w.safetensors"},
        {"w": "/etc/passwd"},
        {"w": ".."},
        {"w": "sub\\w.safetensors"},
        {"w": ""},
        {"w": 3},
        ["w"],
        None,
        {"w": "one.safetensors"},
        {"v": "one.safetensors", "w": "one.safetensors"},
        {"x": "one.safetensors"},
        {"v": "gone.safetensors"},
    ],
)
def test_an_index_names_files_beside_it_that_have_what_it_lists(tmp_path, weight_map):
    save({"v": np.zeros(1), "u": np.zeros(1)}, tmp_path / "one.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with raises(CheckpointDamaged):
        load(path)


def test_a_fifo_is_refused_without_waiting_and_a_link_that_the_user_names_is_followed(tmp_path):
    os.mkfifo(tmp_path / "fifo.safetensors")
    with raises(CheckpointDamaged):
        load(tmp_path / "fifo.safetensors")
    save(arrays(), tmp_path / "blob.safetensors")
    os.symlink("blob.safetensors", tmp_path / "model.safetensors")
    assert_same(load(tmp_path / "model.safetensors"), arrays())


@pytest.mark.parametrize("name", ["w.pt", "pytorch_model.bin", "w.npz", "gone.safetensors"])
def test_a_pickle_is_refused_with_what_to_write_in_its_place(tmp_path, name):
    with raises(CheckpointError):
        load(tmp_path / name)


def test_a_folder_without_one_choice_is_an_error_that_lists_what_there_is(tmp_path):
    with raises(CheckpointError):
        load(tmp_path)
    save(arrays(), tmp_path / "a.safetensors")
    assert isinstance(load(tmp_path), Weights)
    save(arrays(), tmp_path / "b.safetensors")
    with raises(CheckpointError):
        load(tmp_path)


def test_what_cannot_be_saved_is_an_error_and_leaves_nothing(tmp_path):
    large = {"w": np.array([1e30, np.inf, np.nan])}
    for wrong in ({"dtype": "int8"}, {"dtype": "float16"}, {"shard_bytes": 0}):
        with raises(CheckpointError):
            save(large, tmp_path / "w.safetensors", **wrong)
    assert os.listdir(tmp_path) == []
    np.testing.assert_array_equal(
        load(save(large, tmp_path, dtype="bf16"))["w"][1:], [np.inf, np.nan]
    )
