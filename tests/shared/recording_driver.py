"""A CUDA driver that does everything at once and notes it; its kernels are functions of Python.

What CUDA forbids during a capture it refuses, and what is captured happens when the graph runs.
"""

import ctypes
import threading
from collections import Counter
from functools import partial

import numpy as np

from actors.device.cuda.driver import CudaError, DeviceProperties
from actors.kernels.common.kernel import KernelPlan
from actors.kernels.cuda.calls import KernelText, RunKernel
from actors.kernels.cuda.kernel import DeviceView
from compiler.contract.types import numpy_dtype


class RecordingDriver:
    """`calls` are the names and arguments of all calls, `threads` who made each.

    `failing` gives codes by name of a call.
    """

    def __init__(self, free_bytes=1 << 30):
        self.calls, self.threads = [], []
        self.failing = {}
        self.memory = {}
        self.graphs = {}
        self.captured = None
        self.functions = {}
        self.loaded = set()
        self._free_bytes = free_bytes
        self._next = 100
        self._arrays = []
        self.way = 0

    def _note(self, name, *args, is_allowed=True):
        self.calls.append((name, *args))
        self.threads.append((name, threading.get_ident()))
        if name in self.failing:
            raise CudaError("it was to fail", code=self.failing[name], call=name)
        if self._is_captured() and not is_allowed:
            self.captured = None
            raise CudaError("not while a stream is captured", code=900, call=name)

    def _handle(self):
        self._next += 1
        return self._next

    def _do(self, work):
        if self._is_captured():
            self.captured.append(work)
        else:
            work()

    def _is_captured(self):
        return self.captured is not None and self._captured_by == threading.get_ident()

    def names(self):
        return [name for name, *_ in self.calls]

    def counts(self):
        return Counter(self.names())

    # -- the protocol ----------------------------------------------------------------------------

    def seen(self):
        return DeviceProperties("recording", (9, 0), 132, 1 << 37, 13000)

    def free_bytes(self):
        return self._free_bytes

    def _allocate(self, size_bytes):
        buffer = np.full(size_bytes + 256, 0xFF, np.uint8)
        address = buffer.ctypes.data + -buffer.ctypes.data % 256
        self.memory[address] = buffer
        return address

    def allocate(self, size_bytes):
        self._note("allocate", size_bytes, is_allowed=False)
        self._free_bytes -= size_bytes
        return self._allocate(size_bytes)

    def free(self, address):
        self._note("free", is_allowed=False)
        del self.memory[address]

    def allocate_pinned(self, size_bytes):
        self._note("allocate_pinned", size_bytes, is_allowed=False)
        return self._allocate(size_bytes)

    def free_pinned(self, address):
        self._note("free_pinned", is_allowed=False)
        del self.memory[address]

    def copy(self, target, source, size_bytes):
        self._note("copy", is_allowed=False)
        ctypes.memmove(target, source, size_bytes)

    def copy_later(self, target, source, size_bytes, stream):
        self._note("copy_later", stream)
        self._do(lambda: ctypes.memmove(target, source, size_bytes))

    def fill_later(self, target, value, size_bytes, stream):
        self._note("fill_later", stream)
        self._do(lambda: ctypes.memset(target, value, size_bytes))

    def make_stream(self, name):
        self._note("make_stream", name)
        return name

    def make_event(self):
        self._note("make_event")
        return self._handle()

    def record(self, event, stream):
        self._note("record", stream, is_allowed=False)

    def wait(self, stream, event):
        self._note("wait", stream, is_allowed=False)

    def is_done(self, event):
        self._note("is_done")
        return True

    def synchronize_event(self, event):
        self._note("synchronize_event", is_allowed=False)

    def synchronize(self):
        self._note("synchronize", is_allowed=False)

    def load(self, texts):
        self._note("load", len(texts), is_allowed=False)
        self.loaded.update([text.text for text in texts])

    def function(self, text, name):
        assert text.text in self.loaded
        number = self._handle()
        self.functions[number] = KERNELS.get(name) or count_firing
        return number

    def launch_later(self, function, num_blocks, num_threads, shared, words, num_words, stream):
        self._note("launch_later", stream)
        # Read at once, as CUDA does.
        arguments = list((ctypes.c_int64 * num_words).from_address(words))
        self._do(lambda: self.functions[function](arguments))

    def make_product(self, product, workspace_bytes):
        self._note("make_product", is_allowed=False)
        return self._handle()

    def choose_way(self, key, trial):
        self._note("choose_way", key, is_allowed=False)
        with trial() as ways:
            for run in (ways.fill, *ways.runs):
                run("trial")
        return self.way

    def product_later(self, choice, a, b, c, d, workspace, stream):
        self._note("product_later", stream)

    def make_cudnn(self, sdpa, workspace_bytes):
        self._note("make_cudnn", is_allowed=False)
        return self._handle()

    def cudnn_later(self, choice, addresses, workspace, stream):
        self._note("cudnn_later", stream)

    def begin_capture(self, stream):
        self._note("begin_capture", stream, is_allowed=False)
        self.captured, self._captured_by = [], threading.get_ident()

    def end_capture(self, stream):
        self._note("end_capture", stream)
        graph = self._handle()
        self.graphs[graph], self.captured = self.captured, None
        return graph

    def graph_later(self, graph, stream):
        self._note("graph_later", stream, is_allowed=False)
        for work in self.graphs[graph]:
            work()

    def close(self):
        self._note("close")


KERNELS = {}
"""Functions of Python on the words of an argument block, by the name of their kernel."""


def count_firing(words):
    ctypes.c_int64.from_address(words[0]).value += 1


def kernel_call(function, words=(), status=None):
    """Return the call of a kernel that is a function of Python."""
    text = KernelText(f"kernel {len(KERNELS)}", (f"kernel_{len(KERNELS)}",))
    KERNELS[text.kernels[0]] = function
    return RunKernel(text, text.kernels[0], 1, 32, words, status=status)


def array_on(view):
    """Return an array on device memory, which lies in this process."""
    if not isinstance(view, DeviceView):
        return view
    size = view.type.size_bytes if view.is_dense else sum(
        (n - 1) * s for n, s in zip(view.shape, view.strides_bytes, strict=True)
    ) + view.dtype.itemsize  # fmt: skip
    buffer = (ctypes.c_uint8 * max(1, size)).from_address(view.address)
    return np.ndarray(view.shape, numpy_dtype(view.dtype), buffer, 0, view.strides_bytes)


class HostedKernel:
    """A kernel of the host, as a CUDA device's."""

    def __init__(self, kernel):
        self._kernel = kernel

    def plan(self, attrs, inputs, outputs):
        plan = self._kernel.plan(attrs, inputs, outputs)
        return plan and KernelPlan(plan.needs, partial(self._bind, plan))

    def _bind(self, plan, inputs, outputs, workspace):
        arrays = [tuple([array_on(view) for view in views]) for views in (inputs, outputs)]
        scratch = None if workspace is None else array_on(workspace)
        launch = plan.bind(*arrays, scratch)
        return (kernel_call(lambda words: launch()),)
