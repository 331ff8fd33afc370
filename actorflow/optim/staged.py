"""Optimizers that look at a whole parameter: its norm, its rows and columns, its direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from actorflow.literals import checked_number, checked_size
from actorflow.optim.rates import Schedule, not_negative
from actorflow.optim.recipes import (
    OptimizerState,
    RecipeOptimizer,
    UpdateRecipe,
    states,
)
from actorflow.trace.tracer import find_source
from compiler.attrs import AttrValue
from compiler.errors import CompileError
from compiler.ops.staged_updates import (
    ADAFACTOR_UPDATE,
    ADAFACTOR_VECTOR_UPDATE,
    LAMB_UPDATE,
    MUON_UPDATE,
)
from compiler.types import TensorType


@dataclass(frozen=True)
class LAMB(RecipeOptimizer):
    """Adam's direction, as long as the parameter times the rate (You et al., 2020, algorithm 2).

    With the bias corrected; a parameter, or a direction, of norm 0 moves as AdamW's. Its state is
    `adam_m/<name>` and `adam_v/<name>`.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        return UpdateRecipe(LAMB_UPDATE, states("adam_m", "adam_v"))


@dataclass(frozen=True)
class Adafactor(RecipeOptimizer):
    """Adam whose squares are kept by row and column alone (Shazeer & Stern, 2018).

    Follows torch.optim.Adafactor: no momentum, steps relative to the parameter's size, `eps` is
    (that of the squares, by default the dtype's, and the least size). Its state is
    `ada_rows/<name>` and `ada_columns/<name>`, of vectors `ada_squares/<name>`.
    """

    lr: float | Schedule = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        where = find_source()
        if not isinstance(self.eps, (tuple, list)) or len(self.eps) != 2:
            raise CompileError(f"{where}: eps must be two numbers, got {self.eps!r}")
        if self.eps[0] is not None:
            not_negative(self.eps[0], "the first of eps")
        not_negative(self.eps[1], "the second of eps")
        if not -math.inf < checked_number(self.beta2_decay, "beta2_decay") <= 0.0:
            raise CompileError(f"{where}: beta2_decay must be 0 or less, got {self.beta2_decay}")
        if not 1.0 <= checked_number(self.d, "d") < math.inf:
            raise CompileError(f"{where}: d must be 1 or more, got {self.d}")

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        least = float(np.finfo(type_.dtype.value).eps) if self.eps[0] is None else self.eps[0]
        attrs: dict[str, AttrValue] = {"eps1": float(least), "eps2": float(self.eps[1])}
        if type_.rank < 2:
            own = states("ada_squares")
            return UpdateRecipe(ADAFACTOR_VECTOR_UPDATE, own, attrs)
        *outer, rows, columns = type_.shape
        factors = (
            OptimizerState("ada_rows", shape=(*outer, rows, 1)),
            OptimizerState("ada_columns", shape=(*outer, 1, columns)),
        )
        return UpdateRecipe(ADAFACTOR_UPDATE, factors, attrs)


@dataclass(frozen=True)
class Muon(RecipeOptimizer):
    """Momentum made orthogonal by Newton and Schulz' iteration (Jordan et al., 2024).

    For matrices alone: others are given to another optimizer. Follows torch.optim.Muon, but for
    its products, which torch rounds to bfloat16: here a job's `precision` says that.
    `adjust_lr_fn` is "original", which None means, or "match_rms_adamw". Its state is
    `momentum/<name>`.
    """

    lr: float | Schedule = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        where, three = find_source(), self.ns_coefficients
        if not isinstance(three, (tuple, list)) or len(three) != 3:
            raise CompileError(f"{where}: ns_coefficients must be three numbers, got {three!r}")
        if not all([math.isfinite(checked_number(x, "one of ns_coefficients")) for x in three]):
            raise CompileError(f"{where}: ns_coefficients must be finite, got {three!r}")
        if not 0 <= checked_size(self.ns_steps, "ns_steps") < 100:
            raise CompileError(f"{where}: ns_steps must be in 0..99, got {self.ns_steps}")
        if self.adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise CompileError(
                f"{where}: adjust_lr_fn must be 'original', 'match_rms_adamw' or None, got"
                f" {self.adjust_lr_fn!r}"
            )

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated. Raises CompileError for what is no matrix."""
        if type_.rank != 2:
            raise CompileError(
                f"{find_source()}: Muon trains matrices, and parameter {name!r} is {type_}; give"
                " it another optimizer with af.optim.on, or freeze it"
            )
        rows, columns = type_.shape
        ratio = math.sqrt(max(1.0, rows / max(columns, 1)))
        if self.adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        a, b, c = map(float, self.ns_coefficients)
        attrs: dict[str, AttrValue] = {"scale": ratio, "a": a, "b": b, "c": c}
        return UpdateRecipe(MUON_UPDATE, states("momentum"), attrs)
