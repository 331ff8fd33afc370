from pathlib import Path

import numpy as np
import pytest
from disks import LogFs

from actorflow.checkpoint.manager import CheckpointManager

FACTS = {
    "seed": 7,
    "plan_hash": "plan",
    "config": {"lr": 1e-3},
    "data_fingerprint": "data",
}


class Run:
    """A run directory with a writer: saves small states that are a function of the step."""

    def __init__(self, fs, directory, keep_last=2):
        self.fs = fs
        self.directory = Path(directory)
        self.reports = []
        self.manager = CheckpointManager(
            directory, keep_last=keep_last, fs=fs, report=self.reports.append
        )

    def groups(self, step, size=300):
        rng = np.random.default_rng(step)
        return {
            "model": {"w": rng.standard_normal((size // 10, 10)), "b": rng.integers(0, 9, 5)},
            "optim": {"w.m": rng.standard_normal(size).astype(np.float32)},
        }

    def save(self, step, groups=None, **facts):
        return self.manager.save(
            step,
            self.groups(step) if groups is None else groups,
            **{**FACTS, "data_state": {"batches": step}, **facts},
        )

    def assert_holds(self, step, loaded):
        assert loaded.manifest.step == step
        expected = {k: v for g in self.groups(step).values() for k, v in g.items()}
        assert sorted(loaded.tensors) == sorted(expected)
        for name, array in expected.items():
            assert loaded.tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded.tensors[name], array)


@pytest.fixture
def real_run(tmp_path):
    run = Run(None, tmp_path / "runs" / "demo")
    yield run
    run.manager.close()


@pytest.fixture
def make_run():
    return Run


@pytest.fixture
def memory_run():
    fs = LogFs(Path("/disk"))
    run = Run(fs, "/disk/run")
    with run.manager:
        yield run
    assert fs.open_files == {}, "a descriptor was left open"
