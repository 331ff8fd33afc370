"""What a process was started with (folders, standard files, limits), on ranks and on one."""

import errno
import os
import subprocess
import sys

import pytest
from error_texts import raises

from actors.kernels.library import toolchain
from compiler.contract.errors import DeviceError

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]

SCRIPT = """
import os, sys, tempfile
rank = os.environ.get("RANK")
if "apart" in sys.argv and rank == "1":
    os.chdir("/")
if "removed" in sys.argv:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
import numpy as np
import actorflow as af
from actorflow import nn

x = np.ones((96, 8), np.float32)
mesh = af.Mesh(data=2) if rank is not None else None
train = af.job(lambda m, b: (m(b.x) ** 2).mean(), optimizer=af.optim.SGD(0.1), mesh=mesh)
model = nn.Linear(8, 4)
for _ in range(2):
    train.step(model, {"x": x})
train.fit(model, af.data.ArraySource({"x": x}, batch=12), steps=3, progress=False)
for _ in train.stream(model, af.data.ArraySource({"x": x}, batch=12), steps=2):
    pass
with open(sys.argv[1] + (rank or ""), "w") as file:
    file.write("trained")
"""

ONE, RANKS = (), ("-m", "actorflow", "launch", "-n", "2")


def ended(folder, head, before="", after="", word=""):
    """Return the end of a script that a shell starts, and what its ranks wrote."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    told = folder / "told"
    command = f'{before} exec "$@" {after}'
    own = [sys.executable, *head, str(script), str(told), word]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # a limit would cut what it writes
    end = subprocess.run(
        ["sh", "-c", command, "sh", *own],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return end, sorted([path.name for path in folder.glob("told*")])


SURROUNDINGS = {
    "another folder on one rank": {"word": "apart"},
    "a removed folder": {"word": "removed"},
    "a removed folder of the launcher": {"before": "mkdir x; cd x; rmdir ../x;"},
    "no stdout": {"after": ">&-"},
    "no stderr": {"after": "2>&-"},
    "no standard file at all": {"after": "<&- >&- 2>&-"},
    "a full stdout": {"after": ">/dev/full"},
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("head", [RANKS, ONE])
def test_a_job_trains_whatever_its_folders_and_standard_files(tmp_path, head, around):
    end, told = ended(tmp_path, head, **SURROUNDINGS[around])
    assert end.returncode == 0, end.stderr
    assert told == (["told0", "told1"] if head else ["told"])


def test_a_limit_on_files_is_named_where_ranks_get_no_memory(tmp_path):
    end, told = ended(tmp_path, RANKS, before="ulimit -f 64;")
    assert (end.returncode, told) == (1, [])
    assert "ulimit -f" in end.stderr
    assert "Traceback" not in end.stderr


@pytest.mark.parametrize("command", [("cc",), ("ccache", "gcc")])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_compiler_that_no_descriptor_is_left_for_is_not_missing(monkeypatch, number, command):
    def run(*of, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "run", run)
    with raises(DeviceError):
        toolchain._version(command)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOEXEC])
def test_a_compiler_that_cannot_be_started_is_none(monkeypatch, number):
    def run(*of, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "run", run)
    assert toolchain._version(("cc",)) is None
