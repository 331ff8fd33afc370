"""Faults that a device could have, planted one at a time in the code as it is: each is found.

Every test runs a check that there is anyway, without the fault and with it. Faults in records of
products (turned, apart by too much, added to what was there) are planted in `test_matmul.py` and
`test_region.py` of the kernels.
"""

import os
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from emulated_run import emulated_run, execute
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.run import training_run
from actorflow.run.runner import Runner
from actors.device.cuda import device as cuda_device
from actors.device.cuda.device import CudaDevice
from actors.device.executor import Executor
from actors.kernels.common.attention_blocks import BlockExtents
from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.kernels.cuda import embedding
from actors.kernels.cuda.calls import CopyBytes, KernelText
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import gpu_named
from actors.loop.load import load
from actors.race.waits import wait_table
from actors.testing.emulated import kernels
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule
from compiler.contract.attrs import Attrs
from compiler.contract.errors import ActorflowError, DeviceError, InternalError
from compiler.contract.placement import Memory
from compiler.contract.types import DType, TensorType
from compiler.graph.registry import find_op, reference

GPU = gpu_named("h200")


def changed_text(text, old, new, nth=0):
    """Return a kernel text in which one of the places of `old` says `new`."""
    parts = text.text.split(old)
    assert len(parts) > nth + 1, f"{old!r} is not in the text {nth + 1} times"
    source = old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])
    own = text.kernels[0].rpartition("_")[0]
    names = tuple([name.replace(own, "NAME") for name in text.kernels])
    return KernelText.of(
        "mutant", source.replace(own, "NAME"), names, "", has_exchanges=text.has_exchanges
    )


# -- kernels -------------------------------------------------------------------------------------


@pytest.fixture
def sorts(native_toolchain):
    """Return whether keys are sorted as numpy sorts them, in an order of blocks and threads."""

    def run(seed):
        keys = np.random.default_rng(seed).integers(0, 700, 1000).astype(embedding.KEY)
        held = [
            np.full(max(p.size_bytes, 4), 0xFF, np.uint8) for p in embedding.sort_pieces(keys.size)
        ]
        memory = [piece.view(embedding.KEY) for piece in held]
        memory[0][: keys.size] = keys
        addresses = tuple([piece.ctypes.data for piece in memory])
        calls, _, places = embedding.sort_calls(addresses, keys.size, 700)
        kernels.load([call.text for call in calls], native_toolchain)
        execute(calls, seed, np.zeros(7, np.int64))
        found = memory[addresses.index(places)][: keys.size]
        return np.array_equal(found, np.argsort(keys, kind="stable"))

    return run


@pytest.mark.parametrize(
    ("barrier", "function", "nth"),
    [
        ("AF_BARRIER();", "_tile(", 0),
        ("AF_BARRIER();", "_tile(", 1),
        ("AF_WARP_BARRIER();", "_rank(", 0),
    ],
    ids=["before keys move", "after keys moved", "before a count"],
)
def test_a_barrier_left_out_is_found_in_every_order_of_threads(
    barrier, function, nth, sorts, monkeypatch
):
    assert all(sorts(seed) for seed in range(20))
    text = embedding._sort_text()
    before = text.text.partition(function)[0].count(barrier)
    mutant = changed_text(text, barrier, ";", before + nth)
    monkeypatch.setattr(embedding, "_sort_text", lambda: mutant)
    assert not any(sorts(seed) for seed in range(20))


@pytest.fixture
def gathers(native_toolchain):
    """Return whether rows of a bad id are zeros and the id is told, as the host tells it."""

    def run():
        table, ids = np.ones((5, 4), np.float32), np.array([0, 5, 4], np.int32)
        found = emulated_run(
            native_toolchain,
            kernels_on(GPU)["cuda.embedding"],
            {},
            (table, ids),
            (TensorType(DType.FLOAT32, (3, 4)),),
        )
        is_told = str(found.error) == "id 5 at position 1 is outside 0..4"
        return is_told and found.outputs[0][:, 0].tolist() == [1, 0, 1]

    return run


def test_an_unguarded_index_is_found(gathers, monkeypatch):
    assert gathers()
    guard = "(uint64_t)id < (uint64_t)a->num_rows"
    mutant = changed_text(embedding.text_of_ids(), guard, "1")
    monkeypatch.setattr(embedding, "text_of_ids", lambda: mutant)
    assert not gathers()


@pytest.fixture
def attends(native_toolchain):
    """Return whether causal attention of fewer queries than keys is that of the reference."""

    def run():
        rng = np.random.default_rng(5)
        q, k, v = [rng.standard_normal((2, rows, 8)).astype(np.float32) for rows in (4, 11, 11)]
        attrs = {"scale": 0.5, "causal": True}
        types = TensorType(DType.FLOAT32, (2, 4, 8)), *[TensorType(DType.FLOAT32, (2, 4))] * 2
        kernel = kernels_on(GPU)["cuda.attention"]
        found = emulated_run(native_toolchain, kernel, attrs, (q, k, v), types).outputs
        right = reference.get(find_op("attention"))(Attrs(attrs), q, k, v)
        pairs = zip(found, right, strict=True)
        return all([np.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in pairs])

    return run


def test_a_causal_mask_from_the_top_left_is_found(attends, monkeypatch):
    assert attends()
    monkeypatch.setattr(BlockExtents, "offset", property(lambda extents: 0))
    assert not attends()


@pytest.fixture
def attends_by_library(native_toolchain):
    """Return whether the emulated library's causal attention is that of the reference."""
    rng = np.random.default_rng(5)
    q, k, v = [rng.standard_normal((2, rows, 8)).astype(np.float16) for rows in (4, 11, 11)]
    attrs = {"scale": 0.5, "causal": True}
    types = TensorType(DType.FLOAT16, (2, 4, 8)), *[TensorType(DType.FLOAT32, (2, 4))] * 2
    exact = [x.astype(np.float64) for x in (q, k, v)]
    right = reference.get(find_op("attention"))(Attrs(attrs), *exact)

    def run():
        found = emulated_run(
            native_toolchain, kernels_on(GPU)["cudnn.attention"], attrs, (q, k, v), types
        ).outputs
        return all([np.allclose(x, y, atol=1e-2) for x, y in zip(found, right, strict=True)])

    return run


def test_a_mask_of_the_librarys_from_the_top_left_is_found(attends_by_library, monkeypatch):
    assert attends_by_library()
    right = np.tri
    monkeypatch.setattr(np, "tri", lambda rows, columns, k, dtype: right(rows, columns, 0, dtype))
    assert not attends_by_library()


# -- devices -------------------------------------------------------------------------------------


class Copies:
    """A kernel that copies its input to its output, as bytes."""

    def plan(self, attrs, inputs, outputs):
        return KernelPlan(KernelNeeds(), self._bind)

    def _bind(self, inputs, outputs, workspace):
        (x,), (y,) = inputs, outputs
        source = x.address if hasattr(x, "address") else x.ctypes.data
        return (CopyBytes(y.address, source, y.type.size_bytes),)


@pytest.fixture
def copies(native_toolchain):
    """Return a function that feeds a device from pinned memory by a chain of copies."""

    def run():
        cuda = EmulatedCuda(LateSchedule(Random(3)))
        driver = EmulatedDriver(cuda, native_toolchain, GPU)
        device = CudaDevice(driver, {"copy": Copies()})
        type_ = TensorType(DType.FLOAT32, (16,))
        pinned = device.allocate(64, 256, Memory.PINNED)
        block = device.allocate(64, 256, Memory.DEVICE)
        source = device.view(pinned, 0, type_, (4,))
        target = device.view(block, 0, type_, (4,))
        source[...] = np.arange(16)
        stream = device.make_stream("h2d")
        launch = device.bind("copy", {}, (source,), (target,), None, (type_, type_))
        for chain in device.bind_chain(stream, (launch,) * 3):
            chain()
        device.synchronize()
        np.testing.assert_array_equal(device.read(target), np.arange(16))

    return run


def test_an_allocation_during_capture_is_found(copies, monkeypatch):
    copies()
    launch = EmulatedDriver.copy_later

    def allocating(driver, *args):
        driver.allocate(256)
        return launch(driver, *args)

    monkeypatch.setattr(EmulatedDriver, "copy_later", allocating)
    with raises(InternalError):
        copies()


def test_a_copy_from_pageable_memory_is_found(copies, monkeypatch):
    copies()
    monkeypatch.setattr(
        "actors.device.cuda.device.pinned_bytes", lambda kept, size: np.empty(size, np.uint8)
    )
    with pytest.raises(DeviceError, match="are neither of a device nor pinned"):
        copies()


# -- runs ----------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self):
        self.rows = nn.Embedding(40, 8)


ROWS = {
    "ids": np.random.default_rng(0).integers(0, 40, (96, 3)).astype(np.int32),
    "y": np.random.default_rng(1).integers(0, 8, (96, 3)).astype(np.int32),
}
NUM_STEPS = 9
SEEDS, PATIENCE = range(8), range(60)  # for what is right; until what is wrong is found


@pytest.fixture
def outcomes(monkeypatch):
    """Return a function that gives what comes of a job on the emulated device, by seed."""
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")

    @af.job(optimizer=af.optim.AdamW(1e-2), device="cuda", gpu="h200")
    def train(model, batch):
        return af.cross_entropy(model.rows(batch.ids).flatten(0, -2), batch.y.flatten())

    plan = train.compile(Table(), af.data.ArraySource(ROWS, batch=8))

    def one(seed):
        settings = replace(Settings.from_env(os.environ), sim_seed=seed)
        losses = []
        try:
            found = Runner(plan, settings=settings).fit(
                af.data.ArraySource(ROWS, batch=8),
                steps=NUM_STEPS,
                on_step=lambda step, metrics: losses.append(metrics["loss"]),
                progress=False,
            )
        except ActorflowError as error:
            return (type(error).__name__,)
        return (*losses, *[array.tobytes() for array in found.variables.values()])

    return lambda seeds: (one(seed) for seed in seeds)


@pytest.fixture
def sound(outcomes):
    """What comes of the job: losses and variables, the same for every seed."""
    (found,) = {*outcomes(SEEDS)}
    assert len(found) > NUM_STEPS
    return found


def planted(monkeypatch, actor, *, is_input):
    """Have an actor forget that it waits for what it reads, or for whoever reads what it writes."""

    def forgetful(table, *args):
        waits, number = wait_table(table, *args), table.names.index(actor)
        forgotten = [w for w in waits.all[number] if w.is_input is is_input]
        assert forgotten, f"{actor} has no such wait"
        rows = [
            tuple([tuple([w for w in row if w not in forgotten or a != number])
                   for a, row in enumerate(column)])
            for column in (waits.needed, waits.all)
        ]  # fmt: skip
        return replace(waits, needed=rows[0], all=rows[1])

    forgetful_executor = partial(Executor, find_waits=forgetful)
    monkeypatch.setattr(training_run, "load", partial(load, make_executor=forgetful_executor))


@pytest.mark.parametrize("actor", ["step", "fetch"])
def test_a_wait_left_out_is_found(actor, sound, outcomes, monkeypatch):
    planted(monkeypatch, actor, is_input=True)
    assert any(found != sound for found in outcomes(PATIENCE))


@pytest.mark.parametrize("actor", ["feed", "step"])
def test_a_credit_left_out_is_found(actor, sound, outcomes, monkeypatch):
    planted(monkeypatch, actor, is_input=False)
    assert any(found != sound for found in outcomes(PATIENCE))


def test_a_graph_of_a_stale_slot_phase_is_found(sound, outcomes, monkeypatch):
    whole, first = cuda_device.WholeChain, {}

    def stale(context, stream, launches):
        chain = whole(context, stream, launches)
        return first.setdefault((context, stream, len(launches)), chain)

    monkeypatch.setattr(cuda_device, "WholeChain", stale)
    assert all(found != sound for found in outcomes(SEEDS))


def test_a_product_over_its_cap_of_workspace_is_an_error_that_names_the_op(monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")

    @af.job(optimizer=af.optim.SGD(0.1), device="cuda", gpu="h200")
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    batch = {"x": np.ones((4, 6), np.float32), "y": np.zeros(4, np.int32)}
    train.step(nn.Linear(6, 5), batch)
    greedy = partial(EmulatedDriver, product_bytes=1)
    monkeypatch.setattr("actorflow.run.open_gpus.EmulatedDriver", greedy)
    with raises(DeviceError):
        train.step(nn.Linear(6, 5), batch)
