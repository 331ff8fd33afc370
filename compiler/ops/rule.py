"""How gradients of ops with one output are written."""

from __future__ import annotations

from collections.abc import Callable

from compiler.graph import GraphBuilder, Node
from compiler.registry import Op
from compiler.rules import gradient
from compiler.types import ValueId

Grads = tuple[ValueId | None, ...]
"""One gradient per input of a node; None where nothing flows."""

Values = tuple[ValueId, ...]
"""Inputs of a node, or replacements of its outputs."""

Rule = Callable[[GraphBuilder, Node, ValueId], Grads]


def gradient_of(*ops: Op) -> Callable[[Rule], Rule]:
    """Return a decorator that registers the gradient of ops with one output.

    The rule gets the gradient of that output, which is never None.
    """

    def decorate(rule: Rule) -> Rule:
        def pull(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
            (dy,) = grads
            return (None,) * len(node.inputs) if dy is None else rule(b, node, dy)

        for op in ops:
            gradient.register(op, pull, rule.__code__.co_filename)
        return rule

    return decorate
