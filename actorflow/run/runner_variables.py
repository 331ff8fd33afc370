"""The variables of a runner: with the run that is open, or as the last one left them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from actorflow.initialise import check_values, initial_values
from actorflow.logs import logger
from actorflow.run.live_variables import LiveVariables, frozen
from actorflow.run.training_run import Run
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.plan import Plan

if TYPE_CHECKING:
    from actorflow.run.lease import Lease

Array = np.ndarray[Any, Any]


class RunnerVariables:
    """What the runs of one runner begin with and leave. `read` and `write` are for any thread.

    Args:
        plan: of all runs.
        given: first values by name, of variables that do not start from their initialiser.
        seed: of initialisers.
        lease: on the parameters that are trained; it has the values while a run is open.
    """

    def __init__(
        self, plan: Plan, given: Mapping[str, Array], seed: int, lease: Lease | None
    ) -> None:
        self.given = dict(given)
        self._plan = plan
        self._seed = seed
        self._lease = lease
        self._run: Run | None = None
        self._live: LiveVariables | None = None
        self._names = {variable.name for variable in plan.state}

    def first(self, restored: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Return what a run begins with: restored, given or else initial values."""
        return initial_values(self._plan, {**self.given, **(restored or {})}, self._seed)

    def begin(self, run: Run) -> None:
        """Have everybody read and write the variables of a run, before its first step.

        Raises CompileError where another run of this runner goes on.
        """
        if self._live is not None and not self._live.is_over:
            raise CompileError(
                f"{find_source()}: a runner of plan {self._plan.name!r} was called while another"
                " call of it goes on: of two copies of its variables one would be lost. Let the"
                " other end first, or make a second Runner"
            )
        self._run, self._live = run, run.variables
        if self._lease is not None:
            self._lease.attach(run.variables)

    def keep(self, run: Run) -> None:
        """Take over what a run that began leaves, if it is whole; its threads end. Idempotent."""
        if run is not self._run or run.loop.is_inherited:
            return
        variables = run.whole_variables()
        if variables is None:
            logger.warning(
                "a step of plan %r failed inside its updates; the variables go back to those before"
                " the run",
                self._plan.name,
            )
        else:
            self.given = variables
        self._run = self._live = None
        if self._lease is not None:
            self._lease.end({n: frozen(a) for n, a in self.first().items()})

    def hold(self, lease: Lease) -> None:
        """Train under another lease from the next step on."""
        self._lease = lease
        if self._live is not None:
            lease.attach(self._live)

    def read(self) -> dict[str, Array]:
        """Return all variables, read-only, as they are after the last finished step."""
        live = self._live
        values = None if live is None else live.read(live.names)
        return dict(self.first()) if values is None else values

    def write(self, values: Mapping[str, Array]) -> None:
        """Give variables new values; an open run has them in its next step.

        Raises CompileError for other types; then nothing is written.
        """
        known = {n: frozen(a) for n, a in values.items() if n in self._names}
        check_values(self._plan, known)
        if self._live is not None:
            self._live.write(known)
        self.given.update(known)
