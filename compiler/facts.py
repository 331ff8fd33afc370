"""Facts of a graph, each worked out once for a version of it.

A graph never changes, so what follows from it alone (who makes a value, who reads it, which values
share bytes, what runs once per step) is worked out when it is first asked for, and kept with it. A
pass that returns the graph it was given passes all of that on; one that returns another graph
starts afresh. A fact is a tuple or a frozen value: whoever asks next gets the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from compiler.graph import Graph

T = TypeVar("T")


def fact(compute: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Let a function of a graph alone be called once per version; a decorator.

    Two threads that ask at once both work it out, and keep one of two equal answers.
    """

    @functools.wraps(compute)
    def known(graph: Graph) -> T:
        facts = graph.facts
        if known not in facts:
            facts[known] = compute(graph)
        return cast("T", facts[known])

    return known
