"""How an optimizer declares its state and says which op updates each parameter.

An optimizer is a frozen dataclass whose fields are its settings. Its method `recipe` says how one
parameter is updated; `RecipeOptimizer` does the rest for all of them alike: groups, learning rates,
variables for the state, and the attributes of the op, which have the names of the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from actorflow.functional.counters import step_of
from actorflow.literals import checked_number
from actorflow.optim.groups import Group, check_groups, check_patterns
from actorflow.optim.rates import Schedule, check_rate, not_negative, rate_at
from actorflow.tensor import Tensor
from actorflow.trace.tracer import Trace, find_source
from compiler.attrs import Attrs, AttrValue
from compiler.errors import CompileError
from compiler.fusion.staged import StagedUpdate, stages
from compiler.fusion.updates import Update, update
from compiler.graph import UpdateRule
from compiler.registry import Op
from compiler.types import DType, TensorType

MATRICES = "matrices"
"""What `decay_only` may be: parameters of two and more axes decay, biases and scales do not."""


class Optimizer(Protocol):
    """What a job needs of an optimizer."""

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Declare state and return one update rule per parameter. Called once, inside the trace."""
        ...


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A variable beside a parameter, called `<name>/<parameter>`; of its shape, or its own."""

    name: str
    start: float = 0.0
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class UpdateRecipe:
    """How one parameter is updated: by an op, over state; `attrs` are those that no setting is."""

    op: Op
    states: tuple[OptimizerState, ...] = ()
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)

    @property
    def definition(self) -> Update | StagedUpdate:
        """What the op is defined by."""
        return update.get(self.op) if update.has(self.op) else stages.get(self.op)

    @property
    def needs_step(self) -> bool:
        """Whether the op reads the step after the rate."""
        return self.definition.num_operands > 3 + len(self.states)


def states(*names: str) -> tuple[OptimizerState, ...]:
    """Return variables that begin at zero."""
    return tuple([OptimizerState(name) for name in names])


@dataclass(frozen=True, kw_only=True)
class RecipeOptimizer:
    """What optimizers have in common. A subclass adds its settings, and says its `recipe`.

    Args:
        lr: the learning rate, a number or a schedule.
        maximize: climb instead of descending.
        decay_only: "matrices" for no weight decay of biases and scales.
        groups: what is otherwise for some parameters; see `actorflow.optim.groups`.
    """

    lr: float | Schedule = 1e-3
    maximize: bool = False
    decay_only: str | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def recipe(self, name: str, type_: TensorType) -> UpdateRecipe:
        """Return how one parameter is updated."""
        raise NotImplementedError

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Declare the state, `<state>/<parameter>`; return a rule for each that is not frozen.

        Parameters of one learning rate share its value, so that updates which are alike can be
        joined. Raises CompileError with the user's line.
        """
        return _declared(self, trace, parameters)


def _declared(
    optimizer: RecipeOptimizer, trace: Trace, parameters: dict[str, TensorType]
) -> tuple[UpdateRule, ...]:
    check_patterns(optimizer.groups, tuple(parameters))
    step, rates = step_of(trace), _RateTable(trace)
    rules = []
    for name, type_ in parameters.items():
        own = next((g for g in optimizer.groups if g.matches(name)), None)
        if own is not None and own.is_frozen:
            continue
        settings = _settings_for(optimizer, own, type_)
        recipe = settings.recipe(name, type_)
        rate = rates.of(settings.lr, 1.0 if own is None else own.lr_scale, type_.dtype)
        rules.append(
            UpdateRule(
                op=recipe.op,
                variable=trace.variable(name, type_, "parameter", ()),
                state=tuple([_declare(trace, state, name, type_) for state in recipe.states]),
                scalars=(rate._value_in(trace), *[step._value_in(trace)] * recipe.needs_step),
                attrs=Attrs(_attrs(settings, recipe)),
            )
        )
    if not rules:
        raise CompileError(
            f"{optimizer.groups[0].source}: groups of the optimizer freeze every parameter; leave"
            " one to train"
        )
    return tuple(rules)


def _attrs(settings: RecipeOptimizer, recipe: UpdateRecipe) -> dict[str, AttrValue]:
    """Return the attributes of the op: what the recipe says, and settings of their names."""
    given = {**vars(settings), **recipe.attrs}
    given |= {f"beta{i}": beta for i, beta in enumerate(given.pop("betas", ()), 1)}
    given = given if settings.maximize else {k: v for k, v in given.items() if k != "maximize"}
    own = recipe.definition.attributes
    return {a.name: a.type(given[a.name]) for a in own if a.name in given}


def _settings_for(optimizer: Any, own: Group | None, type_: TensorType) -> RecipeOptimizer:
    """Return the optimizer that a parameter of a group has."""
    options = {} if own is None else dict(own.options)
    is_matrix_only = getattr(optimizer, "decay_only", None) == MATRICES
    if is_matrix_only and type_.rank < 2:
        options.setdefault("weight_decay", 0.0)
    return _with(optimizer, options) if options else optimizer  # type: ignore[no-any-return]  # as it came


def _with(optimizer: Any, options: Mapping[str, object]) -> Any:
    """Return an optimizer without groups and with other settings, whose class checks them."""
    kept = {f.name: getattr(optimizer, f.name) for f in fields(optimizer)}
    return type(optimizer)(**(kept | {"groups": ()} | dict(options)))


def _declare(trace: Trace, state: OptimizerState, name: str, type_: TensorType) -> Any:
    shape = type_.shape if state.shape is None else state.shape
    init = (("kind", "constant"), ("value", state.start)) if state.start else (("kind", "zeros"),)
    own = TensorType(type_.dtype, shape)
    return trace.variable(f"{state.name}/{name}", own, "optimizer", init)


class _RateTable:
    """The learning rates of a trace: each is computed once for parameters of one dtype."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[tuple[object, float, DType], Tensor] = {}

    def of(self, lr: float | Schedule, scale: float, dtype: DType) -> Tensor:
        """Return `lr` at this step times `scale`, for parameters of a dtype."""
        key = (id(lr) if callable(lr) else float(lr), scale, dtype)
        if key not in self._known:
            wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
            with self._trace.scope("optimizer"):
                at_one = self._known.get((key[0], 1.0, wide))
                rate = rate_at(lr, step_of(self._trace).to(wide)) if at_one is None else at_one
                self._known[key] = (rate if scale == 1.0 else rate * scale).to(dtype)
        return self._known[key]


def check_settings(optimizer: RecipeOptimizer) -> None:
    """Check every field of an optimizer by its name. Raises CompileError with the user's line."""
    names = [f.name for f in sorted(fields(optimizer), key=lambda f: f.kw_only is True)]
    for name in names:
        check = _CHECKS.get(name)
        if check is not None:
            check(getattr(optimizer, name), name)
    known = [name for name in names if name not in ("groups", "decay_only")]
    check_groups(optimizer.groups, known, type(optimizer).__name__)
    for own in optimizer.groups:
        if own.options:
            _with(optimizer, dict(own.options))


def _check_share(value: object, name: str) -> None:
    if not 0.0 <= checked_number(value, name) < 1.0:
        raise CompileError(f"{find_source()}: {name} must be in [0.0, 1.0), got {value}")


def _check_betas(value: object, name: str) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise CompileError(f"{find_source()}: {name} must be two numbers, got {value!r}")
    _check_share(value[0], "beta1")
    _check_share(value[1], "beta2")


def _check_flag(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise CompileError(f"{find_source()}: {name} must be True or False, got {value!r}")


def _check_decay_only(value: object, name: str) -> None:
    if value not in (None, MATRICES):
        raise CompileError(f"{find_source()}: {name} must be {MATRICES!r} or None, got {value!r}")


_CHECKS: dict[str, Callable[[Any, str], object]] = {
    "lr": lambda value, name: check_rate(value),
    **dict.fromkeys(("momentum", "dampening", "alpha"), _check_share),
    **dict.fromkeys(("weight_decay", "lr_decay", "initial_accumulator_value"), not_negative),
    "eps": lambda value, name: (
        None if isinstance(value, (tuple, list)) else not_negative(value, name)
    ),
    "betas": _check_betas,
    **dict.fromkeys(("nesterov", "maximize", "amsgrad", "centered"), _check_flag),
    "decay_only": _check_decay_only,
}
"""What a setting of a name may be, whatever optimizer it is of."""
