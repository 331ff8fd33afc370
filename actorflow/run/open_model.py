"""A model that is given to a job: for the time of a run, or open for single steps.

There may be several open plans on one model: a training job that is stepped, a job that predicts.
The rule: the newest values of a parameter are its own, or leased to the training plan that stepped
last (`actorflow.nn.lease`). Whoever steps takes over what others changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actorflow.callbacks.protocol import Metrics
from actorflow.compile.compiling import JobSpec
from actorflow.distributed.process_group import ProcessGroup
from actorflow.environment.settings import logger
from actorflow.nn.lease import (
    Claim,
    Lease,
    OpenLoop,
    ParameterStorage,
    are_leased,
    lease,
    leased,
    newest,
)
from actorflow.nn.module import Module
from actorflow.run.packed_values import PackedValues
from actorflow.run.runner import Runner
from actorflow.run.script_guard import guard_noted
from actorflow.tensor.probes import Predicates
from actorflow.tensor.tracer import find_source
from actorflow.trace.traces import ModelSignature
from actors.kernels.library import resident
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan

Array = np.ndarray[Any, Any]


@contextmanager
def runner_on(
    model: Module,
    plan: Plan,
    claim: Claim | None,
    seed: int,
    job_spec: JobSpec,
    group: ProcessGroup,
    loop: OpenLoop | None = None,
) -> Iterator[Runner]:
    """Give a runner with the model's values; with a claim it trains, and the model gets them back.

    The model is leased as long as the call, or as the loop over a `stream`. Raises CompileError
    where another run trains the model. Parameters that take the place of trained ones meanwhile
    have no part in the run; a line says so.
    """
    cells = model.cells()
    lent = nullcontext() if claim is None else leased(cells, claim, loop)
    with guard_noted(), lent as open_lease:
        try:
            values = newest(cells)
            runner = Runner(
                plan,
                values=values,
                seed=seed,
                settings=job_spec.settings,
                lease=open_lease,
                group=group,
                predicates=job_spec.predicates,
            )
            runner.borrows = claim is None and not are_leased(cells)
            runner.job_options = job_spec.job
            yield runner
        finally:
            if claim is not None:
                _say_replaced(model, cells, claim)


def _say_replaced(model: Module, trained: Mapping[str, ParameterStorage], claim: Claim) -> None:
    try:
        now = model.cells()
    except CompileError:  # whoever uses the model next gets it
        return
    gone = [path for path, cell in trained.items() if now.get(path) is not cell]
    if gone:
        logger.warning(
            "%s: parameter %s was replaced or removed during %s, which continued with the old"
            " array: the old array has the trained values. Change a model between runs, or train"
            " it with step",
            claim.source,
            ", ".join(map(repr, gone)),
            claim.what,
        )


@dataclass(slots=True)
class _KnownPlan:
    """A plan of a model, and what it was made for."""

    plan: Plan
    predicates: Predicates
    signature: ModelSignature


class OpenModel:
    """One runner that is stepped on one model; when it is dropped, its runner's plans end.

    It holds the cells of the parameters, never the model, so what a model has of it goes with the
    model. The job has threads take turns.

    Args:
        model: its parameters are kept in step with the runner.
        runner: not stepped before, with the model's values.
        signature: of the runner's plan, to be compared by the job.
        claim: on what steps change; else None, and what is in the runner never comes back.
    """

    def __init__(
        self, model: Module, runner: Runner, signature: ModelSignature, claim: Claim | None
    ) -> None:
        self.runner = runner
        # The plans that it steps in turn, the newest first.
        self._known = [_KnownPlan(runner.plan, runner.predicates, signature)]
        self._cells = model.cells()
        self._claim = claim
        trained = {} if claim is None else claim.part_of(self._cells)
        self._others = {name: cell for name, cell in self._cells.items() if name not in trained}
        self._lease: Lease | None = None
        # On what the runner's plan alone has: see `Runner.lend_packed`.
        self._packed: PackedValues | None = None
        # The arrays that the plan has, by identity: cells never change theirs in place.
        self._seen: dict[str, Array] = {}
        # Not with the model: a predictor may outlive it, and its thread be in a step.
        self._when_dropped = weakref.finalize(self, runner.drop)

    @property
    def signature(self) -> ModelSignature:
        """What the plan was made for that is stepped now."""
        return self._known[0].signature

    def select(self, stamp: object) -> bool:
        """Step the plan of a reading from now on; return whether there is one."""
        if self._known[0].signature.stamp is stamp:
            return True
        return self._turn_to([k for k in self._known if k.signature.stamp is stamp])

    def take_up(self, now: ModelSignature) -> bool:
        """Step the plan of a graph from now on; return whether there is one."""
        known = [k for k in self._known if k.signature.has_graph_of(now)]
        for one in known:
            one.signature = now
        return self._turn_to(known)

    def announce(self, batch: Mapping[str, Array]) -> None:
        """Tell other ranks for which batch another plan is opened, before the next step."""
        self.runner.announce(batch)

    def add(
        self, plan: Plan, predicates: Predicates, now: ModelSignature, claim: Claim | None
    ) -> bool:
        """Step another plan from now on beside the others; return whether that is possible."""
        names = [one and one.names for one in (claim, self._claim)]
        if names[0] != names[1] or not self.runner.can_share(plan):
            return False
        known = _KnownPlan(plan, predicates, now)
        # What a runner closes as too many is closed here, too: it would have to be loaded again.
        self._known = [known, *self._known][: self.runner.max_plans]
        return self._turn_to([known])

    def _turn_to(self, known: Sequence[_KnownPlan]) -> bool:
        for one in known[:1]:
            self._known = [one, *[k for k in self._known if k is not one]]
            self.runner.use(one.plan, one.predicates)
        return bool(known)

    def step(self, batches: Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step with the model's newest values and return its outputs.

        Raises CompileError where another run trains the model.
        """
        open_lease = None if self._claim is None else self._hold(self._claim)
        try:
            self._take_over(self._newer())
            outputs = self.runner.step(batches)
            if self._claim is None and self._packed is None:
                self._lend_packed()
            return outputs
        finally:
            if open_lease is not None:
                open_lease.end_step()

    def load(self) -> None:
        """Load the plan, which else the first step does; not one whose steps change the model."""
        if self._claim is None:
            self.runner.load()

    def _lend_packed(self) -> None:
        """Have the plan alone keep what it reads in a form of its own."""
        self._packed = self.runner.lend_packed(self._cells)
        if self._packed is not None and self._packed.lease is not None:
            handed = self._packed.lease.names
            self._seen = {n: a for n, a in self._seen.items() if n not in handed}
            resident.release_freed()

    def _newer(self) -> Mapping[str, ParameterStorage]:
        """Return the cells that others may have changed: not those whose values the plan has."""
        packed = self._packed
        if packed is None or packed.lease is None:
            return self._others
        open_lease = packed.lease
        if packed.pending:
            open_lease.give_back()
        if open_lease.left is None:
            return {n: cell for n, cell in self._others.items() if n not in open_lease.names}
        # They came home as the plan has them, but for what was written before that: nothing is
        # written to a lease that has ended.
        left, written = open_lease.left_by_name(), packed.pending
        self._seen |= {n: a for n, a in left.items() if n not in written}
        self._packed = None
        return self._others

    def close(self) -> dict[str, Array]:
        """End the plan; the model has the newest values. Return all variables as they were left."""
        self._when_dropped.detach()  # or it would keep this runner as long as this
        self.runner.close()
        return self.variables()

    def variables(self) -> dict[str, Array]:
        """Return the newest values of all variables, by name."""
        return self.runner.variables()

    def _hold(self, claim: Claim) -> Lease:
        """Return the lease, held for the time of a step."""
        open_lease = self._lease
        # False: somebody brought the values home since, and a new lease is taken.
        if open_lease is not None and open_lease.begin_step():
            return open_lease
        if open_lease is not None:
            self._seen |= open_lease.left_by_name()
        # The line of this step, for the error of whoever else wants to train.
        open_lease = lease(self._cells, replace(claim, source=find_source()), is_stepped=True)
        try:
            self._take_over(claim.part_of(self._cells))
            self.runner.hold(open_lease)
        except BaseException:
            open_lease.end(None)
            raise
        self._lease = open_lease
        return open_lease

    def _take_over(self, cells: Mapping[str, ParameterStorage]) -> None:
        """Write what others changed in some cells since into the plan's memory."""
        seen = self._seen
        # Without the lock, which guards cells that change together: here none has changed.
        for name, cell in cells.items():
            if cell.lease is not None or cell.array is not seen.get(name):
                break
        else:
            return
        arrays = newest(cells)
        changed = {n: a for n, a in arrays.items() if a is not self._seen.get(n)}
        if changed:
            self.runner.write(changed)
            self._seen |= arrays
