"""Which products the libraries take on this machine: some need instructions that not all have."""

import numpy as np
import pytest

from actors.kernels.common.gemm import gemm_of, view_of_array
from actors.kernels.library.gemm_launch import workspace_bytes
from actors.kernels.native.matmul import LIBRARIES
from compiler.contract.types import numpy_dtype

BY_NAME = {library.name: library for library in LIBRARIES}


def takes(name, dtype):
    """Whether a library takes a product of dense matrices; the native floor is turned on."""
    rows, columns = (8, 256) if name == "c.columns" else (256, 64)
    shapes = (rows, 64), (64, columns), (rows, columns)
    operands = [np.ones(shape, numpy_dtype(dtype)) for shape in shapes]
    return workspace_bytes(BY_NAME[name], gemm_of(*map(view_of_array, operands))) is not None


def skip_without(name, dtype):
    """Skip a test where a library takes no product of a dtype."""
    if not takes(name, dtype):
        pytest.skip(f"{name} takes no {dtype} on this machine")
