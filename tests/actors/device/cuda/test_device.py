"""Whole runs on a CUDA device: the host's bits, one call of the driver per firing, and its faults.

Plans for a simulated device are run as if they were for CUDA, with kernels of the host behind a
driver that does everything at once: what is looked at is the order of calls.
"""

import gc
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.run import training_run
from actorflow.run.runner import Runner
from actors.device.cuda.device import CudaDevice
from actors.device.host import HostDevice
from actors.kernels.host import catalogue
from compiler.contract.errors import ActorflowError, OutOfMemory
from compiler.contract.placement import Device, DeviceKind
from tests.shared.recording_driver import HostedKernel, RecordingDriver

PER_FIRING = {"record", "wait", "graph_later", "copy_later", "launch_later", "synchronize_event"}
ROWS = {
    "x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32),
    "y": np.arange(32, dtype=np.int32) % 5,
}


class Model(nn.Module):
    def __init__(self):
        self.up, self.down, self.table = nn.Linear(6, 16), nn.Linear(16, 5), nn.Embedding(5, 5)

    def __call__(self, x, y):
        return self.down(af.dropout(af.gelu(self.up(x), approximate="tanh"), 0.1)) + self.table(y)


def compiled(device, **options):
    @af.job(optimizer=af.optim.AdamW(1e-2), device=device, **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x, batch.y), batch.y)

    return train.compile(Model(), rows(), every=3)


def rows():
    return af.data.ArraySource(ROWS, batch=4)


@pytest.fixture(scope="module")
def plans():
    return {device: compiled(device) for device in ("host", "sim")}


def on_cuda(plan):
    """Return a plan for simulated devices as one for CUDA devices."""

    def moved(entry):
        kind = entry.device.kind
        is_simulated = kind is DeviceKind.SIM
        return replace(entry, device=Device(DeviceKind.CUDA)) if is_simulated else entry

    streams, arenas = [tuple(map(moved, entries)) for entries in (plan.streams, plan.arenas)]
    return replace(plan, streams=streams, arenas=arenas)


@pytest.fixture
def opened(monkeypatch, driver):
    """Have runs go on a CUDA device with the recording driver; return the options to open it."""
    options = {}
    kernels = catalogue.kernels_by_name()
    hosted = {name: HostedKernel(kernel) for name, kernel in kernels.items()}

    def open_devices(plan, settings, rank, local_rank):
        return HostDevice(kernels), CudaDevice(driver, hosted, **options)

    run_on(monkeypatch, open_devices)
    return options


def run_on(monkeypatch, open_devices):
    """Let runs open these devices, with plans moved to CUDA."""
    monkeypatch.setattr(training_run, "open_devices", open_devices)
    monkeypatch.setattr(training_run, "with_poison", lambda plan, settings: on_cuda(plan))


def fit(plan, steps, **options):
    runner = Runner(plan, settings=Settings.from_env(os.environ))
    result = runner.fit(rows(), steps=steps, progress=False, **options)
    return result.metrics, {name: array.tobytes() for name, array in result.variables.items()}


def test_a_run_gives_the_bits_of_the_host_and_a_resumed_run_too(plans, opened, tmp_path):
    expected = fit(plans["host"], 11)
    assert fit(plans["sim"], 11) == expected
    fit(plans["sim"], 5, checkpoint=tmp_path / "run", every=3)
    assert fit(plans["sim"], 11, checkpoint=tmp_path / "run", every=3) == expected


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"streams": 2}], ids=str)
def test_options_of_the_job_give_the_bits_of_the_host(opened, options):
    assert fit(compiled("sim", **options), 7) == fit(compiled("host", **options), 7)


def test_a_stepwise_run_gives_the_same_bits(plans, opened):
    opened["is_stepwise"] = True
    assert fit(plans["sim"], 5) == fit(plans["host"], 5)


def test_a_traced_run_gives_the_same_bits_and_names_its_launches(plans, opened, tmp_path):
    path = tmp_path / "trace.json"
    runner = Runner(plans["sim"], settings=replace(Settings.from_env(os.environ), trace=path))
    result = runner.fit(rows(), steps=3, progress=False)
    assert result.metrics == fit(plans["host"], 3)[0]
    launches = max([len(actor.launches) for actor in plans["sim"].actors])
    events = json.loads(path.read_text())["traceEvents"]
    assert len([e for e in events if e.get("cat") == "launch"]) >= 3 * launches


def test_a_chain_is_captured_once_per_phase_before_the_first_step(plans, opened, driver):
    fit(plans["sim"], 6)
    names = driver.names()
    first_step = names.index("record")
    chains = [a for a in on_cuda(plans["sim"]).actors if len(a.launches) >= 3]
    assert names.count("begin_capture") == names.count("end_capture") >= len(chains) >= 1
    assert "begin_capture" not in names[first_step:]
    for call in ("allocate", "allocate_pinned", "make_event", "make_stream", "make_product"):
        assert call not in names[first_step:]


def test_a_step_allocates_nothing_and_the_host_waits_only_where_it_touches_memory(
    plans, opened, driver
):
    counts = []
    for steps in (4, 24):
        gc.collect()
        driver.calls.clear()
        fit(plans["sim"], steps)
        counts.append(driver.counts())
    grown = {name: counts[1][name] - counts[0][name] for name in counts[1] if name in counts[0]}
    grown = {name: count for name, count in grown.items() if count}
    # What the collector drops at the end of a run is not a step's.
    assert {*grown} - {"free", "free_pinned", "close"} <= PER_FIRING
    assert 20 <= grown["graph_later"] <= 36  # one a step, and two for every third, a snapshot's
    assert sum([grown[name] for name in PER_FIRING & {*grown}]) <= 20 * 20  # of 51 launches each


def test_on_every_stream_waits_come_first_and_the_record_last(plans, opened, driver):
    fit(plans["sim"], 6)
    calls = driver.calls[driver.names().index("record") + 1 :]
    for stream in ("h2d", "compute", "d2h"):
        names = [name for name, *args in calls if stream in args and name != "is_done"]
        letters = "".join([name[0] for name in names])  # record, wait, graph, launch
        assert re.fullmatch("(w*(g|l*)r)+|(l+r)?(w*(g|l*)r)+", letters), (stream, letters)
    assert ("graph_later", "compute") in calls
    assert ("launch_later", "d2h") in calls  # a snapshot of many variables is one copy


def test_one_thread_uses_the_driver_and_others_only_wait(plans, opened, driver):
    fit(plans["sim"], 12)
    run = driver.threads[driver.names().index("record") :]
    users = {name: {i for n, i in run if n == name} for name in PER_FIRING}
    fed = set().union(*[users[name] for name in PER_FIRING - {"synchronize_event"}])
    assert len(fed) == 1
    assert fed < users["synchronize_event"]  # it throttles itself, and sinks wait for their data


def test_what_is_too_large_is_refused_before_anything_is_allocated(plans, monkeypatch):
    driver = RecordingDriver(free_bytes=1000)
    kernels = catalogue.kernels_by_name()
    hosted = {name: HostedKernel(kernel) for name, kernel in kernels.items()}
    devices = (HostDevice(kernels), CudaDevice(driver, hosted))
    run_on(monkeypatch, lambda plan, settings, rank, local_rank: devices)
    with raises(OutOfMemory):
        fit(plans["sim"], 1)
    assert "allocate" not in driver.names()


def test_a_fault_in_a_step_ends_the_run_and_says_what_is_lost(plans, opened, driver, tmp_path):
    def fail(step, metrics):
        if step == 4:
            driver.failing["synchronize_event"] = driver.failing["graph_later"] = 700

    with pytest.raises(ActorflowError) as caught:
        fit(plans["sim"], 30, checkpoint=tmp_path / "run", every=3, on_step=fail)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "cuda:0 failed: a kernel addressed memory that is not its own" in text
    assert "which must be started again, from its newest checkpoint" in text
    assert "the variables lay in the memory of the device and are lost; " in text
