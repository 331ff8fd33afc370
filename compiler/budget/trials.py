"""What the searches for a byte budget try their choices with: rewrite, lower, look at the bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from compiler.budget.choice import BudgetChoice
from compiler.graph import Graph
from compiler.lowering.step_program import make_program
from compiler.options import CompileOptions
from compiler.placement import SHARED
from compiler.plan import Plan
from compiler.target import Hardware

_KEPT = 4
"""Graphs and plans at hand: the last few, for a plan of 100,000 launches is hundreds of MB."""


class Trials:
    """An ordered graph with what becomes of it for every choice; none is measured twice.

    `rewrite` runs the budget passes for a choice. `lower` returns the plan of a graph that went
    through all passes.
    """

    def __init__(
        self,
        graph: Graph,
        hardware: Hardware,
        options: CompileOptions,
        rewrite: Callable[[BudgetChoice], Graph],
        lower: Callable[[Graph], Plan],
    ) -> None:
        self.graph = graph
        self.hardware = hardware
        self.options = options
        rewritten = lru_cache(_KEPT)(rewrite)
        self.plan = lru_cache(_KEPT)(lambda choice: lower(rewritten(choice)))
        """Return the plan of a choice."""
        self.arena_bytes = lru_cache(None)(lambda choice: _fullest_bytes(self.plan(choice)))
        """Return the bytes on the device that holds the most; other memories have no budget."""
        self.step_ns = lru_cache(None)(
            lambda choice: (
                make_program(rewritten(choice), hardware, options.num_streams, 0).makespan_ns
            )
        )
        """Return the estimated time of a step, copies included."""


def fullest(plan: Plan) -> int:
    """Return the number of the arena, of those that devices compute in, that is the largest."""
    own = [i for i, arena in enumerate(plan.arenas) if arena.place == arena.device.place]
    return max(own, key=lambda i: (plan.arenas[i].size_bytes, -i))


def fullest_arenas(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of that arena, and of what ranks share where that is the host's."""
    number = fullest(plan)
    device = plan.arenas[number].device
    rows = enumerate(plan.arenas)
    return (number, *[i for i, a in rows if a.place == SHARED and a.device == device])


def _fullest_bytes(plan: Plan) -> int:
    return sum([plan.arenas[number].size_bytes for number in fullest_arenas(plan)])
