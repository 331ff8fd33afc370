"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow.optim.rates import Schedule
from actorflow.optim.recipes import RecipeOptimizer, UpdateRecipe, states
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import update
from compiler.types import TensorType


@dataclass(frozen=True)
class SGD(RecipeOptimizer):
    """Stochastic gradient descent with momentum or Nesterov's momentum.

    Sources: Polyak, 1964; for Nesterov's, Sutskever et al., 2013.
    Follows torch.optim.SGD: weight decay is added to the gradient; with `dampening` the buffer of
    the first step is the gradient itself. Its state, with momentum, is `momentum/<name>`.
    """

    lr: float | Schedule = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (not self.momentum or self.dampening):
            raise CompileError(
                f"{find_source()}: nesterov=True needs momentum > 0 and no dampening"
            )

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        if not self.momentum:
            return UpdateRecipe(update.SGD_UPDATE)
        op = update.DAMPED_MOMENTUM_UPDATE if self.dampening else update.MOMENTUM_UPDATE
        return UpdateRecipe(op, states("momentum"))
