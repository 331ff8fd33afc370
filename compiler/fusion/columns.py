"""What follows from a definition: the columns of an op that is stated by a program."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from compiler.attrs import Attrs
from compiler.fusion import expansion
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.expressions import Expression
from compiler.fusion.forms import Form, Fused, output_of
from compiler.fusion.interpreter import evaluate
from compiler.fusion.program import FusedProgram, Kind, ProgramInput, joined
from compiler.fusion.spaces import Space
from compiler.ops.fused import program_flops
from compiler.ops.signature import Array, Types
from compiler.registry import Cost, Op, cost, reference
from compiler.types import DType, TensorType, numpy_dtype


def register_program(op: Op, found: Fused, where: str) -> None:
    """Fill the columns that follow from `found.form` and `found.emit`."""

    def expand(
        p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        made = p.replay(trace(found, types, attrs), values)
        if not found.signature.is_elementwise:
            return made
        wide = joined([p.kind_of(v) for v in values])  # a lesser value where an operand is unused
        return tuple([output_of(p, Expression(p, v), wide) for v in made])

    def frame(inputs: Types, outputs: Types, attrs: Attrs) -> expansion.Frame | None:
        return _frame(found, inputs, attrs)

    def run(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
        attrs = Attrs(attrs)  # whoever asks for a reference by hand may have a dict
        given = [np.asarray(a) for a in arrays]
        types = tuple([TensorType(DType(str(a.dtype)), a.shape) for a in given])
        form = found.form(types, attrs)
        made = interpret(form, trace(found, types, attrs), [_widened(a) for a in given])
        return tuple(
            [a.astype(numpy_dtype(s.dtype)) for a, s in zip(made, form.outputs, strict=True)]
        )

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        moved = sum([t.size_bytes for t in (*inputs, *outputs)])
        if found.signature.is_elementwise:
            size = max([t.num_elements for t in outputs])
            dtypes = tuple([t.dtype for t in inputs])
            return Cost(_flops_of_elements(found, dtypes, attrs, size), float(moved))
        return Cost(_flops(found, inputs, attrs), float(moved))

    expansion.expand.register(op, expand, where)
    if not found.signature.is_elementwise:
        expansion.frame.register(op, frame, where)
    reference.register(op, run, where)
    cost.register(op, work, where)


def _widened(array: Array) -> Array:
    """Return float16 as float32: a sum of its largest numbers is none of its own."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def frame_of(form: Form) -> expansion.Frame | None:
    """Return how the operands of a call with rows and columns lie."""
    e = form.extents
    assert e is not None, "elementwise ops have the pointwise frame"
    sums = [i for i, slot in enumerate(form.outputs) if slot.kind is Kind.COLUMN and e.rows > 1]
    outputs = [
        e.shape if slot.kind is Kind.COLUMN and e.rows == 1 else e.stretchable(slot.kind)
        for slot in form.outputs
    ]
    return expansion.Frame(
        e.shape,
        tuple([e.stretchable(slot.kind) for slot in form.inputs]),
        tuple(outputs),
        num_trailing=len(e.named),
        write_only=tuple(sums),
    )


def interpret(form: Form, program: FusedProgram, arrays: list[Array]) -> tuple[Array, ...]:
    """Follow a program in numpy, in the width of the arrays."""
    e = form.extents
    if e is None:
        shape = np.broadcast_shapes(*[a.shape for a in arrays])
        arrays = [np.broadcast_to(a, shape) for a in arrays]
        made = evaluate(program, Space(1, int(np.prod(shape))), tuple(arrays))
        return tuple([array.reshape(shape) for array in made])
    if 0 in e.shape:  # of empty rows nothing is summed, and no rows have no largest element
        return tuple(
            [np.zeros(e.of(slot.kind), arrays[0].dtype) for slot in form.outputs],
        )
    made = evaluate(program, Space(e.rows, e.columns), tuple(arrays))
    return tuple([a.reshape(e.of(s.kind)) for a, s in zip(made, form.outputs, strict=True)])


def trace(found: Fused, inputs: Types, attrs: Attrs) -> FusedProgram:
    """Return the program of one call; the same one again for a call like it."""
    if found.signature.is_elementwise:
        return _of_elements(found, tuple([t.dtype for t in inputs]), attrs)
    return _of_rows(found, inputs, attrs)


# What a graph asks again and again, of ops that it has many of, and again in every pass.


@lru_cache(maxsize=2048)
def _of_elements(found: Fused, dtypes: tuple[DType, ...], attrs: Attrs) -> FusedProgram:
    return _traced(found, tuple([TensorType(dtype, ()) for dtype in dtypes]), attrs)


@lru_cache(maxsize=2048)
def _of_rows(found: Fused, inputs: Types, attrs: Attrs) -> FusedProgram:
    return _traced(found, inputs, attrs)


def _traced(found: Fused, inputs: Types, attrs: Attrs) -> FusedProgram:
    form = found.form(inputs, attrs)
    p = form.builder()
    values = tuple([p.input(ProgramInput(slot.dtype, slot.kind)) for slot in form.inputs])
    return p.whole(found.emit(p, attrs, form.extents, values))


@lru_cache(maxsize=2048)
def _frame(found: Fused, inputs: Types, attrs: Attrs) -> expansion.Frame | None:
    return frame_of(found.form(inputs, attrs))


@lru_cache(maxsize=2048)
def _flops_of_elements(found: Fused, dtypes: tuple[DType, ...], attrs: Attrs, size: int) -> float:
    return program_flops(_of_elements(found, dtypes, attrs), Space(1, size))


@lru_cache(maxsize=2048)
def _flops(found: Fused, inputs: Types, attrs: Attrs) -> float:
    e = found.form(inputs, attrs).extents
    return (
        0.0 if e is None else program_flops(trace(found, inputs, attrs), Space(e.rows, e.columns))
    )
