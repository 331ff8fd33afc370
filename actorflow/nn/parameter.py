"""A parameter: a tensor whose data belongs to the model and is changed by the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from actorflow.tensor import Tensor
from actorflow.trace import InitSpec, Trace, current_trace, find_source
from compiler.errors import CompileError
from compiler.types import DType, TensorType, ValueId


class Parameter(Tensor):
    """A named, trainable array. Used in a job it is a tensor; outside it holds `data`.

    `data` is None until the first run materialises the initialiser (a pure function of seed and
    name), or until `load` gives it. `init` is the initialiser's spec, for example (("kind",
    "normal"), ("std", 0.02)).
    """

    def __init__(
        self, extents: tuple[int, ...], init: InitSpec, dtype: DType = DType.FLOAT32
    ) -> None:
        self._type = TensorType(dtype, tuple(extents))
        self.init = init
        self.source = find_source()
        self.data: np.ndarray[Any, Any] | None = None
        self.is_frozen = False

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

    def freeze(self) -> Parameter:
        """Exclude this parameter from the optimizer; return it."""
        self.is_frozen = True
        return self

    def load(self, array: np.ndarray[Any, Any]) -> None:
        """Set the data. Raises CompileError when shape or dtype differ."""
        came = TensorType(DType(str(array.dtype)), tuple(array.shape))
        if came != self._type:
            raise CompileError(f"{self.source}: expected {self._type}, got {came}")
        self.data = np.array(array)

    def __repr__(self) -> str:
        return f"Parameter({self._type})"
