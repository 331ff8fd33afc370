"""Gradients of ops that are written over tensors, by functions as a job calls them.

The compiler's own rules emit nodes one by one. A rule of several matrix products is easier to read,
and to check against its source, as a function of tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import Trace, find_source, recording
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import ValueId
from compiler.graph.graph import Gradient, GraphBuilder, Maybe, Node, gradient
from compiler.graph.registry import Op, OpTypeError

Tensors = tuple[Tensor, ...]
Grads = tuple[Tensor | None, ...]

Rule = Callable[[Attrs, Tensors, Tensors, Grads], Grads]
"""Attributes, operands, outputs, gradients of the outputs (None: nothing flows) -> those of the
operands."""


class GradientTrace(Trace):
    """Records into a builder that stands at some node already: its line and scope are kept."""

    def __init__(self, b: GraphBuilder) -> None:
        super().__init__({}, {}, {}, is_training=True)
        self.builder = b

    def next_random_key(self) -> int:
        """Refuse random ops: they count steps, which is a matter of the job's own trace."""
        raise CompileError(
            f"{find_source()}: a gradient draws random numbers; draw them in the job, and make them"
            " an operand"
        )

    def emit(self, op: Op, inputs: list[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Append a node where the builder stands."""
        return self.builder.emit(op, inputs, attrs)


def rule_over_tensors(rule: Rule) -> Gradient:
    """Return a gradient that runs a function of tensors in the graph that autodiff grows.

    What the function raises as OpTypeError is a CompileError with the line of the node.
    """

    def pull(b: GraphBuilder, node: Node, grads: Maybe) -> Maybe:
        trace = GradientTrace(b)

        def tensors(values: tuple[ValueId, ...]) -> Tensors:
            return tuple([Tensor(trace, value) for value in values])

        flowing = tuple([None if value is None else Tensor(trace, value) for value in grads])
        try:
            with recording(trace):
                results = rule(node.attrs, tensors(node.inputs), tensors(node.outputs), flowing)
        except OpTypeError as error:
            text = f"{node.source}: the gradient of {node.op} {error}"
            raise CompileError(text) from error.__cause__
        return tuple([None if grad is None else grad._value_in(trace) for grad in results])

    return pull


def register_gradient(op: Op, rule: Rule) -> None:
    """Let a function of tensors be the gradient of an op."""
    gradient.register(op, rule_over_tensors(rule))
