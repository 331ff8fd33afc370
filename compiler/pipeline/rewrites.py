"""Rewrites: what one says of itself, whether an order does justice to all, how they run.

A fact is a sentence about a graph ("gradients", "rates"). Each is provided by one rewrite; a
rewrite that needs it stands after that one. A script or an installed package adds rewrites.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.contract.errors import ActorflowError, CompileError, InternalError
from compiler.graph.graph import Graph, Node
from compiler.graph.registry import infer_type
from compiler.graph.target import NO_CHOICE, BudgetChoice, CompileOptions, Hardware
from compiler.pipeline.printer import node_line

# The graph verifier: inputs are produced before they are read, types are as inferred. It runs after
# every pass in tests and under ACTORFLOW_VERIFY=1.

_NODES_AROUND = 7
"""How many nodes before and after a broken one an error shows."""


def check(graph: Graph, after: str) -> Graph:
    """Return `graph` unchanged. Raises InternalError naming the node and the pass it came from.

    The error shows the nodes around it.
    """
    is_known = [False] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        problem = _problem(graph, node, is_known)
        if problem:
            where = f"after {after}: {node.op} at {node.source}"
            raise InternalError(f"{where} {problem}\n{_listing(graph, index)}\n")
        for value in node.outputs:
            is_known[value] = True
    for value in graph.roots():
        if not is_known[value]:
            raise InternalError(f"after {after}: root value {value} has no producer")
    return graph


def _problem(graph: Graph, node: Node, is_known: Sequence[bool]) -> str:
    """Return what is wrong with a node, "" if nothing; `is_known`: values that have a producer."""
    for value in node.inputs:
        if not 0 <= value < len(is_known) or not is_known[value]:
            return f"reads value {value} before it is produced"
    for value in node.after:
        if not 0 <= value < len(is_known) or not is_known[value]:
            return f"waits for value {value}, which comes later"
    inferred = infer_type.get(node.op)(tuple([graph.types[v] for v in node.inputs]), node.attrs)
    if inferred != tuple([graph.types[v] for v in node.outputs]):
        return "has output types other than inference gives"
    repeated = [value for value in node.outputs if is_known[value]]
    return f"produces value {repeated[0]}, which has a producer already" if repeated else ""


def _listing(graph: Graph, index: int) -> str:
    """Return the nodes around one, a line each, and a mark at that one."""
    first, last = max(0, index - _NODES_AROUND), index + _NODES_AROUND + 1
    rows = enumerate(graph.nodes[first:last], first)
    return "\n".join([f"{'>' if at == index else ' '} {node_line(graph, n)}" for at, n in rows])


Watch = Callable[[str, Graph], None]
"""Called with the name of each pass and the graph it returned."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may read besides the graph.

    `choice` is what the search for a budget tries. `step` is the graph of the step, as far as it
    has come, for the graph that evaluates between steps; None for any other.
    """

    hardware: Hardware
    options: CompileOptions
    choice: BudgetChoice = NO_CHOICE
    step: Graph | None = None


PassFunction = Callable[[Graph, PassContext], Graph]


def of_graph(rewrite: Callable[[Graph], Graph]) -> PassFunction:
    """Return the function of a pass that reads the graph alone."""
    return lambda graph, context: rewrite(graph)


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite: its name, what must have happened before, what holds afterwards, and when.

    `needs` and `provides` are facts. A need is a fact that some pass provides: what is needed of a
    pass that the options leave out is waived, for whoever needs it does as well without. A pass
    `per_choice` runs once for every choice that a search for a budget tries; such passes come last.
    """

    name: str
    run: PassFunction
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    is_wanted: Callable[[CompileOptions], bool] = lambda options: True
    per_choice: bool = False


def check_order(
    passes: Sequence[Pass], options: CompileOptions, wanted: Sequence[str]
) -> tuple[Pass, ...]:
    """Return the passes that the options want, in order; a few microseconds.

    Raises InternalError, naming pass and fact, where one needs what none before it provides, where
    two provide the same, and where a fact that is `wanted` in the end is provided by none.
    """
    provided: dict[str, str] = {}
    waived = {f for step in passes if not step.is_wanted(options) for f in step.provides}
    steps = tuple([step for step in passes if step.is_wanted(options)])
    for step in steps:
        for fact in step.needs:
            if fact not in provided and fact not in waived:
                later = [other.name for other in steps if fact in other.provides]
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
    return steps


def run_passes(
    graph: Graph,
    steps: Sequence[Pass],
    context: PassContext,
    watch: Watch | None,
    prefix: str = "",
) -> Graph:
    """Run passes over a graph."""
    for step in steps:
        graph = step.run(graph, context)
        verify_and_dump(graph, step.name, context.options, watch, prefix)
    return graph


def verify_and_dump(
    graph: Graph, name: str, options: CompileOptions, watch: Watch | None, prefix: str = ""
) -> None:
    """Have a graph verified where that is asked for, and seen, after the pass of a name."""
    if options.verify:
        check(graph, name)
    if watch is not None:
        watch(prefix + name, graph)


# Passes from elsewhere: a script or an installed package adds one, and edits nothing of ours.
#
#     register("drop_abs", rewrite, needs=("minimal",), before="order")
#
# The place of an added pass follows from the facts that it needs and provides, as for our own, and
# from the names of passes that it wants to be before or after. It is as early as all of that
# allows, so that one which asks for nothing sees the graph as it was traced. What it returns is
# checked each time, and every plan says which passes from elsewhere made it.


@dataclass(frozen=True, slots=True)
class PluginPass:
    """A pass from elsewhere, and the passes that it stands before and after ("": no matter).

    `files` are the one that registered it, and the one that holds its function; a prompt has a name
    in angle brackets instead.
    """

    name: str
    rewrite: Callable[[Graph], Graph]
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    before: str
    after: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"pass {self.name!r} ({self.files[0]})"


_added: list[PluginPass] = []

_times: dict[str, int] = {}
"""How often each name was registered in this process: the next pass of a name is another one."""


def register(
    name: str,
    rewrite: Callable[[Graph], Graph],
    *,
    needs: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    before: str = "",
    after: str = "",
    where: str | None = None,
) -> None:
    """Add a pass, for all compilations that follow.

    It runs inside of a compilation, so it must not compile. `where` is the file that knows it, by
    default the caller's; a file that is run again, or a cell of a notebook, replaces its own.
    Raises ValueError, naming the file, where another one has a pass of that name.
    """
    _times[name] = _times.get(name, 0) + 1
    code = getattr(rewrite, "__code__", None)
    held_by = getattr(code, "co_filename", None) or f"<{type(rewrite).__module__}>"
    where = where or sys._getframe(1).f_code.co_filename
    files = tuple(dict.fromkeys((where, held_by)))
    added = PluginPass(name, rewrite, needs, provides, before, after, files)
    for index, other in enumerate(_added):
        modules = {getattr(run, "__module__", "") for run in (rewrite, other.rewrite)}
        is_same = other.files == added.files or modules == {"__main__"}
        if other.name == name and not is_same:
            raise ValueError(f"{other} exists already; give that of {where} another name")
        if other.name == name:
            _added[index] = added
            return
    _added.append(added)


def unregister(name: str) -> None:
    """Take back a pass. Raises LookupError when there is none of that name."""
    for index, added in enumerate(_added):
        if added.name == name:
            del _added[index]
            return
    raise LookupError(f"no pass called {name!r} was registered")


def registered() -> tuple[PluginPass, ...]:
    """Return the passes from elsewhere, the first registered first."""
    return tuple(_added)


def registered_files() -> tuple[str, ...]:
    """Return the files that decide what passes from elsewhere do, sorted; `<...>` has no file."""
    return tuple(sorted({file for added in _added for file in added.files}))


def identity() -> str:
    """Return what a plan depends on besides those files: names, places, needs and facts."""
    rows = [(a.name, _times[a.name], a.before, a.after, a.needs, a.provides) for a in _added]
    return repr(rows) if rows else ""


def with_added(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Return the passes with those from elsewhere among them.

    Raises CompileError, naming pass and file, where one cannot stand anywhere.
    """
    if not _added:
        return passes
    waiting, placed = list(_added), list(passes)
    while waiting:
        names = {step.name for step in placed}
        facts = {fact for step in placed for fact in step.provides}
        ready = [added for added in waiting if _is_ready(added, names, facts)]
        if not ready:
            raise CompileError(_missing(waiting[0], placed))
        added = ready[0]
        step = Pass(added.name, _Checked(added), added.needs, added.provides)
        placed.insert(_place(added, placed), step)
        waiting.remove(added)
    return tuple(placed)


def _is_ready(added: PluginPass, names: set[str], facts: set[str]) -> bool:
    """Whether all that a pass refers to has its place already: another added one may not yet."""
    return {n for n in (added.before, added.after) if n} <= names and {*added.needs} <= facts


def _missing(added: PluginPass, placed: Sequence[Pass]) -> str:
    names = [step.name for step in placed]
    for name in (added.before, added.after):
        if name and name not in names:
            side = "before" if name == added.before else "after"
            return f"{added} must run {side} {name!r}, which is no pass; the passes are {names}"
    facts = [fact for step in placed for fact in step.provides]
    fact = next(fact for fact in added.needs if fact not in facts)
    return f"{added} needs {fact!r}, and no pass provides it; provided are {facts}"


def _place(added: PluginPass, placed: list[Pass]) -> int:
    """Return the index at which a pass is inserted."""
    first, last, why = 0, len(placed), "at the end"
    for index, other in enumerate(placed):
        twice = [fact for fact in added.provides if fact in other.provides]
        if twice:
            raise CompileError(f"{added} provides {twice[0]!r}, as {other.name!r} does")
        if other.name == added.after or {*added.needs} & {*other.provides}:
            first, why = index + 1, f"after {other.name!r}"
        # What a budget asks for is done last, for the choice names launches of the ordered graph.
        is_limit = other.name == added.before or {*added.provides} & {*other.needs}
        if last == len(placed) and (is_limit or other.per_choice):
            last = index
    if first > last:
        raise CompileError(
            f"{added} has no valid position: it must run {why}, and before {placed[last].name!r},"
            " which comes earlier"
        )
    return last if added.before else first


class _Checked:
    """A pass from elsewhere, of which a graph is expected and nothing trusted."""

    def __init__(self, added: PluginPass) -> None:
        self._added = added

    def __call__(self, graph: Graph, context: PassContext) -> Graph:
        """Return what the pass returns. Raises CompileError where that is no graph."""
        try:
            result = self._added.rewrite(graph)
        except ActorflowError:
            raise
        except Exception as error:
            raise CompileError(f"{self._added} failed: {type(error).__name__}: {error}") from error
        if not isinstance(result, Graph):
            raise CompileError(f"{self._added} returned {result!r:.60}, expected a graph")
        try:
            check(result, self._added.name)
        except InternalError as error:
            reason = error.reason.rstrip()
            raise CompileError(f"{self._added} returned a broken graph: {reason}") from None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CompileError(f"{self._added} returned a broken graph: {reason}") from error
        if _outputs(result) != _outputs(graph):
            raise CompileError(
                f"{self._added} changed the outputs: {_outputs(graph)} became {_outputs(result)}"
            )
        if _trains(result) != _trains(graph):
            raise CompileError(
                f"{self._added} changed what is trained: {_trains(graph)} became {_trains(result)}"
            )
        return result


def _trains(graph: Graph) -> str:
    batches = 1 if graph.accumulation is None else graph.accumulation.every
    return f"{len(graph.objectives())} objectives, {len(graph.updates)} updates, {batches} batches"


def _outputs(graph: Graph) -> list[str]:
    return [f"{output.name} {graph.types[output.value]}" for output in graph.outputs]
