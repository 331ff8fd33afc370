"""The sums that native kernels share: of one order, whatever the compiler optimises."""

import ctypes

import numpy as np
import pytest

from actors.kernels.library import runtime
from actors.kernels.library.toolchain import FLAGS, Toolchain

LENGTHS = (1, 7, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4099)

LEVELS = ("-O0", "-O1", "-O2", "-O3", "-O3 -mno-avx512f", "-O3 -mno-avx", "-O2 -fno-tree-vectorize")


@pytest.fixture(scope="module")
def built(native_toolchain, tmp_path_factory):
    """Return a function that builds the two sums with other flags; skips what is not known."""

    def build(level):
        place = tmp_path_factory.mktemp("sums")
        text = runtime._with_includes('#include "runtime.h"\n#include "sums.h"\n') + "".join(
            f"AF_EXPORT double own_{t}(const {t} *x, int64_t n) {{ return af_sum_{t}(x, n); }}\n"
            for t in ("float", "double")
        )
        flags = (*FLAGS, *level.split())
        version = native_toolchain.version
        chosen = Toolchain(native_toolchain.command, version, level, place, flags=flags)
        library = chosen.library(text)
        for name in ("own_float", "own_double"):
            getattr(library, name).restype = ctypes.c_double
            getattr(library, name).argtypes = (ctypes.c_void_p, ctypes.c_int64)
        return library

    return build


def lanes(x):
    """Sum as sums.h says it does, one stretch after the other."""
    total, unit = 0.0, 64 // x.itemsize
    for first in range(0, len(x), 256):
        part = x[first : first + 256]
        if len(part) < unit:
            total += float(np.add.accumulate(part)[-1])
            continue
        held = np.zeros((4, unit), x.dtype)
        for u, i in enumerate(range(0, len(part), unit)):
            piece = part[i : i + unit]
            held[u % 4, unit - len(piece) :] += piece
        tree = held.reshape(-1)
        while len(tree) > 1:
            tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
        total += float(tree[0])
    return total


@pytest.mark.parametrize("level", LEVELS)
def test_a_sum_has_the_same_bits_whatever_the_compiler_optimises(level, built):
    library = built(level)
    for dtype, name in (("float32", "own_float"), ("float64", "own_double")):
        for count in LENGTHS:
            terms = np.random.default_rng(count).random(count + 1) + 0.5
            x = terms.astype(dtype)[1:]  # at no round address
            got = getattr(library, name)(x.ctypes.data, count)
            assert got == lanes(x), (level, dtype, count)


def test_what_lies_before_a_rest_does_not_reach_its_sum(built):
    library = built("-O3")
    x = np.full(256 + 20, np.nan, np.float32)
    x[256:] = 1
    x[:256] = np.inf
    assert library.own_float(x[256:].ctypes.data, 20) == 20
