"""How a program is walked on a GPU, and programs on some rows of their operands."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from error_texts import raises
from fused_programs import (
    Builder,
    compare,
    interpret,
    known,
    layer_norm,
    layer_norm_grad,
    operands,
    results_of,
)
from kernel_calls import bind_to
from program_texts import texts_of

from actors.kernels.common.kernel import KernelNeeds, KernelPlan, size_bytes
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.emit import SumPlace
from actors.kernels.cuda.kernel import DeviceView, gpu_named, known_gpus
from actors.kernels.cuda.programs import (
    matrix_views,
    program_calls,
    program_ns,
    program_pieces,
    text_of,
    walk_of,
)
from actors.kernels.cuda.strips import rows_at_once
from compiler.contract.errors import InternalError
from compiler.contract.program import Kind
from compiler.contract.types import DType, TensorType, contiguous_strides

GPU = gpu_named("h200")


@dataclass(frozen=True)
class InChunks:
    """A program on chunk after chunk of its rows."""

    program: object
    rows: int
    columns: int
    ends: tuple
    name: str = "cuda.chunks"

    def walks(self, views):
        for first, last in zip((0, *self.ends), (*self.ends, self.rows), strict=True):
            matrices = matrix_views(views)
            yield walk_of(GPU, self.program, self.rows, self.columns, matrices, (first, last))

    def plan(self, attrs, inputs, outputs):
        views = tuple([DeviceView(0, x.type, x.strides_bytes) for x in (*inputs, *outputs)])
        sizes = [size_bytes(program_pieces(self.program, walk)) for walk in self.walks(views)]
        return KernelPlan(KernelNeeds(max(sizes)), self._bind)

    def _bind(self, inputs, outputs, workspace):
        views = (*inputs, *outputs)
        return tuple(
            [
                call
                for walk in self.walks(views)
                for call in program_calls(self.program, walk, self.rows, views, workspace)
            ]
        )


@pytest.mark.parametrize(("rows", "columns", "ends"), [(11, 40, (3, 4)), (3, 17_000, (1,))])
def test_chunks_of_rows_make_what_all_rows_make(emulated_run, rows, columns, ends):
    programs = known(rows, columns)
    for name in ("layer norm", "cross-entropy", "dropout", "repeated blocks"):
        program = programs[name]
        arrays = operands(program, rows, columns)
        kernel = InChunks(program, rows, columns, ends)
        results = tuple(results_of(program, rows, columns))
        found = emulated_run(kernel, {}, tuple(arrays), results, seeds=(0,))
        compare(program, found.outputs, interpret(program, rows, columns, arrays), 1e-4)


def test_a_sum_over_all_rows_is_not_made_of_some():
    program = layer_norm_grad(30)
    kernel = InChunks(program, 8, 30, (4,))
    views = views_of(program, 8, 30)
    count = len(program.inputs)
    pieces = [program_pieces(program, walk) for walk in kernel.walks(views)]
    space = TensorType(DType.UINT8, (max(map(size_bytes, pieces)),))
    with raises(InternalError):
        bind_to(kernel, {}, views[:count], views[count:], DeviceView(1 << 20, space, (1,)))


def views_of(program, rows, columns):
    shapes = {Kind.FULL: (rows, columns), Kind.ROW: (rows,), Kind.COLUMN: (columns,)}
    values = (*range(len(program.inputs)), *program.outputs)
    types = [TensorType(program.dtype_of(v), shapes.get(program.kind_of(v), ())) for v in values]
    return tuple([DeviceView(0, t, contiguous_strides(t.shape, t.dtype.itemsize)) for t in types])


def walk(program, rows, columns, gpu=GPU):
    return walk_of(gpu, program, rows, columns, matrix_views(views_of(program, rows, columns)))


def plain():
    b = Builder()
    return b.program(b.op("exp", b.input()))


def test_what_is_one_row_is_walked_by_all_threads():
    found = walk(plain(), 1000, 77_777)
    assert (found.num_rows, found.columns) == (1, 77_777_000)
    assert found.team == found.num_blocks * found.num_threads
    assert found.team == GPU.num_sms * GPU.threads_per_sm
    assert walk(plain(), 3, 5).num_blocks == 1


def test_a_row_has_more_threads_the_longer_it_is_and_the_fewer_there_are():
    program = layer_norm(768)
    teams = [walk(program, 100_000, columns).team for columns in (3, 20, 768, 5000, 50_304)]
    assert teams == sorted(teams)
    assert teams[-1] == 512
    assert teams[0] < 32 == teams[2] < teams[3]
    assert walk(program, 64, 4000).team > walk(program, 100_000, 4000).team
    assert all([walk(program, rows, 300).team <= 512 for rows in (1, 20, 10**6)])


def test_few_long_rows_are_cut_and_sums_over_rows_have_a_bounded_scratch():
    assert walk(layer_norm(768), 2, 100_000).is_cut
    assert not walk(layer_norm(768), 2, 4000).is_cut
    assert not walk(plain(), 2, 100_000).is_cut
    for rows, columns in ((10**6, 768), (10**6, 50_304), (5000, 3), (7, 100_000)):
        program = layer_norm_grad(768)
        size = size_bytes(program_pieces(program, walk(program, rows, columns)))
        assert size <= max(65 << 20, 17 * 2 * 12 * columns)


@pytest.mark.parametrize("gpu", known_gpus())
def test_rows_whose_sums_are_in_scratch_have_all_the_registers_of_a_block(gpu):
    program, places = layer_norm_grad(768), {}
    for columns in (3, 768, 5000, 12_000, 20_000, 29_000, 40_000, 100_000):
        found = walk(program, 5000, columns, gpu_named(gpu))
        text = text_of(program, found.sums, is_cut=False).text
        (bound,) = re.findall(r"_UP_TO\((\d+)\) \w+_rows\(", text)
        places.setdefault(found.sums, set()).add((int(bound), found.num_threads))
    assert {bound for bound, _ in places[SumPlace.SHARED]} == {768}
    # No second block of so many threads fits, whatever registers it gets.
    assert places[SumPlace.SCRATCH] == {(512, 512)}


def sums_of_columns(dtype=DType.FLOAT32):
    b = Builder()
    x, scale = b.input(Kind.FULL, dtype), b.input(Kind.ROW, dtype)
    y = b.op("mul", x, scale)
    return b.program(b.op("add", scale, scale), y, b.reduce("column_sum", y))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.INT32])
@pytest.mark.parametrize("shape", [(37, 5000), (20, 2049), (300, 2500)])
def test_sums_over_rows_alone_go_by_pieces_of_the_columns(emulated_run, shape, dtype):
    program = sums_of_columns(dtype)
    found = walk(program, *shape)
    assert found.num_pieces > 1
    assert not found.is_cut
    arrays = operands(program, *shape)
    attrs = {"program": program, "rows": shape[0], "columns": shape[1]}
    results = tuple(results_of(program, *shape))
    made = emulated_run(kernels_on(GPU)["cuda.fused"], attrs, tuple(arrays), results, seeds=(0,))
    compare(program, made.outputs, interpret(program, *shape, arrays), 1e-4)


def test_wide_sums_keep_the_gpu_busy():
    found = walk(sums_of_columns(), 2048, 50_304)
    on_the_way = found.num_blocks * found.num_threads * 16 * rows_at_once(sums_of_columns(), 4)
    assert found.num_blocks >= 2 * GPU.num_sms
    # What memory of 3 TB/s delivers in the 700 ns that it takes to answer.
    assert on_the_way >= 16_000 * GPU.num_sms


def test_what_phases_read_again_costs_less_than_the_first_time():
    x = walk(layer_norm(768), 65_536, 768)
    size = 2 * 65_536 * 768 * 4
    once, thrice = GPU.bytes_ns(size), program_ns(GPU, layer_norm(768), x, size)
    assert once < thrice < 2 * once


def test_a_grid_is_never_larger_than_what_the_gpu_holds_at_once():
    for rows, columns in ((10**6, 768), (1, 10**9), (10**6, 3), (256, 50_304)):
        for program in (plain(), layer_norm(768), layer_norm_grad(768)):
            found = walk(program, rows, columns)
            assert found.num_blocks * found.num_threads <= GPU.num_sms * GPU.threads_per_sm
            assert found.num_threads <= 512


def test_a_text_has_only_the_kernels_that_its_program_needs():
    names = {}
    for is_cut in (False, True):
        (text,) = texts_of(layer_norm(8), is_cut=is_cut)
        names[is_cut] = [name.rpartition("_")[2] for name in text.kernels]
    assert names[False] == ["rows"]
    assert names[True] == ["columns0", "columns1", "columns2", "last"]
    b = Builder()
    scalar = b.input(Kind.SCALAR)
    program = b.program(b.op("exp", scalar))
    (text,) = texts_of(program, is_cut=False)
    (name,) = text.kernels
    assert name.endswith("_finish")


def test_operands_between_elements_have_no_views():
    odd = DeviceView(0, TensorType(DType.FLOAT32, (2, 2)), (10, 4))
    assert matrix_views((odd,)) is None
    assert np.prod(odd.shape) == 4


def test_elements_that_are_moved_one_by_one_are_said_to_take_longer():
    def took(columns):
        """Bytes of bfloat16 with a bias, so that rows stay rows."""
        b = Builder()
        x, bias = b.input(Kind.FULL, DType.BFLOAT16), b.input(Kind.COLUMN, DType.BFLOAT16)
        program = b.program(b.op("add", x, bias))
        size = 2 * 2 * columns * 65_536
        return program_ns(GPU, program, walk(program, 65_536, columns), size) / size

    shares = GPU.narrow_rates
    assert max(shares[n] for n in (1, 2, 4)) < shares[8] < shares[16] < 1
    assert took(3072) == pytest.approx(1 / shares[16] / GPU.bytes_per_ns, rel=0.05)
    assert took(3073) == pytest.approx(1 / shares[2] / GPU.bytes_per_ns, rel=0.05)


def test_few_rows_have_few_blocks_so_that_small_sums_take_little_scratch():
    found = walk(sums_of_columns(), 16, 24)
    assert found.num_blocks == 1
    assert size_bytes(program_pieces(sums_of_columns(), found)) == 24 * 8
