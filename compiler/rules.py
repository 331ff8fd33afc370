"""Columns whose facts rewrite graphs: gradients and local simplifications."""

from __future__ import annotations

from collections.abc import Callable

from compiler.graph import GraphBuilder, Node
from compiler.registry import OpAttr
from compiler.types import ValueId

Maybe = tuple[ValueId | None, ...]

Gradient = Callable[[GraphBuilder, Node, Maybe], Maybe]
"""Emits the gradient of a node.

Takes one value per output of the node, None where nothing flows back; returns one per input, of the
input's type, or None.
"""

Simplify = Callable[[GraphBuilder, Node, tuple[ValueId, ...]], tuple[ValueId, ...] | None]
"""Rewrites a node, whose inputs here are in the builder, while it is copied.

Returns one value per output, or None to keep the node.
"""

gradient = OpAttr[Gradient]("gradient", "the op's vector-Jacobian product; read by autodiff")
simplify = OpAttr[Simplify]("simplify", "local algebraic rewrite; read by the simplify pass")
