"""Who waits at a terminal for a compilation hears what is done."""

import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np, actorflow as af
from actorflow import nn

@af.job(optimizer=af.optim.AdamW(0.1))
def slow(model, batch):
    return af.square(af.softmax(model(batch.x), -1)).mean()

data = af.data.ArraySource({"x": np.ones((8, 4), np.float32)}, batch=4)
slow.fit(nn.Linear(4, 8), data, steps=1, progress=False)
"""

COMPILER = """#!/bin/sh
case "$*" in *kernels.c*)
    if [ -e "$0.first" ]; then read -r _ < "$0.wait"; else : > "$0.first"; fi ;;
esac
exec {cc} "$@"
"""
"""Builds one file, the runtime, as it is, and each later one when the test writes a line."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_phase_is_named_while_the_compiler_works(tmp_path):
    compiler = tmp_path / "slow-cc"
    compiler.write_text(COMPILER.format(cc=shutil.which("cc")))
    compiler.chmod(0o755)
    os.mkfifo(f"{compiler}.wait")
    release = os.open(f"{compiler}.wait", os.O_RDWR)
    environ = os.environ | {"CC": str(compiler), "ACTORFLOW_CACHE": str(tmp_path / "cache")}
    environ.pop("ACTORFLOW_NATIVE", None)
    read_end, write_end = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=write_end, stderr=write_end, env=environ
    )
    os.close(write_end)
    told = b""
    while b"job 'slow': " not in told or not told.endswith(b"\n"):
        told += os.read(read_end, 4096)
    os.write(release, b"\n" * 1000)
    try:
        while chunk := os.read(read_end, 4096):
            told += chunk
    except OSError:  # EIO: nobody has the other end any more
        pass
    os.close(read_end)
    os.close(release)
    assert started.wait() == 0, told
    assert re.search(rb"job 'slow': (planning|compiling kernels)", told)
