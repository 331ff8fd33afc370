import errno
import os
import stat

import pytest
from disks import LogFs
from error_texts import raises

from actorflow.checkpoint.fs import Fs, is_safe_name, remove_tree

BAD_NAMES = [
    "..", ".", "", "../x", "/etc/passwd", "x/y", "x\0y", "Model.safetensors", "a" * 200,
    "x\n", "x ", "x.", "é", ".hidden", "-dash", "con", "nul.txt", "com1", "lpt9.safetensors",
    None, 3, b"x",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_could_leave_the_directory_or_clash_is_refused(name, tmp_path):
    assert not is_safe_name(name)
    with raises(OSError):
        Fs().open_read(tmp_path, name)


@pytest.mark.parametrize("name", ["manifest.json", "model-00001.safetensors", "a", "console.x"])
def test_a_plain_name_is_permitted(name):
    assert is_safe_name(name)


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "fifo")
    fs = Fs()
    fs.close(fs.open_read(tmp_path, "real"))
    for name, code in [("link", errno.ELOOP), ("dir", errno.ENXIO), ("fifo", errno.ENXIO)]:
        with pytest.raises(OSError) as raised:
            fs.open_read(tmp_path, name)
        assert raised.value.errno == code


def test_a_directory_that_is_a_link_is_not_entered(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError) as raised:
        Fs().open_read(tmp_path / "link", "x")
    assert raised.value.errno in (errno.ELOOP, errno.ENOTDIR)


def test_removing_a_tree_does_not_follow_links(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("x")
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "link").symlink_to(tmp_path / "outside")
    (tree / "deep" / "file").write_text("x")
    remove_tree(Fs(), tree)
    assert not tree.exists()
    assert (tmp_path / "outside" / "kept").exists()


def outcome(call):
    try:
        result = call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return result if isinstance(result, list | bool) else None


def play(fs, root):
    """A walk over names; returns what each call answered."""

    def tree(path):
        return fs.stat(path).is_directory

    yield outcome(lambda: fs.mkdir(root / "a"))
    yield outcome(lambda: fs.mkdir(root / "a"))
    yield outcome(lambda: fs.mkdir(root / "no" / "b"))
    fd = fs.create(root / "a" / "f")
    fs.write(fd, memoryview(b"12345"))
    fs.fsync(fd)
    fs.close(fd)
    yield outcome(lambda: fs.create(root / "a" / "f"))
    yield outcome(lambda: fs.rmdir(root / "a"))
    yield outcome(lambda: fs.rename(root / "a", root / "b"))
    yield outcome(lambda: fs.rename(root / "a", root / "c"))
    yield outcome(lambda: fs.listdir(root))
    yield outcome(lambda: fs.listdir(root / "b"))
    yield outcome(lambda: fs.listdir(root / "b" / "f"))
    yield outcome(lambda: fs.listdir(root / "zzz"))
    yield outcome(lambda: tree(root / "b"))
    yield outcome(lambda: tree(root / "b" / "f"))
    yield outcome(lambda: tree(root / "zzz"))
    yield outcome(lambda: fs.mkdir(root / "full"))
    yield outcome(lambda: fs.mkdir(root / "full" / "x"))
    yield outcome(lambda: fs.rename(root / "b", root / "full"))
    yield outcome(lambda: fs.mkdir(root / "empty"))
    yield outcome(lambda: fs.rename(root / "full", root / "empty"))
    yield outcome(lambda: fs.listdir(root))
    yield outcome(lambda: fs.unlink(root / "empty"))
    yield outcome(lambda: fs.fsync_dir(root / "b"))
    yield outcome(lambda: fs.fsync_dir(root / "zzz"))
    yield outcome(lambda: fs.open_read(root / "b", "zzz"))
    yield outcome(lambda: fs.open_read(root / "zzz", "f"))
    fd = fs.open_read(root / "b", "f")
    buffer = bytearray(4)
    yield [fs.stat_open(fd).size_bytes, fs.readinto(fd, memoryview(buffer)), bytes(buffer)]
    yield [fs.readinto(fd, memoryview(buffer)), fs.readinto(fd, memoryview(buffer))]
    fs.close(fd)
    first = fs.lock(root / "lock", "me")
    yield outcome(lambda: fs.lock(root / "lock", "you"))
    fs.close(first)
    fs.close(fs.lock(root / "lock", "you"))
    yield outcome(lambda: fs.unlink(root / "b" / "f"))
    yield outcome(lambda: fs.unlink(root / "b" / "f"))
    yield outcome(lambda: fs.rmdir(root / "b"))
    yield outcome(lambda: fs.listdir(root))


def test_the_disk_in_memory_answers_like_the_real_one(tmp_path):
    assert list(play(LogFs(tmp_path), tmp_path)) == list(play(Fs(), tmp_path))


def test_a_lock_names_its_owner_and_can_be_taken_after_it(tmp_path):
    fs = Fs()
    first = fs.lock(tmp_path / "lock", "somebody with a long name")
    fs.close(first)
    first = fs.lock(tmp_path / "lock", "process 12")
    with pytest.raises(BlockingIOError, match="process 12:"):
        fs.lock(tmp_path / "lock", "me")
    fs.close(first)


def test_files_are_readable_by_others_as_the_umask_allows(tmp_path):
    fs = Fs()
    old = os.umask(0o022)
    try:
        fs.close(fs.create(tmp_path / "f"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o644


def test_free_space_is_what_the_system_says(tmp_path):
    status = os.statvfs(tmp_path)
    assert 0 <= Fs().free_bytes(tmp_path) <= status.f_blocks * status.f_frsize


def test_a_forked_child_has_no_part_in_a_lock(tmp_path, child_says):
    fs = Fs()
    held = fs.lock(tmp_path / "lock", "the parent")
    again = "BlockingIOError: [Errno 11] the parent"
    assert child_says(lambda: fs.lock(tmp_path / "lock", "the child")).startswith(again)
    gate_in, gate_out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_out)
        os.read(gate_in, 1)  # lives until the parent has taken the lock anew
        os._exit(0)
    fs.close(held)
    fs.close(fs.lock(tmp_path / "lock", "the parent again"))
    os.close(gate_out)
    assert os.waitpid(child, 0)[1] == 0
    os.close(gate_in)


def test_closing_an_inherited_lock_in_a_child_closes_nothing_else(tmp_path, child_says):
    fs = Fs()
    held = fs.lock(tmp_path / "lock", "the parent")

    def close_it():
        came = os.fstat(held).st_rdev
        fs.close(held)
        return came == os.stat(os.devnull).st_rdev

    assert child_says(close_it) == "True"
    fs.close(held)
