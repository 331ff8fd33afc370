"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actorflow.optim.groups import Group
from actorflow.optim.rates import Schedule
from actorflow.optim.recipes import UpdateRecipe, check_settings, declared, states
from actorflow.trace.tracer import Trace
from compiler.attrs import AttrValue
from compiler.graph import UpdateRule
from compiler.ops.adaptive_updates import ADAM_UPDATE, AMSGRAD_UPDATE
from compiler.ops.update import ADAMW_UPDATE
from compiler.registry import Op
from compiler.types import TensorType


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba, 2015); with `amsgrad` after Reddi et al., 2018.

    Follows torch.optim.Adam: weight decay is added to the gradient, epsilon after the bias
    correction.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decay_only: str | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `adam_m/<name>`, `adam_v` (, `adam_most`)."""
        return declared(self, trace, parameters)

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        return _recipe(self, ADAM_UPDATE, is_decoupled=False)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Kingma & Ba, 2015; Loshchilov & Hutter, 2019).

    Follows torch.optim.AdamW: epsilon is added after the bias correction.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    amsgrad: bool = False
    maximize: bool = False
    decay_only: str | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `adam_m/<name>`, `adam_v` (, `adam_most`)."""
        return declared(self, trace, parameters)

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        return _recipe(self, ADAMW_UPDATE, is_decoupled=True)


def _recipe(own: Adam | AdamW, op: Op, *, is_decoupled: bool) -> UpdateRecipe:
    attrs: dict[str, AttrValue] = {
        "beta1": float(own.betas[0]),
        "beta2": float(own.betas[1]),
        "eps": float(own.eps),
        "weight_decay": float(own.weight_decay),
    }
    attrs |= {"maximize": True} if own.maximize else {}
    if not own.amsgrad:
        return UpdateRecipe(op, states("adam_m", "adam_v"), attrs, needs_step=True)
    attrs |= {"decoupled": is_decoupled}
    return UpdateRecipe(
        AMSGRAD_UPDATE, states("adam_m", "adam_v", "adam_most"), attrs, needs_step=True
    )
