"""Whatever happens to the bytes of a checkpoint is noticed, and the next older one is used."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disks import LogFs
from error_texts import raises

from actorflow.checkpoint.errors import CheckpointDamaged, CheckpointError, NoValidCheckpoint
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.checkpoint.manifest import Expected, decode, encode
from actorflow.checkpoint.shard import FileEntry, ShardSpec, TensorPiece

RUN = Path("/disk/run")
FILES = ["manifest.json", "model-00001.safetensors", "optim-00001.safetensors"]


@pytest.fixture
def saved(make_run):
    fs = LogFs(Path("/disk"))
    run = make_run(fs, RUN, keep_last=5)
    with run.manager:
        for step in (1, 2):
            run.save(step, run.groups(step, size=10))
    return run


def content(run, step, name):
    """The bytes of one file of a checkpoint, open to damage."""
    directory = RUN / f"step-{step:010d}"
    return run.fs.inodes[run.fs.inodes[run.fs._find(directory)].entries[name]].data


def assert_noticed(run, step=2):
    with pytest.raises(CheckpointDamaged):
        run.manager.verify(step)
    with pytest.raises(CheckpointDamaged):
        run.manager.load(step)


def test_every_flipped_bit_of_every_file_is_noticed(saved):
    num_flips = 0
    for name in FILES:
        data = content(saved, 2, name)
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CheckpointDamaged):
                saved.manager.verify(2)
            data[bit // 8] ^= 1 << bit % 8
            num_flips += 1
    saved.manager.verify(2)
    assert num_flips > 10_000


@pytest.mark.parametrize("name", FILES)
def test_every_cut_and_every_appended_byte_is_noticed(saved, name):
    data = content(saved, 2, name)
    original = bytes(data)
    for length in range(len(original)):
        data[:] = original[:length]
        assert_noticed(saved)
    for extra in (b"\0", b"\n", b"x" * 1000, original):
        data[:] = original + extra
        assert_noticed(saved)
    data[:] = original
    saved.manager.verify(2)


@pytest.mark.parametrize("name", FILES)
def test_zeroed_pages_and_exchanged_bytes_are_noticed(saved, name):
    data = content(saved, 2, name)
    original = bytes(data)
    for start in range(0, len(original), 64):
        data[:] = original
        data[start : start + 64] = bytes(len(original[start : start + 64]))
        if data != original:
            assert_noticed(saved)
    data[:] = original[::-1]
    assert_noticed(saved)


def test_files_swapped_within_and_between_checkpoints_are_noticed(saved):
    for first, second in [
        ((2, FILES[1]), (2, FILES[2])),
        ((2, FILES[1]), (1, FILES[1])),
        ((2, FILES[0]), (1, FILES[0])),
    ]:
        a, b = content(saved, *first), content(saved, *second)
        a[:], b[:] = bytes(b), bytes(a)
        assert_noticed(saved)
        a[:], b[:] = bytes(b), bytes(a)
        saved.manager.verify(2)


def test_a_checkpoint_under_another_ones_name_is_noticed(saved):
    saved.fs.rename(RUN / "step-0000000002", RUN / "step-0000000005")
    with raises(CheckpointDamaged):
        saved.manager.verify(5)


def test_a_hostile_manifest_with_a_right_hash_cannot_pass_another_tensor_off(saved):
    data = content(saved, 2, FILES[0])
    original = bytes(data)
    manifest = decode(original)

    (first,) = (t for t in manifest.tensors if t.name == "w")
    others = tuple(t for t in manifest.tensors if t.name != "w")
    (piece,) = (p for p in manifest.pieces if p.tensor == "w")
    rest = tuple(p for p in manifest.pieces if p.tensor != "w")
    changed = {
        "x": (replace(first, name="x"), replace(piece, tensor="x")),
        "shape": (
            replace(first, shape=first.shape[::-1]), replace(piece, extents=first.shape[::-1]),
        ),
        "dtype": (replace(first, dtype="uint64"), piece),
        "hash": (first, replace(piece, xxh3_128="0" * 32)),
    }  # fmt: skip
    file, *files = manifest.files
    lies = [
        replace(manifest, step=3),
        replace(manifest, files=(replace(file, xxh3_128="0" * 32), *files)),
        *(
            replace(manifest, tensors=(tensor, *others), pieces=(box, *rest))
            for tensor, box in changed.values()
        ),
    ]
    for lie in lies:
        assert lie != manifest
        data[:] = encode(lie)
        assert_noticed(saved)


def test_a_signed_tensor_larger_than_any_memory_is_a_typed_error(saved):
    manifest = decode(bytes(content(saved, 2, FILES[0])))
    (w,) = [t for t in manifest.tensors if t.name == "w"]
    w = replace(w, dtype="float64", shape=(2**58,))
    (piece,) = [
        replace(p, extents=w.shape, offset=(0,)) for p in manifest.pieces if p.tensor == "w"
    ]
    spec = ShardSpec(piece.file, (TensorPiece(w, (0,), w.shape),))
    file = FileEntry(piece.file, spec.size_bytes(), "0" * 32)
    lie = replace(manifest, files=(file,), tensors=(w,), pieces=(piece,))
    content(saved, 2, FILES[0])[:] = encode(lie)
    content(saved, 2, piece.file)[:] = spec.header()

    class Sparse:
        """Says that a file has the size that its manifest claims, as one with a hole may."""

        def __getattr__(self, name):
            return getattr(saved.fs, name)

        def stat_open(self, fd):
            found = saved.fs.stat_open(fd)
            is_shard = found.size_bytes == len(spec.header())
            return replace(found, size_bytes=spec.size_bytes()) if is_shard else found

    manager = CheckpointManager(RUN, fs=Sparse(), report=saved.reports.append)
    with raises(CheckpointError):
        manager.load(2)
    expected = Expected({t.name: f"{t.dtype}{list(t.shape)}" for t in manifest.tensors})
    assert manager.latest(expected).manifest.step == 1


@pytest.mark.parametrize("name", FILES)
def test_the_newest_valid_one_is_used_and_the_damaged_one_reported(saved, name):
    content(saved, 2, name)[-1] ^= 1
    loaded = saved.manager.latest()
    assert loaded.manifest.step == 1
    assert len(saved.reports) == 1
    assert "step 2 is damaged and not used" in saved.reports[0]
    assert "/disk/run/step-0000000002" in saved.reports[0]


def test_damaged_checkpoints_alone_never_mean_a_fresh_start(saved):
    for step in (1, 2):
        content(saved, step, FILES[1])[-1] ^= 1
    with raises(NoValidCheckpoint):
        saved.manager.latest()
    assert len(saved.reports) == 2


def test_an_empty_checkpoint_directory_is_damaged(saved):
    saved.fs.mkdir(RUN / "step-0000000009")
    with raises(CheckpointDamaged):
        saved.manager.verify(9)
    assert saved.manager.latest().manifest.step == 2


def test_falling_back_goes_on_and_the_damaged_one_is_replaced_when_reached(saved, make_run):
    content(saved, 2, FILES[2])[-1] ^= 1
    run = make_run(saved.fs, RUN, keep_last=1)
    with run.manager:
        run.save(1, run.groups(1, size=10))
        assert run.manager.steps() == (1, 2), (
            "the one just saved is not pushed out by a damaged one"
        )
        run.save(2, run.groups(2, size=10))
        assert run.manager.steps() == (2,)
        run.manager.verify(2)
    assert "replacing the damaged checkpoint of step 2" in run.reports[0]


@pytest.fixture
def real(real_run):
    with real_run.manager:
        real_run.save(1)
        real_run.save(2)
    return real_run


def shard_path(run, name=FILES[1]):
    return run.directory / "step-0000000002" / name


def as_link(path):
    copy = path.parent.parent / "copy"
    shutil.move(path, copy)
    path.symlink_to(copy)


def as_fifo(path):
    path.unlink()
    os.mkfifo(path)


def as_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [as_link, as_fifo, as_directory, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_damaged_even_with_the_right_bytes(real, name, change):
    change(shard_path(real, name))
    with raises(CheckpointDamaged):
        real.manager.verify(2)
    real.assert_holds(1, real.manager.latest())


def test_a_checkpoint_that_is_a_link_is_not_followed(real, tmp_path):
    step = real.directory / "step-0000000002"
    shutil.move(step, tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged):
        real.manager.verify(2)


def test_files_that_the_manifest_does_not_name_are_ignored(real):
    (real.directory / "step-0000000002" / "notes.txt").write_text("mine")
    (real.directory / "metrics.jsonl").write_text("{}")
    (real.directory / "step-2").mkdir()
    (real.directory / "step-00000000021").mkdir()
    real.assert_holds(2, real.manager.latest())
    assert real.manager.steps() == (1, 2)


def test_loaded_arrays_are_the_callers_own(real):
    loaded = real.manager.latest()
    loaded.tensors["w"][:] = 0
    assert np.any(real.manager.latest().tensors["w"])
