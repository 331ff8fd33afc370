"""A buffer: a tensor of the model's own that no optimizer changes, but the job itself may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.initialise import initial_value
from actorflow.literals import checked_size, dtype_named
from actorflow.nn.parameter import Stored
from actorflow.tensor import Operand, as_tensor
from actorflow.trace.tracer import InitSpec, Trace, current_trace, find_source
from compiler.errors import CompileError
from compiler.types import DType, TensorType, ValueId

Array = np.ndarray[Any, Any]

_GIVEN: InitSpec = (("kind", "given"),)
"""The spec of values that the user gave: a plan that runs without the model is given them, too."""

_DRAWN = ("uniform", "normal")
"""Initialisers whose numbers follow from the seed of a run."""


class Buffer(Stored):
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
            self.load(np.asarray(values))
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
        if kind not in _DRAWN:
            self.load(initial_value("a buffer", type_, spec, 0))

    def assign(self, value: Operand) -> None:
        """Give the buffer another value, of its type; inside a job.

        Reads that follow in the job see it. A job that trains keeps the last one for the next
        step, or, where a step has several batches, for the next batch; a step that is skipped
        keeps none. In a job that does not train nothing is kept.
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
