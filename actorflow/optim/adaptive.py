"""Optimizers whose step follows the size of past gradients, or their sign alone."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow.optim.rates import Schedule
from actorflow.optim.recipes import OptimizerState, RecipeOptimizer, UpdateRecipe, states
from compiler.ops.adaptive_updates import ADAGRAD_UPDATE, LION_UPDATE, RMSPROP_UPDATES
from compiler.types import TensorType


@dataclass(frozen=True)
class Adagrad(RecipeOptimizer):
    """Adagrad (Duchi, Hazan & Singer, 2011). Follows torch.optim.Adagrad.

    Its state is `adagrad_sum/<name>`.
    """

    lr: float | Schedule = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        start = float(self.initial_accumulator_value)
        return UpdateRecipe(ADAGRAD_UPDATE, (OptimizerState("adagrad_sum", start),))


@dataclass(frozen=True)
class RMSprop(RecipeOptimizer):
    """RMSprop (Hinton, 2012), centred (Graves, 2013) or with momentum or both.

    Follows torch.optim.RMSprop: epsilon is added to the root. Its state is `rms_square/<name>`
    (, `rms_mean/<name>`) (, `momentum/<name>`).
    """

    lr: float | Schedule = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        own = ["rms_square", *["rms_mean"] * self.centered, *["momentum"] * bool(self.momentum)]
        return UpdateRecipe(RMSPROP_UPDATES[self.centered, bool(self.momentum)], states(*own))


@dataclass(frozen=True)
class Lion(RecipeOptimizer):
    """Lion: the sign of a mean of gradients (Chen et al., 2023), with decoupled weight decay.

    A learning rate is 3 to 10 times smaller than AdamW's, and weight decay as much larger. Its
    state is `lion_m/<name>`.
    """

    lr: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        return UpdateRecipe(LION_UPDATE, states("lion_m"))
