"""A program as a step of a region: on the rows of a chunk, in scratch that steps share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from actors.kernels.cuda.calls import DeviceCalls
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.programs import moved_bytes, program_calls, program_ns, program_pieces
from actors.kernels.cuda.views import DeviceView, DeviceViews
from actors.kernels.cuda.walks import TeamWalk, matrix_views, walk_of
from actors.kernels.kernel import is_dense
from actors.kernels.scratch import Piece
from actors.protocol import Array
from compiler.errors import InternalError
from compiler.fusion.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.fusion.region import Region
from compiler.fusion.spaces import row_stride
from compiler.types import DType


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """A program on some rows of its operands (inputs, then outputs), which are given with all."""

    gpu: Gpu
    program: FusedProgram
    extents: tuple[int, int]
    views: DeviceViews
    chunk: tuple[int, int]

    @property
    def walk(self) -> TeamWalk:
        """How the rows are walked. Raises InternalError for operands of uneven rows."""
        rows, columns = self.extents
        matrices = matrix_views(self.views)
        chunk = None if self.chunk == (0, rows) else self.chunk
        found = None
        if matrices is not None:
            found = walk_of(self.gpu, self.program, rows, columns, matrices, chunk)
        if found is None:
            raise InternalError(f"a program of a region has operands of uneven rows: {self.views}")
        return found

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch."""
        return program_pieces(self.program, self.walk)

    def duration_ns(self) -> float:
        """Return an estimate."""
        share = (self.chunk[1] - self.chunk[0]) / max(1, self.extents[0])
        moved = moved_bytes(matrix_views(self.views) or ())
        return program_ns(self.gpu, self.program, self.walk, int(moved * share))

    def calls(self, workspace: DeviceView | None) -> DeviceCalls:
        """Return the kernels."""
        return program_calls(self.program, self.walk, self.extents[0], self.views, workspace)


def column_sum_step(gpu: Gpu, x: DeviceView, out: DeviceView) -> ProgramStep:
    """Return the sum over the rows of a matrix."""
    rows, columns = x.shape
    return ProgramStep(gpu, _sum_of(x.dtype), (rows, columns), (x, out), (0, rows))


@functools.cache
def _sum_of(dtype: DType) -> FusedProgram:
    entry = ProgramInput(dtype, Kind.FULL)
    return FusedProgram((entry,), (Instruction("column_sum", (0,), dtype, Kind.COLUMN),), (1,))


def uneven_operands(region: Region, given: Mapping[int, Array]) -> tuple[int, ...]:
    """Return inputs and outputs whose rows a program cannot walk, or which no matrix shows."""
    found: dict[int, None] = {}
    for value, array in given.items():
        is_even = array.ndim == 2 or is_dense(array.shape, array.strides, array.itemsize)
        if value >= region.first_output and not is_even:
            found[value] = None
    for step in region.steps:
        if step.program is None:
            continue
        places = (*range(len(step.reads)), *step.program.outputs)
        for value, place in zip((*step.reads, *step.makes), places, strict=True):
            kind = step.program.kind_of(place)
            if value in given and not _is_even(given[value], kind, region.columns):
                found[value] = None
    return tuple(found)


def _is_even(array: Array, kind: Kind, columns: int) -> bool:
    strides = tuple([step // array.itemsize for step in array.strides])
    return row_stride(kind, columns, array.shape, strides) is not None
