"""Runs whose checkpoints cannot be written for a while, or at all."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.checkpoint import fs as fs_module
from actorflow.checkpoint.errors import CheckpointError, CheckpointLockLost, CheckpointSpaceError
from actorflow.checkpoint.manager import CheckpointManager

STEPS = 6


@pytest.fixture
def break_disk(monkeypatch):
    """From the n-th checkpoint on, for some of them, a call of the disk fails."""

    def make(code, first, last=99, call="fsync"):
        attempts = []
        mkdir, real = fs_module.Fs.mkdir, getattr(fs_module.Fs, call)

        def counting(self, path):
            if path.name.startswith(".tmp-"):
                attempts.append(path)
            mkdir(self, path)

        def failing(self, *arguments):
            if first <= len(attempts) <= last:
                raise OSError(code, os.strerror(code), str(arguments[0]))
            return real(self, *arguments)

        monkeypatch.setattr(fs_module.Fs, "mkdir", counting)
        monkeypatch.setattr(fs_module.Fs, call, failing)
        return attempts

    return make


def fit(classify, mlp, source, folder, model=None, **options):
    settings = {"steps": STEPS, "every": 1, "keep_last": 9, "progress": False, **options}
    return classify().fit(model or mlp(), source, checkpoint=folder, **settings)


CODES = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_by_default_the_run_ends_with_a_typed_error(
    mlp, classification, classify, tmp_path, break_disk, code
):
    break_disk(code, first=3)
    kind = CheckpointSpaceError if code in (errno.ENOSPC, errno.EDQUOT) else CheckpointError
    with pytest.raises(kind, match=str(tmp_path / "run")) as raised:
        fit(classify, mlp, classification(), tmp_path / "run")
    assert raised.value.__cause__ is not None
    assert CheckpointManager(tmp_path / "run").steps() == (1, 2)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["fsync", "write", "rename", "create"])
def test_a_run_that_is_to_go_on_saves_again_when_it_can(
    mlp, classification, classify, tmp_path, break_disk, caplog, code, call
):
    expected = fit(classify, mlp, classification(), tmp_path / "whole")
    break_disk(code, first=2, last=4, call=call)
    result = fit(classify, mlp, classification(), tmp_path / "run", on_save_error="warn")
    assert result.last_step == STEPS
    assert CheckpointManager(tmp_path / "run").steps() == (1, 5, 6)
    assert caplog.text.count("The run continues (on_save_error='warn')") == 3
    assert caplog.text.count("checkpoints can be saved again: that of step 5 is") == 1
    loaded = CheckpointManager(tmp_path / "run").latest()
    for name, array in expected.variables.items():
        np.testing.assert_array_equal(result.variables[name], array, err_msg=name)
        np.testing.assert_array_equal(loaded.tensors[name], array, err_msg=name)
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_a_last_save_that_fails_is_an_error_and_the_model_is_trained(
    mlp, classification, classify, tmp_path, break_disk
):
    expected = fit(classify, mlp, classification(), tmp_path / "whole")
    attempts = break_disk(errno.ENOSPC, first=2)
    model = mlp()
    with pytest.raises(CheckpointSpaceError):
        fit(classify, mlp, classification(), tmp_path / "run", model, on_save_error="warn")
    assert len(attempts) == STEPS
    assert CheckpointManager(tmp_path / "run").steps() == (1,)
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, expected.variables[name], err_msg=name)


@pytest.mark.host("a snapshot of the first steps may still be on its way")
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_directory_that_another_run_took_is_left_to_it(
    mlp, classification, classify, tmp_path, policy
):
    folder = tmp_path / "run"

    def take_over(step, metrics):
        if step == 3:
            folder.rename(tmp_path / "elsewhere")
            folder.mkdir()
            (folder / "status.json").write_text("another run's")

    # Between the two calls of `take_over` there is no directory at all.
    lost = "no longer belongs to this run: the directory was (replaced|moved or removed) during"
    with pytest.raises(CheckpointLockLost, match=lost):
        fit(
            classify, mlp, classification(), folder, steps=30, on_step=take_over,
            on_save_error=policy,
        )  # fmt: skip
    assert os.listdir(folder) == ["status.json"]
    assert (folder / "status.json").read_text() == "another run's"
    assert CheckpointManager(tmp_path / "elsewhere").latest() is not None


def test_a_directory_that_is_put_back_is_written_again(mlp, classification, classify, tmp_path):
    folder = tmp_path / "run"

    def move(step, metrics):
        if step == 3:
            folder.rename(tmp_path / "elsewhere")
        if step == 40:
            (tmp_path / "elsewhere").rename(folder)

    result = fit(
        classify, mlp, classification(), folder, steps=60, on_step=move, on_save_error="warn"
    )
    assert result.last_step == 60
    assert CheckpointManager(folder).latest().manifest.step == 60


def test_a_directory_that_is_removed_ends_the_run_with_a_typed_error(
    mlp, classification, classify, tmp_path
):
    def remove(step, metrics):
        if step == 3:
            (tmp_path / "run").rename(tmp_path / "gone")  # a save may be under way in it
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)

    with raises(CheckpointLockLost):
        fit(classify, mlp, classification(), tmp_path / "run", steps=30, on_step=remove)
    assert not (tmp_path / "run").exists()


def test_another_word_for_the_policy_is_refused(mlp, classification, classify, tmp_path):
    with raises(af.CompileError):
        fit(classify, mlp, classification(), tmp_path / "run", on_save_error="ignore")
    assert not (tmp_path / "run").exists()


ON_A_SMALL_DISK = """
    import os, subprocess, sys
    import numpy as np
    import actorflow as af
    from actorflow import nn
    from actorflow.checkpoint.errors import CheckpointSpaceError
    from actorflow.checkpoint.manager import CheckpointManager

    disk = sys.argv[1]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)

    @af.job(optimizer=af.optim.AdamW(1e-2))
    def train(model, batch):
        return model(batch.x).mean()

    def fit(steps, **options):
        data = af.data.ArraySource({"x": np.ones((64, 8), np.float32)}, batch=8)
        return train.fit(
            nn.Linear(8, 300), data, steps=steps, checkpoint=disk + "/run", every=1, keep_last=1,
            progress=False, **options,
        )

    fit(2)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with open(disk + "/ballast", "wb") as file:
        file.write(bytes(free - 20_000))
    try:
        fit(6)
    except CheckpointSpaceError as error:
        assert disk in str(error), error
        assert error.free_bytes < error.need_bytes < 64_000, error
    else:
        raise AssertionError("no error")
    assert CheckpointManager(disk + "/run").latest().manifest.step == 2

    def make_room(step, metrics):
        if step == 20:
            os.unlink(disk + "/ballast")

    assert fit(60, on_step=make_room, on_save_error="warn").last_step == 60
    assert CheckpointManager(disk + "/run").latest().manifest.step == 60
"""


def test_a_small_disk_that_is_full_is_a_typed_error_or_a_warning(tmp_path):
    (tmp_path / "disk").mkdir()
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(ON_A_SMALL_DISK))
    own = ["unshare", "--map-root-user", "--mount"]  # mounts that end with the process
    is_there = shutil.which("unshare") is not None
    if not is_there or subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system gives no process mounts of its own")
    done = subprocess.run(
        [*own, sys.executable, str(script), str(tmp_path / "disk")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The run continues" in done.stderr
