"""A parameter: a tensor whose data belongs to the model and is changed by the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from actorflow.tensor import Tensor, checked_size
from actorflow.trace import InitSpec, Trace, current_trace, find_source
from compiler.errors import CompileError
from compiler.types import DType, TensorType, ValueId

Array = np.ndarray[Any, Any]


class Parameter(Tensor):
    """A named, trainable array. Used in a job it is a tensor; outside it holds `data`.

    `init` is the initialiser's spec, for example (("kind", "normal"), ("std", 0.02)). While a plan
    is open on the model the newest values are in the plan's memory; `data` fetches them.
    """

    def __init__(
        self, extents: tuple[int, ...], init: InitSpec, dtype: DType = DType.FLOAT32
    ) -> None:
        self._type = TensorType(
            dtype, tuple(checked_size(e, "an extent of a parameter") for e in extents)
        )
        self.init = init
        self.source = find_source()
        if dtype is DType.BFLOAT16:
            raise CompileError(
                f"{self.source}: a parameter cannot be bfloat16: updates are smaller than its"
                " steps. Make it float32, and give the job precision='bf16'"
            )
        self.is_frozen = False
        self.version = 0
        self._data: Array | None = None
        self._fetch: Callable[[], None] | None = None

    @property
    def data(self) -> Array | None:
        """The newest values, or None until the first run materialises the initialiser.

        Assign or `load` to change them; writing into the array is seen by the next run only.
        """
        self.fetch()
        return self._data

    @data.setter
    def data(self, array: Array) -> None:
        self.load(array)

    def load(self, array: Array) -> None:
        """Set the data to a copy. Raises CompileError when shape or dtype differ."""
        came = f"{array.dtype}{list(array.shape)}"
        if tuple(array.shape) != self._type.shape or str(array.dtype) != self._type.dtype.value:
            raise CompileError(f"{self.source}: expected {self._type}, got {came}")
        self.fetch()
        self.accept(np.array(array))

    def accept(self, array: Array) -> None:
        """Take over `array` as the newest values. For whoever runs plans on the model."""
        self._data = array
        self.version += 1

    def fetch(self) -> None:
        """Have the newest values brought here, if they are elsewhere."""
        if self._fetch is not None:
            fetch, self._fetch = self._fetch, None
            fetch()

    def lend(self, fetch: Callable[[], None]) -> None:
        """Note that the newest values are elsewhere from now on, and who brings them."""
        self._fetch = fetch

    def freeze(self) -> Parameter:
        """Exclude this parameter from the optimizer; return it."""
        self.is_frozen = True
        return self

    def _value_in(self, trace: Trace) -> ValueId:
        name = trace.parameter_name(self, self.source)
        return trace.variable(name, self._type, "parameter", self.init, self.source)

    @property
    def _value(self) -> ValueId:  # type: ignore[override]  # resolved in the current trace
        trace = current_trace()
        if trace is None:
            raise CompileError(f"{find_source()}: a parameter has a value only inside a job")
        return self._value_in(trace)

    @property
    def type(self) -> TensorType:
        """Dtype and shape."""
        return self._type

    def __repr__(self) -> str:
        return f"Parameter({self._type})"
