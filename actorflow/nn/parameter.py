"""What a model keeps: tensors whose data is its own. A parameter is changed by the optimizer."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from actorflow.layouts import LayerWords, Layout, Words, constraint, layout_of, layouts_of
from actorflow.literals import checked_size
from actorflow.run.lease import Cell, change, frozen, newest
from actorflow.tensor import Tensor
from actorflow.trace.tracer import Constraint, InitSpec, Trace, current_trace, find_source
from compiler.errors import CompileError
from compiler.graph import SourceLocation
from compiler.ops.sources import MOST_AT_FIRST
from compiler.sbp.words import Partial
from compiler.types import DType, TensorType, ValueId

Array = np.ndarray[Any, Any]


class Stored(Tensor):
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
        self.cell = Cell()

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
        change({self.cell: self.checked(array)})

    def checked(self, array: Array) -> Array:
        """Return an array as it is if nobody can write into it, else a read-only copy.

        Raises CompileError when shape or dtype are not its own.
        """
        is_array = isinstance(array, (np.ndarray, np.generic))
        came = f"{array.dtype}{list(array.shape)}" if is_array else type(array).__name__
        if came != str(self._type):
            raise CompileError(
                f"{find_source()}: a {self.kind} (made at {self.source}) expected {self._type},"
                f" got {came}; give it a numpy array of that dtype and shape"
            )
        return frozen(np.asarray(array))

    def _value_in(self, trace: Trace) -> ValueId:
        name = trace.name_of(self, self.kind, self.source)
        sbp: Constraint = ()
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


class Parameter(Stored):
    """A named, trainable array; see `Stored`. `sbp` says how it lies on the ranks of a job."""

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
                f"{where}: a parameter cannot be partial: what updates it is no sum of terms. Give"
                " af.split(axis) or af.broadcast"
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
    own = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    if sbp is not None:
        ranks = {name: parameter.ndim for name, parameter in own.items()}
        for name, words in layouts_of(sbp, ranks, layer).items():
            own[name].sbp = words
