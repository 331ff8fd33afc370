"""What the library can do to a product before it stores it, found in the program that reads it.

    y = a @ b; h = y + bias; out = h + residual

is one product with the epilogue BIAS, and beta 1 with the residual as c. It saves writing the
product and reading it again. A value is then rounded once, where product and program round twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.kernels.cuda.calls import RunProduct
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.product import LtEpilogue, alignment_of
from actors.kernels.cuda.products import PlannedProduct, plan_product
from actors.kernels.cuda.views import DeviceView
from compiler.fusion.program import FusedProgram, Kind
from compiler.types import DType, TensorType, contiguous_strides

_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""Of results that the library adds a bias to."""


@dataclass(frozen=True, slots=True)
class AddedTerms:
    """What a program adds to an operand, by their places among its inputs; None for nothing."""

    bias: int | None
    residual: int | None


def added_terms(program: FusedProgram, product: int, rows: int) -> AddedTerms | None:
    """Return what a program adds to its operand `product`, if it does nothing else.

    That is a row for all rows, and a matrix with as many `rows`; one of each at most, all of one
    type.
    """
    if len(program.outputs) != 1 or program.dtype_of(program.outputs[0]) not in _TYPES:
        return None
    leaves = _leaves(program, program.outputs[0])
    if leaves is None or sorted(leaves) != list(range(len(program.inputs))):
        return None
    dtype = program.dtype_of(program.outputs[0])
    entries = {place: program.inputs[place] for place in leaves}
    if any([e.dtype is not dtype or e.every != 1 for e in entries.values()]):
        return None
    full = [p for p, e in entries.items() if e.kind is Kind.FULL and e.count in (0, rows)]
    bias = [place for place, entry in entries.items() if entry.kind is Kind.COLUMN]
    residual = [place for place in full if place != product]
    is_all = product in full and len(full) + len(bias) == len(leaves)
    if not is_all or max(len(bias), len(residual)) > 1 or len(leaves) == 1:
        return None
    return AddedTerms(bias[0] if bias else None, residual[0] if residual else None)


def _leaves(program: FusedProgram, value: int) -> list[int] | None:
    """Return the inputs that a value is the sum of; None where it is no sum of inputs."""
    own = value - len(program.inputs)
    if own < 0:
        return [value]
    instruction = program.instructions[own]
    if instruction.op != "add":
        return None
    found = [_leaves(program, operand) for operand in instruction.operands]
    known = [leaf for leaves in found if leaves is not None for leaf in leaves]
    return None if None in found else known


@dataclass(frozen=True, slots=True)
class ProductWithTerms:
    """out = a @ b + residual + bias as one call of the library."""

    gpu: Gpu
    planned: PlannedProduct
    operands: tuple[DeviceView, DeviceView, DeviceView]
    bias: DeviceView | None
    residual: DeviceView | None

    def duration_ns(self) -> float:
        """Return an estimate."""
        added = [term.type.size_bytes for term in (self.bias, self.residual) if term is not None]
        return self.planned.duration_ns() + self.gpu.bytes_ns(sum(added))

    def call(self, scratch: tuple[int, ...]) -> RunProduct:
        """Return the call, with the addresses of the plan's pieces."""
        plain = self.planned.calls(self.operands, scratch)
        (call,) = [call for call in plain if isinstance(call, RunProduct)]
        product = call.product
        if self.bias is not None:
            product = replace(product, epilogue=LtEpilogue.BIAS, bias=self.bias.address)
        if self.residual is not None:
            alignment = min(product.d.alignment, alignment_of(self.residual.address))
            product = replace(product, beta=1.0, d=replace(product.d, alignment=alignment))
            call = replace(call, c=self.residual.address)
        return replace(call, product=product)


def product_with_terms(
    gpu: Gpu,
    program: FusedProgram,
    factors: tuple[DeviceView, DeviceView],
    place: int,
    extents: tuple[int, int],
    views: Sequence[DeviceView],
) -> ProductWithTerms | None:
    """Return the one product that a product and its reader are; None where they are not.

    The product is input `place` of the program, whose inputs and outputs lie as `views`: what is
    added and the result densely, for the library takes them alike.
    """
    terms = added_terms(program, place, extents[0])
    if terms is None or not all([view.is_dense for n, view in enumerate(views) if n != place]):
        return None
    dtype = views[-1].dtype
    strides = contiguous_strides(extents, dtype.itemsize)
    out = DeviceView(views[-1].address, TensorType(dtype, extents), strides)
    planned = plan_product(gpu, *[view.as_operand for view in (*factors, out)])
    if planned is None or not planned.is_plain:
        return None
    bias, residual = [None if p is None else views[p] for p in (terms.bias, terms.residual)]
    return ProductWithTerms(gpu, planned, (*factors, out), bias, residual)
