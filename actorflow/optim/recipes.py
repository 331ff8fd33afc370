"""How an optimizer declares its state and says which op updates each parameter.

An optimizer is a frozen dataclass whose fields are its settings. Its method `recipe` says how one
parameter is updated; `RecipeOptimizer` does the rest for all of them alike: groups, learning rates,
variables for the state, and the attributes of the op, which have the names of the settings. `on`
gives a job several optimizers, each for some parameters and one loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Protocol

from actorflow.environment.option_values import Patterns, chosen, wrong_patterns
from actorflow.functional.random import step_of
from actorflow.optim.schedules import Schedule, check_rate, not_negative, rate_at
from actorflow.tensor.literals import checked_number
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import Trace, find_source
from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import SourceLocation, UpdateRule
from compiler.graph.registry import Op
from compiler.ops.language.define import CompositeUpdate, Update, stages, update


@dataclass(frozen=True, slots=True)
class Group:
    """See `group`, which makes one. `options` are settings of the optimizer, by name."""

    patterns: tuple[str, ...]
    lr_scale: float
    is_frozen: bool
    options: tuple[tuple[str, object], ...]
    source: SourceLocation

    def matches(self, path: str) -> bool:
        """Whether a parameter is in the group, if it is in none before."""
        return any([fnmatchcase(path, pattern) for pattern in self.patterns])


def group(
    *patterns: str,
    lr: float | Schedule | None = None,
    lr_scale: float = 1.0,
    frozen: bool = False,
    **options: object,
) -> Group:
    """Return a group of the parameters whose paths match one of some patterns.

        af.optim.AdamW(
            1e-3,
            groups=[
                af.optim.group("*.bias", "*norm*", weight_decay=0.0),
                af.optim.group("head.*", lr_scale=10.0),
                af.optim.group("embedding.*", frozen=True),
            ],
        )

    Of several groups that match a path the first decides. A group adds no launches of its own on
    devices that join updates: parameters that are treated alike are joined, whatever their group.

    Args:
        patterns: globs over paths, such as "blocks.*.bias": `*` stands for any letters, dots too.
        lr: their learning rate, a number or a schedule, in place of the optimizer's.
        lr_scale: what the learning rate is multiplied by.
        frozen: True leaves them as they are: no update, no state, no gradient.
        options: other settings of the optimizer, by its own names: weight_decay=0.0.

    Raises CompileError with the user's line; a setting that the optimizer has not, and a pattern
    that matches no parameter, is told of where the optimizer is made and where a job is compiled.
    """
    where = find_source()
    if wrong := wrong_patterns(patterns):
        raise CompileError(f"{where}: a group needs {wrong}")
    if not isinstance(frozen, bool):
        raise CompileError(f"{where}: frozen must be True or False, got {frozen!r}")
    scale = not_negative(lr_scale, "lr_scale")
    if lr is not None:
        check_rate(lr)
        options = {"lr": lr, **options}
    if frozen and (options or scale != 1.0):
        raise CompileError(f"{where}: a frozen group has no other settings; leave them out")
    return Group(patterns, scale, frozen, tuple(options.items()), where)


def check_groups(groups: object, known: Sequence[str], optimizer: str) -> None:
    """Raise CompileError for what are no groups, or groups with settings that nothing reads."""
    if not isinstance(groups, (list, tuple)):
        came = type(groups).__name__
        raise CompileError(
            f"{find_source()}: groups must be a list of af.optim.group(...), got {came}"
        )
    for one in groups:
        if not isinstance(one, Group):
            raise CompileError(
                f"{find_source()}: groups must be a list of af.optim.group(...), one is {one!r:.60}"
            )
        for name, _ in one.options:
            if name not in known:
                raise CompileError(
                    f"{one.source}: {optimizer} has no setting {name!r} for a group; it has"
                    f" {', '.join(known)}"
                )


def check_patterns(groups: Sequence[Group], paths: Sequence[str]) -> None:
    """Raise CompileError, with the line of the group, for a pattern that matches no parameter."""
    for group in groups:
        for pattern in group.patterns:
            chosen(pattern, paths, f"{group.source}: a group of an optimizer")


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
    def definition(self) -> Update | CompositeUpdate:
        """What the op is defined by."""
        return update.get(self.op) if update.has(self.op) else stages.get(self.op)

    @property
    def needs_step(self) -> bool:
        """Whether the op reads the step after the rate."""
        # 3: parameter, gradient and rate.
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
        groups: what is otherwise for some parameters; see `af.optim.group`.
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
    step, rates, line = step_of(trace), _RateTable(trace), find_source()
    rules = []
    for name, type_ in parameters.items():
        # The first group that matches decides, as `group` says.
        group = next((g for g in optimizer.groups if g.matches(name)), None)
        if group is not None and group.is_frozen:
            continue
        settings = _settings_for(optimizer, group, type_)
        recipe = settings.recipe(name, type_)
        rate = rates.of(settings.lr, 1.0 if group is None else group.lr_scale, type_.dtype)
        rules.append(
            UpdateRule(
                op=recipe.op,
                variable=trace.variable(name, type_, "parameter", ()),
                state=tuple([_declare(trace, s, name, type_, line) for s in recipe.states]),
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
    values = {**vars(settings), **recipe.attrs}
    values |= {f"beta{i}": beta for i, beta in enumerate(values.pop("betas", ()), 1)}
    values = values if settings.maximize else {k: v for k, v in values.items() if k != "maximize"}
    attributes = recipe.definition.attributes
    return {a.name: a.type(values[a.name]) for a in attributes if a.name in values}


def _settings_for(optimizer: Any, own: Group | None, type_: TensorType) -> RecipeOptimizer:
    """Return the optimizer that a parameter of a group has."""
    options = {} if own is None else dict(own.options)
    is_matrix_only = getattr(optimizer, "decay_only", None) == MATRICES
    if is_matrix_only and type_.rank < 2:
        # setdefault: what a group says of the decay itself stands.
        options.setdefault("weight_decay", 0.0)
    return _with(optimizer, options) if options else optimizer  # type: ignore[no-any-return]  # as it came


def _with(optimizer: Any, options: Mapping[str, object]) -> Any:
    """Return an optimizer without groups and with other settings, whose class checks them."""
    settings = {f.name: getattr(optimizer, f.name) for f in fields(optimizer)}
    return type(optimizer)(**(settings | {"groups": ()} | dict(options)))


def _declare(
    trace: Trace, state: OptimizerState, name: str, type_: TensorType, line: SourceLocation
) -> Any:
    shape = type_.shape if state.shape is None else state.shape
    init = (("kind", "constant"), ("value", state.start)) if state.start else (("kind", "zeros"),)
    state_type = TensorType(type_.dtype, shape)
    return trace.variable(f"{state.name}/{name}", state_type, "optimizer", init, line)


class _RateTable:
    """The learning rates of a trace: each is computed once for parameters of one dtype."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[tuple[object, float, DType], Tensor] = {}

    def of(self, lr: float | Schedule, scale: float, dtype: DType) -> Tensor:
        """Return `lr` at this step times `scale`, for parameters of a dtype."""
        # By id: whether two functions compute the same cannot be told. The optimizer keeps them
        # alive.
        key = (id(lr) if callable(lr) else float(lr), scale, dtype)
        if key not in self._known:
            # Computed in float32 for 16-bit parameters, and rounded once at the end.
            wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
            with self._trace.scope("optimizer"):
                at_one = self._known.get((key[0], 1.0, wide))
                rate = rate_at(lr, step_of(self._trace).to(wide)) if at_one is None else at_one
                self._known[key] = (rate if scale == 1.0 else rate * scale).to(dtype)
        return self._known[key]


def check_settings(optimizer: RecipeOptimizer) -> None:
    """Check every field of an optimizer by its name. Raises CompileError with the user's line."""
    # Stable sort: positional settings first, so the error names the one that the user wrote first.
    names = [f.name for f in sorted(fields(optimizer), key=lambda f: f.kw_only is True)]
    for name in names:
        check = _CHECKS.get(name)
        if check is not None:
            check(getattr(optimizer, name), name)
    settings = [name for name in names if name not in ("groups", "decay_only")]
    check_groups(optimizer.groups, settings, type(optimizer).__name__)
    for group in optimizer.groups:
        if group.options:
            _with(optimizer, dict(group.options))


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


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """See `on`, which makes one."""

    patterns: Patterns
    optimizer: Optimizer
    loss: str
    source: SourceLocation


def on(patterns: Patterns, optimizer: Optimizer, *, loss: str = "loss") -> OptimizerPart:
    """Return a part of a job's optimizer: which parameters it trains, how, and on what loss.

        @af.job(
            optimizer=[
                af.optim.on("generator.*", af.optim.Adam(2e-4), loss="g_loss"),
                af.optim.on("discriminator.*", af.optim.Adam(2e-4), loss="d_loss"),
            ]
        )
        def train(model, batch):
            ...
            return {"g_loss": g_loss, "d_loss": d_loss}

    A parameter gets the gradient of its own part's loss and of no other; what no part names is read
    as if frozen. All gradients are of the values before the step, and all updates happen at its
    end: simultaneous descent, where a loop in torch that steps one optimizer after the other has
    the second see what the first has changed.

    Args:
        patterns: globs over paths, such as "generator.*" or ["head.*", "!*.bias"].
        optimizer: how they are updated.
        loss: the key of their loss in what the job returns.

    Raises CompileError with the user's line.
    """
    where = find_source()
    if wrong := wrong_patterns(patterns):
        raise CompileError(f"{where}: on() needs {wrong}")
    if not is_optimizer(optimizer):
        raise CompileError(
            f"{where}: on() needs an optimizer, such as af.optim.AdamW(1e-3), got {optimizer!r}"
        )
    if not isinstance(loss, str) or not loss:
        raise CompileError(f"{where}: loss must be a key of what the job returns, got {loss!r}")
    globs = patterns if isinstance(patterns, str) else tuple(patterns)
    return OptimizerPart(globs, optimizer, loss, where)


def is_optimizer(value: object) -> bool:
    """Whether something can give the rules of a job."""
    return callable(getattr(value, "rules", None)) and not isinstance(value, type)


def parts_of(given: object, where: SourceLocation) -> tuple[OptimizerPart, ...] | None:
    """Return the parts of what a job got as its optimizer; None for what is none."""
    if is_optimizer(given):
        return (OptimizerPart("*", given, "loss", where),)  # type: ignore[arg-type]  # it has rules
    listed = [given] if isinstance(given, OptimizerPart) else given
    if not isinstance(listed, (list, tuple)) or not listed:
        return None
    return tuple(listed) if all([isinstance(part, OptimizerPart) for part in listed]) else None


def claims(
    parts: Sequence[OptimizerPart], paths: Sequence[str], trained: Mapping[str, object]
) -> list[list[str]]:
    """Return the paths that each part trains, of those that a job trains.

    Raises CompileError, with the line of the part, for a path that two parts claim, and for a part
    that has nothing to train.
    """
    owner: dict[str, OptimizerPart] = {}
    path_lists = []
    for part in parts:
        matching = chosen(part.patterns, paths, f"{part.source}: on()") if paths else ()
        part_paths = [path for path in matching if path in trained]
        for path in part_paths:
            other = owner.setdefault(path, part)
            if other is not part:
                raise CompileError(
                    f"{part.source}: parameter {path!r} is claimed by {part.patterns!r} here and by"
                    f" {other.patterns!r} at {other.source}; one optimizer can train it: take it"
                    f" out of the other with '!{path}'"
                )
        if not part_paths and len(parts) > 1:
            raise CompileError(
                f"{part.source}: every parameter that {part.patterns!r} matches is frozen or"
                " excluded by trainable=; leave the part out, or unfreeze() some of them"
            )
        path_lists.append(part_paths)
    return path_lists
