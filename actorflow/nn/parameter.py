"""What a model keeps: tensors whose data is its own.

A `Parameter` is changed by the optimizer. A `Buffer` is changed by no optimizer, but the job itself
may assign to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from actorflow.nn.lease import ParameterStorage, assign_values, frozen, newest
from actorflow.tensor.initial_values import initial_value
from actorflow.tensor.layouts import LayerWords, Words, constraint, layout_of, layouts_of
from actorflow.tensor.literals import checked_size, dtype_named, refuse_masked
from actorflow.tensor.tensor import Operand, Tensor, as_tensor
from actorflow.tensor.tracer import InitSpec, Trace, current_trace, find_source
from compiler.contract.arrays import as_array
from compiler.contract.errors import CompileError
from compiler.contract.sbp import Layout, Partial
from compiler.contract.types import DType, TensorType, ValueId, numpy_dtype
from compiler.graph.graph import SourceLocation
from compiler.ops.primitives.sources import MOST_AT_FIRST

Array = np.ndarray[Any, Any]

Init = InitSpec | str | Callable[["ModelTensor"], object]
"""How a parameter or a buffer begins; see `ModelTensor`."""

_UNSAID: InitSpec = ()

_GIVEN: InitSpec = (("kind", "given"),)
"""The spec of values that the user gave: a plan that runs without the model is given them, too."""


def _shape_of(values: object, kind: str) -> tuple[int, ...]:
    """Return the shape that a user wrote. Raises CompileError."""
    if isinstance(values, float):
        raise CompileError(
            f"{find_source()}: a {kind} expected an array or a shape, got {values}; for a number"
            f" write np.float32({values})"
        )
    sizes = tuple(values) if isinstance(values, Sequence) else (values,)
    if any([isinstance(size, (float, list, tuple)) for size in sizes]):
        raise CompileError(
            f"{find_source()}: a {kind} expected an array or a shape, got {values!r:.60}; for"
            " values write np.array(..., np.float32)"
        )
    shape = tuple([checked_size(e, f"an extent of a {kind}") for e in sizes])
    if any([extent < 0 for extent in shape]):
        raise CompileError(
            f"{find_source()}: an extent of a {kind} must be 0 or more, got {min(shape)}"
        )
    return shape


def _is_cast(given: np.dtype[Any], own: np.dtype[Any]) -> bool:
    """Whether values of a dtype are taken for another: floats, or integers that it holds all."""
    if given.kind == own.kind == "f" or given.name == own.name:
        return True
    return given.kind in "iu" and own.kind in "iu" and np.can_cast(given, own)


class ModelTensor(Tensor):
    """A parameter or a buffer: a tensor inside a job; outside of jobs it holds `data`.

    Args:
        values: an array that it begins with, of numpy or of a library that exports arrays (DLPack,
            `__array__`), which is copied; or a shape.
        init: how one of a shape begins, zeros by default: "zeros", "ones", or a function that
            declares it, as those of `nn.init` do: `lambda p: nn.init.normal_(p, std=0.02)`.
        dtype: of its elements; by default that of the array, and float32 for a shape.

    `init` is then the initialiser's spec, for example (("kind", "normal"), ("std", 0.02)), which is
    taken as an argument, too. `cell` has the values; while a run trains them they are in the run's
    memory, and reads and writes go there. Raises CompileError for other arguments.
    """

    kind: str
    """What it is, in messages and as the role of its variable."""

    is_frozen: bool

    init: InitSpec

    origin: tuple[ModelTensor, Callable[[Array], Array]] | None = None
    """See `begin_from`."""

    _layout: Layout = ()
    _layout_source: SourceLocation

    def __init__(
        self,
        values: Array | Sequence[int] | int,
        init: Init | None = None,
        dtype: DType | str | None = None,
    ) -> None:
        self.source = find_source()
        self.cell = ParameterStorage()
        refuse_masked(values, f"the value of a {self.kind}")
        array = as_array(values)
        if array is None:
            self._type = self._type_of(_shape_of(values, self.kind), dtype or DType.FLOAT32)
            self.init = self._spec_of(init)
            return
        if init is not None:
            raise CompileError(
                f"{self.source}: a {self.kind} begins with an array or by an initialiser, got both"
            )
        self._type = self._type_of(array.shape, dtype or array.dtype)
        self.init = _GIVEN
        self.load(array)

    def _type_of(self, shape: tuple[int, ...], dtype: DType | npt.DTypeLike) -> TensorType:
        return TensorType(dtype_named(dtype, f"{self.kind}s of dtype"), shape)

    def _spec_of(self, init: Init | None) -> InitSpec:
        """Return the spec of an initialiser, as the constructor takes one."""
        if init is None or isinstance(init, str):
            if init not in (None, "zeros", "ones"):
                raise CompileError(
                    f'{self.source}: init of a {self.kind} by name is "zeros" or "ones", got'
                    f" {init!r:.60}; give another as a function, such as nn.init.xavier_uniform_ or"
                    " lambda p: nn.init.normal_(p, std=0.02)"
                )
            return (("kind", init or "zeros"),)
        if callable(init):
            self.init = _UNSAID
            is_numpys = str(getattr(init, "__module__", "")).startswith("numpy")
            if is_numpys or init(self) is not self or self.init == _UNSAID:
                raise CompileError(
                    f"{self.source}: init of a {self.kind} must be a function that declares how it"
                    " begins and returns it, such as nn.init.zeros_; for values give the array"
                    f" itself: nn.{type(self).__name__}(array)"
                )
            init = self.init
        if not isinstance(init, tuple):
            raise CompileError(
                f'{self.source}: init of a {self.kind} must be "zeros", "ones" or a function such'
                f" as nn.init.normal_, got {type(init).__name__}; for values give the array itself:"
                f" nn.{type(self).__name__}(array)"
            )
        for key, number in init:
            if isinstance(number, float) and not abs(number) < MOST_AT_FIRST:  # nor where it is NaN
                raise CompileError(
                    f"{self.source}: a {self.kind} cannot start with {key} {number}: it must be"
                    f" finite and below {MOST_AT_FIRST:g}"
                )
        return init

    @property
    def is_drawn(self) -> bool:
        """Whether its first values wait for `Module.init`, `Module.state` or a run."""
        return self.init != _GIVEN or self.origin is not None

    def begin_from(self, source: ModelTensor, function: Callable[[Array], Array]) -> None:
        """Let it begin as a function of the first values of another one of the same model.

        If the other one has values, it gets its own now. `function` returns an array of its shape.
        """
        self.origin, self.init = (source, function), _GIVEN
        values = source.data
        if values is not None:
            self.load(function(values))

    @property
    def data(self) -> Array | None:
        """The newest values, or None until `Module.init`, `Module.state` or a run makes the first.

        The array is read-only, and what later steps do does not change it. Assign to change the
        values: `x.data = new`. Callable from any thread; while the model is being
        trained this copies the values after the last finished step.
        """
        return newest({"data": self.cell}).get("data")

    @data.setter
    def data(self, array: Any) -> None:
        self.load(array)

    def load(self, array: Any) -> None:
        """Set the values to a copy; a run that trains the model has them in its next step.

        An array of its own bytes that cannot be written into is taken as it is, without a copy.
        Callable from any thread. Raises CompileError where `checked` does.
        """
        assign_values({self.cell: self.checked(array)})

    def type_in(self, dtype: str | None) -> TensorType:
        """Return the type with another dtype, if floats may have it here and these are some."""
        if dtype is None or not self.dtype.is_float:
            return self._type
        return self._type_of(self.shape, dtype)

    def set_type(self, type_: TensorType) -> None:
        """Give it another type, for values that are assigned next; no run may have the values."""
        self._type = type_

    def checked(self, array: Any, path: str = "", type_: TensorType | None = None) -> Array:
        """Return an array as values of a type: as it is if nobody can write into it, or a copy.

        The type is its own by default.

        Floats are cast to its own float dtype, and integers to one that holds them all. Arrays of
        other libraries are taken as well (`as_array`). Raises CompileError when the shape differs,
        for other dtypes, and for numbers that its dtype does not hold, with the path in the model.
        """
        refuse_masked(array, f"the value of a {self.kind}")
        values = as_array(array)
        type_ = type_ or self._type
        own = numpy_dtype(type_.dtype)
        which = f"{self.kind} {path!r}" if path else f"a {self.kind}"
        if values is None or values.shape != self.shape or not _is_cast(values.dtype, own):
            came = type(array).__name__
            mend = "give it a numpy array of that dtype and shape"
            if values is not None:
                came = f"{values.dtype}{list(values.shape)}"
                if values.ndim == 2 and values.shape == self.shape[::-1]:
                    mend = "it has the shape of the transpose: give array.T"
            raise CompileError(
                f"{find_source()}: {which} (made at {self.source}) expected {type_}, got"
                f" {came}; {mend}"
            )
        if values.dtype == own:
            return frozen(values)
        with np.errstate(over="ignore"):
            cast = values.astype(own)
        if own.itemsize < values.itemsize and bool((np.isinf(cast) & ~np.isinf(values)).any()):
            raise CompileError(
                f"{find_source()}: {which} is {type_}, and was given numbers of"
                f" {values.dtype} beyond those that {own} holds; scale them, or give it that dtype"
            )
        cast.flags.writeable = False
        return cast

    def _present(self) -> Array:
        """Return the values for another library. Raises CompileError."""
        if current_trace() is not None:
            return super().__array__()  # of an eager block; in a job an error
        data = self.data
        if data is None:
            raise CompileError(
                f"{find_source()}: the {self.kind} made at {self.source} has no values yet, which"
                " follow from its path in the model: call model.init(seed), or read model.state()"
            )
        return data

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Return the newest values for numpy: read-only, unless a copy is asked for."""
        data = self._present()
        if dtype is None or data.dtype == dtype:
            return data.copy() if copy else data
        if copy is False:
            raise ValueError(f"{data.dtype} values become {dtype} by a copy only")
        return data.astype(dtype)

    def __dlpack__(self, *, copy: bool | None = None, **_: Any) -> Any:
        """Return a capsule of DLPack with a copy of the newest values on the host.

        A copy, because the values of a model never change in place, and a consumer may write.
        """
        if copy is False:
            raise BufferError(f"the values of a {self.kind} are exported as a copy only")
        return self._present().copy().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's name of the host."""
        return 1, 0

    def _value_in(self, trace: Trace) -> ValueId:
        name = trace.name_of(self, self.kind, self.source)
        # Without a mesh the layout says nothing: the same model runs on one rank.
        sbp: Layout = ()
        if self._layout and trace.mesh is not None:
            what = f"sbp of {self.kind} {name!r}"
            sbp = constraint(self._layout, self._type, trace.mesh, what, self._layout_source)
        return trace.variable(name, self._type, self.kind, self.init, self.source, sbp)

    @property
    def _value(self) -> ValueId:  # type: ignore[override]  # resolved in the current trace
        trace = current_trace()
        if trace is None:
            raise CompileError(f"{find_source()}: a {self.kind} has a value only inside a job")
        return self._value_in(trace)

    def _read(self) -> Array | None:
        trace = current_trace()
        return trace.read(self._value_in(trace)) if trace is not None and trace.is_eager else None

    @property
    def type(self) -> TensorType:
        """Dtype and shape."""
        return self._type

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._type})"


class Parameter(ModelTensor):
    """A named, trainable array; see `ModelTensor`. `sbp` says how it lies on the ranks of a job."""

    kind = "parameter"

    def __init__(
        self,
        values: Array | Sequence[int] | int,
        init: Init | None = None,
        dtype: DType | str | None = None,
        *,
        sbp: Words | None = None,
    ) -> None:
        super().__init__(values, init, dtype)
        self.is_frozen = False
        if sbp is not None:
            self.sbp = sbp

    def _type_of(self, shape: tuple[int, ...], dtype: DType | npt.DTypeLike) -> TensorType:
        if dtype in (DType.BFLOAT16, DType.BFLOAT16.value):
            raise CompileError(
                f"{self.source}: a parameter cannot be bfloat16: updates are smaller than its"
                " steps. Make it float32, and give the job precision='bf16'"
            )
        type_ = super()._type_of(shape, dtype)
        if not type_.dtype.is_float:
            raise CompileError(
                f"{self.source}: a parameter must be of floats, for an optimizer changes it, got"
                f" {type_}. Give it a dtype, such as dtype='float32', or keep it in an nn.Buffer"
            )
        return type_

    @property
    def sbp(self) -> Words:
        """How the parameter lies on the ranks of a job, and its optimizer state and gradient.

        Words by axes of the mesh, such as {"model": af.split(0)}; nothing, by default, leaves it to
        the compiler. Assign to change it. A parameter is split or whole: the terms of a sum could
        not be updated each on its own. Raises CompileError with the user's line.
        """
        return dict(self._layout)

    @sbp.setter
    def sbp(self, given: Words) -> None:
        layout, where = layout_of(given, "sbp of a parameter"), find_source()
        if any([isinstance(word, Partial) for _, word in layout]):
            raise CompileError(
                f"{where}: a parameter cannot be partial, because its update is not a sum of"
                " terms. Give af.split(axis) or af.broadcast"
            )
        self._layout, self._layout_source = layout, where

    def freeze(self) -> Parameter:
        """Exclude this parameter from every optimizer; return it."""
        self.is_frozen = True
        return self

    def unfreeze(self) -> Parameter:
        """Undo `freeze`; return it."""
        self.is_frozen = False
        return self

    def assign(self, value: object) -> NoReturn:
        """Refuse: a parameter is the optimizer's. Raises CompileError."""
        raise CompileError(
            f"{find_source()}: the parameter made at {self.source} cannot be assigned: the"
            " optimizer changes it. Keep what the job computes itself in an nn.Buffer; outside of"
            " jobs, write parameter.data = array"
        )


def lay_out(layer: str, sbp: LayerWords | None, **parameters: Parameter | None) -> None:
    """Give the parameters of a layer, the weight first, the layouts that `sbp` says.

    Raises CompileError with the user's line.
    """
    present = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    if sbp is not None:
        ranks = {name: parameter.ndim for name, parameter in present.items()}
        for name, words in layouts_of(sbp, ranks, layer).items():
            present[name].sbp = words


_DRAWN = ("uniform", "normal", "truncated_normal", "orthogonal")
"""Initialisers whose numbers follow from the seed of a run."""


class Buffer(ModelTensor):
    """State that is no parameter: running statistics, counts, tables. It is not trained.

    As an attribute of a module it is part of `state()`, `load()` and checkpoints. In a job it is a
    tensor, and `assign` gives it another value; see there.

    Its arguments are those of a `ModelTensor`, and every dtype of arrays is permitted.
    """

    kind = "buffer"
    is_frozen = True

    def __init__(
        self,
        values: Array | Sequence[int] | int,
        init: Init | None = None,
        dtype: DType | str | None = None,
    ) -> None:
        super().__init__(values, init, dtype)
        # Constant ones are made now, so the buffer has values before any run; drawn ones wait for
        # the seed.
        if self.init != _GIVEN and not self.is_drawn:
            self.load(initial_value("a buffer", self._type, self.init, 0))
            if self.init not in ((("kind", "zeros"),), (("kind", "ones"),)):
                self.init = _GIVEN

    @property
    def is_drawn(self) -> bool:
        """Whether its first values wait for a seed."""
        return dict(self.init).get("kind") in _DRAWN or self.origin is not None

    def assign(self, value: Operand) -> None:
        """Give the buffer another value, of its type; inside a job.

        Reads that follow in the job see it. The last one is kept for the next step, or, where a
        step has several batches, for the next batch; a step that is skipped keeps none. So it is
        in a job with `train=False`, too, as in torch, but not between the steps of a training
        (`af.Evaluation`), which an evaluation does not change: the log names the line.
        """
        trace = current_trace()
        if trace is None:
            raise CompileError(
                f"{find_source()}: buffer.assign(value) is for inside of a job; outside of jobs,"
                " write buffer.data = array"
            )
        name = trace.name_of(self, self.kind, self.source)
        tensor = as_tensor(value, self._type.dtype)
        if tensor.type != self._type:
            raise CompileError(
                f"{find_source()}: buffer {name!r} (made at {self.source}) is {self._type}, and"
                f" was assigned {tensor.type}; cast it with .to('{self._type.dtype}'), or give it"
                " that shape with .reshape or .broadcast_to"
            )
        trace.assign(name, super()._value_in(trace), tensor._value_in(trace))

    def _value_in(self, trace: Trace) -> ValueId:
        name = trace.name_of(self, self.kind, self.source)
        value = trace.assigned_to(name)
        return super()._value_in(trace) if value is None else value
