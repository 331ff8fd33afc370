"""A model that is given to a job: for the time of a run, or open for single steps.

There may be several open plans on one model: a training job that is stepped, a job that predicts.
The rule: the newest values of a parameter are its own, or leased to the training plan that stepped
last (`actorflow.nn.lease`). Whoever steps takes over what others changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from actorflow.compile.compiling import JobSpec
from actorflow.distributed.process_group import ProcessGroup
from actorflow.environment.settings import logger
from actorflow.nn.lease import Claim, Lease, OpenLoop, ParameterStorage, lease, leased, newest
from actorflow.nn.module import Module
from actorflow.options.run_spec import Metrics
from actorflow.run.runner import Runner
from actorflow.run.script_guard import guard_noted
from actorflow.tensor.tracer import find_source
from actorflow.trace.traces import ModelSignature
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
            yield Runner(
                plan,
                values=values,
                seed=seed,
                settings=job_spec.settings,
                lease=open_lease,
                group=group,
                predicates=job_spec.predicates,
            )
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


class OpenModel:
    """One runner that is stepped on one model; a model that is dropped ends its runner's plan.

    It holds the cells of the parameters, never the model. The job has threads take turns.

    Args:
        model: its parameters are kept in step with the runner.
        runner: not stepped before, with the model's values.
        signature: of the plan, to be compared by the job.
        claim: on what steps change; else None, and what is in the runner never comes back.
    """

    def __init__(
        self, model: Module, runner: Runner, signature: ModelSignature, claim: Claim | None
    ) -> None:
        self.signature = signature
        self.runner = runner
        self._cells = model.cells()
        self._claim = claim
        trained = {} if claim is None else claim.part_of(self._cells)
        self._others = {name: cell for name, cell in self._cells.items() if name not in trained}
        self._lease: Lease | None = None
        # The arrays that the plan has, by identity: cells never change theirs in place.
        self._seen: dict[str, Array] = {}
        # A bound method of the runner, which must not lead to the model: it would never be dropped.
        self._when_dropped = weakref.finalize(model, runner.drop)

    def step(self, batches: Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step with the model's newest values and return its outputs.

        Raises CompileError where another run trains the model.
        """
        open_lease = None if self._claim is None else self._hold(self._claim)
        try:
            self._take_over(self._others)
            return self.runner.step(batches)
        finally:
            if open_lease is not None:
                open_lease.end_step()

    def close(self) -> dict[str, Array]:
        """End the plan; the model has the newest values. Return all variables as they were left."""
        self._when_dropped.detach()  # or it would keep this runner as long as the model
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
        arrays = newest(cells) if cells else {}
        changed = {n: a for n, a in arrays.items() if a is not self._seen.get(n)}
        if changed:
            self.runner.write(changed)
            self._seen |= arrays
