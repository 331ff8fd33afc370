"""Whole jobs through the driver of a GPU, with CUDA's own calls acted on the host, at once.

What is acted are the functions of cupy's modules, as their documentation says: so the order and the
arguments of all that a run asks for are those that a GPU gets.
"""

import ctypes
import gc
import os
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.environment.settings import Settings
from actorflow.run import open_gpus
from actorflow.run.runner import Runner
from actors.device.cuda import cupy_driver
from actors.device.cuda.cupy_driver import CupyDriver
from actors.testing.emulated import driver, kernels, library_calls

ROWS = {
    "x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32),
    "y": np.arange(32, dtype=np.int32) % 5,
}


class Refused(Exception):
    status = 1


class Acted:
    """The runtime and the driver in one: memory is the host's, and a stream does things at once."""

    CUDADriverError = CUDARuntimeError = Refused

    def __init__(self, toolchain):
        self.toolchain, self.blocks, self.made, self.captured = toolchain, {}, [], None
        self.used = set()

    def __getattr__(self, name):
        raise AttributeError(f"a GPU was asked for {name}, which no test acts")

    def _keep(self, thing):
        self.made.append(thing)
        return len(self.made)

    def _put(self, work):
        (self.captured.append if self.captured is not None else lambda do: do())(work)

    def driverGetVersion(self):
        return 13_000

    def getDeviceCount(self):
        return 1

    def setDevice(self, index):
        assert index == 0

    def getDeviceProperties(self, index):
        return {
            "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132,
            "totalGlobalMem": 1 << 37,
        }  # fmt: skip

    def memGetInfo(self):
        return 1 << 36, 1 << 37

    def malloc(self, size):
        assert self.captured is None
        held = np.full(size + 256, 0xFF, np.uint8)
        address = held.ctypes.data + -held.ctypes.data % 256
        self.blocks[address] = held
        return address

    def hostAlloc(self, size, flags):
        assert flags == 3  # portable and mapped
        return self.malloc(size)

    def free(self, address):
        del self.blocks[address]

    freeHost = free  # noqa: N815  # its name at CUDA

    def memcpy(self, target, source, size, kind):
        assert (kind, self.captured) == (4, None)
        ctypes.memmove(target, source, size)

    def memset(self, target, value, size):
        ctypes.memset(target, value, size)

    def memcpyAsync(self, target, source, size, kind, stream):
        self._put(lambda: ctypes.memmove(target, source, size))

    def memsetAsync(self, target, value, size, stream):
        self._put(lambda: ctypes.memset(target, value, size))

    def streamCreateWithFlags(self, flags):
        assert flags == 1  # non-blocking
        return self._keep("stream")

    def eventCreateWithFlags(self, flags):
        assert flags == 3  # blocking, without times
        return self._keep("event")

    def eventCreate(self):
        return self._keep("event")

    def eventElapsedTime(self, begin, end):
        self.used.add("timed")
        return 1.0  # milliseconds: of ways that take as long the first is taken

    def eventRecord(self, event, stream):
        assert (self.made[event - 1], self.made[stream - 1]) == ("event", "stream")
        assert self.captured is None

    def streamWaitEvent(self, stream, event):
        self.eventRecord(event, stream)

    def eventSynchronize(self, event):
        assert self.made[event - 1] == "event"

    def streamSynchronize(self, stream):
        assert self.captured is None

    def streamBeginCapture(self, stream, mode):
        assert (mode, self.captured) == (1, None)  # of this thread
        self.captured = []

    def streamEndCapture(self, stream):
        captured, self.captured = self.captured, None
        return self._keep(captured)

    def graphInstantiate(self, graph):
        return self._keep(self.made[graph - 1])

    def graphDestroy(self, graph):
        self.made[graph - 1] = None

    def graphUpload(self, graph, stream):
        assert self.made[graph - 1]

    def graphLaunch(self, graph, stream):
        for work in self.made[graph - 1]:
            work()

    def graphExecDestroy(self, handle):
        self.made[handle - 1] = None

    eventDestroy = streamDestroy = graphExecDestroy  # noqa: N815  # likewise

    def moduleLoadData(self, image):
        return self._keep(image)

    def moduleGetFunction(self, module, name):
        return self._keep(kernels.built(name))

    def moduleUnload(self, module):
        self.made[module - 1] = None

    def funcGetAttribute(self, attribute, function):
        assert attribute == 4
        return 32

    def launchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        assert (gy, gz, by, bz, extra) == (1, 1, 1, 1, 0)
        kernel = self.made[function - 1]
        words = ctypes.c_void_p.from_address(parameters).value
        # A block is copied when the launch is made, by the size that the kernel was built with.
        block = (ctypes.c_int64 * kernel.num_words).from_address(words)
        kept = (ctypes.c_int64 * kernel.num_words)(*block)
        self._put(lambda: kernels.run(kernel, (gx, bx), shared, ctypes.addressof(kept), 0))

    # In the place of cuBLASLt, whose numbers are those of the emulation.

    version = 130_000

    def open(self):
        self.used.add("opened")

    def close(self):
        self.used.add("closed")

    def choose(self, product, workspace_bytes, trial, choices):
        return SimpleNamespace(product=product, algorithm=b"first")

    def warm(self, product, choice, trial):
        self.used.add("warm")

    def run(self, choice, a, b, c, d, workspace, stream):
        self._put(lambda: library_calls.run_product(choice.product, a, b, c, d))


class Model(nn.Module):
    def __init__(self):
        self.up, self.down, self.table = nn.Linear(6, 16), nn.Linear(16, 5), nn.Embedding(5, 5)

    def __call__(self, x, y):
        return self.down(af.dropout(af.gelu(self.up(x), approximate="tanh"), 0.1)) + self.table(y)


@af.job(optimizer=af.optim.AdamW(1e-2), device="cuda", gpu="h200")
def train(model, batch):
    return af.cross_entropy(model(batch.x, batch.y), batch.y)


def rows():
    return af.data.ArraySource(ROWS, batch=4)


@pytest.fixture
def acted(monkeypatch, native_toolchain, cached_toolchain):
    """Have cupy's modules, NVRTC and cuBLASLt acted by the host."""

    def build(texts, arch, folder, num_threads):
        assert arch == "sm_90a"
        kernels.load(texts, native_toolchain)
        return tuple([text.text.encode() for text in texts])

    made = Acted(native_toolchain)
    libraries = cupy_driver.CudaLibraries(
        modules=lambda: (made, made), current=threading.local(), build=build,
        products=lambda path: made,
    )  # fmt: skip
    monkeypatch.setattr(open_gpus, "CupyDriver", partial(CupyDriver, libraries=libraries))
    return made


def test_a_run_asks_a_gpu_for_what_gives_the_bits_of_the_emulation(acted, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "tried", lambda *given: 0)  # the first way, as of equal ones here
    plan = train.compile(Model(), rows(), every=3)
    settings = replace(Settings.from_env(os.environ), cache=None)
    found = []
    for is_emulated in (True, False, False):
        runner = Runner(plan, settings=replace(settings, emulated_gpus=8 * is_emulated))
        options = {"checkpoint": tmp_path / str(len(found)), "every": 3, "progress": False}
        result = runner.fit(rows(), steps=7, **options)
        found.append((result.metrics, {n: v.tobytes() for n, v in result.variables.items()}))
    assert found[0] == found[1] == found[2]
    assert {"opened", "warm", "timed"} <= acted.used
    del runner, result
    gc.collect()
    assert acted.blocks == {}
    assert "closed" in acted.used
    assert not [thing for thing in acted.made if isinstance(thing, list | bytes)]
