"""What may lie at a name in a folder that others may write, and what is done about it."""

import ast
import errno
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
from error_texts import raises

from compiler.contract.files import open_regular, read_regular, replace_regular

ROOT = Path(__file__).resolve().parents[3]
APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT


def a_pipe(path, victim):
    os.mkfifo(path)


def a_folder(path, victim):
    path.mkdir()


def a_socket(path, victim):
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(os.path.relpath(path))


def a_link(path, victim):
    path.symlink_to(victim)


def a_link_to_nothing(path, victim):
    path.symlink_to(victim.with_name("made by nobody"))


def a_link_to_itself(path, victim):
    path.symlink_to(path)


def a_link_to_a_device(path, victim):
    path.symlink_to("/dev/zero")


def a_second_name(path, victim):
    os.link(victim, path)


LINKS = [a_link, a_link_to_nothing, a_link_to_itself, a_link_to_a_device]
TRAPS = [a_pipe, a_folder, a_socket, *LINKS]


@pytest.fixture
def victim(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket may not be long
    (tmp_path / "elsewhere").mkdir()
    victim = tmp_path / "elsewhere" / "victim"
    victim.write_text("precious")
    yield victim
    assert victim.read_text() == "precious"
    assert os.listdir(victim.parent) == ["victim"]


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, APPEND, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, victim, trap, flags):
    trap(tmp_path / "x", victim)
    with raises(OSError) as said:
        open_regular(tmp_path / "x", flags)
    assert said.value.filename == str(tmp_path / "x")


def test_a_pipe_that_somebody_reads_is_not_written_to(tmp_path):
    os.mkfifo(tmp_path / "x")
    reader = os.open(tmp_path / "x", os.O_RDONLY | os.O_NONBLOCK)
    with raises(OSError):
        open_regular(tmp_path / "x", APPEND)
    os.close(reader)


def test_a_file_with_a_second_name_is_read_and_not_written(tmp_path, victim):
    a_second_name(tmp_path / "x", victim)
    assert read_regular(tmp_path / "x", 100) == b"precious"
    with raises(OSError):
        open_regular(tmp_path / "x", APPEND)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
def test_a_file_of_another_user_is_written_where_the_folder_is_theirs_too(tmp_path):
    file = tmp_path / "x"
    file.write_text("theirs")
    os.chown(file, 4711, -1)
    assert read_regular(file, 100) == b"theirs"
    with raises(OSError) as said:
        open_regular(file, APPEND)
    assert said.value.errno == errno.EPERM
    os.chown(tmp_path, 4711, -1)
    os.close(open_regular(file, APPEND))


@pytest.mark.parametrize("trap", [a_pipe, a_socket, *LINKS, a_second_name])
@pytest.mark.parametrize("name", ["x", "x.partial"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_replaced_is_neither_followed_nor_waited_for(
    tmp_path, victim, trap, name, is_shared
):
    trap(tmp_path / name, victim)
    replace_regular(tmp_path / "x", b"new", is_shared=is_shared)
    assert read_regular(tmp_path / "x", 3) == b"new"
    assert (tmp_path / "x").lstat().st_nlink == 1


def test_a_folder_is_not_replaced_and_nothing_is_left_beside_it(tmp_path):
    (tmp_path / "x").mkdir()
    for is_shared in (False, True):
        with pytest.raises(IsADirectoryError):
            replace_regular(tmp_path / "x", b"new", is_shared=is_shared)
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("size_bytes", [0, 1, 99, 100])
def test_a_file_is_read_up_to_its_bound(tmp_path, size_bytes):
    (tmp_path / "x").write_bytes(bytes(size_bytes))
    assert read_regular(tmp_path / "x", 100) == bytes(size_bytes)


@pytest.mark.parametrize("size_bytes", [101, 1 << 40])
def test_a_file_above_its_bound_is_not_read(tmp_path, size_bytes):
    with open(tmp_path / "x", "wb") as file:
        file.truncate(size_bytes)
    with raises(OSError):
        read_regular(tmp_path / "x", 100)


OPENERS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "mkstemp"}
OTHERS = {
    "actorflow/checkpoint/fs.py": "folders, the null device, calls of Fs itself",
    "actorflow/compile/compiling.py": "sources of the compiler and of plugins",
    "actorflow/compile/extensions.py": "entry points of installed packages",
    "actorflow/compile/prove.py": "/proc",
    "actors/kernels/library/runtime.py": "sources of ours",
    "actors/kernels/library/resident.py": "/proc",
    "actors/kernels/library/toolchain.py": "/proc, a folder just made",
    "actorflow/run/runner.py": "a method of its plans",
    "actorflow/run/report.py": "a descriptor of the door",
    "actors/loop/watchdog.py": "a descriptor of the door",
    "actors/kernels/library/openblas.py": "/proc",
    "actors/kernels/library/tuning.py": "/proc",
    "actors/loop/timeline.py": "the file that ACTORFLOW_TRACE names",
    "actorflow/checkpoint/manager.py": "its own method of that name",
}
"""Files of the rooms below that open something else, and what."""


@pytest.mark.parametrize(
    "room",
    ["actorflow/checkpoint", "actorflow/compile", "actorflow/run", "actors/kernels/common",
     "actors/kernels/library", "actors/loop"],
)  # fmt: skip
def test_rooms_that_write_into_shared_folders_open_files_by_the_door_alone(room):
    found = set()
    for path in (ROOT / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in OPENERS:
                found.add(str(path.relative_to(ROOT)))
    assert found <= set(OTHERS)
