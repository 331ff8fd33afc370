"""Tracing the function inside a node: a trace within the trace of the job.

What the function reads from outside, tensors, parameters and entries of the batch, becomes an
operand of the body, the same at every step.
"""

from __future__ import annotations

from actorflow.tensor import Tensor
from actorflow.trace.tracer import Constraint, InitSpec, Trace, find_source
from compiler.attrs import Attrs
from compiler.body import Body, closed, operand
from compiler.errors import CompileError
from compiler.graph import SourceLocation
from compiler.registry import Op
from compiler.types import TensorType, ValueId


class InnerTrace(Trace):
    """A run of the function of a node. `taken` are values of the outer trace, in order of use."""

    def __init__(self, outer: Trace, what: str) -> None:
        super().__init__({}, {}, {}, is_training=outer.is_training, devices=outer.devices)
        self.mesh = outer.mesh
        self.outer = outer
        self.taken: dict[ValueId, ValueId] = {}
        self.batches_per_step = outer.batches_per_step
        self.regions = [0]
        self._what = what
        self._scope = outer._scope
        self._module_paths = outer._module_paths

    def operand(self, type_: TensorType) -> Tensor:
        """Return a new operand of the body."""
        with self.builder.at(self._scope, find_source()):
            return Tensor(self, operand(self.builder, type_))

    def body(self, results: list[Tensor]) -> Body:
        """Return what was traced, with these results."""
        return closed(self.builder, [tensor._value_in(self) for tensor in results])

    def captured(self, tensor: Tensor) -> ValueId:
        """Return a tensor from outside as an operand. Raises CompileError for a closed trace's."""
        return self.take(tensor._value_in(self.outer))

    def take(self, value: ValueId) -> ValueId:
        """Return a value of the outer trace as an operand, the same one each time."""
        if value not in self.taken:
            type_ = self.outer.builder.type_of(value)
            with self.builder.at(self._scope, self.outer.builder.producer_of(value).source):
                self.taken[value] = operand(self.builder, type_)
        return self.taken[value]

    def emit(self, op: Op, inputs: list[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Append a node. Raises CompileError where it would leave the device, stage or rank."""
        if self.regions[-1] != 0 or op.name == "copy_to":
            raise CompileError(
                f"{find_source()}: {self._what} runs on one device, and cannot move to another"
                " within; say around it where it runs: with af.device(...):"
            )
        if len(self.stages) > 1:
            raise CompileError(
                f"{find_source()}: {self._what} runs on one stage, and cannot move to another"
                " within; say around it where it runs: with af.stage(...):"
            )
        if op.name == "to_sbp":
            raise CompileError(
                f"{find_source()}: {self._what} runs on each rank by itself, and lays nothing out"
                " within; call to_sbp on what it takes, or on what it returns"
            )
        return super().emit(op, inputs, attrs)

    def batch_input(self, key: str) -> ValueId:
        """Return an entry of the batch as an operand."""
        return self.take(self.outer.batch_input(key))

    def name_of(self, stored: object, kind: str, source: SourceLocation) -> str:
        """Return the path of what the job's model keeps."""
        return self.outer.name_of(stored, kind, source)

    def assign(self, name: str, variable: ValueId, value: ValueId) -> None:
        """Refuse: how often a body runs is not the job's to say."""
        raise CompileError(
            f"{find_source()}: {self._what} assigns to buffer {name!r}; return the value from it,"
            " and assign it outside"
        )

    def assigned_to(self, name: str) -> ValueId | None:
        """Return what the job gave a buffer, as an operand."""
        value = self.outer.assigned_to(name)
        return None if value is None else self.take(value)

    def variable(
        self,
        name: str,
        type_: TensorType,
        role: str,
        init: InitSpec,
        source: SourceLocation | None = None,
        sbp: Constraint = (),
    ) -> ValueId:
        """Return a variable of the job as an operand."""
        return self.take(self.outer.variable(name, type_, role, init, source, sbp))

    def has_variable(self, name: str) -> bool:
        """Whether the job uses a variable."""
        return self.outer.has_variable(name)

    def next_random_key(self) -> int:
        """Refuse random ops: they would draw the same numbers at every step."""
        raise CompileError(
            f"{find_source()}: {self._what} draws random numbers, which would be the same at every"
            " step; draw them outside, with an axis for the steps, and pass them as xs"
        )
