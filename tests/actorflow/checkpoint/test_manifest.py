import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiers
import xxhash
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.checkpoint import manifest
from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    decode,
    encode,
)
from actorflow.checkpoint.shard import FileEntry, PieceEntry, ShardSpec, TensorEntry, TensorPiece

HASH = "0123456789abcdef0123456789abcdef"
TENSOR = TensorEntry("w", "float32", (2, 3))
FILE = "model-00001.safetensors"
SPEC = ShardSpec(FILE, (TensorPiece(TENSOR, (0, 0), (2, 3), HASH),))
MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    attempt=HASH,
    step=12,
    seed=5,
    plan_hash="abc",
    config={"lr": 0.1, "betas": [0.9, 0.95]},
    files=(FileEntry(SPEC.name, SPEC.size_bytes(), HASH),),
    tensors=(TENSOR,),
    pieces=(PieceEntry("w", (0, 0), (2, 3), FILE, HASH),),
    num_ranks=1,
    data_state={"kind": "tokens", "batches": 3},
    data_fingerprint="def",
    versions={"numpy": "2"},
    has_nan=False,
)


def sealed(value):
    """A manifest file with a right hash over any JSON value or text."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode()


def as_json():
    return json.loads(encode(MANIFEST).splitlines()[0])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=tiers.examples(80), deadline=None)
@given(
    config=st.dictionaries(st.text(), json_values, max_size=3),
    state=st.none() | st.dictionaries(st.text(), json_values, max_size=3),
    seed=st.integers(0, 2**128 - 1),
    step=st.integers(0, 10**10 - 1),
    text=st.text(),
    has_nan=st.booleans(),
)
def test_a_manifest_comes_back_as_it_was(config, state, seed, step, text, has_nan):
    manifest = replace(
        MANIFEST,
        config=config,
        data_state=state,
        seed=seed,
        step=step,
        plan_hash=text,
        has_nan=has_nan,
        versions={text: text},
    )
    assert decode(encode(manifest)) == manifest


def test_the_file_is_a_line_of_json_a_newline_and_its_hash():
    body, _, digest = encode(MANIFEST).partition(b"\n")
    assert json.loads(body)["step"] == 12
    assert digest.decode() == xxhash.xxh3_128(body).hexdigest()


def test_every_flipped_bit_every_cut_and_every_appended_byte_is_found():
    data = encode(MANIFEST)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointDamaged):
            decode(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(CheckpointDamaged):
            decode(data[:length])
    for extra in (b"\n", b" ", b"\0", data):
        with pytest.raises(CheckpointDamaged):
            decode(data + extra)


def hostile():
    """Well-hashed manifests that lie: one change each."""
    file, tensor, piece = "files", "tensors", "pieces"
    for name in [
        "../x", "/etc/passwd", "..", ".", "", "a/b", "A", "x\n", "con", "manifest.json", ".lock",
        "x" * 500, "é", None, 3, ["x"],
    ]:  # fmt: skip
        yield f"file {name!r}", (file, 0, "name"), name
    for size in [-1, 2**63, 1e3, "3", None, True, 0, 10**30, SPEC.size_bytes() + 1]:
        yield f"size {size!r}", (file, 0, "size_bytes"), size
    for shape in [
        None, 3, "23", [-1, 3], [2.0, 3], [True, 3], ["2", 3], [2**70], [2**40, 2**40, 0],
        [1] * 100, [[2, 3]], {}, [2, 4],
    ]:  # fmt: skip
        yield f"shape {str(shape)[:30]}", (tensor, 0, "shape"), shape
    for dtype in ["object", "O", "|O", "complex64", "float33", "", "f4", None, 1, "F32"]:
        yield f"dtype {dtype!r}", (tensor, 0, "dtype"), dtype
    for name in ["", "__metadata__", None, 5]:
        yield f"tensor {name!r}", (tensor, 0, "name"), name
    for target in ["other.safetensors", "../x", None, 1]:
        yield f"piece in {target!r}", (piece, 0, "file"), target
        yield f"piece of {target!r}", (piece, 0, "tensor"), target
    for box in [None, 3, [0], [0, 0, 0], [-1, 0], [1, 0], [0.0, 0], [True, 0], [2**70, 0], "00"]:
        yield f"offset {str(box)[:30]}", (piece, 0, "offset"), box
    for box in [None, [2], [2, 3, 1], [2, 4], [3, 2], [1, 3], [0, 0], [2**62, 3]]:
        yield f"extents {str(box)[:30]}", (piece, 0, "extents"), box
    for count in [0, -1, None, True, "1", 2**30]:
        yield f"ranks {count!r}", ("num_ranks",), count
    for digest in [None, 0, "", "0" * 31, "0" * 33, HASH.upper(), "g" * 32, HASH + "\n"]:
        yield f"hash {digest!r}", (piece, 0, "xxh3_128"), digest
        yield f"file hash {digest!r}", (file, 0, "xxh3_128"), digest
        yield f"attempt {digest!r}", ("attempt",), digest
    for step in [-1, 10**10, 1.0, "1", None, True, 10**400]:
        yield f"step {str(step)[:20]}", ("step",), step
    for seed in [-1, 2**128, 0.5, None, "1", False]:
        yield f"seed {seed!r}", ("seed",), seed
    for version in [0, FORMAT_VERSION + 1, -1, True, None, "1", 1.0]:
        yield f"version {version!r}", ("format_version",), version
    for key, wrong in [
        ("config", []), ("config", None), ("files", {}), ("files", None), ("files", [None]),
        ("tensors", "x"), ("tensors", [[]]), ("pieces", {}), ("pieces", [None]), ("pieces", []),
        ("data_state", []), ("data_state", 0),
        ("versions", {"a": 1}), ("versions", []), ("has_nan", 0), ("has_nan", None),
        ("plan_hash", None), ("data_fingerprint", 7),
    ]:  # fmt: skip
        yield f"{key} {wrong!r}", (key,), wrong


HOSTILE = list(hostile())


@pytest.mark.parametrize(("path", "value"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_a_well_hashed_lie_is_refused(path, value):
    lie = as_json()
    place = lie
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if path == ("files", 0, "name"):
        lie["pieces"][0]["file"] = value  # so that nothing but the name itself is wrong
    with pytest.raises(CheckpointDamaged):
        decode(sealed(lie))


@pytest.mark.parametrize("where", [(), ("files", 0), ("tensors", 0), ("pieces", 0)])
def test_missing_and_unknown_fields_are_refused(where):
    for edit in ("drop", "add"):
        for name in list(encode_place(as_json(), where)):
            lie = as_json()
            place = encode_place(lie, where)
            if edit == "drop":
                del place[name]
            else:
                place[name + "_"] = place[name]
            with raises(CheckpointDamaged):
                decode(sealed(lie))


def encode_place(value, where):
    for key in where:
        value = value[key]
    return value


def test_what_is_listed_twice_is_refused():
    for key in ("files", "tensors", "pieces"):
        lie = as_json()
        lie[key] *= 2
        with raises(CheckpointDamaged):
            decode(sealed(lie))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"3", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b"NaN", b"{}",
        b'{"step": 1, "step": 2}', b"1" * 10_000,
    ],
    ids=lambda b: repr(b[:20]),
)  # fmt: skip
def test_text_that_is_no_manifest_is_refused(body):
    with pytest.raises(CheckpointDamaged):
        decode(sealed(body))


def test_a_repeated_key_is_refused_even_if_the_last_one_is_right():
    body = encode(MANIFEST).splitlines()[0]
    with raises(CheckpointDamaged):
        decode(sealed(b'{"step":1,' + body[1:]))


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(constant):
    body = encode(MANIFEST).splitlines()[0].replace(b'"lr":0.1', b'"lr":' + constant)
    with raises(CheckpointDamaged):
        decode(sealed(body))


FORMAT_1 = Path(__file__).parents[2] / "data" / "checkpoint_format_1"


def test_what_format_1_wrote_is_loaded_as_tensors_of_one_piece(tmp_path):
    shutil.copytree(FORMAT_1, tmp_path / "step-0000000012")
    reader = CheckpointManager(tmp_path)
    assert reader.verify(12).format_version == FORMAT_VERSION
    loaded = reader.latest()
    assert loaded.manifest.data_state == {"batches": 12}
    assert [p.offset for p in loaded.manifest.pieces] == [(), (0, 0), (0, 0), ()]
    assert {n: a.tolist() for n, a in loaded.tensors.items()} == {
        "gain": 2.5, "none": [], "w": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], "step": 12,
    }  # fmt: skip
    part = reader.load(12, boxes={"w": (slice(1, 3), slice(0, 3))}).tensors
    assert {n: a.tolist() for n, a in part.items()} == {"w": [[3, 4, 5], [6, 7, 8]]}


def test_a_lie_of_format_1_is_refused():
    lie = json.loads((FORMAT_1 / "manifest.json").read_bytes().splitlines()[0])
    for change in ({"tensors": lie["tensors"][1:]}, {"pieces": []}, {"num_ranks": 1}, {"step": -1}):
        with pytest.raises(CheckpointDamaged):
            decode(sealed(lie | change))


def test_a_newer_format_says_so():
    lie = as_json() | {"format_version": 9, "something": "new"}
    with raises(CheckpointDamaged):
        decode(sealed(lie))


@pytest.mark.parametrize(
    "state",
    [
        {"n": np.int64(3)},
        {"a": [1, {"b": {1, 2}}]},
        {1: 2},
        {"x": float("nan")},
        {"x": float("-inf")},
        {"x": b"bytes"},
    ],
)
def test_state_that_json_would_change_is_refused_by_its_path(state):
    with raises(CheckpointError):
        encode(replace(MANIFEST, data_state=state))


def test_state_without_end_is_refused():
    state = {}
    state["self"] = state
    with raises(CheckpointError):
        encode(replace(MANIFEST, data_state=state))


def test_numbers_of_subclasses_are_stored_by_value():
    stored = decode(encode(replace(MANIFEST, config={"lr": np.float64(0.1), "betas": (1, 2)})))
    assert stored.config == {"lr": 0.1, "betas": [1, 2]}
    assert type(stored.config["lr"]) is float


@pytest.mark.parametrize(
    "change",
    [{"seed": -1}, {"seed": "x"}, {"plan_hash": None}, {"data_state": {"at": "half \udcff"}}],
)
def test_a_manifest_that_could_not_be_read_back_is_not_written(change):
    with pytest.raises(CheckpointError, match="cannot be written"):
        encode(replace(MANIFEST, **change))


UNUSABLE = {
    "deep": {"data_state": json.loads('{"a":' * 70 + "1" + "}" * 70)},
    "deep config": {"config": json.loads('{"a":' * 70 + "1" + "}" * 70)},
    "half a surrogate": {"plan_hash": "\ud800"},
    "half a surrogate, deep": {"config": {"a": ["\udfff"]}},
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=list(UNUSABLE))
def test_a_signed_text_that_could_not_be_written_is_not_read(change):
    with pytest.raises(CheckpointDamaged):
        decode(sealed(as_json() | change))


def test_infinity_written_as_a_number_is_not_read():
    text = json.dumps(as_json()).replace("0.1", "1e999").encode()
    with raises(CheckpointDamaged):
        decode(sealed(text))


def test_more_than_a_reader_takes_is_not_written(monkeypatch):
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", len(encode(MANIFEST)))
    assert decode(encode(MANIFEST)) == MANIFEST
    with raises(CheckpointError):
        encode(replace(MANIFEST, plan_hash="abcd"))
