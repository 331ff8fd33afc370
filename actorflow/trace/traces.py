"""The graphs of one job on one model: traced once, and again when what a trace reads has changed.

The identity of a graph is what its trace may read, as it was after the trace: what a trace fills in
itself, such as a cache, does not count as changed. Before a `fit`, `stream` or `compile` all of it
is read again; before a `step` the guard of the newest trace is asked first, and only where it does
not hold is all read. A graph whose identity cannot be complete is traced again whenever all is
read, and says so once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from actorflow.logs import logger
from actorflow.nn.module import Module
from actorflow.trace.called import Called, calls_watched, not_read
from actorflow.trace.guard import Guard
from actorflow.trace.reading import Reading
from actorflow.trace.signature import Identity, ModelSignature, difference
from actorflow.trace.tracer import find_source, source_of
from actorflow.trace.walk import read_job
from compiler.errors import CompileError
from compiler.gc_pause import collector_paused
from compiler.graph import Graph
from compiler.graph_hash import hash_graph
from compiler.types import TensorType

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
