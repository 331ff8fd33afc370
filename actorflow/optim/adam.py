"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow.optim.rates import Schedule
from actorflow.optim.recipes import RecipeOptimizer, UpdateRecipe, states
from compiler.ops.adaptive_updates import ADAM_UPDATE, AMSGRAD_UPDATE
from compiler.ops.update import ADAMW_UPDATE
from compiler.registry import Op
from compiler.types import TensorType


@dataclass(frozen=True)
class Adam(RecipeOptimizer):
    """Adam (Kingma & Ba, 2015); with `amsgrad` after Reddi et al., 2018.

    Follows torch.optim.Adam: weight decay is added to the gradient, epsilon after the bias
    correction. Its state is `adam_m/<name>`, `adam_v/<name>` (, `adam_most/<name>`).
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        return _recipe(self, ADAM_UPDATE, is_decoupled=False)


@dataclass(frozen=True)
class AdamW(RecipeOptimizer):
    """Adam with decoupled weight decay (Kingma & Ba, 2015; Loshchilov & Hutter, 2019).

    Follows torch.optim.AdamW: epsilon is added after the bias correction. State as of `Adam`.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    amsgrad: bool = False

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        return _recipe(self, ADAMW_UPDATE, is_decoupled=True)


def _recipe(own: Adam | AdamW, op: Op, *, is_decoupled: bool) -> UpdateRecipe:
    if not own.amsgrad:
        return UpdateRecipe(op, states("adam_m", "adam_v"))
    attrs = {"decoupled": is_decoupled}
    return UpdateRecipe(AMSGRAD_UPDATE, states("adam_m", "adam_v", "adam_most"), attrs)
