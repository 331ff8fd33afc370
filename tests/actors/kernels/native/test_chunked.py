"""Regions against float64: the loss over a vocabulary with its gradients, and a wide hidden layer.

One table: element types, extents, chunks, and which results are wanted, for every kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from kernel_calls import Declined, run_typed
from wide_regions import (
    BF16,
    COLUMN_SUM,
    F32,
    FULL,
    activated_region,
    dtypes_of,
    loss_operands,
    loss_region,
)

from actors.kernels.native.emit import emit
from actors.kernels.native.region import CHUNKED_KERNELS, functions_of_region
from actors.kernels.program.spaces import buffers_of
from actors.kernels.reference.bfloat16 import upcast
from actors.kernels.reference.region import REGION_KERNELS
from compiler.contract.program import ProgramError
from compiler.contract.region import TiledLoop, check_region
from compiler.contract.types import TensorType


def run(kernel, region, dtypes, arrays):
    return run_typed(kernel, {"region": region}, dtypes, arrays, region.outputs)


def kernels(dtype):
    numpys = upcast(REGION_KERNELS) if dtype is BF16 else REGION_KERNELS
    return {"c": CHUNKED_KERNELS[0], "numpy": next(iter(numpys))}


def test_rows_that_do_not_lie_evenly_apart_are_declined():
    """As where a part of a longer tensor is read, of which rows are several axes."""
    region, rng = activated_region(6, 4, 5), np.random.default_rng(1)
    whole, weight = rng.standard_normal((2, 5, 4)).astype(np.float32), np.ones((4, 5), np.float32)
    (got,), _ = run(REGION_KERNELS[0], region, [F32] * 2, [whole[:, :3].copy(), weight])
    np.testing.assert_allclose(got, np.tanh(whole[:, :3].reshape(6, 4)) @ weight, rtol=1e-5)
    with pytest.raises(Declined):
        run(REGION_KERNELS[0], region, [F32] * 2, [whole[:, :3], weight])


def test_scratch_is_one_chunk_and_the_gradient_lies_over_the_logits(groups, native):
    region, _ = loss_region(F32, 512, 4096, 8, 32, ("losses", "dx", "dw"))
    assert len(buffers_of(region).dtypes) == 1
    arrays = loss_operands(F32, 512, 4096, 8, False)
    for kernel in kernels(F32).values():
        _, needs = run(kernel, region, dtypes_of(F32, 5), arrays)
        assert 32 * 4096 * 4 <= needs.workspace_bytes < 2 * 32 * 4096 * 4 + (5 << 20)


def test_a_kernel_tells_the_functions_that_it_will_need(groups, native):
    region, _ = loss_region(F32, 20, 17, 4, 6, ("losses", "dx"))
    (function,) = functions_of_region({"region": region})
    assert function.name == emit(region.steps[1].program).name


def broken(groups):
    """Regions that say something wrong."""
    region, _ = loss_region(F32, 20, 17, 4, 6, ("losses", "dx"))
    product, program, dx = region.steps
    b = groups.Builder()
    summed = b.program(b.reduce("column_sum", b.input(FULL, F32)))

    def with_steps(*steps):
        return replace(region, steps=steps)

    yield replace(region, chunk_rows=21)
    yield replace(region, num_inputs=4)
    yield replace(region, columns=18)
    yield with_steps(product, program)
    yield with_steps(program, dx)
    yield with_steps(product, product, program, dx)
    yield with_steps(replace(product, reads=(0, 2)), program, dx)
    yield with_steps(replace(product, reads=(3, 1)), program, dx)
    yield with_steps(product, replace(program, program=None), dx)
    yield with_steps(product, replace(program, reads=(5, 3, 3)), dx)
    yield with_steps(product, replace(program, program=summed), dx)
    yield with_steps(product, program, replace(dx, kind=COLUMN_SUM))


def test_a_region_that_contradicts_itself_is_refused_by_a_rule(groups):
    shapes = [(20, 4), (4, 17), (17, 4), (20,), ()]
    inputs = tuple([TensorType(d, s) for d, s in zip(dtypes_of(F32, 5), shapes, strict=True)])
    for region in broken(groups):
        with raises(ProgramError):
            check_region(region, inputs)


def test_chunks_cover_all_rows_once():
    for rows, step in itertools.product((1, 5, 12), (1, 4, 5)):
        region = TiledLoop(rows, 2, min(step, rows), 0, (), (), ())
        covered = [row for first, last in region.chunks() for row in range(first, last)]
        assert covered == list(range(rows))
