"""Optimizers whose step follows the size of past gradients, or their sign alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actorflow.optim.groups import Group
from actorflow.optim.rates import Schedule
from actorflow.optim.recipes import OptimizerState, UpdateRecipe, check_settings, declared, states
from actorflow.trace.tracer import Trace
from compiler.attrs import AttrValue
from compiler.graph import UpdateRule
from compiler.ops.adaptive_updates import ADAGRAD_UPDATE, LION_UPDATE, RMSPROP_UPDATES
from compiler.types import TensorType


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi, Hazan & Singer, 2011). Follows torch.optim.Adagrad."""

    lr: float | Schedule = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    decay_only: str | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `adagrad_sum/<name>`."""
        return declared(self, trace, parameters)

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        attrs: dict[str, AttrValue] = {
            "lr_decay": float(self.lr_decay),
            "eps": float(self.eps),
            "weight_decay": float(self.weight_decay),
        }
        attrs |= {"maximize": True} if self.maximize else {}
        start = float(self.initial_accumulator_value)
        return UpdateRecipe(
            ADAGRAD_UPDATE, (OptimizerState("adagrad_sum", start),), attrs, needs_step=True
        )


@dataclass(frozen=True)
class RMSprop:
    """RMSprop (Hinton, 2012), centred (Graves, 2013) or with momentum or both.

    Follows torch.optim.RMSprop: epsilon is added to the root.
    """

    lr: float | Schedule = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False
    decay_only: str | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `rms_square` (, `rms_mean`) (, `momentum`)."""
        return declared(self, trace, parameters)

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        attrs: dict[str, AttrValue] = {
            "alpha": float(self.alpha),
            "eps": float(self.eps),
            "weight_decay": float(self.weight_decay),
            "momentum": float(self.momentum),
        }
        attrs |= {"maximize": True} if self.maximize else {}
        own = ["rms_square", *["rms_mean"] * self.centered, *["momentum"] * bool(self.momentum)]
        return UpdateRecipe(
            RMSPROP_UPDATES[self.centered, bool(self.momentum)], states(*own), attrs
        )


@dataclass(frozen=True)
class Lion:
    """Lion: the sign of a mean of gradients (Chen et al., 2023), with decoupled weight decay.

    A learning rate is 3 to 10 times smaller than AdamW's, and weight decay as much larger.
    """

    lr: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False
    decay_only: str | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `lion_m/<name>`."""
        return declared(self, trace, parameters)

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        attrs: dict[str, AttrValue] = {
            "beta1": float(self.betas[0]),
            "beta2": float(self.betas[1]),
            "weight_decay": float(self.weight_decay),
        }
        attrs |= {"maximize": True} if self.maximize else {}
        return UpdateRecipe(LION_UPDATE, states("lion_m"), attrs)
