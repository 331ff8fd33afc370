"""The graphs of one job on one model: traced once, and again when what a trace reads has changed.

The identity of a graph is what its trace may read, as it was after the trace: what a trace fills in
itself, such as a cache, does not count as changed. Before a `fit`, `stream` or `compile` all of it
is read again; before a `step` the guard of the newest trace is asked first, and only where it does
not hold is all read. A graph whose identity cannot be complete is traced again whenever all is
read, and says so once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np

from actorflow.environment.settings import collector_paused, logger
from actorflow.nn.module import Module
from actorflow.nn.parameter import Stored
from actorflow.tensor.initial_values import whole_type
from actorflow.tensor.tracer import (
    find_source,
    is_ours,
    is_users,
    is_users_module,
    parts_of,
    source_of,
)
from actorflow.trace.dependency_scan import read_job
from actorflow.trace.guard import Guard, Reading
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan
from compiler.contract.types import TensorType
from compiler.graph.graph import Graph
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.sources import OF_MODEL

# A walk finds a function by the names in the code. One that is fetched by a text, `globals()[name]`
# or `getattr(module, name)`, or that comes out of an object which is not looked into, is found by
# watching the trace itself.

Called = dict[int, tuple[CodeType, str, str]]
"""Of the functions that were called: code, module, and the file of who called first; by `id` of the
code, which is kept. (To hash a code object takes longer than the call.)"""

_NOT_OF_THE_TRACE = frozenset(("<module>", "__del__", "__repr__", "__str__"))
"""Code that runs for other reasons: an import, an object that goes, a text for people."""


@contextmanager
def calls_watched() -> Iterator[Called | None]:
    """Yield what gets all functions that this thread calls.

    None under a debugger or a measure of coverage: only one at a time can watch.
    """
    called: Called = {}
    if sys.gettrace() is not None:
        yield None
        return

    def note(frame: FrameType, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if id(code) not in called and caller is not None:
            module = str(frame.f_globals.get("__name__"))
            called[id(code)] = (code, module, caller.f_code.co_filename)

    sys.settrace(note)
    try:
        yield called
    finally:
        if sys.gettrace() is note:  # and no debugger that a breakpoint has started
            sys.settrace(None)


def not_read(called: Called, read: list[CodeType]) -> list[str]:
    """Return the functions of the user that were called and not read, each with its line.

    What we call ourselves is read, or belongs to an op and not to the job.
    """
    known = {part for code in read for part in parts_of(code)}
    missed = [
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        for code, module, caller in called.values()
        if is_users(code.co_filename) and is_users_module(module) and not is_ours(caller)
        if code not in known and code.co_name not in _NOT_OF_THE_TRACE
    ]
    return sorted(missed)


# The identity decides the graph: whatever a trace read, with parameters by their path, type and
# sharing. So a second model of the same class has an equal graph, and the plan of the first. An
# open plan moreover belongs to certain parameter objects; another object in the place of one
# changes no graph, but the plan must be opened with its values. A signature keeps the objects, so
# that none is mistaken for a later one with its `id`.

Identity = tuple[tuple[str, str], ...]
"""Rows (what, value) of what decided a graph."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ModelSignature:
    """What an open plan was made for; `stamp` is of the reading that found it.

    The hash of the graph counts beside the identity, which is not complete for every job.
    """

    identity: Identity
    graph_hash: str
    parameters: Mapping[str, Stored]
    stamp: object

    def has_graph_of(self, other: ModelSignature) -> bool:
        """Whether both are of one graph, as far as can be told."""
        return (self.identity, self.graph_hash) == (other.identity, other.graph_hash)

    def has_parameters_of(self, other: ModelSignature) -> bool:
        """Whether both have the same parameter objects under the same paths."""
        mine, its = self.parameters, other.parameters
        return list(mine) == list(its) and all([its[n] is p for n, p in mine.items()])

    def moves(self, now: ModelSignature) -> str:
        """Return in words which parameters are others now; a line for the log."""
        before = {id(p): name for name, p in self.parameters.items()}
        others = [n for n, p in now.parameters.items() if before.get(id(p)) != n]
        moved = [n for n in others if id(now.parameters[n]) in before]
        fresh = [repr(n) for n in others if n not in moved]
        words = [f"{n!r} is what was {before[id(now.parameters[n])]!r}" for n in moved]
        if fresh:
            words.append(f"{', '.join(fresh)} now another object, whose optimizer state is fresh")
        return "; ".join(words)


def difference(before: Identity, now: Identity) -> str:
    """Return in words what changed first."""
    old, new = dict(before), dict(now)
    for key, value in new.items():
        if key not in old:
            return f"{key} ({value}) is new"
        if old[key] != value:
            return f"{key} changed from {old[key]} to {value}"
    return f"{next((k for k in old if k not in new), 'the order of the parts')} is gone"


def carried_over(
    plan: Plan, left: Mapping[str, Array], before: ModelSignature, now: ModelSignature
) -> dict[str, Array]:
    """Return what the state of a closed plan gives the plan that follows it, by name.

    State of the optimizer goes with its parameter, also under another path; a parameter that was
    not there before begins with fresh state.
    """
    were = {id(p): name for name, p in before.parameters.items()}
    carried = {}
    for variable in plan.state:
        name = variable.name
        path = name if variable.role in OF_MODEL else name.partition("/")[2]
        if path in now.parameters:
            old = were.get(id(now.parameters[path]))
            if old is None:
                continue
            name = name.removesuffix(path) + old
        array = left.get(name)
        if array is not None and array.shape == whole_type(plan, variable).shape:
            carried[variable.name] = array
    return carried


Spec = Mapping[str, TensorType]

_OFTEN = 3
"""Traces in a row that gave the graph there was, until a line says what causes them."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph, and what its trace read.

    `guard` tells whether that still holds; it is another object after each reading. `unsure` says
    what decides the graph and cannot be compared; it is empty for most.
    """

    graph: Graph
    digest: str
    identity: Identity
    spec: Spec
    guard: Guard
    unsure: str

    def signature(self, model: Module) -> ModelSignature:
        """Return what a plan of this graph, open on this model, was made for."""
        parameters = dict(model.named_stored())
        return ModelSignature(self.identity, self.digest, parameters, self.guard.stamp)


class Traces:
    """The graphs of a job on a model, the newest last.

    Args:
        job: name of the job.
        function: the user's.
        optimizer: of the job, or None.
        trace: makes the graph.
        most: graphs that there may be, before shapes or settings change too often.
    """

    def __init__(
        self,
        job: str,
        function: object,
        optimizer: object,
        trace: Callable[[Module, Spec], Graph],
        most: int,
    ) -> None:
        self._job = job
        self._function = function
        self._optimizer = optimizer
        self._trace = trace
        self._most = most
        self._traced: list[Traced] = []
        self._called: frozenset[CodeType] | None = None
        self._told: set[str] = set()
        self._num_quiet = 0

    def newest(self, spec: Spec) -> Traced | None:
        """Return the newest trace if it is of these types and holds; in microseconds."""
        last = self._traced[-1] if self._traced else None
        return last if last is not None and last.spec == spec and last.guard.holds() else None

    def current(self, model: Module, spec: Spec) -> Traced:
        """Return the trace of the model as it is now; a changed graph says why in one line.

        Raises CompileError from the trace, or where there are too many graphs.
        """
        reading = self._read(model, spec)
        identity = tuple(reading.rows)
        known = next((t for t in self._traced if t.identity == identity), None)
        if known is None or known.unsure:
            return self._trace_again(model, spec, reading, known)
        self._num_quiet = 0
        kept = Traced(known.graph, known.digest, known.identity, spec, reading.guard.close(), "")
        return self._keep(kept, known)

    def _read(self, model: Module, spec: Spec) -> Reading:
        return read_job(self._function, self._optimizer, model, spec, self._called)

    def _watch(self, model: Module, spec: Spec) -> tuple[Graph, Called]:
        """Return the graph of a new trace, and the functions that it has called."""
        # A generator that the collector finds is run to be closed, and would count as called.
        with collector_paused(), calls_watched() as called:
            graph = self._trace(model, spec)
        return graph, called or {}

    def _trace_again(
        self, model: Module, spec: Spec, before: Reading, known: Traced | None
    ) -> Traced:
        states = _states(before)
        graph, called = self._watch(model, spec)
        digest = hash_graph(graph)
        drawn = [what for what, state in _states(before).items() if state != states[what]]
        after = self._read(model, spec)
        unsure = [f"draws random numbers from {what}" for what in drawn]
        if after.rows != before.rows and not drawn:
            # A cache that the trace filled is no matter, a count that decides the graph is one.
            again, later = self._watch(model, spec)
            called |= later
            if hash_graph(again) != digest:
                changed = difference(tuple(before.rows), tuple(after.rows))
                unsure.append(f"changes what it reads while it is traced ({changed})")
        codes = {code for code, _, _ in called.values()}
        self._called = frozenset(codes | (self._called or codes)) if codes else None
        after = self._read(model, spec)
        unsure += [f"reads {what}, which cannot be compared" for what in after.opaque]
        missed = not_read(called, [*before.codes, *after.codes])
        unsure += [f"calls {name}, which no name in the code leads to" for name in missed]
        guard = after.guard.close()
        made = Traced(graph, digest, tuple(after.rows), spec, guard, ", and ".join(unsure))
        self._say_unsure(made.unsure)
        same = next((t for t in self._traced if t.digest == digest), None)
        if same is not None:
            self._say_quiet(tuple(before.rows), same)
            return self._keep(made, same)
        self._say_changed(tuple(before.rows), known)
        return self._keep(made, known)

    def _keep(self, made: Traced, instead_of: Traced | None) -> Traced:
        self._traced = [t for t in self._traced if t is not instead_of] + [made]
        return made

    def _say_unsure(self, unsure: str) -> None:
        if unsure and unsure not in self._told:
            self._told.add(unsure)
            logger.warning(
                "%s: job %r %s: its graph stays as it was traced until something else changes, or"
                " a fit or compile traces it again; pass such things in the batch, or keep numbers"
                " and arrays instead",
                source_of(self._function),
                self._job,
                unsure,
            )

    def _say_quiet(self, now: Identity, same: Traced) -> None:
        if now == same.identity:
            return
        reason = difference(same.identity, now)
        logger.info("job %r traced again because %s: the graph is the same", self._job, reason)
        self._num_quiet += 1
        if self._num_quiet == _OFTEN:
            logger.warning(
                "job %r is traced again and again because %s, and its graph stays the same; keep"
                " what changes outside of what the job reads, or its steps are slow",
                self._job,
                reason,
            )

    def _say_changed(self, now: Identity, known: Traced | None) -> None:
        self._num_quiet = 0
        if not self._traced:
            return
        reason = f"it {known.unsure}" if known else difference(self._traced[-1].identity, now)
        if known is None and len(self._traced) >= self._most:
            raise CompileError(
                f"{find_source()}: job {self._job!r} has met {len(self._traced)} input signatures,"
                f" as many as max_plans={self._most} allows, and now {reason}. Pad batches to few"
                " shapes, pass in the batch what changes, or raise max_plans"
            )
        logger.warning("job %r recompiled because %s", self._job, reason)


def _states(reading: Reading) -> dict[str, object]:
    """Return the states of the random generators that a trace may draw from."""
    states: dict[str, object] = {
        "numpy's global generator": _plain(np.random.get_state(legacy=False)),
        "Python's global generator": random.getstate(),
    }
    for what, generator in reading.generators:
        if isinstance(generator, random.Random):
            states[what] = generator.getstate()
        elif isinstance(generator, np.random.RandomState):
            states[what] = _plain(generator.get_state(legacy=False))
        else:
            bits = getattr(generator, "bit_generator", generator)
            states[what] = _plain(bits.state)
    return states


def _plain(state: Any) -> object:
    """Return a state with its arrays as bytes, which can be compared."""
    if isinstance(state, Mapping):
        return {key: _plain(item) for key, item in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
