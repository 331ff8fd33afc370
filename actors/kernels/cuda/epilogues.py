"""What the library can do to a product before it stores it, found in the program that reads it.

    y = a @ b; h = y + bias; out = h + residual     BIAS, and beta 1 with the residual as c
    h = a @ b + bias; g = gelu(h)                   GELU_BIAS; GELU_AUX_BIAS where h is kept too
    dh = (a @ b) * gelu'(h); db = column_sum(dh)    DGELU_BGRAD; DGELU where db is summed behind it

It saves writing the product and reading it again. A value is then rounded once, where product and
program round twice. What else such a program makes a program behind the product does: the rest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actors.kernels.common.kernel import Piece, size_bytes
from actors.kernels.cuda.calls import (
    AUX_BYTES,
    AUX_ELEMENTS,
    DeviceCalls,
    LtEpilogue,
    RunProduct,
    alignment_of,
)
from actors.kernels.cuda.kernel import DeviceView, Gpu, carve
from actors.kernels.cuda.matmul import PlannedProduct, plan_product
from actors.kernels.cuda.programs import ProgramStep
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType, TensorType, contiguous_strides

# GELU and its gradient are found in the form in which the compiler states them.
#
# gelu(x) = max(x, -30) g(c) with c = clip(x, -30, 30) and g(c) = 1 / (1 + e^-2u), which is
# (1 + tanh u) / 2 of u = sqrt(2 / pi) (c + 0.044715 c^3): the tanh form, as the library has it. The
# bounds change no result: there the gate is 0 or 1. Only for |x| beyond 1e19, where the library's
# slope may be NaN, ours is 0 or 1.

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715 * _SLOPE
_BOUND = 30.0

_Form = float | str | tuple["_Form", ...]
"""A constant, a value by a name, or an op with its operands."""

_CLIPPED: _Form = ("min", ("max", "x", -_BOUND), _BOUND)
_SQUARE: _Form = ("mul", _CLIPPED, _CLIPPED)
_TWICE_U: _Form = ("mul", _CLIPPED, ("add", ("mul", _SQUARE, _CUBIC), _SLOPE))
_GATE: _Form = ("reciprocal", ("add", 1.0, ("exp", ("neg", _TWICE_U))))
_GELU_FORM: _Form = ("mul", ("max", "x", -_BOUND), _GATE)
_CHANGE: _Form = ("mul", _CLIPPED, ("add", ("mul", _SQUARE, 3.0 * _CUBIC), _SLOPE))
_GRADIENT: _Form = (
    "mul",
    "dy",
    ("add", _GATE, ("mul", ("mul", _GATE, ("sub", 1.0, _GATE)), _CHANGE)),
)
_COMMUTATIVE = ("add", "mul", "max", "min")


@dataclass(frozen=True, slots=True)
class GeluGradient:
    """dy gelu'(x), by the values dy and x."""

    dy: int
    x: int


@functools.lru_cache(maxsize=512)
def gelu_operand(program: FusedProgram, value: int) -> int | None:
    """Return the x of which a value is the GELU; None where it is none."""
    values = _named(program, value, _GELU_FORM, {})
    return None if values is None else values["x"]


@functools.lru_cache(maxsize=512)
def gelu_gradient(program: FusedProgram, value: int) -> GeluGradient | None:
    """Return what a value is the gradient of GELU of; None where it is none."""
    values = _named(program, value, _GRADIENT, {})
    return None if values is None else GeluGradient(values["dy"], values["x"])


def _named(
    program: FusedProgram, value: int, form: _Form, named: dict[str, int]
) -> dict[str, int] | None:
    """Return the values that names of a form stand for where a value has it, beside `named`."""
    if isinstance(form, str):
        # A name that is taken must stand for the same value everywhere in the form.
        return named | {form: value} if named.get(form, value) == value else None
    index = value - len(program.inputs)
    if index < 0:
        return None
    instruction = program.instructions[index]
    if isinstance(form, float):
        is_it = instruction.op == "constant" and math.isclose(instruction.constants[0], form)
        return named if is_it else None
    op, *parts = form
    if instruction.op != op or len(instruction.operands) != len(parts):
        return None
    operands = instruction.operands
    # Operands of what commutes may stand either way round.
    for order in itertools.permutations(operands) if op in _COMMUTATIVE else (operands,):
        values: dict[str, int] | None = named
        for operand, part in zip(order, parts, strict=True):
            values = None if values is None else _named(program, operand, part, values)
        if values is not None:
            return values
    return None


_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""Of results that the library adds a bias to."""


Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AddedTerms:
    """What a program adds to an operand, by their places among its inputs; None for nothing."""

    bias: int | None
    residual: int | None


@dataclass(frozen=True, slots=True)
class RemainingProgram:
    """What is left of a program, and which of that one's operands it reads and makes."""

    program: FusedProgram
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EpilogueMatch:
    """How the library finishes a product, by places among a program's operands: inputs, outputs.

    `out` is what it stores; `bias` it reads, or makes where it is a gradient; `aux` likewise.
    """

    epilogue: LtEpilogue
    out: int
    bias: int | None = None
    residual: int | None = None
    aux: int | None = None
    rest: RemainingProgram | None = None

    @property
    def dense(self) -> tuple[int, ...]:
        """The operands that the library reads or writes."""
        places = (self.out, self.bias, self.residual, self.aux)
        return tuple([place for place in places if place is not None])

    def in_place(self, pairs: Pairs, num_inputs: int) -> Pairs:
        """Return those pairs (output, input) of a program that may share bytes here as well.

        What the library writes lies over nothing that it reads but c.
        """
        outs = [p - num_inputs for p in (self.aux, self.out) if p is not None and p >= num_inputs]
        inputs = [p for p in (self.aux, self.residual) if p is not None and p < num_inputs]
        of_c = (self.out - num_inputs, self.residual)
        return tuple([p for p in pairs if p[0] not in outs or p[1] not in inputs or p == of_c])


@functools.lru_cache(maxsize=512)
def match_epilogues(program: FusedProgram, product: int, rows: int) -> tuple[EpilogueMatch, ...]:
    """Return the ways in which the library can finish a product that is an input of a program.

    The one that leaves the least to do is the first.
    """
    # The library reports no bad index.
    if any([i.op == "check_index" for i in program.instructions]):
        return ()
    sums = tuple(_sums(program, product, rows))
    return sums or tuple(_gradients(program, product, rows))


def _sums(program: FusedProgram, product: int, rows: int) -> Iterator[EpilogueMatch]:
    """Yield the ways to add something, and to take GELU of it, if the program does no more.

    What is kept beside its GELU may also be made alone, and GELU of it by a program.
    """
    first, outputs = len(program.inputs), program.outputs
    for out, value in enumerate(outputs):
        x = gelu_operand(program, value)
        aux_outputs = [n for n, other in enumerate(outputs) if other == x and n != out]
        terms = added_terms(program, value if x is None else x, product, rows)
        if terms is None or len(outputs) != 1 + len(aux_outputs):
            continue
        has_bias = terms.bias is not None
        if x is not None:
            epilogue = (_GELU_AUX if aux_outputs else _GELU_EPILOGUES)[has_bias]
            aux = first + aux_outputs[0] if aux_outputs else None
            yield EpilogueMatch(epilogue, first + out, terms.bias, terms.residual, aux)
        if terms != AddedTerms(None, None) and (x is None or aux_outputs):
            number = out if x is None else aux_outputs[0]
            place = first + number
            rest = None if x is None else _rest(program, [out], product, number)
            yield EpilogueMatch(_PLAIN[has_bias], place, terms.bias, terms.residual, rest=rest)
        return


_PLAIN = (LtEpilogue.NONE, LtEpilogue.BIAS)
_GELU_EPILOGUES = (LtEpilogue.GELU, LtEpilogue.GELU_BIAS)
_GELU_AUX = (LtEpilogue.GELU_AUX, LtEpilogue.GELU_AUX_BIAS)
"""Without a bias, and with one."""


def added_terms(program: FusedProgram, value: int, product: int, rows: int) -> AddedTerms | None:
    """Return what is added to a program's operand `product` to make a value; None if more is done.

    That is a row for all rows, and a matrix with as many `rows`; one of each at most, all of one
    type, and all that the program reads.
    """
    dtype, leaves = program.dtype_of(value), _leaves(program, value)
    if dtype not in _TYPES or leaves is None or sorted(leaves) != [*range(len(program.inputs))]:
        return None
    entries = {place: program.inputs[place] for place in leaves}
    if any([e.dtype is not dtype or e.every != 1 for e in entries.values()]):
        return None
    full = [p for p, e in entries.items() if e.kind is Kind.FULL and e.count in (0, rows)]
    bias = [place for place, entry in entries.items() if entry.kind is Kind.COLUMN]
    residual = [place for place in full if place != product]
    is_all = product in full and len(full) + len(bias) == len(leaves)
    if not is_all or max(len(bias), len(residual)) > 1:
        return None
    return AddedTerms(bias[0] if bias else None, residual[0] if residual else None)


def _leaves(program: FusedProgram, value: int) -> list[int] | None:
    """Return the inputs that a value is the sum of; None where it is no sum of inputs."""
    instruction = _made_by(program, value)
    if instruction is None:
        return [value]
    if instruction.op != "add":
        return None
    branches = [_leaves(program, operand) for operand in instruction.operands]
    inputs = [leaf for leaves in branches if leaves is not None for leaf in leaves]
    return None if None in branches else inputs


def _made_by(program: FusedProgram, value: int) -> Instruction | None:
    index = value - len(program.inputs)
    return None if index < 0 else program.instructions[index]


def _gradients(program: FusedProgram, product: int, rows: int) -> Iterator[EpilogueMatch]:
    """Yield the ways through the slope of GELU: with the sums over rows, and without."""
    first = len(program.inputs)
    for number, value in enumerate(program.outputs):
        gradient = gelu_gradient(program, value)
        if gradient is None or gradient.dy != product or gradient.x >= first:
            continue
        x, y = program.inputs[gradient.x], program.inputs[product]
        is_plain = x.kind is Kind.FULL and x.every == 1 and x.count in (0, rows)
        if not is_plain or y.kind is not Kind.FULL or x.dtype not in _TYPES:
            continue
        others = [n for n in range(len(program.outputs)) if n != number]
        sums = [n for n in others if _is_sum_of(program, program.outputs[n], value)]
        for bias in (*sums[:1], None):
            remaining = [n for n in others if n != bias]
            rest = _rest(program, remaining, product, number) if remaining else None
            if remaining and rest is None:
                continue
            epilogue = LtEpilogue.DGELU if bias is None else LtEpilogue.DGELU_BGRAD
            place = None if bias is None else first + bias
            yield EpilogueMatch(epilogue, first + number, place, aux=gradient.x, rest=rest)
        return


def _is_sum_of(program: FusedProgram, total: int, value: int) -> bool:
    """Whether a value is the sum of another one over all rows, in its type or in float32."""
    reduction = _made_by(program, total)
    if reduction is None or reduction.op != "column_sum":
        return False
    (operand,) = reduction.operands
    cast = _made_by(program, operand)
    is_wider = cast is not None and (cast.op, cast.operands) == ("cast", (value,))
    return operand == value or (is_wider and program.dtype_of(operand) is DType.FLOAT32)


def _rest(
    program: FusedProgram, left: list[int], product: int, known: int
) -> RemainingProgram | None:
    """Return what makes some outputs where another one is known; None if it needs the product."""
    first, base = len(program.inputs), program.outputs[known]
    needed, todo = set[int](), [program.outputs[n] for n in left]
    while todo:
        value = todo.pop()
        instruction = None if value == base else _made_by(program, value)
        if value not in needed:
            needed.add(value)
            todo += () if instruction is None else instruction.operands
    if product in needed:
        return None
    reads = sorted([v for v in needed if v < first])
    steps = sorted([v for v in needed if v >= first and v != base])
    # Inputs first, the known output as one more of them, then instructions in their old order.
    numbers = {v: n for n, v in enumerate([*reads, *([base] if base in needed else []), *steps])}
    inputs = [program.inputs[v] for v in reads]
    if base in needed:
        inputs.append(ProgramInput(program.dtype_of(base), Kind.FULL))
    copies = [program.instructions[v - first] for v in steps]
    instructions = tuple(
        [replace(i, operands=tuple([numbers[v] for v in i.operands])) for i in copies]
    )
    outputs = tuple([numbers[program.outputs[n]] for n in left])
    operands = [*reads, *([first + known] if base in needed else []), *[first + n for n in left]]
    return RemainingProgram(FusedProgram(tuple(inputs), instructions, outputs), tuple(operands))


@dataclass(frozen=True, slots=True)
class EpilogueProduct:
    """out = finish(a @ b) as one call of the library, and the rest of the program behind it."""

    gpu: Gpu
    planned: PlannedProduct
    finish: EpilogueMatch
    operands: tuple[DeviceView, DeviceView, DeviceView]
    views: tuple[DeviceView, ...]
    rest: ProgramStep | None

    def duration_ns(self) -> float:
        """Return an estimate."""
        beside = [p for p in self.finish.dense if p != self.finish.out]
        added = self.gpu.bytes_ns(sum([self.views[p].type.size_bytes for p in beside]))
        rest = 0.0 if self.rest is None else self.rest.duration_ns()
        return self.planned.duration_ns() + added + rest

    @property
    def is_aligned(self) -> bool:
        """Whether the library takes the addresses, which only `bind` knows."""
        return self.finish.aux is None or not self.views[self.finish.aux].address % AUX_BYTES

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch: of the product, or of the program behind it."""
        rest = () if self.rest is None else self.rest.pieces
        return max(self.planned.pieces, rest, key=size_bytes)

    def calls(self, space: DeviceView | None) -> DeviceCalls:
        """Return the calls, with scratch for the pieces of one after the other."""
        rest = () if self.rest is None else self.rest.calls(space)
        return (self._product(carve(space, self.planned.pieces)), *rest)

    def _product(self, scratch: tuple[int, ...]) -> RunProduct:
        finish, views = self.finish, self.views
        plain = self.planned.calls(self.operands, scratch)
        (call,) = [call for call in plain if isinstance(call, RunProduct)]
        product = replace(call.product, epilogue=finish.epilogue)
        if finish.bias is not None:
            bias = views[finish.bias]
            # None is the library's default, the type of d.
            other = None if bias.dtype is product.d.dtype else bias.dtype
            product = replace(product, bias=bias.address, bias_dtype=other)
        if finish.aux is not None:
            stride = product.d.column_stride
            product = replace(product, aux=views[finish.aux].address, aux_stride=stride)
        if finish.residual is not None:
            residual = views[finish.residual].address
            alignment = min(product.d.alignment, alignment_of(residual))
            product = replace(product, beta=1.0, d=replace(product.d, alignment=alignment))
            call = replace(call, c=residual)
        return replace(call, product=product)


def finished_products(
    gpu: Gpu,
    program: FusedProgram,
    factors: tuple[DeviceView, DeviceView],
    place: int,
    extents: tuple[int, int],
    views: Sequence[DeviceView],
) -> tuple[EpilogueProduct, ...]:
    """Return the ways in which the library can make what a product and its reader make.

    The product is input `place` of the program, whose inputs and outputs lie as `views`: what the
    library reads and makes densely, for it takes them alike.
    """
    products = []
    for finish in match_epilogues(program, place, extents[0]):
        # The library takes one layout for c and d, and no strides within a row.
        if not all([views[n].is_dense for n in finish.dense]):
            continue
        if finish.aux is not None and extents[1] % AUX_ELEMENTS:
            continue
        dtype = views[finish.out].dtype
        strides = contiguous_strides(extents, dtype.itemsize)
        out = DeviceView(views[finish.out].address, TensorType(dtype, extents), strides)
        product = plan_product(gpu, *[view.as_operand for view in (*factors, out)])
        if product is None or not product.is_plain:
            continue
        rest = None
        if finish.rest is not None:
            rest_views = tuple([views[n] for n in finish.rest.operands])
            rest = ProgramStep(gpu, finish.rest.program, extents, rest_views, (0, extents[0]))
        operands = (*factors, out)
        products.append(EpilogueProduct(gpu, product, finish, operands, tuple(views), rest))
    return tuple(products)
