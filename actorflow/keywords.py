"""Functions whose keywords are the fields of a value object, which states them once.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class FitOptions:
        steps: int
        keep_last: int = 3

    @takes(FitOptions)
    def fit(self, options: FitOptions) -> FitResult: ...

    runner.fit(steps=100)

Signature (at run time and for type checkers), defaults, help text and checks come from the class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from compiler.errors import CompileError

P = ParamSpec("P")
Self = TypeVar("Self")
First = TypeVar("First")
Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Count:
    """A field that is an integer between two, both included."""

    least: int
    most: int

    def expected(self, value: Any) -> str:
        """Return what was expected where a value is something else, or nothing."""
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if is_integer and self.least <= value <= self.most:
            return ""
        return f"an integer of {self.least} or more, and at most {self.most:,}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A field that is one of a few values."""

    values: tuple[object, ...]

    def expected(self, value: Any) -> str:
        """Return what was expected where a value is something else, or nothing."""
        # By type too: 1 is no True.
        if any([type(value) is type(known) and value == known for known in self.values]):
            return ""
        known = [repr(value) for value in self.values]
        return " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"


def check_fields(options: Any, where: object, owner: str = "") -> None:
    """Raise CompileError, with the user's line, for a field that its rule does not allow.

    A rule stands in the metadata of the field. `owner` says whose options they are.
    """
    for field in fields(options):
        rule, value = field.metadata.get("rule"), getattr(options, field.name)
        if rule is None or value is field.default:  # which may be None, for what is left out
            continue
        if expected := rule.expected(value):
            raise CompileError(f"{where}: {field.name}{owner} must be {expected}, got {value!r}")


@overload
def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Self, Options], Result]], Callable[Concatenate[Self, P], Result]]: ...


@overload
def takes(
    options: Callable[P, Options], first: type[First]
) -> Callable[
    [Callable[[Self, First, Options], Result]], Callable[Concatenate[Self, First, P], Result]
]: ...


def takes(options: Any, first: Any = None) -> Any:
    """Have a method take the arguments of a value object in place of the object, its last argument.

    `first` is the type of one argument before them, where there is one.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        own = list(signature(method).parameters.values())[:-1]
        asked = signature_with(own, options)

        @wraps(method)
        def call(*unnamed: Any, **named: Any) -> Any:
            given = arguments_of(method.__name__, asked, unnamed, named)
            leading = [given.pop(parameter.name) for parameter in own]
            return method(*leading, options(**given))

        return describe(call, asked, options)

    return decorate


def signature_with(own: list[Parameter], options: Callable[..., Any]) -> Signature:
    """Return the signature of some parameters and then those of a value object."""
    return Signature([*own, *signature(options).parameters.values()])


def arguments_of(
    name: str, asked: Signature, unnamed: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name. Raises TypeError, as a call of a function does."""
    try:
        return asked.bind(*unnamed, **named).arguments
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def describe(call: Callable[..., Any], asked: Signature, options: type) -> Callable[..., Any]:
    """Have `help` and `inspect` show what a function takes; return the function."""
    call.__signature__ = asked  # type: ignore[attr-defined]  # the place that inspect reads
    call.__doc__ = f"{cleandoc(call.__doc__ or '')}\n\n{cleandoc(options.__doc__ or '')}"
    return call
