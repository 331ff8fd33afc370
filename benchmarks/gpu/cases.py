"""Calls of ops with what they must give in float64: the table of the tests, and larger shapes.

The table is the one that the tests of ops run, with formulas of its own; here are rows that fill
more than one block, with extents that no block divides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "shared"))

import op_table as table
from attention_formulas import attention_grad
from op_table import Row, normal, row

_IDS = np.random.default_rng(7).integers(0, 5003, (37, 129))
_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def large_rows() -> tuple[Row, ...]:
    """Return calls of many blocks."""
    p, g, m = (normal(1003, 769, seed=s) for s in range(3))
    heads = [normal(2, 3, 257, 64, seed=s) for s in range(3)]
    labels = np.random.default_rng(8).integers(0, 5003, 517)
    return (
        row("gelu", table.gelu, normal(1003, 769)),
        row("add", np.add, normal(1003, 769), normal(769)),
        *[
            row("sum", lambda x, axes: x.sum(axes), normal(1003, 769), axes=axes, keepdims=False)
            for axes in ((0,), (1,), (0, 1))
        ],
        row("softmax", table.softmax, normal(517, 1023), scale=0.3, causal=False),
        row("softmax", table.softmax, normal(3, 257, 257), scale=0.3, causal=True),
        row("layer_norm", table.layer_norm, normal(1003, 769), normal(769), normal(769, seed=1),
            eps=1e-5),
        row("cross_entropy_rows", table.losses, normal(517, 5003), labels),
        row("matmul", np.matmul, normal(1003, 515), normal(515, 259)),
        row("matmul", np.matmul, normal(6, 129, 65), normal(6, 65, 257)),
        row("attention", table.attention, *heads, scale=0.125, causal=True),
        row("attention", table.attention, *heads, scale=0.125, causal=False),
        row("transpose", lambda x, perm: x.transpose(perm), normal(65, 129, 67), perm=(2, 0, 1)),
        row("embedding", lambda w, ids: w[ids], normal(5003, 96), _IDS),
        row("embedding_grad", table.scattered, normal(37, 129, 96), _IDS, rows=5003),
        row("adamw_update", table.adamw, p, g, m, np.square(m), np.array(1e-3), np.array(3),
            **_ADAM),
        row("dropout", table.dropout, normal(1003, 769), np.array(5), np.array(7), p=0.1, key=2),
    )  # fmt: skip


def library_rows(*, is_tiny: bool) -> tuple[Row, ...]:
    """Return calls that cuDNN takes: of attention, with either mask, and of convolutions.

    Those are a ResNet's: a square kernel, one that strides alone, one that is a product, the first
    one, and groups.
    """
    calls: list[Row] = []
    for x, weight, stride, pad in (
        [((2, 8, 6, 5), (8, 8, 3, 3), 1, 1)]
        if is_tiny
        else [
            ((16, 256, 14, 14), (256, 256, 3, 3), 1, 1),
            ((4, 64, 28, 28), (128, 64, 1, 1), 2, 0),
            ((8, 128, 14, 14), (256, 128, 1, 1), 1, 0),
            ((4, 3, 56, 56), (64, 3, 7, 7), 2, 3),
            ((4, 32, 14, 14), (64, 8, 3, 3), 1, 1),
        ]
    ):
        calls += _convolutions(x, weight, stride, pad)
    for rows, columns in ((9, 16),) if is_tiny else ((257, 257), (200, 512), (1024, 1024)):
        q = normal(2, 3, rows, 64)
        k, v = (normal(2, 3, columns, 64, seed=s) for s in (1, 2))
        for causal in (False, True):
            attrs = {"scale": 0.125, "causal": causal}
            calls.append(row("attention", table.attention, q, k, v, **attrs))
            y, *statistics = table.attention(q, k, v, **attrs)
            rows_of = [x.astype(np.float32) for x in statistics]
            operands = normal(*y.shape, seed=3), q, k, v, y, *rows_of
            calls.append(row("attention_grad", attention_grad, *operands, **attrs))
    return tuple(calls)


def _convolutions(
    x: tuple[int, ...], weight: tuple[int, ...], stride: int, pad: int
) -> Iterator[Row]:
    """Yield a convolution and its gradients, of numbers whose sums are about 1."""
    ways = {"strides": (stride,) * 2, "low": (pad,) * 2, "high": (pad,) * 2, "dilation": (1, 1)}
    ways["groups"] = x[1] // weight[1]
    ends = zip(x[2:], weight[2:], strict=True)
    y = x[0], weight[0], *[(n + 2 * pad - k) // stride + 1 for n, k in ends]
    yield row("conv", table.conv, normal(*x), normal(*weight, seed=1), **ways)
    yield row("conv_input_grad", table.conv_input_grad, normal(*y), normal(*weight, seed=1),
              spatial=x[2:], **ways)  # fmt: skip
    yield row("conv_weight_grad", table.conv_weight_grad, normal(*x), normal(*y, seed=1),
              kernel=weight[2:], **ways)  # fmt: skip


def rows(*, is_tiny: bool) -> tuple[Row, ...]:
    """Return all calls; of tiny ones the first of each op."""
    # A copy between places is the plain copy's kernel, which has rows of its own.
    small = [r for r in table.ROWS_OF_OPS if r.op != "copy_to"]
    if not is_tiny:
        return (*small, *large_rows())
    return tuple({r.op: r for r in reversed(small)}.values())
