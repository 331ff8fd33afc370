"""Whether a tensor holds NaN or infinity, in C (`non_finite.c`): a pass at memory speed."""

from __future__ import annotations

from dataclasses import dataclass

from actors.kernels import cost
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.axes import rows_and_columns
from actors.kernels.native.launch import Word, address, native_launch
from actors.kernels.work import NATIVE_CALLS, BytePass, Work
from actors.protocol import Arrays, Launch
from compiler.errors import InternalError
from compiler.types import DType

_TYPES = (DType.FLOAT32, DType.FLOAT64)


@dataclass(frozen=True, slots=True)
class NativeNonFinite:
    """`non_finite`(x, earlier) -> flag; `earlier` may be left out."""

    name: str = "c.non_finite"
    op: str = "non_finite"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64 of at most two axes that do not join."""
        x = inputs[0]
        if not runtime.is_on() or x.type.dtype not in _TYPES:
            return None
        if rows_and_columns(x.shape, (x.strides_bytes,), x.dtype.itemsize, in_order=False) is None:
            return None
        work = Work(NATIVE_CALLS, passes=((BytePass.SIMPLE, float(x.type.size_bytes)),))
        return cost.needs(inputs, outputs, work)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (x, *earlier), (out,) = inputs, outputs
        found = rows_and_columns(x.shape, (x.strides,), x.itemsize, in_order=False)
        if found is None:
            raise InternalError(f"{self.name} was bound to a layout that it does not take")
        rows, columns = found
        width = chunks.RUN_BYTES // x.itemsize
        blocks = rows.extent * -(-columns.extent // width)
        words: list[Word] = [
            *(address(x), address(out), address(earlier[0]) if earlier else 0),
            *(rows.extent, columns.extent),
            *(rows.steps[0] // x.itemsize, columns.steps[0] // x.itemsize),
            *(width, chunks.units_per_chunk(max(1, blocks), x.nbytes), blocks),
            *(runtime.num_threads(), int(DType(x.dtype.name) is DType.FLOAT64), 0),
        ]
        where = runtime.address_in("non_finite.c", "af_non_finite")
        return native_launch(where, words, (inputs, outputs))


NATIVE_NON_FINITE_KERNELS = (NativeNonFinite(),)
