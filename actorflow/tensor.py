"""The symbolic tensor: what a job's function computes with while it is traced.

A `Tensor` has a static dtype and shape and no data. Arithmetic follows numpy's broadcasting;
operands of several dtypes are cast to the one they meet in (`actorflow.promotion`). Python numbers
take the dtype of the other operand, which must hold them, or that of a higher category. Sizes
and axes are integers, of Python or of numpy. Whatever would need data (`if tensor:`,
`float(tensor)`, `np.asarray(tensor)`) is a CompileError with the user's line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from actorflow.habits import OF_TENSORS, missing
from actorflow.layouts import Words, laid_out
from actorflow.literals import checked_size, dtype_named, scalar
from actorflow.promotion import result_type
from actorflow.trace.devices import device_number, is_device_name
from actorflow.trace.tracer import Trace, current_trace, find_source
from compiler.attrs import Attrs, AttrValue
from compiler.errors import CompileError
from compiler.fusion.define import definition, inlined
from compiler.fusion.expressions import Expression
from compiler.ops import (
    binary,
    copies,
    elementwise,
    rounding,
    shape,
    sources,
)
from compiler.registry import Op
from compiler.sbp.words import Sbp
from compiler.types import DType, TensorType, ValueId

Operand = Any
"""A Tensor, a Python number or a numpy array."""


_Infix = Callable[["Tensor", Operand], "Tensor"]


def _infix(op: Op) -> tuple[_Infix, _Infix]:
    """Return what an operator does with a tensor on its left, and with one on its right only."""
    return lambda self, other: apply(op, self, other), lambda self, other: apply(op, other, self)


class Tensor:
    """A value of the graph being traced."""

    __array_priority__ = 1000
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, value: ValueId) -> None:
        self._trace = trace
        self._value = value

    def _value_in(self, trace: Trace) -> ValueId:
        return self._value if self._trace is trace else trace.captured(self)

    @property
    def type(self) -> TensorType:
        """Dtype and shape."""
        return self._trace.builder.type_of(self._value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Static shape."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.type.shape)

    def __repr__(self) -> str:
        return f"Tensor({self.type})"

    __add__, __radd__ = _infix(binary.ADD)
    __sub__, __rsub__ = _infix(binary.SUB)
    __mul__, __rmul__ = _infix(binary.MUL)
    __truediv__, __rtruediv__ = _infix(binary.DIV)
    __floordiv__, __rfloordiv__ = _infix(rounding.FLOOR_DIVIDE)
    __mod__, __rmod__ = _infix(rounding.REMAINDER)
    __and__, __rand__ = _infix(rounding.BITWISE_AND)
    __or__, __ror__ = _infix(rounding.BITWISE_OR)
    __xor__, __rxor__ = _infix(rounding.BITWISE_XOR)
    __lshift__, __rlshift__ = _infix(rounding.SHIFT_LEFT)
    __rshift__, __rrshift__ = _infix(rounding.SHIFT_RIGHT)
    __lt__ = _infix(binary.LESS)[0]
    __le__ = _infix(binary.LESS_EQUAL)[0]
    __gt__ = _infix(binary.GREATER)[0]
    __ge__ = _infix(binary.GREATER_EQUAL)[0]
    __eq__ = _infix(binary.EQUAL)[0]  # type: ignore[assignment]  # elementwise, as in numpy
    __ne__ = _infix(binary.NOT_EQUAL)[0]  # type: ignore[assignment]  # elementwise, as in numpy

    def __neg__(self) -> Tensor:
        return apply(elementwise.NEG, self)

    def __abs__(self) -> Tensor:
        return self.abs()

    def __invert__(self) -> Tensor:
        return apply(rounding.BITWISE_NOT, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return self.matmul(other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        from actorflow.functional.products import matmul  # functions are written with tensors

        return matmul(other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return self.pow(other)

    def __rpow__(self, other: Operand) -> Tensor:
        from actorflow.functional import elementwise  # functions are written with tensors

        return elementwise.pow(other, self)

    def __getitem__(self, index: Any) -> Tensor:
        """Return elements by integers, slices, None, one `...`, and tensors of integers."""
        from actorflow.functional.indexing import subscript  # functions are written with tensors

        return subscript(self, index)

    def reshape(self, *extents: int | Sequence[int]) -> Tensor:
        """Return the same elements under another shape; one extent may be -1."""
        return apply(
            shape.RESHAPE, self, shape=_resolve_shape(self, integers(*extents, what="an extent"))
        )

    def permute(self, *dims: int | Sequence[int]) -> Tensor:
        """Put the axes into another order."""
        order = tuple([checked_axis(self, axis) for axis in integers(*dims, what="an axis")])
        return apply(shape.TRANSPOSE, self, perm=order)

    def transpose(self, *dims: int | Sequence[int]) -> Tensor:
        """Exchange two axes, as torch; numpy's other forms are not mistaken for that.

        Without arguments it reverses the axes, and another number of them, or one sequence, is an
        order of all.
        """
        if len(dims) == 2:
            return self.swapaxes(*dims)
        return self.permute(*dims) if dims else self.permute(*range(self.ndim)[::-1])

    @property
    def T(self) -> Tensor:  # noqa: N802  # numpy's own name
        """The tensor with its axes reversed."""
        return self.transpose()

    def swapaxes(self, first: Any, second: Any) -> Tensor:
        """Exchange two axes."""
        order = list(range(self.ndim))
        a, b = checked_axis(self, first), checked_axis(self, second)
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def broadcast_to(self, *extents: int | Sequence[int]) -> Tensor:
        """Repeat axes of extent 1, and add leading ones, up to the given shape."""
        wide = integers(*extents, what="an extent")
        if any(extent < 0 for extent in wide):
            raise CompileError(
                f"{find_source()}: broadcast_to needs extents of 0 or more, got {list(wide)}"
            )
        return apply(shape.BROADCAST_TO, self, shape=wide)

    def to(self, target: DType | npt.DTypeLike | str) -> Tensor:
        """Convert to another element type, or copy to another device of the job.

        `target` is a `DType` or whatever numpy takes for one; or the name of a device, "sim:1". A
        copy is made in every step; the gradient comes back the same way.
        """
        if isinstance(target, str) and is_device_name(target):
            trace = _recorded("a copy to a device")
            self._value_in(trace)
            to = device_number(trace, target)
            is_there = len(trace.devices) == 1
            return self if is_there else apply(copies.COPY_TO, self, to=to, bucket=0)
        return apply(elementwise.CAST, self, dtype=dtype_named(target, "dtype").value)

    astype = to

    def to_sbp(self, sbp: Words | None = None, **axes: Sbp | str) -> Tensor:
        """Return the same values, lying on the ranks of the job as words by axes of its mesh say.

        `x.to_sbp(model=af.split(1))`, or a mapping; see `actorflow.layouts`. On a batch's entry it
        says which part of it each rank is given.
        """
        trace = _recorded("a layout")
        return Tensor(trace, laid_out(trace, self._value_in(trace), sbp, axes))

    def detach(self) -> Tensor:
        """Return the same values; no gradient flows back through them."""
        return apply(shape.STOP_GRADIENT, self)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        """Return a function of `actorflow.functional` as a method, where it is one in torch."""
        from actorflow.functional.methods import METHODS  # functions are written with tensors

        if name not in METHODS:
            raise missing(f"{type(self).__name__!r} object", name, OF_TENSORS)
        return partial(METHODS[name], self)

    def __dir__(self) -> list[str]:
        from actorflow.functional.methods import METHODS

        return sorted({*super().__dir__(), *METHODS})

    def __bool__(self) -> NoReturn:
        raise _no_data("a truth value")

    def __float__(self) -> NoReturn:
        raise _no_data("a number")

    def __int__(self) -> NoReturn:
        raise _no_data("a number")

    def __index__(self) -> NoReturn:
        raise _no_data("an integer")

    def __iter__(self) -> NoReturn:
        raise _no_data(
            "an iterator",
            "af.unbind(x) has its slices; af.map and af.scan run a function over them",
        )

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise CompileError(
            f"{find_source()}: tensors never change; write x = af.index_put(x, (i,), values),"
            " x.masked_fill(mask, number) or af.where(mask, a, b)"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise CompileError(f"{find_source()}: a scalar tensor has no length")
        return self.shape[0]

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise _no_data("a numpy array")


def _no_data(what: str, mend: str = "decide with tensors (af.where)") -> CompileError:
    return CompileError(
        f"{find_source()}: a traced tensor has no data yet, so it cannot become {what}. The job's"
        f" function is traced once and its plan runs many steps: {mend}, or return the tensor from"
        " the job and look at it afterwards"
    )


def apply(op: Op, *operands: Operand, **attrs: AttrValue) -> Tensor:
    """Record an op with one output."""
    return apply_many(op, *operands, **attrs)[0]


def apply_many(op: Op, *operands: Operand, **attrs: AttrValue) -> tuple[Tensor, ...]:
    """Record an op; Python numbers and arrays among the operands become constants.

    Among expressions, in the function of an op of one's own, it becomes a part of that op's
    program. Raises CompileError outside of a trace and for operands of wrong types.
    """
    if any([isinstance(o, Expression) for o in operands]):
        if any([isinstance(o, Tensor) for o in operands]):
            raise CompileError(
                f"{find_source()}: {op} of a tensor and an expression, which lives only in the"
                " program of its op; make the tensor an operand of it"
            )
        return inlined(op, operands, Attrs(attrs))  # type: ignore[return-value]  # what came, comes
    trace = _recorded(str(op))
    partner = next((o.dtype for o in operands if isinstance(o, Tensor)), DType.FLOAT32)
    places = _meeting(op)
    if len(places) > 1 or not partner.is_float:
        op, operands, partner = _alike(op, places, operands, partner)
    values = [_value_of(trace, o, partner) for o in operands]
    made = trace.emit(op, values, Attrs(attrs))
    return tuple(Tensor(trace, v) for v in made)


_OF_BOOLS = {binary.ADD: binary.MAXIMUM, binary.MUL: binary.MINIMUM}
"""What arithmetic of bools is: `or` and `and`."""


@functools.cache
def _meeting(op: Op) -> tuple[int, ...]:
    """Return the places of operands that meet in one dtype: those of an op of ours, by elements."""
    found = definition.get(op) if definition.has(op) else None
    if found is None or found.traces_at_once or not found.signature.is_elementwise:
        return ()
    specs = enumerate(found.signature.inputs)
    return tuple([i for i, spec in specs if spec.elements not in ("int", "bool")])


def _alike(
    op: Op, places: tuple[int, ...], operands: tuple[Operand, ...], partner: DType
) -> tuple[Op, tuple[Operand, ...], DType]:
    """Return an op on operands of one dtype, cast where they are of several, and that dtype."""
    given = list(operands)
    places = tuple([i for i in places if i < len(given)])
    for i in places:
        if isinstance(given[i], (np.ndarray, np.generic)) and not isinstance(given[i], float):
            given[i] = as_tensor(given[i])
    known = (Tensor, bool, int, float)  # of anything else the value says what is wrong
    meeting = [given[i] for i in places if isinstance(given[i], known)]
    if not meeting:
        return op, operands, partner
    dtype = result_type(meeting)
    if not dtype.is_float and definition.get(op).signature.inputs[places[0]].elements == "float":
        dtype = DType.FLOAT32
    for i in places:
        if isinstance(given[i], Tensor) and given[i].dtype is not dtype:
            given[i] = apply(elementwise.CAST, given[i], dtype=dtype.value)
    return _OF_BOOLS.get(op, op) if dtype is DType.BOOL else op, tuple(given), dtype


def as_tensor(operand: Operand, partner: DType = DType.FLOAT32) -> Tensor:
    """Return a tensor as it is, an array as a constant, a number as a constant of `partner`.

    Raises CompileError for anything else, and for a number that `partner` does not hold.
    """
    if isinstance(operand, Tensor):
        return operand
    trace = _recorded("a function of tensors")
    return Tensor(trace, _value_of(trace, operand, partner))


def _recorded(what: str) -> Trace:
    trace = current_trace()
    if trace is None:
        raise CompileError(
            f"{find_source()}: {what} was called outside of a job; call it inside a function"
            " decorated with @af.job"
        )
    return trace


def _value_of(trace: Trace, operand: Operand, partner: DType) -> ValueId:
    if isinstance(operand, Tensor):
        return operand._value_in(trace)
    if isinstance(operand, (bool, int, float)):
        return _constant(trace, scalar(operand, partner))
    if isinstance(operand, (np.generic, np.ndarray)):
        array = np.ascontiguousarray(operand)
        return _constant(trace, array.reshape(np.shape(operand)))
    raise CompileError(
        f"{find_source()}: expected a tensor, a number or a numpy array, got"
        f" {type(operand).__name__}"
    )


def _constant(trace: Trace, array: np.ndarray[Any, Any]) -> ValueId:
    dtype = dtype_named(str(array.dtype), "arrays of dtype")
    attrs = Attrs({"dtype": dtype.value, "shape": array.shape, "data": array.tobytes()})
    return trace.emit(sources.CONSTANT, [], attrs)[0]


def checked_axis(tensor: Tensor, axis: object) -> int:
    """Return an axis of `tensor` counted from the front. Raises CompileError out of range."""
    index = checked_size(axis, "an axis")
    if not -tensor.ndim <= index < tensor.ndim:
        raise CompileError(f"{find_source()}: axis {index} is out of range for {tensor.type}")
    return index % tensor.ndim


def integers(*given: Any, what: str) -> tuple[int, ...]:
    """Return the integers of `f(2, 3)`, `f((2, 3))` or `f(array)`. Raises CompileError."""
    items = given[0] if len(given) == 1 else given
    if isinstance(items, np.ndarray):
        items = items.tolist()
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Tensor)):
        items = (items,)
    return tuple(checked_size(item, what) for item in items)


def _resolve_shape(tensor: Tensor, given: tuple[int, ...]) -> tuple[int, ...]:
    if given.count(-1) > 1:
        raise CompileError(f"{find_source()}: reshape to {given} has more than one -1")
    known = 1
    for extent in given:
        known *= extent if extent != -1 else 1
    total = tensor.type.num_elements
    if -1 in given and known and total % known == 0:
        return tuple(total // known if e == -1 else e for e in given)
    return given
