"""What tests of kernels of CUDA devices share."""

import functools

import pytest
from emulated_run import emulated_run as run_emulated


@pytest.fixture(scope="session")
def emulated_run(native_toolchain):
    """Return how a kernel is queried, bound and executed on the host: see `emulated_run`."""
    return functools.partial(run_emulated, native_toolchain)
