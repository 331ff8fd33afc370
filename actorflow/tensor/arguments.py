"""The arguments of public functions and layers, held against their annotations.

It is done in one place, so that they may take for granted what their annotations say: what is
annotated as a tensor is one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.language.expressions import Expression

F = TypeVar("F", bound=Callable[..., Any])


class Parameters(NamedTuple):
    """What a function takes: names in order, and annotations as texts.

    `rest` is the name of `*args`, or nothing; `takes_any_name` says whether there is `**kwargs`.
    """

    by_place: tuple[str, ...]
    by_name: tuple[str, ...]
    rest: str
    takes_any_name: bool
    annotations: Mapping[str, Any]


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return what a function written in Python takes; of one that wraps another, what that takes.

    `inspect.signature` says the same in ten times the time, a seventh of importing actorflow. It is
    asked about those few that state a signature which is not that of their code.
    """
    inner: Any = inspect.unwrap(function, stop=_states_signature)
    if _states_signature(inner):
        return _stated(inspect.signature(inner))
    code = inner.__code__
    num_by_place, num_named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    has_rest = bool(code.co_flags & inspect.CO_VARARGS)
    return Parameters(
        code.co_varnames[:num_by_place],
        code.co_varnames[num_by_place:num_named],
        code.co_varnames[num_named] if has_rest else "",
        bool(code.co_flags & inspect.CO_VARKEYWORDS),
        inner.__annotations__,
    )


def _states_signature(function: Callable[..., Any]) -> bool:
    return hasattr(function, "__signature__")


def _stated(signature: inspect.Signature) -> Parameters:
    parameters = signature.parameters.values()
    names = {kind: [p.name for p in parameters if p.kind is kind] for kind in _PARAMETER_KINDS}
    return Parameters(
        (*names[_BY_PLACE_ALONE], *names[_BY_PLACE]),
        tuple(names[_BY_NAME]),
        "".join(names[_REST]),
        bool(names[_ANY_NAME]),
        {p.name: p.annotation for p in parameters if p.annotation is not p.empty},
    )


_PARAMETER_KINDS = _BY_PLACE_ALONE, _BY_PLACE, _REST, _BY_NAME, _ANY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


def validate_arguments(function: F) -> F:
    """Let in what the annotations of a function say; else raise CompileError with the user's line.

    Arrays become tensors, and so does a number where the first argument is a tensor; other numbers
    stay, as they take the dtype of whatever they meet. Wrong numbers of arguments are Python's to
    refuse, but for `sbp`, which some layers take and others do not.
    """
    parameters = parameters_of(function)
    places, rest = parameters.by_place, parameters.rest
    names = [*places, *[rest] * bool(rest), *parameters.by_name]
    operands = [name for name in names if name != "self"]
    checks: dict[str, _Door] = {}
    for name in operands:
        annotation = str(parameters.annotations.get(name, ""))
        kind = _KINDS.get(annotation.removesuffix(" | None"))
        if kind is not None:
            what = f"{_name(function)} expected {kind.expected} as {name}"
            is_first, is_optional = name == operands[0], annotation.endswith(" | None")
            checks[name] = _Door(kind, what, is_first, is_optional)
    takes_sbp = parameters.takes_any_name or "sbp" in operands
    is_without_sbp = function.__name__ == "__init__" and not takes_sbp
    if not checks and not is_without_sbp:
        return function

    by_place, num_places = [checks.get(name) for name in places], len(places)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        # Loops and no lists: each call of a trace comes through here, watched by its hook.
        for value in args:
            if isinstance(value, Expression):  # in the program of an op of one's own
                return function(*args, **kwargs)
        if is_without_sbp and "sbp" in kwargs:
            _refuse_sbp(type(args[0]).__name__)
        positional = list(args)
        for place, value in enumerate(args):
            check = by_place[place] if place < num_places else checks.get(rest)
            if check is not None:
                positional[place] = check(value)
        for name, value in kwargs.items():
            if name in checks:
                kwargs[name] = checks[name](value)
        return function(*positional, **kwargs)

    return called  # type: ignore[return-value]  # of the same signature


def _refuse_sbp(layer: str) -> NoReturn:
    raise CompileError(
        f"{find_source()}: {layer} takes no sbp=; set the SBP of its parameters afterwards, such"
        ' as layer.weight.sbp = {"model": af.split(0)}'
    )


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__call__").removesuffix(".__init__").lstrip("_")


@dataclass(frozen=True, slots=True)
class _Admitted:
    """What an annotation lets in, and how that is called."""

    expected: str
    is_one: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Door:
    """The check of one parameter; `what` begins its error."""

    kind: _Admitted
    what: str
    is_first: bool
    is_optional: bool

    def __call__(self, value: Any) -> Any:
        """Return what comes in for a value. Raises CompileError."""
        if (value is None and self.is_optional) or self.kind.is_one(value):
            return value
        if self.kind is _TENSOR and isinstance(value, (np.ndarray, np.generic)):
            return as_tensor(value)
        if self.kind is _TENSOR and isinstance(value, (bool, int, float)):
            partner = DType.BOOL if isinstance(value, bool) else DType.FLOAT32
            return as_tensor(value, partner) if self.is_first else value
        raise CompileError(f"{find_source()}: {self.what}, got {type(value).__name__}")


_TENSOR = _Admitted(
    "a tensor, a number or a numpy array", lambda value: isinstance(value, (Tensor, Expression))
)
_LIST = _Admitted("a list or tuple", lambda value: isinstance(value, (list, tuple)))

_KINDS = {
    "Tensor": _TENSOR,
    "Sequence[Tensor]": _LIST,
    "Sequence[Index]": _LIST,
    "Module": _Admitted("a module", callable),
    "bool": _Admitted("True or False", lambda value: isinstance(value, (bool, np.bool_, int))),
    "str": _Admitted("a text", lambda value: isinstance(value, str)),
}
"""What is checked, by annotation; whatever else a function says it looks after itself."""
