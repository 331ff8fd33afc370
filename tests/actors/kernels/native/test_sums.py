"""Sums of long tensors, in every native kernel that has them: right, and of one order."""

import ctypes
import math

import numpy as np
import pytest

from actors.kernels.native import runtime, toolchain
from actors.kernels.native.reduce import NATIVE_REDUCE_KERNELS

KERNELS = {kernel.op: kernel for kernel in NATIVE_REDUCE_KERNELS}
MARK = 1e-6
LENGTHS = (1, 7, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4099)

LEVELS = ("-O0", "-O1", "-O2", "-O3", "-O3 -mno-avx512f", "-O3 -mno-avx", "-O2 -fno-tree-vectorize")


def terms(count, dtype, kind):
    """Return terms of one sign: equal ones, whose errors add up, or random ones."""
    if kind == "equal":
        return np.full(count, 0.1, dtype)
    return (np.random.default_rng(count).random(count) + 0.5).astype(dtype)


@pytest.fixture(scope="module")
def built(native_toolchain, tmp_path_factory):
    """Return a function that builds the two sums with other flags; skips what is not known."""

    def build(level):
        place = tmp_path_factory.mktemp("sums")
        wanted = ("-march=native", "-O3")
        flags = [flag for flag in toolchain.FLAGS if flag not in wanted]
        text = runtime._with_includes('#include "runtime.h"\n#include "sums.h"\n') + "".join(
            f"AF_EXPORT double own_{t}(const {t} *x, int64_t n) {{ return af_sum_{t}(x, n); }}\n"
            for t in ("float", "double")
        )
        levels = ["-march=native", *level.split()]
        chosen = toolchain.Toolchain(
            (*native_toolchain.command, *flags, *levels), native_toolchain.version, level, place
        )
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
def test_a_sum_has_the_same_bits_whatever_the_compiler_optimises(level, built, monkeypatch):
    monkeypatch.setattr(toolchain, "FLAGS", ("-shared", "-fPIC"))
    library = built(level)
    for dtype, name in (("float32", "own_float"), ("float64", "own_double")):
        for count in LENGTHS:
            x = terms(count + 1, dtype, "random")[1:]  # at no round address
            got = getattr(library, name)(x.ctypes.data, count)
            assert got == lanes(x), (level, dtype, count)


def test_what_lies_before_a_rest_does_not_reach_its_sum(built):
    library = built("-O3")
    x = np.full(256 + 20, np.nan, np.float32)
    x[256:] = 1
    x[:256] = np.inf
    assert library.own_float(x[256:].ctypes.data, 20) == 20


@pytest.mark.parametrize("kind", ["equal", "random"])
@pytest.mark.parametrize("count", [10_000, 100_003, 1_000_000])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((-1,), (0,)), ((-1, 1), (0,)), ((1, -1), (1,)), ((-1, 3), (0,)), ((2, -1, 2), (1,))],
)
def test_long_sums_and_means_lose_less_than_the_mark(shape, axes, count, kind, native, native_call):
    others = -math.prod(shape)
    x = terms(others * count, "float32", kind).reshape(shape)
    for op in ("sum", "mean"):
        want = getattr(np, op)(x.astype(np.float64), axes)
        attrs = {"axes": axes, "keepdims": False}
        out = np.zeros(want.shape, np.float32)
        (got,) = native_call.call(KERNELS[op], attrs, (x,), (out,), launches=1)
        np.testing.assert_allclose(got, want, rtol=MARK)
