"""How most cells of ops with one output are written."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.signature import Array, Types
from compiler.registry import Cost, Op, cost, reference
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


def array_of(*ops: Op) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Return a decorator that registers the array of (attrs, *arrays) as reference of ops."""

    def decorate(function: Callable[..., Array]) -> Callable[..., Array]:
        def run(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
            return (np.asarray(function(attrs, *inputs)),)

        for op in ops:
            reference.register(op, run, function.__code__.co_filename)
        return function

    return decorate


def streams(*ops: Op, flops: float = 0.0) -> None:
    """Let ops cost `flops` per element of the first input, and move all operands once."""

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        moved = sum([t.size_bytes for t in (*inputs, *outputs)])
        return Cost(flops * inputs[0].num_elements, float(moved))

    for op in ops:
        cost.register(op, work, sys._getframe(1).f_code.co_filename)
