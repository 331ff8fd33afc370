"""Decompositions of matrices and Fourier transforms, by LAPACK and pocketfft through numpy.

Each launch allocates what numpy returns, and copies it into the outputs. A matrix that has no
such decomposition, as one that is singular for `solve`, raises numpy's LinAlgError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from actors.kernels.common import cost
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    Operands,
    Work,
    Workspace,
    flag,
)
from actors.kernels.reference.bfloat16 import has_bfloat16
from actors.machine.protocol import Arrays, Launch

Function = Callable[..., Any]

_FUNCTIONS: dict[str, Function] = {
    "cholesky": np.linalg.cholesky,
    "solve": np.linalg.solve,
    "qr": np.linalg.qr,
    "svd": partial(np.linalg.svd, full_matrices=False),
    "eigh": np.linalg.eigh,
    "slogdet": np.linalg.slogdet,
    "det": np.linalg.det,
}


def _plan_matrices(
    function: Function, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan a function of numpy's linear algebra of the operands. It takes what numpy knows."""
    if has_bfloat16(inputs):
        return None
    m, n = inputs[0].shape[-2:]
    matrices = inputs[0].type.num_elements / max(1, m * n)
    # A vector operation for each element of a step, of min(m, n) steps: LAPACK of small matrices.
    size = matrices * m * n * min(m, n) * inputs[0].dtype.itemsize
    work = Work(2, passes=((BytePass.POWER, float(size)),))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        def launch() -> None:
            made = function(*inputs)
            for out, array in zip(outputs, made if len(outputs) > 1 else (made,), strict=True):
                np.copyto(out, array)

        return launch

    return KernelPlan(cost.needs(inputs, outputs, work), bind)


def _plan_fft(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `fft`(x [..., n, 2]) -> [..., n, 2]; attrs inverse. No factor in either direction.

    It takes what numpy knows.
    """
    if has_bfloat16(inputs):
        return None
    size = float(inputs[0].type.size_bytes)
    work = Work(2, passes=((BytePass.POWER, size * max(1, inputs[0].shape[-2].bit_length())),))
    transform: Function = partial(np.fft.fft, norm="backward")
    if flag(attrs, "inverse"):
        transform = partial(np.fft.ifft, norm="forward")

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        (x,), (out,) = inputs, outputs

        def launch() -> None:
            made = transform(x[..., 0] + np.multiply(x[..., 1], 1j))
            out[..., 0], out[..., 1] = made.real, made.imag

        return launch

    return KernelPlan(cost.needs(inputs, outputs, work), bind)


LINEAR_ALGEBRA_KERNELS = (
    *[
        Kernel(f"numpy.{op}", op, partial(_plan_matrices, function))
        for op, function in _FUNCTIONS.items()
    ],
    Kernel("numpy.fft", "fft", _plan_fft),
)
