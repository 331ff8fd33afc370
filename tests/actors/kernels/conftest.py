"""What tests of kernels share: paths, small pieces, `kernel_calls` and `group_runs`."""

from __future__ import annotations

from types import SimpleNamespace

import group_runs
import kernel_calls
import numpy as np
import pytest
from small_blocks import cut_small

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from actors.kernels.common import attention_blocks, gemm
from actors.kernels.common.host_memory import quiet_floating_point
from actors.kernels.cuda import attention as on_gpu
from actors.kernels.cuda import matmul as product_on_gpu
from actors.kernels.native import attention as in_c
from actors.kernels.native.fused import FUSED_KERNELS
from actors.kernels.reference import convolution as on_numpy
from actors.kernels.reference.fused import NUMPY_FUSED_KERNELS


@pytest.fixture(scope="session")
def harness():
    """The module that calls kernels, whichever the catalogue chooses."""
    return kernel_calls


@pytest.fixture(scope="session")
def native_call():
    """How one kernel is called, not the one that the catalogue chooses."""
    return SimpleNamespace(
        operand=kernel_calls.operand,
        bind=kernel_calls.bind_kernel,
        call=kernel_calls.call_kernel,
    )


@pytest.fixture(params=["numpy", "native"])
def path(request):
    """numpy's kernels, or native ones, which are turned on."""
    if request.param.startswith("native"):
        request.getfixturevalue("native")
    return request.param


@pytest.fixture(autouse=True, scope="module")
def quiet_thread():
    """What a loop thread does before its first launch; undone after the module."""
    settings, size = np.geterr(), np.getbufsize()
    quiet_floating_point()
    yield
    np.seterr(**settings)
    np.setbufsize(size)


@pytest.fixture(params=[64, None], ids=["tiny-pieces", "usual-pieces"])
def pieces(request, monkeypatch):
    """Runs a test with blocks and chunks of 64 bytes as well, so that small tensors have many."""
    if request.param is not None:
        cut_small(monkeypatch, block_bytes=request.param, chunk_bytes=request.param)


SMALL = (
    (attention_blocks, {"STRIPS": (3, 3), "CHUNKS": (4, 4), "GROUP_BYTES": 1}),
    (in_c, {"_KEYS": 16, "_STRIP": 6, "_BLOCK": 12}),
    (on_gpu, {"CHUNK_BYTES": 700, "_LEAST_ROWS": 3}),
    (on_numpy, {"CHUNK_BYTES": 300}),
    (gemm, {"CHUNK_FLOPS": 50_000}),
    (product_on_gpu, {"_MOST_PLACES": 3}),
)


@pytest.fixture
def tiny(monkeypatch):
    """Blocks, strips and chunks so small that small tensors have many."""
    for module, values in SMALL:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    cut_small(monkeypatch, block_bytes=64, chunk_bytes=64)


@pytest.fixture
def with_threads(native, native_toolchain):
    """Return a function that makes a call with that many threads."""

    def run(num_threads, function):
        native.enable(native_toolchain, num_threads)
        assert native.num_threads() == num_threads
        return function()

    return run


@pytest.fixture(params=["c.fused", "numpy.fused", "cuda.fused"])
def kernel(request):
    """All kernels of groups; numpy's needs no compiler, and that of a GPU runs on the host."""
    if request.param == "cuda.fused":
        return group_runs.OnHost(request.getfixturevalue("native_toolchain"))
    if request.param == "numpy.fused":
        return NUMPY_FUSED_KERNELS[0]
    request.getfixturevalue("native")
    return FUSED_KERNELS[0]


@pytest.fixture(scope="session")
def groups():
    """The module that runs fused groups, and compares them with the interpreter."""
    return group_runs
