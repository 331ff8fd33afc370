"""The symbolic tensor: what a job's function computes with while it is traced.

A `Tensor` has a static dtype and shape and no data. Arithmetic follows numpy's broadcasting;
operands of several dtypes are cast to the one they meet in (`actorflow.tensor.literals`). Python
numbers take the dtype of the other operand, which must hold them, or that of a higher category.
Sizes and axes are integers, of Python or of numpy. Whatever would need data (`if tensor:`,
`float(tensor)`, `np.asarray(tensor)`) is a CompileError with the user's line, but for an eager
tensor, which has its data at once (`actorflow.eager_mode`).

Methods that are functions of `actorflow.functional` are looked up in the table `METHODS`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from actorflow.tensor.calls import pause_recording
from actorflow.tensor.layouts import Words, device_number, is_device_name, laid_out
from actorflow.tensor.literals import (
    checked_size,
    dtype_named,
    refuse_masked,
    result_type,
    scalar,
)
from actorflow.tensor.tracer import Trace, find_source, has_our_types, require_trace
from compiler.contract.attrs import NO_ATTRS, Attrs, AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.sbp import Sbp
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.registry import Op
from compiler.ops.families import arithmetic
from compiler.ops.language.definition import definition, inlined
from compiler.ops.language.expressions import Expression
from compiler.ops.primitives import shape, sources, transfer
from compiler.ops.primitives.shape import CAST

# What users of torch reach for and do not find here, and what they do instead.

_DATA = (
    "a tensor has data only while the plan runs: return it from the job, whose step gives it, or"
    " call the function by af.eager"
)
_GRADIENT = "a job with an optimizer computes gradients itself; af.grad(y, x) has them as tensors"
_PLACE = "say of the job where it runs: @af.job(device='cuda')"
_MODE = "say of the job whether it trains: @af.job(train=False) for one that does not"

TENSOR_HINTS = {
    **dict.fromkeys(("item", "tolist", "numpy", "data", "cpu"), _DATA),
    **dict.fromkeys(("backward", "grad", "requires_grad", "retain_grad"), _GRADIENT),
    **dict.fromkeys(("cuda", "device"), _PLACE),
}
MODULE_HINTS = {
    "parameters": "named_parameters() has them; an optimizer is given to the job, and takes none:"
    " @af.job(optimizer=af.optim.Adam(1e-3))",
    **dict.fromkeys(("train", "eval", "training"), _MODE),
    **dict.fromkeys(("to", "cuda", "cpu"), _PLACE),
    "state_dict": "state() returns the arrays by path, and save(path) writes them",
    "load_state_dict": "load(arrays_or_path) takes the arrays by path",
    **dict.fromkeys(
        ("modules", "children", "named_children"),
        "named_modules() has this module and"
        " all below it with their paths; vars(module) has its own parts",
    ),
    "buffers": "named_buffers() has them with their paths",
    "apply": "write for path, module in model.named_modules(): ...",
    **dict.fromkeys(
        ("double", "half", "float", "bfloat16"),
        "model.load(model.state(), dtype="
        "'float64') changes the dtype, and @af.job(precision='bf16') that of the computation",
    ),
    "reset_parameters": "make a new model; init(seed) says from which seed its values are",
    "zero_grad": "each step has its own gradients",
    "register_buffer": "write self.name = nn.Buffer(...)",
    "register_parameter": "write self.name = nn.Parameter(...)",
    "requires_grad_": "write freeze() or unfreeze()",
}
PACKAGE_HINTS = {
    **dict.fromkeys(("no_grad", "inference_mode"), f"x.detach() stops gradients; {_MODE}"),
    "manual_seed": "write af.seed(0), or @af.job(seed=0)",
    "empty": "write af.zeros, which costs nothing until it is written over",
    **dict.fromkeys(("from_numpy", "as_tensor"), "numpy arrays are taken as they are"),
    "save": "model.save(path) writes weights, and fit(checkpoint=...) a run",
    **dict.fromkeys(
        ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8"),
        "dtypes are texts, as numpy takes them: dtype='float32'",
    ),
    **dict.fromkeys(("float", "double", "half", "long"), "write x.to('float32') and the like"),
    "cuda": _PLACE,
    "utils": "sources of batches are in af.data, and af.data.ArraySource takes arrays",
    "Generator": "random numbers follow from the seed of the job: @af.job(seed=0)",
}


def unsupported_attribute(owner: str, name: str, instead: dict[str, str]) -> AttributeError:
    """Return the error of an attribute that is not there, with what there is in its place."""
    mend = instead.get(name, "")
    if instead is TENSOR_HINTS and name.endswith("_") and not name.startswith("_"):
        mend = f"tensors never change: write x = x.{name.rstrip('_')}(...)"
    return AttributeError(f"{owner} has no attribute {name!r}{mend and '; '}{mend}")


Array = np.ndarray[Any, Any]
Size = int  # `int` and `bool` are methods where these stand
Flag = bool

Operand: TypeAlias = "Tensor | float | Array | np.generic"
"""A Tensor, a Python number or a numpy array."""

METHODS: dict[str, Callable[..., Any]] = {}
"""What tensors have as methods, by name, and operators; `actorflow.functional` fills it."""


_Infix = Callable[["Tensor", "Operand"], "Tensor"]


def _infix(op: Op) -> tuple[_Infix, _Infix]:
    """Return what an operator does with a tensor on its left, and with one on its right only."""
    return lambda self, other: apply(op, self, other), lambda self, other: apply(op, other, self)


def _operator(name: str, x: Tensor, other: Any) -> Tensor:
    y: Tensor = METHODS[name](x, other)
    return y


class ValuesAndIndices(NamedTuple):
    """Elements that were picked along an axis, and where they were."""

    values: Tensor
    indices: Tensor


if TYPE_CHECKING:

    class _Methods:
        """The methods of `METHODS`, for type checkers: what they return."""

        _tensor: tuple[Callable[..., Tensor], ...] = ()
        _tensors: tuple[Callable[..., tuple[Tensor, ...]], ...] = ()
        _picked: tuple[Callable[..., ValuesAndIndices], ...] = ()
        (
            abs, acos, acosh, add, addmm, all, amax, amin, any, argmax, argmin, argsort, asin,
            asinh, atan, atan2, atanh, baddbmm, bernoulli, bfloat16, bitwise_and, bitwise_not,
            bitwise_or, bitwise_xor, bmm, bool, ceil, cholesky, clamp, clip, clone, contiguous,
            cos, cosh, count_nonzero, cross, cumprod, cumsum, det, diag, diagonal, div, dot,
            double, eq, erf, erfc, exp, exp2, expand, expand_as, expm1, flatten, flip, fliplr,
            flipud, float, floor, floor_divide, fmod, frac, gather, ge, gt, half, hypot, index_add,
            index_copy, index_fill, index_put, index_select, int, inverse, isfinite, isinf, isnan,
            le, lerp, log, log10, log1p, log2, log_softmax, logaddexp, logcumsumexp, logical_and,
            logical_not, logical_or, logical_xor, logsumexp, long, lt, masked_fill, matmul,
            matrix_power, maximum, mean, minimum, mm, moveaxis, movedim, mul, multinomial, mv,
            nan_to_num, nanquantile, nansum, narrow, ne, neg, new_full, new_ones, new_zeros, norm,
            outer, pow, prod, put, quantile, reciprocal, relu, remainder, repeat,
            repeat_interleave, reshape_as, roll, rot90, round, rsqrt, scatter, scatter_add,
            scatter_reduce, select, short, sigmoid, sign, sin, sinh, softmax, sqrt, square,
            squeeze, std, sub, sum, swapdims, take, take_along_dim, tan, tanh, tile, trace, tril,
            triu, trunc, type_as, unflatten, unfold, unique, unsqueeze, var, view, view_as,
        ) = _tensor  # fmt: skip
        chunk, slogdet, split, std_mean, unbind, var_mean = _tensors
        cummax, cummin, kthvalue, sort, topk = _picked
        dim: Callable[[], Size]
        numel: Callable[[], Size]
        size: Callable[..., Any]

        @overload
        def max(self, *, keepdim: Flag = ...) -> Tensor: ...
        @overload
        def max(self, dim: Tensor) -> Tensor: ...
        @overload
        def max(self, dim: Size, keepdim: Flag = ...) -> ValuesAndIndices: ...
        def max(self, *args: Any, **kwargs: Any) -> Any: ...
        @overload
        def min(self, *, keepdim: Flag = ...) -> Tensor: ...
        @overload
        def min(self, dim: Tensor) -> Tensor: ...
        @overload
        def min(self, dim: Size, keepdim: Flag = ...) -> ValuesAndIndices: ...
        def min(self, *args: Any, **kwargs: Any) -> Any: ...
        @overload
        def median(self) -> Tensor: ...
        @overload
        def median(self, dim: Size, keepdim: Flag = ...) -> ValuesAndIndices: ...
        def median(self, *args: Any, **kwargs: Any) -> Any: ...

        item: Callable[[], Any]  # of an eager tensor, as the next two
        numpy: Callable[[], Array]
        tolist: Callable[[], Any]

else:
    _Methods = object


class Tensor(_Methods):
    """A value of the graph being traced."""

    # numpy asks these two before it handles `array * tensor` itself, element by element.
    __array_priority__ = 1000
    __array_ufunc__ = None
    # __eq__ is elementwise, which would take the hash away.
    __hash__ = object.__hash__

    _known_type: TensorType | None = None

    def __init__(self, trace: Trace, value: ValueId) -> None:
        self._trace = trace
        self._value = value

    def _value_in(self, trace: Trace) -> ValueId:
        return self._value if self._trace is trace else trace.captured(self)

    @property
    def type(self) -> TensorType:
        """Dtype and shape."""
        if self._known_type is None:
            self._known_type = self._trace.builder.type_of(self._value)
        return self._known_type

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
        array = self._read()
        if array is None:
            return f"Tensor({self.type})"
        shown = np.array2string(array, separator=", ", prefix="Tensor(")
        return f"Tensor({shown}, {self.type})"

    __add__, __radd__ = _infix(arithmetic.ADD)
    __sub__, __rsub__ = _infix(arithmetic.SUB)
    __mul__, __rmul__ = _infix(arithmetic.MUL)
    __truediv__, __rtruediv__ = _infix(arithmetic.DIV)
    __floordiv__, __rfloordiv__ = _infix(arithmetic.FLOOR_DIVIDE)
    __mod__, __rmod__ = _infix(arithmetic.REMAINDER)
    __and__, __rand__ = _infix(arithmetic.BITWISE_AND)
    __or__, __ror__ = _infix(arithmetic.BITWISE_OR)
    __xor__, __rxor__ = _infix(arithmetic.BITWISE_XOR)
    __lshift__, __rlshift__ = _infix(arithmetic.SHIFT_LEFT)
    __rshift__, __rrshift__ = _infix(arithmetic.SHIFT_RIGHT)
    __lt__ = _infix(arithmetic.LESS)[0]
    __le__ = _infix(arithmetic.LESS_EQUAL)[0]
    __gt__ = _infix(arithmetic.GREATER)[0]
    __ge__ = _infix(arithmetic.GREATER_EQUAL)[0]
    __eq__ = _infix(arithmetic.EQUAL)[0]  # type: ignore[assignment]  # elementwise, as in numpy
    __ne__ = _infix(arithmetic.NOT_EQUAL)[0]  # type: ignore[assignment]  # elementwise, as in numpy

    def __neg__(self) -> Tensor:
        return apply(arithmetic.NEG, self)

    def __abs__(self) -> Tensor:
        return self.abs()

    def __invert__(self) -> Tensor:
        return apply(arithmetic.BITWISE_NOT, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return self.matmul(other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return _operator("__rmatmul__", self, other)

    def __pow__(self, other: Operand) -> Tensor:
        return self.pow(other)

    def __rpow__(self, other: Operand) -> Tensor:
        return _operator("__rpow__", self, other)

    def __getitem__(self, index: Any) -> Tensor:
        """Return elements by integers, slices, None, one `...`, and tensors of integers."""
        return _operator("__getitem__", self, index)

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
            trace = require_trace("a copy to a device")
            self._value_in(trace)
            to = device_number(trace, target)
            is_there = len(trace.devices) == 1
            return self if is_there else apply(transfer.COPY_TO, self, to=to, bucket=0)
        return apply(CAST, self, dtype=dtype_named(target, "dtype").value)

    astype = to

    def to_sbp(self, sbp: Words | None = None, **axes: Sbp | str) -> Tensor:
        """Return the same values, lying on the ranks of the job as words by axes of its mesh say.

        `x.to_sbp(model=af.split(1))`, or a mapping; see `actorflow.tensor.layouts`. On a batch's
        entry it says which part of it each rank is given.
        """
        trace = require_trace("a layout")
        return Tensor(trace, laid_out(trace, self._value_in(trace), sbp, axes))

    def detach(self) -> Tensor:
        """Return the same values; no gradient flows back through them."""
        return apply(shape.STOP_GRADIENT, self)

    if not TYPE_CHECKING:  # `_Methods` says which there are

        def __getattr__(self, name: str) -> Callable[..., Tensor]:
            """Return a function of `actorflow.functional` as a method, where it is one in torch."""
            if name not in METHODS:
                array = self._read() if name in _READERS else None
                if array is not None:
                    return partial(_READERS[name], array)
                raise unsupported_attribute(f"{type(self).__name__!r} object", name, TENSOR_HINTS)
            return partial(METHODS[name], self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *METHODS})

    def _read(self) -> Array | None:
        """Return the data of an eager tensor, read-only; None of one that is traced."""
        return self._trace.read(self._value)

    def _data(self, what: str, mend: str = "decide with tensors (af.where)") -> Array:
        array = self._read()
        if array is None:
            raise _no_data(what, mend)
        return array

    def __bool__(self) -> bool:
        return bool(self._data("a truth value"))

    def __float__(self) -> float:
        return float(self._data("a number").item())

    def __int__(self) -> int:
        return int(self._data("a number").item())

    def __index__(self) -> int:
        return self._data("an integer").__index__()

    def __iter__(self) -> Iterator[Tensor]:
        mend = "af.unbind(x) has its slices; af.map and af.scan run a function over them"
        self._data("an iterator", mend)
        return iter([self[place] for place in range(len(self))])

    def __format__(self, spec: str) -> str:
        array = self._read() if spec else None
        return (
            str(self) if array is None else format(array.item() if not array.ndim else array, spec)
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

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        mend = "write af.index_select(array, 0, index) for array[index], and af.f(x) for np.f(x)"
        return np.array(self._data("a numpy array", mend), dtype)


_READERS: dict[str, Callable[[Array], Any]] = {
    "item": lambda array: array.item(),
    "tolist": lambda array: array.tolist(),
    "numpy": np.array,
}
"""Methods of eager tensors, which give Python's or numpy's values."""


def _no_data(what: str, mend: str) -> CompileError:
    return CompileError(
        f"{find_source()}: a traced tensor has no data yet, so it cannot become {what}. The job's"
        f" function is traced once and its plan runs many steps: {mend}, or return the tensor from"
        " the job and look at it afterwards, or call the function by af.eager"
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
    trace = require_trace(str(op))
    recorder = pause_recording() if has_our_types(op) else None
    try:
        return _applied(trace, op, operands, attrs)
    finally:
        if recorder is not None:
            sys.settrace(recorder)


def _applied(
    trace: Trace, op: Op, operands: tuple[Operand, ...], attrs: dict[str, AttrValue]
) -> tuple[Tensor, ...]:
    # A Python number takes the dtype of the first tensor, as in torch.
    partner = next((o.dtype for o in operands if isinstance(o, Tensor)), DType.FLOAT32)
    places = _meeting(op)
    if len(places) > 1 or not partner.is_float:
        op, operands, partner = _alike(op, places, operands, partner)
    values = [_value_of(trace, o, partner) for o in operands]
    results = trace.emit(op, values, Attrs(attrs) if attrs else NO_ATTRS)
    return tuple([Tensor(trace, v) for v in results])


_OF_BOOLS = {arithmetic.ADD: arithmetic.MAXIMUM, arithmetic.MUL: arithmetic.MINIMUM}
"""What arithmetic of bools is: `or` and `and`."""


@functools.cache
def _meeting(op: Op) -> tuple[int, ...]:
    """Return the places of operands that meet in one dtype: those of an op of ours, by elements."""
    entry = definition.get(op) if definition.has(op) else None
    if entry is None or entry.traces_at_once or not entry.signature.is_elementwise:
        return ()
    specs = enumerate(entry.signature.inputs)
    return tuple([i for i, spec in specs if spec.elements not in ("int", "bool")])


def _alike(
    op: Op, places: tuple[int, ...], operands: tuple[Operand, ...], partner: DType
) -> tuple[Op, tuple[Operand, ...], DType]:
    """Return an op on operands of one dtype, cast where they are of several, and that dtype."""
    if _is_met(places, operands, partner):
        return op, operands, partner
    values: list[Any] = list(operands)
    places = tuple([i for i in places if i < len(values)])
    for i in places:
        if isinstance(values[i], (np.ndarray, np.generic)) and not isinstance(values[i], float):
            values[i] = as_tensor(values[i])
    kinds = (Tensor, bool, int, float)  # of anything else the value says what is wrong
    meeting = [values[i] for i in places if isinstance(values[i], kinds)]
    if not meeting:
        return op, operands, partner
    dtype = result_type(meeting)
    # A float function of integers is computed in float32, as torch's default dtype is.
    if not dtype.is_float and definition.get(op).signature.inputs[places[0]].elements == "float":
        dtype = DType.FLOAT32
    for i in places:
        if isinstance(values[i], Tensor) and values[i].dtype is not dtype:
            values[i] = apply(CAST, values[i], dtype=dtype.value)
    return _OF_BOOLS.get(op, op) if dtype is DType.BOOL else op, tuple(values), dtype


def _is_met(places: tuple[int, ...], operands: tuple[Operand, ...], partner: DType) -> bool:
    """Whether operands are tensors of one float dtype, as most are, and Python's floats."""
    met = [operands[i] for i in places if i < len(operands)]
    tensors = [x for x in met if isinstance(x, Tensor)]
    is_float = partner.is_float and all([x.dtype is partner for x in tensors])
    others = [x for x in met if not isinstance(x, Tensor)]
    return bool(is_float and tensors) and all([type(x) is float for x in others])


def as_tensor(operand: Any, partner: DType = DType.FLOAT32) -> Tensor:
    """Return a tensor as it is, an array as a constant, a number as a constant of `partner`.

    Raises CompileError for anything else, and for a number that `partner` does not hold.
    """
    if isinstance(operand, Tensor):
        return operand
    instead = "A parameter begins with an array, nn.Parameter(np.eye(3)), or by an initialiser:"
    trace = require_trace("a function of tensors", f"{instead} nn.Parameter((3, 4), 'zeros')")
    return Tensor(trace, _value_of(trace, operand, partner))


def _value_of(trace: Trace, operand: Operand, partner: DType) -> ValueId:
    if isinstance(operand, Tensor):
        return operand._value_in(trace)
    if isinstance(operand, (bool, int, float)):
        return _constant(trace, scalar(operand, partner))
    if isinstance(operand, (np.generic, np.ndarray)):
        refuse_masked(operand, "an operand")
        # ascontiguousarray makes an axis for a scalar; the reshape takes it away again.
        array = np.ascontiguousarray(operand)
        return _constant(trace, array.reshape(np.shape(operand)))
    raise CompileError(
        f"{find_source()}: expected a tensor, a number or a numpy array, got"
        f" {type(operand).__name__}"
    )


def _constant(trace: Trace, array: np.ndarray[Any, Any]) -> ValueId:
    make = _attrs_of_constant if array.ndim else _attrs_of_number
    attrs = make(_dtype_of_arrays(array.dtype), array.shape, array.tobytes())
    return trace.emit(sources.CONSTANT, [], attrs)[0]


@functools.lru_cache(1 << 6)
def _dtype_of_arrays(dtype: np.dtype[Any]) -> DType:
    # Kept, since numpy takes 5 us to name a dtype, a seventh of `x * 2.0` in eager mode.
    return dtype_named(str(dtype), "arrays of dtype")


def _attrs_of_constant(dtype: DType, shape: tuple[int, ...], data: bytes) -> Attrs:
    return Attrs({"dtype": dtype.value, "shape": shape, "data": data})


_attrs_of_number = functools.lru_cache(1 << 10)(_attrs_of_constant)
"""Numbers come again, and so do what they are hashed by."""


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
    # The most common integer needs no check.
    return tuple([i if type(i) is int else checked_size(i, what) for i in items])


def _resolve_shape(tensor: Tensor, given: tuple[int, ...]) -> tuple[int, ...]:
    if given.count(-1) > 1:
        raise CompileError(f"{find_source()}: reshape to {given} has more than one -1")
    product = 1
    for extent in given:
        product *= extent if extent != -1 else 1
    total = tensor.type.num_elements
    # Otherwise the op's own check refuses the shape, in its words.
    if -1 in given and product and total % product == 0:
        return tuple(total // product if e == -1 else e for e in given)
    return given
