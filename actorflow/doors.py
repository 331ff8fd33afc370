"""The door of public functions and layers: what is annotated as a tensor comes in as one.

The annotations of a function say what it takes. Here they are held against what comes, once for all
functions, so that the functions themselves may take for granted what they say.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from actorflow.tensor import Tensor, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.fusion.expressions import Expression
from compiler.types import DType

F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """Let in what the annotations of a function say; else raise CompileError with the user's line.

    Arrays become tensors, and so does a number where the first argument is a tensor; other numbers
    stay, as they take the dtype of whatever they meet. Wrong numbers of arguments are Python's to
    refuse, but for `sbp`, which some layers take and others do not.
    """
    parameters = [*inspect.signature(function).parameters.values()]
    operands = [p for p in parameters if p.name != "self"]
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = next((p.name for p in operands if p.kind is p.VAR_POSITIONAL), "")
    checks: dict[str, _Door] = {}
    for parameter in operands:
        annotation = str(parameter.annotation)
        kind = _KINDS.get(annotation.removesuffix(" | None"))
        if kind is not None:
            what = f"{_name(function)} expected {kind.expected} as {parameter.name}"
            is_first, is_optional = parameter is operands[0], annotation.endswith(" | None")
            checks[parameter.name] = _Door(kind, what, is_first, is_optional)
    takes_all = any([p.kind is p.VAR_KEYWORD or p.name == "sbp" for p in operands])
    is_without_sbp = function.__name__ == "__init__" and not takes_all
    if not checks and not is_without_sbp:
        return function

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if any([isinstance(a, Expression) for a in args]):  # in the program of an op of one's own
            return function(*args, **kwargs)
        if is_without_sbp and "sbp" in kwargs:
            _refuse_sbp(type(args[0]).__name__)
        given = list(args)
        for place, value in enumerate(args):
            check = checks.get(places[place] if place < len(places) else rest)
            if check is not None:
                given[place] = check(value)
        for name, value in kwargs.items():
            if name in checks:
                kwargs[name] = checks[name](value)
        return function(*given, **kwargs)

    return called  # type: ignore[return-value]  # of the same signature


def _refuse_sbp(layer: str) -> NoReturn:
    raise CompileError(
        f"{find_source()}: {layer} takes no sbp=; say how its parameters lie afterwards, such as"
        ' layer.weight.sbp = {"model": af.split(0)}'
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
