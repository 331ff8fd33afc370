"""Each row of the table of ops, eagerly and as a plan without fusion: the same bits.

Forward and gradient, in float32 and bfloat16. The plan goes its own way: it is traced, compiled
whole, verified and run.
"""

from __future__ import annotations

import numpy as np
import op_table as table
import pytest
from changed_passes import plan_without_fusion
from element_rows import ROWS_OF_ELEMENTS

import actorflow as af
from actorflow import nn
from actorflow.tensor.tensor import apply_many
from compiler.graph.graph import gradient
from compiler.graph.registry import find_op, input_output_aliases, is_comm

pytestmark = pytest.mark.host("eager mode computes on the host")

ROWS = [
    row
    for row in (*table.ROWS_OF_OPS, *ROWS_OF_ELEMENTS)
    if not is_comm.get(find_op(row.op)) and not input_output_aliases.get(find_op(row.op))
]
"""All but updates, which write over variables: `test_training` has those of every optimizer."""

TOGETHER = 40
"""Rows of one job: a plan of many ops is compiled sooner than many plans."""

PARTS = [ROWS[first : first + TOGETHER] for first in range(0, len(ROWS), TOGETHER)]


class Nothing(nn.Module):
    pass


def arrays_of(rows):
    """Return what a job of some rows reads: operands, and gradients that flow into outputs."""
    arrays = {}
    for at, row in enumerate(rows):
        for i, array in enumerate(row.inputs):
            is_float = array.dtype == np.float64
            arrays[f"{at} x{i}"] = array.astype(np.float32) if is_float else array
        first = row.outputs(row.inputs)[0]
        if first is not None:
            arrays[f"{at} dy"] = table.normal(*np.shape(first), seed=9).astype(np.float32)
    return arrays


def results_of(at, row, dtype, batch, *, has_gradients=True):
    """Return the outputs of a row's op, and the gradients of the first of them."""
    op = find_op(row.op)
    inputs = [
        batch[f"{at} x{i}"].to(dtype) if a.dtype == np.float64 else batch[f"{at} x{i}"]
        for i, a in enumerate(row.inputs)
    ]
    made = apply_many(op, *inputs, **row.attrs)
    results = {f"{at} {row.op} y{i}": y for i, y in enumerate(made)}
    floats = [x for x in inputs if x.dtype.is_float]
    if has_gradients and gradient.has(op) and made[0].dtype.is_float and floats:
        dy = batch[f"{at} dy"].to(made[0].dtype)
        slopes = af.grad(made[0], floats, grad_outputs=[dy], allow_unused=True)
        names = [f"{at} {row.op} d{i}" for i in range(len(floats))]
        results |= {n: d for n, d in zip(names, slopes, strict=True) if d is not None}
    return results


def bits(value, like):
    """Return bits as integers; what a job returns as a Python number is of the dtype of `like`."""
    array = np.ascontiguousarray(np.asarray(value, np.asarray(like).dtype))
    return array.view(np.uint8)


def assert_same_bits(rows, results_of_row, **options):
    """Compare what is computed eagerly with what a plan without fusion computes."""

    def compute(model, batch):
        results = {}
        for at, row in enumerate(rows):
            results |= results_of_row(at, row, batch)
        return results

    model, arrays = Nothing(), arrays_of(rows)
    eager = af.eager(compute, train=False, **options)(model, arrays)
    planned = af.job(compute, train=False, **options).step(model, arrays)
    assert list(eager) == list(planned)
    for name in eager:
        assert eager[name].shape == np.shape(planned[name])
        expected = bits(planned[name], eager[name])
        np.testing.assert_array_equal(bits(eager[name], eager[name]), expected, name)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_ops_have_the_bits_of_the_plan_without_fusion(part, dtype, monkeypatch):
    plan_without_fusion(monkeypatch)
    assert_same_bits(PARTS[part], lambda at, row, batch: results_of(at, row, dtype, batch))


@pytest.mark.usefixtures("cached_toolchain")
@pytest.mark.thinned(len(PARTS))
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_ops_on_a_gpu_have_the_bits_of_its_plan_without_fusion(part, monkeypatch):
    """The host acts as the GPU; its kernels, and which of them are chosen, are those of plans."""
    plan_without_fusion(monkeypatch)
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")

    def forward(at, row, batch):
        return results_of(at, row, "float32", batch, has_gradients=False)

    assert_same_bits(PARTS[part], forward, device="cuda:0")
