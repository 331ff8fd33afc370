import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import actorflow as af
from actorflow import nn
from actorflow.compile import compiling
from actorflow.compile.compiling import PlanCache
from actors.kernels.common import files
from actors.kernels.common.files import write_checksummed
from compiler.contract.types import DType, TensorType

ROOT = Path(__file__).resolve().parents[3]
SPEC = {"x": TensorType(DType.FLOAT32, (4, 3))}


@pytest.fixture
def compiles(monkeypatch, tmp_path, compiled_graphs):
    """Count real compilations, with a cache directory of the test's own."""
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "cache"))
    return compiled_graphs


def fresh_job(rate=0.1):
    @af.job(optimizer=af.optim.SGD(rate))
    def train(model, batch):
        return model(batch.x).mean()

    return train


def compiled_at(rate=0.1):
    return fresh_job(rate).compile(nn.Linear(3, 2), SPEC)


def test_a_second_process_takes_the_plan_from_disk(compiles):
    one, two = (fresh_job().compile(nn.Linear(3, 2), SPEC) for _ in range(2))
    assert one == two
    assert len(compiles) == 1


def test_one_job_compiles_once_per_signature(compiles, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    train, model = fresh_job(), nn.Linear(3, 2)
    assert train.compile(model, SPEC) is train.compile(model, SPEC)
    train.compile(model, SPEC, every=10)
    assert len(compiles) == 2


def test_anything_that_changes_the_plan_changes_the_key(compiles):
    fresh_job(0.1).compile(nn.Linear(3, 2), SPEC)
    fresh_job(0.2).compile(nn.Linear(3, 2), SPEC)
    fresh_job(0.1).compile(nn.Linear(3, 2, bias=False), SPEC)
    fresh_job(0.1).compile(nn.Linear(3, 2), {"x": TensorType(DType.FLOAT32, (5, 3))})
    assert len(compiles) == 4


def test_a_damaged_file_is_reported_and_compiled_anew(compiles, tmp_path, caplog):
    for _ in range(2):
        fresh_job().compile(nn.Linear(3, 2), SPEC)
        (file,) = (tmp_path / "cache").rglob("*.plan")
        file.write_bytes(file.read_bytes()[:-9])
    assert len(compiles) == 2
    assert "compiling again" in caplog.text


def a_huge_file(path, victim):
    with open(path, "wb") as file:
        file.truncate(128 << 30)


@pytest.mark.parametrize(
    "trap",
    [
        lambda path, victim: os.mkfifo(path), lambda path, victim: path.symlink_to(victim),
        lambda path, victim: path.symlink_to("nowhere"),
        lambda path, victim: path.symlink_to("/dev/zero"), a_huge_file,
        lambda path, victim: os.link(victim, path),
    ],
    ids=["pipe", "link", "link to nothing", "device", "huge file", "second name"],
)  # fmt: skip
def test_a_trap_in_the_cache_costs_a_compilation(compiles, tmp_path, trap, caplog):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    plan = compiled_at()
    (file,) = (tmp_path / "cache").glob("*.plan")
    file.unlink()
    trap(file, victim)
    assert compiled_at() == plan
    assert len(compiles) == 2
    assert "compiling again" in caplog.text
    assert victim.read_text() == "precious"
    assert compiled_at() == plan
    assert len(compiles) == 2, "the trap was replaced"


def test_a_cached_plan_that_is_not_proven_is_reported_and_compiled_anew(compiles, tmp_path, caplog):
    plan = compiled_at()
    (file,) = (tmp_path / "cache").glob("*.plan")
    actors = [
        replace(a, launches=tuple([replace(x, kernel="numpy.none") for x in a.launches]))
        for a in plan.actors
    ]
    hostile = replace(plan, actors=tuple(actors))
    write_checksummed(file, hostile.to_bytes())
    assert compiled_at() == plan
    assert len(compiles) == 2
    assert "which is unknown on this machine" in caplog.text


def test_a_folder_that_others_may_write_is_not_believed(compiles, tmp_path, caplog):
    fresh_job().compile(nn.Linear(3, 2), SPEC)
    (tmp_path / "cache").chmod(0o777)
    fresh_job().compile(nn.Linear(3, 2), SPEC)
    assert len(compiles) == 2
    assert caplog.text.count("others may write") == 1
    assert "the cache is not used" in caplog.text


def test_files_that_swapped_their_names_do_not_answer_for_each_other(compiles, tmp_path, caplog):
    plans = [compiled_at(0.1), compiled_at(0.2)]
    one, two = (tmp_path / "cache").glob("*.plan")
    one.rename(tmp_path / "third")
    two.rename(one)
    (tmp_path / "third").rename(two)
    assert [compiled_at(0.1), compiled_at(0.2)] == plans
    assert len(compiles) == 4
    assert caplog.text.count("holds the plan of another key") == 2


@pytest.mark.parametrize("at", [0, 30, 60, 90, -1])
def test_no_changed_byte_of_a_file_goes_unnoticed(compiles, tmp_path, caplog, at):
    plan = compiled_at()
    (file,) = (tmp_path / "cache").glob("*.plan")
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert compiled_at() == plan
    assert len(compiles) == 2
    assert caplog.text.count("compiling again") == 1


def plan_files(tmp_path):
    return {file.name: file for file in (tmp_path / "cache").glob("*.plan")}


@pytest.fixture
def looks_each_time(monkeypatch):
    """Let the cache look for what is too old after each plan."""
    monkeypatch.setattr(files, "LOOK_EVERY", 1)


def test_plans_used_longest_ago_make_room_for_a_new_one(
    compiles, tmp_path, monkeypatch, looks_each_time
):
    plans = [compiled_at(rate) for rate in (0.1, 0.2, 0.3)]
    kept = sorted(plan_files(tmp_path).values(), key=lambda file: file.stat().st_mtime_ns)
    now = kept[0].stat().st_mtime
    for file, days in zip(kept, (30, 20, 10), strict=True):
        os.utime(file, (now, now - days * 86_400))
    assert compiled_at(0.1) == plans[0], "the oldest is used, and so the youngest"
    size = max(file.stat().st_size for file in kept)
    monkeypatch.setenv("ACTORFLOW_CACHE_SIZE", f"{3 * size + 100} B")
    compiled_at(0.4)
    assert len(compiles) == 4
    left = plan_files(tmp_path)
    assert [file.name in left for file in kept] == [True, False, True]
    assert len(left) == 3


def test_a_plan_larger_than_the_bound_is_kept_alone(
    compiles, tmp_path, monkeypatch, looks_each_time
):
    monkeypatch.setenv("ACTORFLOW_CACHE_SIZE", "1")
    for rate in (0.1, 0.2, 0.2):
        compiled_at(rate)
    assert (len(compiles), len(plan_files(tmp_path))) == (2, 1)


def test_an_unwritable_cache_is_reported_and_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    told = []
    plan = fresh_job().compile(nn.Linear(3, 2), SPEC)
    PlanCache(blocked / "cache", told.append).store("0" * 32, plan)
    assert len(told) == 1
    assert str(blocked) in told[0]


def test_a_cache_that_is_off_keeps_nothing():
    cache = PlanCache(None, print)
    cache.store("0" * 32, fresh_job().compile(nn.Linear(3, 2), SPEC))
    assert cache.find("0" * 32) is None


OP = """
import numpy as np
from compiler.graph.columns import reference_of, gradient_of
from compiler.ops.families.arithmetic import scaled
from compiler.graph.registry import define, infer_type

TWIN = define("twin")
infer_type.register(TWIN, lambda inputs, attrs: inputs)
reference_of(TWIN)(lambda attrs, x: np.copy(x))

@gradient_of(TWIN)
def _twin(b, node, dy):
    return (scaled(b, dy, {factor}),)
"""

KERNEL = """
from functools import partial
import numpy as np
from actors.kernels.host import catalogue
from actors.kernels.common.kernel import KernelNeeds

class Twin:
    name, op = "elsewhere.twin", "twin"

    def query(self, attrs, inputs, outputs):
        return KernelNeeds({scratch})

    def bind(self, attrs, inputs, outputs, workspace):
        return partial(np.copyto, outputs[0], inputs[0])

catalogue.register(Twin())
"""

TRAIN = """
import numpy as np
import actorflow as af
from actorflow import nn
from actorflow.tensor.tensor import apply
from compiler.graph.registry import find_op
import op, kernel

class Model(nn.Module):
    def __init__(self):
        self.w = nn.Parameter((2,), (("kind", "zeros"),))

@af.job(optimizer=af.optim.SGD(1.0))
def train(model, batch):
    return (apply(find_op("twin"), model.w) * batch.x).sum()

model = Model()
train.step(model, {"x": np.ones(2, np.float32)})
train.close(model)
print(*model.w.data)
"""


@pytest.fixture
def trained(tmp_path):
    """Train in a new process with an op and a kernel of files of its own; return the weights."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(factor=1, scratch=0):
        (tmp_path / "op.py").write_text(OP.format(factor=float(factor)))
        (tmp_path / "kernel.py").write_text(KERNEL.format(scratch=scratch))
        environment = {
            **os.environ,
            "ACTORFLOW_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",  # two texts of one second and size share a .pyc
        }
        done = subprocess.run(
            [sys.executable, "train.py"],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), len(list((tmp_path / "cache").glob("*.plan")))

    return run


def test_a_gradient_registered_elsewhere_makes_a_new_plan_when_its_file_changes(trained):
    assert trained(factor=1) == (["-1.0", "-1.0"], 1)
    assert trained(factor=1) == (["-1.0", "-1.0"], 1)
    assert trained(factor=5) == (["-5.0", "-5.0"], 2)


def test_a_kernel_registered_elsewhere_makes_a_new_plan_when_its_file_changes(trained):
    assert trained(scratch=0)[1] == 1
    assert trained(scratch=64)[1] == 2


def test_a_file_written_while_the_process_runs_gives_a_key_of_this_process_alone(tmp_path):
    early, late = tmp_path / "early.py", tmp_path / "late.py"
    for path in (early, late):
        path.write_text("x = 1")
    os.utime(early, ns=(1, 1))
    stamps = [compiling._content_stamp(p) for p in (early, late, tmp_path / "<stdin>")]
    assert stamps[0] != stamps[1]
    assert stamps[1] == stamps[2] == compiling._THIS_PROCESS
