"""Ranks on GPUs that the host emulates, with its NCCL: against one rank on the host."""

import re
import signal

import numpy as np
import pytest
from launching import STAGED, end_of, launcher
from rank_trainings import (
    Net,
    Split,
    Staged,
    Training,
    assert_trained,
    images,
    loss_and_states,
)

import actorflow as af
from actorflow.distributed.process_group import ProcessGroup
from actorflow.environment.settings import Settings
from compiler.contract.errors import CompileError, DeviceError
from compiler.contract.plan_tables import ActorKind
from compiler.contract.types import DType, TensorType

pytestmark = [
    pytest.mark.host("it compares with the host"),
    pytest.mark.usefixtures("native_toolchain"),
]

CASES = {
    "data": (Training(), {"data": 2}),
    "uneven rows": (Training(data=lambda: images(7)), {"data": 3}),
    "model": (Training(Split), {"model": 2}),
    "uneven columns": (Training(Split), {"model": 3}),
    "data and model": (Training(Net), {"data": 2, "model": 2}),
    "zero": (Training(options={"zero": True}), {"data": 2}),
    "stages": (Training(Staged, options={"accumulate": 2}, fn=loss_and_states), {"stage": 3}),
    "stages and zero": (
        Training(Staged, options={"accumulate": 2, "zero": True}, fn=loss_and_states),
        {"stage": 3, "data": 2},
    ),
}


@pytest.fixture
def on_gpus(monkeypatch):
    """Return what has jobs run on emulated GPUs from then on."""

    def switch(seed=0, gpus="emulated"):
        monkeypatch.setenv("ACTORFLOW_DEVICE", "cuda")
        monkeypatch.setenv("ACTORFLOW_CUDA", gpus)
        monkeypatch.setenv("ACTORFLOW_SIM_SEED", str(seed))

    return switch


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", CASES)
def test_ranks_on_gpus_come_to_what_one_rank_on_the_host_comes_to(name, on_gpus):
    training, axes = CASES[name]
    (alone,) = training.run(None)
    on_gpus()
    ranks = training.run(af.Mesh(**axes))
    assert_trained(ranks, alone, 2e-5)
    for rank in ranks:
        streams = {rank.plan.streams[a.stream] for a in rank.plan.actors
                   if a.kind is ActorKind.COMM}  # fmt: skip
        assert {str(stream.device) for stream in streams} == {"cuda:0"}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["data", "stages"])
def test_no_lateness_changes_a_bit(name, on_gpus):
    training, axes = CASES[name]
    found = []
    for seed in (0, 1, 2):
        on_gpus(seed)
        rank, *_ = training.run(af.Mesh(**axes), steps=2)
        arrays = {n: a.tobytes() for n, a in rank.result.variables.items()}
        found.append((rank.losses, arrays))
    assert found[0] == found[1] == found[2]


def test_a_sum_that_nccl_has_no_type_for_is_refused_with_its_line(on_gpus):
    on_gpus()

    @af.job(optimizer=af.optim.SGD(0.5), mesh=af.Mesh(data=2))
    def counted(model, batch):
        return {"loss": model(batch.x).mean(), "count": batch.n.amax((0, 1))}

    rows = {
        "x": TensorType(DType.FLOAT32, (4, 6)),
        "n": TensorType(DType.INT16, (4, 3)),
    }
    with pytest.raises(CompileError, match=r"test_gpu_ranks.py:\d+: all_reduce of int16.*float32"):
        counted.compile(af.nn.Linear(6, 4), rows)


@pytest.mark.parametrize("options", [{"sync": True}, {"trace": "file"}], ids=str)
def test_stages_are_not_run_launch_by_launch(options, on_gpus, tmp_path):
    on_gpus()
    training, axes = CASES["stages"]
    plan = training.job(af.Mesh(**axes)).compile(Staged(), images(), rank=0)
    given = {n: tmp_path / v if v == "file" else v for n, v in options.items()}
    group = ProcessGroup(0, lambda name, value: [value] * 3)
    with pytest.raises(DeviceError, match=r"rank_trainings.py:\d+: .* has stages on GPUs.*unset"):
        group.communicator(plan, Settings(**given), ())


SCRIPT = """
import os, signal, sys
import numpy as np
import actorflow as af
from actorflow import nn

rank, mesh = int(os.environ.get("RANK", 0)), None
if "RANK" in os.environ:
    mesh = af.Mesh(data=2)

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 10)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))

@af.job(optimizer=af.optim.SGD(0.1, momentum=0.9), mesh=mesh)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

def on_step(step, metrics):
    print(f"loss {float(metrics['loss']):.6f}")
    if rank == 1 and step == 3 and "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)

x = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
data = af.data.ArraySource({"x": x, "y": x[:, :10].argmax(1).astype(np.int64)}, batch=32)
steps = 200 if "kill" in sys.argv else int(sys.argv[1])
checkpoint = sys.argv[2] if len(sys.argv) > 2 and "kill" not in sys.argv else None
train.fit(Net(), data, steps=steps, on_step=on_step, progress=False, checkpoint=checkpoint)
"""


def on_cuda(gpus="emulated"):
    return {"ACTORFLOW_DEVICE": "cuda", "ACTORFLOW_CUDA": gpus}


def losses(text):
    return [float(number) for number in re.findall(r"^loss (\S+)$", text, re.MULTILINE)]


def test_launched_ranks_have_a_gpu_each_and_resume_to_the_bit(tmp_path):
    with launcher(tmp_path) as start:
        status, out, err = end_of(start(SCRIPT, "6"))
        assert status == 0, err
        host = losses(out)
        status, out, err = end_of(start(SCRIPT, "6", **on_cuda()))
        assert status == 0, err
        np.testing.assert_allclose(losses(out), host, rtol=1e-5)
        folder, told = str(tmp_path / "run"), []
        for steps in ("3", "6"):
            status, resumed, err = end_of(start(SCRIPT, steps, folder, **on_cuda()))
            assert status == 0, err
            told += losses(resumed)
        assert told == losses(out)


def test_a_rank_that_is_killed_ends_the_others_streams(tmp_path):
    with launcher(tmp_path) as start:
        status, _, err = end_of(start(SCRIPT, "kill", **on_cuda()))
    assert status == 128 + 9
    assert err.splitlines()[-1] == "actorflow launch: rank 1 was ended by SIGKILL"
    assert "went with a device: cuda:0 was given up: rank 1 was ended by SIGKILL" in err


BLOCKED = """
import os, threading
import numpy as np
import actorflow as af

@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
def train(model, batch):
    return (model(batch.x) ** 2).mean()

def batches():
    for number in range(100):
        if number == 4 and os.environ["RANK"] == "1":
            threading.Event().wait()
        yield {"x": np.ones((4, 6), np.float32)}

spec = {"x": af.TensorType(af.DType.FLOAT32, (4, 6))}
data = af.data.from_iterable(batches, spec, fingerprint="ones")
train.fit(af.nn.Linear(6, 4), data, steps=50, progress=False,
          on_step=lambda step, metrics: print("step", step, flush=True))
"""


def test_a_stop_while_data_is_awaited_ends_without_the_state_that_gpus_cannot_take_back(tmp_path):
    with launcher(tmp_path) as start:
        process = start(BLOCKED, **on_cuda())
        while process.stdout.readline() not in ("step 4\n", ""):
            pass
        process.send_signal(signal.SIGINT)
        status, _, err = end_of(process)
    assert status == 1
    last = err.splitlines()[-1]
    assert "gave no batch for step 5 when the run was to stop, and others had begun" in last
    assert "the state after step 4 is lost, and not saved" in last


def test_fewer_gpus_than_ranks_are_an_error_that_names_the_rank(tmp_path):
    with launcher(tmp_path) as start:
        status, _, err = end_of(start(SCRIPT, "2", **on_cuda("emulated:1")))
    assert status == 1
    assert "rank 1 of its host needs GPUs of its own, and its cuda:0 is number 1 of those" in err


def test_launched_stages_train(tmp_path):
    script = (
        STAGED
        + """
@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(stage=2), accumulate=2)
def train(model, batch):
    return loss(model, batch)

data = af.data.ArraySource(arrays, batch=8)
train.fit(Net(), data, steps=4, progress=False,
          on_step=lambda step, metrics: print(f"loss {float(metrics['loss']):.6f}"))
"""
    )
    with launcher(tmp_path) as start:
        told = [end_of(start(script, **environ)) for environ in ({}, on_cuda())]
    assert [status for status, *_ in told] == [0, 0], told
    np.testing.assert_allclose(*[losses(out) for _, out, _ in told], rtol=1e-5)
    assert len(losses(told[0][1])) == 4
