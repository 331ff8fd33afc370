"""What a model keeps: tensors whose data is its own.

A `Parameter` is changed by the optimizer. A `Buffer` is changed by no optimizer, but the job itself
may assign to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from actorflow.nn.lease import ParameterStorage, assign_values, frozen, newest
from actorflow.tensor.initial_values import initial_value
from actorflow.tensor.layouts import LayerWords, Words, constraint, layout_of, layouts_of
from actorflow.tensor.literals import checked_size, dtype_named, refuse_masked
from actorflow.tensor.tensor import Operand, Tensor, as_tensor
from actorflow.tensor.tracer import InitSpec, Trace, current_trace, find_source
from compiler.contract.errors import CompileError
from compiler.contract.sbp import Layout, Partial
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.graph import SourceLocation
from compiler.ops.primitives.sources import MOST_AT_FIRST

Array = np.ndarray[Any, Any]


class ModelTensor(Tensor):
    """A parameter or a buffer: a tensor inside a job; outside of jobs it holds `data`.

    `init` is the initialiser's spec, for example (("kind", "normal"), ("std", 0.02)). `cell` has
    the values; while a run trains them they are in the run's memory, and reads and writes go there.
    """

    kind: str
    """What it is, in messages and as the role of its variable."""

    is_frozen: bool

    _layout: Layout = ()
    _layout_source: SourceLocation

    def __init__(self, type_: TensorType, init: InitSpec) -> None:
        self._type = type_
        self.init = init
        self.source = find_source()
        for key, number in init:
            if isinstance(number, float) and not abs(number) < MOST_AT_FIRST:  # nor where it is NaN
                raise CompileError(
                    f"{self.source}: a {self.kind} cannot start with {key} {number}: it must be"
                    f" finite and below {MOST_AT_FIRST:g}"
                )
        self.cell = ParameterStorage()

    @property
    def data(self) -> Array | None:
        """The newest values, or None until the first run materialises the initialiser.

        The array is read-only, and what later steps do does not change it. Assign to change the
        values: `x.data = new`. Callable from any thread; while the model is being
        trained this copies the values after the last finished step.
        """
        return newest({"data": self.cell}).get("data")

    @data.setter
    def data(self, array: Array) -> None:
        self.load(array)

    def load(self, array: Array) -> None:
        """Set the values to a copy; a run that trains the model has them in its next step.

        An array of its own bytes that cannot be written into is taken as it is, without a copy.
        Callable from any thread. Raises CompileError when shape or dtype differ.
        """
        assign_values({self.cell: self.checked(array)})

    def checked(self, array: Array, path: str = "") -> Array:
        """Return an array as it is if nobody can write into it, else a read-only copy.

        Raises CompileError when shape or dtype are not its own, with the path in the model.
        """
        refuse_masked(array, f"the value of a {self.kind}")
        is_array = isinstance(array, (np.ndarray, np.generic))
        came = f"{array.dtype}{list(array.shape)}" if is_array else type(array).__name__
        # Compared as texts: an array may be of a dtype that no TensorType can name.
        if came != str(self._type):
            which = f"{self.kind} {path!r}" if path else f"a {self.kind}"
            raise CompileError(
                f"{find_source()}: {which} (made at {self.source}) expected {self._type},"
                f" got {came}; give it a numpy array of that dtype and shape"
            )
        return frozen(np.asarray(array))

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
        extents: tuple[int, ...],
        init: InitSpec,
        dtype: DType = DType.FLOAT32,
        *,
        sbp: Words | None = None,
    ) -> None:
        sizes = tuple([checked_size(e, "an extent of a parameter") for e in extents])
        super().__init__(TensorType(dtype, sizes), init)
        if dtype is DType.BFLOAT16:
            raise CompileError(
                f"{self.source}: a parameter cannot be bfloat16: updates are smaller than its"
                " steps. Make it float32, and give the job precision='bf16'"
            )
        self.is_frozen = False
        if sbp is not None:
            self.sbp = sbp

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


_GIVEN: InitSpec = (("kind", "given"),)
"""The spec of values that the user gave: a plan that runs without the model is given them, too."""

_DRAWN = ("uniform", "normal")
"""Initialisers whose numbers follow from the seed of a run."""


class Buffer(ModelTensor):
    """State that is no parameter: running statistics, counts, tables. It is not trained.

    As an attribute of a module it is part of `state()`, `load()` and checkpoints. In a job it is a
    tensor, and `assign` gives it another value; see there.

    Args:
        values: an array, whose values it begins with, or a shape.
        init: how a buffer of a shape begins, as of a `Parameter`; zeros by default.
        dtype: of a buffer of a shape.

    Raises CompileError for what is neither array nor shape, and for dtypes that none can have.
    """

    kind = "buffer"
    is_frozen = True

    def __init__(
        self,
        values: Array | Sequence[int] | int,
        init: InitSpec | None = None,
        dtype: DType | str = DType.FLOAT32,
    ) -> None:
        if isinstance(values, (np.ndarray, np.generic)):
            if init is not None:
                raise CompileError(
                    f"{find_source()}: a buffer begins with an array or by an initialiser, got both"
                )
            type_ = TensorType(dtype_named(values.dtype, "buffers of dtype"), np.shape(values))
            super().__init__(type_, _GIVEN)
            self.load(values)
            return
        sizes = tuple(values) if isinstance(values, Sequence) else (values,)
        shape = tuple([checked_size(e, "an extent of a buffer") for e in sizes])
        if any([extent < 0 for extent in shape]):
            raise CompileError(
                f"{find_source()}: an extent of a buffer must be 0 or more, got {min(shape)}"
            )
        type_ = TensorType(dtype_named(dtype, "buffers of dtype"), shape)
        spec = init or (("kind", "zeros"),)
        kind = dict(spec).get("kind")
        super().__init__(type_, spec if kind in ("zeros", "ones", *_DRAWN) else _GIVEN)
        # Constant ones are made now, so the buffer has values before any run; drawn ones wait for
        # the seed.
        if kind not in _DRAWN:
            self.load(initial_value("a buffer", type_, spec, 0))

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
