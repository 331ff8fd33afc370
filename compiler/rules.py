"""Columns whose facts rewrite graphs: gradients and local simplifications."""

from __future__ import annotations

from typing import Protocol

from compiler.graph import GraphBuilder, Node
from compiler.registry import OpAttr
from compiler.types import ValueId


class Gradient(Protocol):
    """Emit the gradient of `node` into `b`.

    `grads` holds one value per output of the node, None where nothing flows back; the result holds
    one value per input of the node, None where nothing flows. Each gradient has the type of its
    input.
    """

    def __call__(
        self, b: GraphBuilder, node: Node, grads: tuple[ValueId | None, ...]
    ) -> tuple[ValueId | None, ...]:
        """Return one gradient, or None, per input of `node`."""
        ...


class Simplify(Protocol):
    """Rewrite `node` while it is copied into `b`: return replacements of its outputs, or None."""

    def __call__(
        self, b: GraphBuilder, node: Node, inputs: tuple[ValueId, ...]
    ) -> tuple[ValueId, ...] | None:
        """Return one value of `b` per output, or None to keep `node`; `inputs` are in `b`."""
        ...


gradient = OpAttr[Gradient]("gradient", "the op's vector-Jacobian product; read by autodiff")
simplify = OpAttr[Simplify]("simplify", "local algebraic rewrite; read by the simplify pass")
