"""A model on which a job's plan is open: whose values are newest, and how they come home.

There may be several open plans on one model: a training job that is stepped, a job that predicts.
The rule: a parameter's newest values are in its own array, or lent to the training plan that
stepped last. Whoever reads the parameter fetches them first; whoever steps compares versions and
takes over what others changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actorflow.nn.module import Module
from actorflow.ports import Metrics
from actorflow.runner import Runner
from actorflow.signature import Signature

Array = np.ndarray[Any, Any]


def values_of(model: Module) -> dict[str, Array]:
    """Return the newest data of all parameters that have some, by path; not copied."""
    return {n: p.data for n, p in model.named_parameters() if p.data is not None}


def give_back(model: Module, variables: Mapping[str, Array]) -> None:
    """Make `variables` the newest data of the model's parameters."""
    for name, parameter in model.named_parameters():
        if name in variables:
            parameter.fetch()
            parameter.accept(np.array(variables[name]))


class OpenModel:
    """One runner that is stepped on one model; a model that is dropped ends its runner's plan.

    It holds the parameters, never the model.

    Args:
        model: its parameters are kept in step with the runner.
        runner: not stepped before, with the model's values.
        signature: of the plan, to be compared by the job.
        is_training: whether steps change the parameters; values of other runners never come back.
    """

    def __init__(
        self, model: Module, runner: Runner, signature: Signature, *, is_training: bool
    ) -> None:
        self.signature = signature
        self.runner = runner
        self._parameters = dict(model.named_parameters())
        self._is_training = is_training
        self._is_ahead = False
        self._seen = self._versions()
        self._when_dropped = weakref.finalize(model, runner.close)

    def step(self, batches: Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step with the model's newest values and return its outputs."""
        if not self._is_ahead:
            self._take_over()
        try:
            return self.runner.step(batches)
        finally:
            if self._is_training and not self._is_ahead:
                self._is_ahead = True
                for parameter in self._parameters.values():
                    parameter.lend(self._bring_home)

    def close(self) -> dict[str, Array]:
        """End the plan; the model has the newest values. Return all variables as they were left."""
        self._when_dropped.detach()  # or it would keep this runner as long as the model
        try:
            self._bring_home()
            return self.runner.variables()
        finally:
            self.runner.close()

    def _take_over(self) -> None:
        """Write what others changed since into the plan's memory."""
        for parameter in self._parameters.values():
            parameter.fetch()
        versions = self._versions()
        if versions != self._seen:
            arrays = {n: p.data for n, p in self._parameters.items() if p.data is not None}
            self.runner.write(arrays)
            self._seen = versions

    def _bring_home(self) -> None:
        """Give the parameters their newest values, once; each of them may ask."""
        if not self._is_ahead:
            return
        self._is_ahead = False
        variables = self.runner.variables()
        for name, parameter in self._parameters.items():
            if name in variables:
                parameter.accept(variables[name])
        self._seen = self._versions()

    def _versions(self) -> list[int]:
        return [p.version for p in self._parameters.values()]
