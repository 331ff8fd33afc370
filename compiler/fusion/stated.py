"""Functions that a definition states: what they take, what attributes they have, calling them.

The program of an op, a gradient of its own, the types of an op of numpy: functions of somebody
else. What is wrong with one is told as an `OpTypeError`, with the line of it where there is one.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from compiler.attrs import AttrValue
from compiler.errors import ActorflowError
from compiler.fusion.expressions import plain
from compiler.registry import OpTypeError

P = ParamSpec("P")
R = TypeVar("R")

Function = Callable[..., Any]
"""Operands, and attributes by keyword -> one result, or a tuple of them."""

Settings = dict[str, AttrValue]
"""Attributes by name."""


_REMEMBERED: list[Any] = []

FOREIGN: list[object] = []
"""Definitions of somebody whose functions may read what changes, as a global of a notebook."""


def remembered(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that keeps what follows from definitions, until `forget` is called."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        made = lru_cache(maxsize=most)(function)
        _REMEMBERED.append(made)
        return made  # type: ignore[return-value]  # mypy knows nothing of its parameters

    return decorate


def forget() -> None:
    """Let functions of definitions run again, where there are such as may give something else.

    For a job that is traced: then it is seen what they read, and a change of it is a change of the
    job.
    """
    if FOREIGN:
        for made in _REMEMBERED:
            made.cache_clear()


@dataclass(frozen=True, slots=True)
class Attribute:
    """A keyword-only argument of a function."""

    name: str
    type: type
    default: AttrValue
    is_required: bool


_TYPES: dict[object, type] = {t.__name__: t for t in (int, float, bool, str)}


def parameters_of(function: object) -> list[inspect.Parameter]:
    """Return what a function takes. Raises OpTypeError for what is no function, or does not say."""
    try:
        return list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]  # told
    except (TypeError, ValueError):
        raise OpTypeError(
            f"needs a function written in Python, got {function!r:.60}; wrap it in a lambda"
        ) from None


def attributes_of(function: Function) -> tuple[Attribute, ...]:
    """Return the keyword-only arguments of a function. Raises OpTypeError for a strange default."""
    found: list[Attribute] = []
    for p in parameters_of(function):
        if p.kind is not p.KEYWORD_ONLY:
            continue
        is_required = p.default is p.empty
        default = None if is_required else plain(p.default)
        _expect_plain(p.name, default)
        typed = object if default is None else type(default)
        named = str(getattr(p.annotation, "__name__", p.annotation))  # a text, in most files
        found.append(Attribute(p.name, _TYPES.get(named, typed), default, is_required))
    return tuple(found)


def settings_of(attributes: tuple[Attribute, ...], attrs: Mapping[str, Any]) -> Settings:
    """Return every attribute, defaults put in. Raises OpTypeError for wrong ones."""
    known = sorted([a.name for a in attributes])
    for name in attrs:
        if name not in known:
            raise OpTypeError(
                f"knows no attribute {name!r}; it has {known}: what its function takes by keyword"
                " only, after a *. Operands are given by position"
            )
    return {a.name: _checked(a, attrs) for a in attributes}


def _checked(attribute: Attribute, attrs: Mapping[str, Any]) -> AttrValue:
    if attribute.name not in attrs:
        if attribute.is_required:
            raise OpTypeError(f"needs the attribute {attribute.name!r}")
        return attribute.default
    value: AttrValue = attrs[attribute.name]
    _expect_plain(attribute.name, value)
    wanted = (int, float) if attribute.type is float else (attribute.type,)
    if attribute.type is not object and type(value) not in wanted:
        raise OpTypeError(
            f"needs {attribute.name} of type {attribute.type.__name__}, got {value!r:.60}"
        )
    return value


def _expect_plain(name: str, value: object) -> None:
    """Check that a plan, which may become a file, can hold an attribute."""
    if type(value) is tuple:
        for item in value:
            _expect_plain(name, item)
    elif type(value) not in (int, float, bool, str, bytes, type(None)) or (
        type(value) is int and not -(2**63) <= value < 2**64
    ):
        raise OpTypeError(
            f"needs {name} as a number of 64 bits, a bool, a text or a tuple of such, got"
            f" {value!r:.60} of type {type(value).__name__}"
        )


def expect_takes(function: Function, names: Sequence[str], what: str) -> None:
    """Check that a function can be called with one operand for each name."""
    found = inspect.signature(function)
    needed = {a.name: None for a in attributes_of(function) if a.is_required}
    try:
        found.bind(*names, **needed)
    except TypeError as error:
        raise OpTypeError(
            f"has a {what} of {found}, which cannot be called with ({', '.join(names)}): {error}"
        ) from None


def results_of(
    says: str, function: Function, *operands: object, **named: object
) -> tuple[Any, ...]:
    """Call a function; return what it returns as a tuple.

    Raises OpTypeError, which begins with `says`, naming the line where the function failed.
    """
    try:
        made = function(*operands, **named)
    except (ActorflowError, OpTypeError):
        raise
    except Exception as error:
        code = getattr(function, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        where = ""
        if isinstance(code, CodeType):
            own = [f.lineno for f in frames if f.filename == code.co_filename]
            where = f" at {code.co_filename}:{own[-1] if own else code.co_firstlineno}"
        raise OpTypeError(f"{says}fails{where}: {type(error).__name__}: {error}") from error
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


@dataclass(frozen=True, slots=True, eq=False)
class OwnGradient:
    """A gradient that is stated: a function of what it takes by name."""

    function: Function
    takes: tuple[str, ...]
    attributes: tuple[str, ...]

    def results(
        self, values: Mapping[str, Any], settings: Settings, operands: Sequence[str]
    ) -> tuple[Any, ...]:
        """Return its results, one per operand. Raises OpTypeError for another number of them."""
        for name in self.takes:
            if name not in values:
                raise OpTypeError(f"takes {name!r}; it may take {', '.join(sorted(values))}")
        named = {n: values[n] for n in self.takes} | {n: settings[n] for n in self.attributes}
        made = results_of("", self.function, **named)
        if len(made) != len(operands):
            each = ", ".join(operands)
            raise OpTypeError(f"returns {len(made)} results, expected one for each of ({each})")
        return made


def read_gradient(
    function: Function,
    values: Sequence[str],
    outputs: Sequence[str],
    attributes: tuple[Attribute, ...],
) -> OwnGradient:
    """Return a gradient that takes by name `values`, gradients of `outputs` and attributes.

    Raises OpTypeError where it takes anything else, or no gradient.
    """
    grads = [f"d{name}" for name in outputs]
    settings = sorted([a.name for a in attributes])
    takes: list[str] = []
    own: list[str] = []
    for p in parameters_of(function):
        is_setting = p.kind is p.KEYWORD_ONLY
        known = settings if is_setting else sorted({*values, *grads})
        if p.name in known and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            (own if is_setting else takes).append(p.name)
        elif p.default is p.empty:  # what has a default is the function's own business
            kind = "the attribute " if is_setting else ""
            listed = ", ".join(known) or "none"
            raise OpTypeError(f"has a gradient that takes {kind}{p.name!r}; it may take {listed}")
    if not {*takes} & {*grads}:
        raise OpTypeError(
            f"has a gradient that takes no output's gradient; it may take {', '.join(grads)}"
        )
    return OwnGradient(function, tuple(takes), tuple(own))
