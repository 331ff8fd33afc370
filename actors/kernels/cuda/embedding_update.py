"""The kernel "cuda.embedding_update": an update on the rows of a table that a batch picked.

The rows of dy are added up by id (`row_sums`); then the program of the dense update runs on the
rows that were picked, with the sum of each in place of the gradient. So the bits are those of the
gradient of the table and the dense update. Scratch is a sum per id: how many differ, nobody knows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from actors.kernels.attributes import fused_program
from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.expressions import store
from actors.kernels.codegen.stages import scalar_values, structs
from actors.kernels.codegen.values import Values, indented
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.row_sums import RowSums, block_of, sums_of
from actors.kernels.cuda.stages import scalars_function
from actors.kernels.cuda.views import DeviceView, PlacedView, carve, on_device
from actors.kernels.cuda.walks import made_for_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from actors.kernels.scratch import Piece, size_bytes
from compiler.errors import InternalError
from compiler.fusion.program import GRADIENT, FusedProgram, is_by_elements
from compiler.types import TensorType, numpy_dtype

_PICKS, _NUM_PARTS = words.PARTIALS, words.NUM_COLUMN_CHUNKS
"""Words of the header that say something else here: the row of each entry or -1, and in how many
blocks the columns of a row are."""


@dataclass(frozen=True, slots=True)
class CudaEmbeddingUpdate:
    """Table [V, D], dy, ids, and what else the update reads -> what it makes, in the rows of ids.

    Attrs are those of the fused kernel of the update. The outputs lie over the inputs: rows that no
    id names are not touched. One more input `skip` [] int64 leaves all as it is where it is not 0.
    """

    gpu: Gpu
    name: str = "cuda.embedding_update"
    op: str = "embedding_update"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take programs of elements and numbers, on dense tables."""
        table, dy, ids, *rest = inputs
        sums = sums_of(dy, ids, table.shape[0])
        is_dense = all([x.is_dense for x in (table, *rest, *outputs)])
        if sums is None or not is_dense or not is_by_elements(fused_program(attrs, "program")):
            return None
        moved = (1.0 + 2 * len(outputs)) * dy.type.size_bytes
        own_ns = self.gpu.call_ns + self.gpu.bytes_ns(moved)
        return KernelNeeds(
            size_bytes(_pieces(sums, table.type)),
            tuple(enumerate((0, *range(3, 2 + len(outputs))))),  # the states come after dy and ids
            sums.duration_ns(self.gpu, dy.dtype.itemsize) + own_ns,
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the sums, and one kernel for the update."""
        table, dy, ids, *rest = on_device(inputs)
        sums = sums_of(dy.as_operand, ids.as_operand, table.shape[0])
        if sums is None:
            raise InternalError(f"{self.name} is bound to what it does not take")
        gradient, picks, *pieces = carve(workspace, _pieces(sums, table.type))
        calls = sums.calls(tuple(pieces), dy, ids, gradient, picks)
        if not table.type.num_elements or not sums.num:
            return calls
        program = fused_program(attrs, "program")
        text = _text(program)
        own = len(program.inputs)
        operands = [view.address for view in (table, *rest)]
        skip = operands[own - 1] if len(operands) >= own else 0
        operands.insert(GRADIENT, gradient)
        operands[own:] = [view.address for view in on_device(outputs)]
        threads, parts = block_of(sums.columns)
        block = [0] * words.operand(len(operands))
        block[words.COLUMNS], block[_NUM_PARTS] = sums.columns, parts
        block[_PICKS], block[words.SKIP] = picks, skip
        for position, address in enumerate(operands):
            block[words.operand(position)] = address
        call = RunKernel(text, text.kernels[0], sums.num * parts, threads, tuple(block))
        return (*calls, call)


def _pieces(sums: RowSums, table: TensorType) -> tuple[Piece, ...]:
    """Return a sum per id, the row that each belongs to, and the scratch of the sums."""
    gradient = Piece((sums.num, sums.columns), numpy_dtype(table.dtype))
    return (gradient, Piece((sums.num,), np.dtype(np.int64)), *sums.pieces)


@functools.lru_cache(maxsize=256)
def _text(program: FusedProgram) -> KernelText:
    """Return the kernel of a program: a thread for each element of each entry."""
    num_words = words.operand(len(program.inputs) + len(program.outputs))
    values = Values(program, made_for_device(program).schedule)
    lines = [
        f"typedef struct {{ af_word w[{num_words}]; }} NAME_arguments;",
        *structs(values),
        *scalars_function(values),
        "AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {",
        *indented(_body(values)),
        "}",
    ]
    about = "an update of picked rows"
    return KernelText.of("rows", "\n".join(lines) + "\n", ("NAME",), about)


def _body(values: Values) -> list[str]:
    program = values.program
    count, parts = len(program.inputs), f"a[{_NUM_PARTS}].i"
    text = [
        "AF_SHARED(NAME_scalars, s, 1);",
        "const af_word *a = arguments.w;",
        f"if (a[{words.SKIP}].p && *(const int64_t *)a[{words.SKIP}].p) return;",
        f"const int64_t columns = a[{words.COLUMNS}].i;",
        f"const int64_t e = (int64_t)((uint32_t)AF_BLOCK / (uint32_t){parts});",
        f"const int64_t j = (AF_BLOCK - e * {parts}) * AF_NUM_THREADS + AF_THREAD;",
        f"const int64_t r = ((const int64_t *)a[{_PICKS}].p)[e];",
        "if (r < 0) return;",
        "if (AF_THREAD == 0) NAME_get_scalars(a, s); /* for all: powers in double are dear */",
        "AF_BARRIER();",
        "if (j >= columns) return;",
    ]
    scalars = scalar_values(values)
    text += [f"const {values.type(v)} v{v} = s->v{v};" for v in scalars]
    for v in [v for v in range(count) if v not in scalars]:
        row = "e" if v == GRADIENT else "r"
        text.append(f"const {values.type(v)} v{v} = {values.element(v, f'{row} * columns + j')};")
    made = [v for v in range(count, program.num_values) if v not in scalars]
    made_here = [v for v in made if values.constant(v) is None]
    text += [f"const {values.type(v)} v{v} = {values.define(v)};" for v in made_here]
    for position, v in enumerate(program.outputs):
        value = store(values.dtype(v), values.name(v))
        text.append(f"{values.output(position)}[r * columns + j] = {value};")
    return text
