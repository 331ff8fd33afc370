"""Texts for tests of the emulation, and how one is run."""

import ctypes

import numpy as np
import pytest

from actors.device.cuda.memory import argument_block
from actors.kernels.cuda.calls import KernelText
from actors.testing.emulated import kernels

HEAD = """
typedef struct { af_word w[4]; } NAME_arguments;
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    const af_word *a = arguments.w;
"""


@pytest.fixture
def run_text(native_toolchain):
    """Return a function that builds the body of a kernel and runs it on arrays and numbers."""

    def run(body, words, num_blocks=1, num_threads=64, seed=0, *, has_exchanges=True):
        text = KernelText.of(
            "af_try", HEAD + body + "}\n", ("NAME",), "of a test", has_exchanges=has_exchanges
        )
        kernels.load([text], native_toolchain)
        given = [w.ctypes.data if isinstance(w, np.ndarray) else w for w in words]
        block = argument_block((*given, *(0,) * (4 - len(given))))
        built = kernels.built(text.kernels[0])
        kernels.run(built, (num_blocks, num_threads), 0, ctypes.addressof(block), seed)

    return run
