"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actorflow.optim.groups import Group
from actorflow.optim.rates import Schedule
from actorflow.optim.recipes import UpdateRecipe, check_settings, declared, states
from actorflow.trace.tracer import Trace, find_source
from compiler.attrs import AttrValue
from compiler.errors import CompileError
from compiler.graph import UpdateRule
from compiler.ops import update
from compiler.types import TensorType


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum or Nesterov's momentum.

    Sources: Polyak, 1964; for Nesterov's, Sutskever et al., 2013.
    Follows torch.optim.SGD: weight decay is added to the gradient; with `dampening` the buffer of
    the first step is the gradient itself.
    """

    lr: float | Schedule = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decay_only: str | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        if self.nesterov and (not self.momentum or self.dampening):
            raise CompileError(
                f"{find_source()}: nesterov=True needs momentum > 0 and no dampening"
            )

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `momentum/<name>` where momentum is used."""
        return declared(self, trace, parameters)

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        attrs: dict[str, AttrValue] = {"weight_decay": float(self.weight_decay)}
        attrs |= {"maximize": True} if self.maximize else {}
        if not self.momentum:
            return UpdateRecipe(update.SGD_UPDATE, (), attrs)
        attrs |= {"momentum": float(self.momentum)}
        if self.dampening:
            attrs |= {"dampening": float(self.dampening)}
            op = update.DAMPED_MOMENTUM_UPDATE
            return UpdateRecipe(op, states("momentum"), attrs, needs_step=True)
        attrs |= {"nesterov": bool(self.nesterov)}
        return UpdateRecipe(update.MOMENTUM_UPDATE, states("momentum"), attrs)
