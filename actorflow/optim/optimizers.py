"""The optimizers, each a dataclass of its settings with the recipe of one update; EMA of weights.

A class says which paper, or which optimizer of torch, it follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actorflow.functional.elementwise import minimum, where
from actorflow.optim.recipes import OptimizerState, RecipeOptimizer, UpdateRecipe, states
from actorflow.optim.schedules import Schedule, not_negative
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import Trace, find_source
from compiler.contract.attrs import AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, Phase, TensorType, ValueId
from compiler.graph.graph import Write
from compiler.graph.registry import Op
from compiler.ops.families import updates
from compiler.ops.families.updates import (
    ADAFACTOR_UPDATE,
    ADAFACTOR_VECTOR_UPDATE,
    ADAGRAD_UPDATE,
    ADAM_UPDATE,
    ADAMW_UPDATE,
    AMSGRAD_UPDATE,
    EMA_UPDATE,
    LAMB_UPDATE,
    LION_UPDATE,
    MUON_UPDATE,
    RMSPROP_UPDATES,
)


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
            squares = states("ada_squares")
            return UpdateRecipe(ADAFACTOR_VECTOR_UPDATE, squares, attrs)
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
        names = ["rms_square", *["rms_mean"] * self.centered, *["momentum"] * bool(self.momentum)]
        return UpdateRecipe(RMSPROP_UPDATES[self.centered, bool(self.momentum)], states(*names))


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


Array = np.ndarray[Any, Any]

AVERAGE = "ema/"
"""Before the name of a parameter: that of its average."""

COUNT = "ema_count"
"""The steps that averages were made of."""

_ZEROS = (("kind", "zeros"),)


@dataclass(frozen=True, slots=True)
class EMA:
    """Exponential moving averages of the weights that a job trains.

        @af.job(optimizer=af.optim.AdamW(1e-3), ema=0.999)

    Each trained parameter has an average beside it, the variable `ema/<parameter>`: planned, saved
    and moved as the optimizer's state is. After its update the step writes

        average += (1 - decay) * (parameter - average)

    as torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)` does; the first step copies. A
    step that is skipped leaves averages, and their count, as they are.

    Args:
        decay: what an average keeps of itself in a step, in [0, 1).
        warmup: a power such as 2/3: after n steps an average keeps at most 1 - (1 + n)^-warmup, so
            that it follows young weights fast (timm's ModelEmaV3); None for `decay` at once.

    Raises CompileError with the user's line.
    """

    decay: float = 0.999
    warmup: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= checked_number(self.decay, "decay of an EMA") < 1.0:
            raise CompileError(
                f"{find_source()}: decay of an EMA must be in [0.0, 1.0), got {self.decay}"
            )
        if self.warmup is not None:
            not_negative(self.warmup, "warmup of an EMA")

    def add_to(self, trace: Trace, parameters: Mapping[str, TensorType]) -> None:
        """Declare averages of parameters and what a step does with them.

        The nodes read the parameters as they are before the step; `compiler.passes.autodiff` lets
        them read what updates make.
        """
        number = TensorType(DType.FLOAT64, ())
        with trace.scope("optimizer"):
            count = trace.variable(COUNT, number, "optimizer", _ZEROS)
            steps = Tensor(trace, count)
            decay = as_tensor(float(self.decay), DType.FLOAT64)
            if self.warmup is not None:
                decay = minimum(1.0 - (steps + 1.0) ** -float(self.warmup), decay)
            share = where(steps == 0.0, 1.0, 1.0 - decay)
            _approach(trace, count, steps + 1.0, as_tensor(1.0, DType.FLOAT64))
            for name, type_ in parameters.items():
                average = trace.variable(AVERAGE + name, type_, "optimizer", _ZEROS)
                now = Tensor(trace, trace.variable(name, type_, "parameter", ()))
                _approach(trace, average, now, share.to(type_.dtype))


def _approach(trace: Trace, average: ValueId, now: Tensor, share: Tensor) -> None:
    b = trace.builder
    declared = b.producer_of(average)
    with b.at("optimizer", declared.source, Phase.UPDATE, declared.device):
        value = b.emit_one(EMA_UPDATE, average, now._value_in(trace), share._value_in(trace))
    b.writes.append(Write(average, value))


def averages_in(variables: Mapping[str, Array]) -> dict[str, Array]:
    """Return the averages among the variables of a run, by the paths of their parameters."""
    return {n.removeprefix(AVERAGE): a for n, a in variables.items() if n.startswith(AVERAGE)}


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
            return UpdateRecipe(updates.SGD_UPDATE)
        op = updates.DAMPED_MOMENTUM_UPDATE if self.dampening else updates.MOMENTUM_UPDATE
        return UpdateRecipe(op, states("momentum"))
