"""The kernel "c.embedding_update": an update on the rows of a table that a batch picked.

C finds equal ids and adds up their rows of dy (`embedding.c`); for each row of the table that
occurs it calls the function generated of the dense update, with the sum in place of the gradient.
So the bits are those of the dense rule. Scratch is chains of ids, and a row of sums per thread.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.chunks import Chunks
from actors.kernels.codegen.fused_kernel import argument_words
from actors.kernels.codegen.programs import Made, function_of, made_of
from actors.kernels.codegen.spaces import LoopSpace
from actors.kernels.indices import INDEX
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.embedding import (
    FLOATS,
    PLACE,
    ROW_BYTES,
    are_rows,
    explain_ids,
    ids_words,
    is_id,
    rows_in_c,
    rows_words,
)
from actors.kernels.native.launch import NativeLaunch, Word, address, native_launch
from actors.kernels.native.runtime import CFunction
from actors.kernels.scratch import ALIGNMENT_BYTES, Piece
from actors.kernels.work import NATIVE_CALLS, BytePass, Work
from actors.protocol import Arrays
from compiler.fusion.program import GRADIENT, Kind

_MOST_WORDS = 128
"""As MOST_WORDS in embedding.c."""


@dataclass(frozen=True, slots=True)
class EmbeddingUpdateKernel:
    """Table [V, D], dy, ids, and what else the update reads -> what it makes, in the rows of ids.

    Attrs are those of the fused kernel of the update. The outputs lie over the inputs: rows that no
    id names are not touched.
    """

    name: str = "c.embedding_update"
    op: str = "embedding_update"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64, dense but for the rows of dy, and programs of one loop."""
        (table, dy, ids, *rest), function = inputs, function_of(attrs)
        if not runtime.is_on() or function is None or runtime.is_broken(function):
            return None
        operands = (table, *rest, *outputs)
        if not (all([x.is_dense for x in operands]) and are_rows(dy) and is_id(ids)):
            return None
        made = made_of(attrs)
        is_small = words.column_sum(made.program, 0, 0) <= _MOST_WORDS
        if not (_is_by_elements(made) and is_small and table.type.dtype in FLOATS):
            return None
        moved = (1.0 + 2 * len(outputs)) * dy.type.size_bytes
        work = Work(
            NATIVE_CALLS,
            passes=((BytePass.GATHER, moved),),
            in_c=partial(rows_in_c, BytePass.SCATTER, moved),
            unswept=(0, *range(len(inputs), len(inputs) + len(outputs))),
        )
        pieces = _pieces(ids.type.num_elements, table.shape[1], table.dtype, runtime.num_threads())
        over = (0, *range(3, 2 + len(outputs)))  # the table, and its states after dy and ids
        return cost.needs(inputs, outputs, work, scratch.size_bytes(pieces), tuple(enumerate(over)))

    def functions(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> tuple[CFunction, ...]:
        """Return the one function of the program."""
        function = function_of(attrs)
        return () if function is None else (function,)

    def bind(
        self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace
    ) -> NativeLaunch:
        """Return the launch. Raises CompilerError when the compiler refuses the function."""
        (table, dy, ids, *rest), function = inputs, function_of(attrs)
        if function is None:
            raise ValueError("there is no C for this update; `query` declines it")
        made, (rows, columns) = made_of(attrs), table.shape
        pieces = functools.partial(_pieces, ids.size, columns, table.dtype)
        workers = scratch.workers_for(pieces, workspace, runtime.num_threads())
        sums, *chains = scratch.carve(workspace, pieces(workers))
        arrays = (table, sums[:1], *rest, *outputs)
        block, kept = argument_words(made, _space(made, rows, columns), rows, arrays, None)
        moved = (2 + 2 * len(outputs)) * dy.size * dy.itemsize + ids.size * ROW_BYTES
        per_chunk = chunks.units_per_chunk(ids.size, moved)
        launch: list[Word] = [
            *(address(dy), address(table)),
            *ids_words(ids),
            *rows_words(dy),
            *(rows, columns, int(dy.itemsize == 8)),
            *(per_chunk, max(1, -(-ids.size // per_chunk)), workers),
            *[address(piece) for piece in chains],
            *(_num_slots(ids.size), 0),
            *(runtime.address_of(function, "_rows"), ctypes.addressof(block), len(block)),
            *(words.operand(GRADIENT), address(sums), sums.shape[1] * sums.itemsize),
        ]
        where = runtime.address_in("embedding.c", "af_embedding_update")
        keep = (inputs, outputs, sums, *chains, block, kept)
        return native_launch(where, launch, keep, explain_ids(ids, rows))


def _is_by_elements(made: Made) -> bool:
    """Whether a program is one loop over the elements of a row, without scratch."""
    program = made.program
    kinds = {program.kind_of(v) for v in range(program.num_values)}
    return kinds <= {Kind.FULL, Kind.SCALAR}


def _space(made: Made, rows: int, columns: int) -> LoopSpace:
    """Return the space of the table; the gradient of every row is the one row of sums."""
    program = made.program
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    strides = [columns if kind is Kind.FULL else 0 for kind in kinds]
    strides[GRADIENT] = 0
    return LoopSpace(rows, columns, tuple(strides), Chunks(max(rows, 1), 1, columns, 0))


def _pieces(
    num_ids: int, columns: int, dtype: np.dtype[np.generic], num_workers: int
) -> tuple[Piece, ...]:
    """Return the sums, the ids, the table of hashes, and three columns of places."""
    own = -(-columns // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # no cache line has two writers
    column, slots = Piece((num_ids,), PLACE), Piece((_num_slots(num_ids),), PLACE)
    return (Piece((num_workers, own), dtype), Piece((num_ids,), INDEX), slots, *[column] * 3)


def _num_slots(num_ids: int) -> int:
    """Return a power of two, at least twice the ids, so that searches are short and end."""
    return 1 << (2 * max(num_ids, 1) - 1).bit_length()


EMBEDDING_UPDATE_KERNELS = (EmbeddingUpdateKernel(),)
