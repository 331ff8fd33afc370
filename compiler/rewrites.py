"""What a rewrite says of itself, whether an order of them does justice to all, and how they run.

A fact is a sentence about a graph ("gradients", "rates"). Each is provided by one rewrite; who
needs it stands after that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from compiler.budget.choice import BudgetChoice
from compiler.errors import InternalError
from compiler.graph import Graph
from compiler.options import CompileOptions
from compiler.passes.check import check
from compiler.target import Hardware

Watch = Callable[[str, Graph], None]
"""Called with the name of each pass and the graph it returned."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite: its name, what must have happened before, what holds afterwards, and when.

    `needs` and `provides` are facts. A need is a fact that some pass provides: what is needed of a
    pass that the options leave out is waived, for whoever needs it does as well without.
    """

    name: str
    run: Callable[[Graph], Graph]
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    is_wanted: Callable[[CompileOptions], bool] = lambda options: True

    def apply(self, graph: Graph, hardware: Hardware, options: CompileOptions) -> Graph:
        """Return the rewritten graph, the same one for all hardware."""
        return self.run(graph)


@dataclass(frozen=True, slots=True)
class DevicePass:
    """A rewrite that depends on what devices the job has."""

    name: str
    run: Callable[[Graph, Hardware], Graph]
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    is_wanted: Callable[[CompileOptions], bool] = lambda options: True

    def apply(self, graph: Graph, hardware: Hardware, options: CompileOptions) -> Graph:
        """Return the graph, rewritten for this hardware."""
        return self.run(graph, hardware)


@dataclass(frozen=True, slots=True)
class JobPass:
    """A rewrite that depends on what the whole job is compiled for."""

    name: str
    run: Callable[[Graph, Hardware, CompileOptions], Graph]
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    is_wanted: Callable[[CompileOptions], bool] = lambda options: True

    def apply(self, graph: Graph, hardware: Hardware, options: CompileOptions) -> Graph:
        """Return the graph, rewritten for this job."""
        return self.run(graph, hardware, options)


@dataclass(frozen=True, slots=True)
class BudgetPass:
    """A rewrite of the ordered graph that does what a search for a budget has chosen.

    It runs once for every choice that is tried, and returns the graph itself where the choice has
    nothing for it.
    """

    name: str
    run: Callable[[Graph, BudgetChoice, Hardware], Graph]
    needs: tuple[str, ...]
    provides: tuple[str, ...]

    def is_wanted(self, options: CompileOptions) -> bool:
        """Whether anything may be asked of it."""
        return options.asks_for_less


AnyPass = Pass | DevicePass | JobPass | BudgetPass

Rewrite = TypeVar("Rewrite", Pass, AnyPass)


def check_order(
    passes: Sequence[Rewrite], options: CompileOptions, wanted: Sequence[str]
) -> tuple[Rewrite, ...]:
    """Return the passes that the options want, in order; a few microseconds.

    Raises InternalError, naming pass and fact, where one needs what none before it provides, where
    two provide the same, and where a fact that is `wanted` in the end is provided by none.
    """
    provided: dict[str, str] = {}
    waived = {f for step in passes if not step.is_wanted(options) for f in step.provides}
    chosen = tuple([step for step in passes if step.is_wanted(options)])
    for step in chosen:
        for fact in step.needs:
            if fact not in provided and fact not in waived:
                later = [other.name for other in chosen if fact in other.provides]
                where = f"{later[0]!r} provides it later" if later else "no pass provides it"
                raise InternalError(f"pass {step.name!r} needs {fact!r}, and {where}")
        for fact in step.provides:
            if fact in provided:
                raise InternalError(
                    f"pass {step.name!r} provides {fact!r}, as {provided[fact]!r} does"
                )
            provided[fact] = step.name
    for fact in wanted:
        if fact not in provided and fact not in waived:
            raise InternalError(f"lowering needs {fact!r}, and no pass provides it")
    return chosen


def rewritten(
    graph: Graph,
    steps: Sequence[AnyPass],
    hardware: Hardware,
    options: CompileOptions,
    watch: Watch | None,
    prefix: str = "",
) -> Graph:
    """Run passes over a graph, but for those that a budget asks for."""
    for step in steps:
        if isinstance(step, BudgetPass):
            continue
        graph = step.apply(graph, hardware, options)
        look(graph, step.name, options, watch, prefix)
    return graph


def look(
    graph: Graph, name: str, options: CompileOptions, watch: Watch | None, prefix: str = ""
) -> None:
    """Have a graph verified where that is asked for, and seen, after the pass of a name."""
    if options.verify:
        check(graph, name)
    if watch is not None:
        watch(prefix + name, graph)
