"""Values of options as users write them: checked fields, patterns over paths, sizes in bytes.

`accepts_options` gives a function the fields of a value object as keywords. Signature (at run time
and for type checkers), defaults, help text and checks come from the class, which states them once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class RunSpec:
        steps: int
        keep_last: int = 3

    @accepts_options(RunSpec)
    def fit(self, run_spec: RunSpec) -> FitResult: ...

    runner.fit(steps=100)

A pattern, such as "head.*" or "!*.bias", is a glob over paths of parameters: `*` stands for any
letters, dots too, `?` for one, `[ab]` for one of some. One that begins with "!" takes out what it
matches. Of several that match a path the last decides, and a list that begins with "!" begins with
every path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from compiler.contract.errors import CompileError

P = ParamSpec("P")
Self = TypeVar("Self")
First = TypeVar("First")
Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class IntRange:
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
class OneOfValues:
    """A field that is one of a few values."""

    values: tuple[object, ...]

    def expected(self, value: Any) -> str:
        """Return what was expected where a value is something else, or nothing."""
        # By type too: 1 is no True.
        if any([type(value) is type(known) and value == known for known in self.values]):
            return ""
        texts = [repr(value) for value in self.values]
        return " or ".join(texts) if len(texts) == 2 else f"one of {', '.join(texts)}"


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
def accepts_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[Self, Options], Result]], Callable[Concatenate[Self, P], Result]]: ...


@overload
def accepts_options(
    options: Callable[P, Options], first: type[Any]
) -> Callable[
    [Callable[[Self, First, Options], Result]], Callable[Concatenate[Self, First, P], Result]
]: ...


def accepts_options(options: Any, first: Any = None) -> Any:
    """Decorate a method so that it takes the fields of its last argument, a value object.

    `first` says that there is one argument before them, of the type that the method gives it.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(signature(method).parameters.values())[:-1]
        call_signature = signature_with(parameters, options)

        @wraps(method)
        def call(*unnamed: Any, **named: Any) -> Any:
            arguments = arguments_of(method.__name__, call_signature, unnamed, named)
            leading = [arguments.pop(parameter.name) for parameter in parameters]
            return method(*leading, options(**arguments))

        return describe(call, call_signature, options)

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
    """Set the signature and docstring that `help` and `inspect` show; return the function."""
    call.__signature__ = asked  # type: ignore[attr-defined]  # the place that inspect reads
    call.__doc__ = f"{cleandoc(call.__doc__ or '')}\n\n{cleandoc(options.__doc__ or '')}"
    return call


Patterns = str | Sequence[str]


def wrong_patterns(given: object) -> str:
    """Return what is wrong with what should be patterns; nothing where they are."""
    patterns = [given] if isinstance(given, str) else given
    is_list = isinstance(patterns, (list, tuple)) and bool(patterns)
    if is_list and all([isinstance(p, str) and p.strip("!") for p in patterns]):  # type: ignore[attr-defined]  # a list
        return ""
    return f"a pattern over paths, such as 'head.*', or a list of some, got {given!r}"


def chosen(
    patterns: Patterns, paths: Sequence[str], what: str, kind: str = "parameter"
) -> tuple[str, ...]:
    """Return the paths that patterns choose, in the order of `paths`.

    Raises CompileError, which begins with `what`, for a pattern that matches no path. `kind` is
    what the paths are of.
    """
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    # A list that begins with an exclusion begins with all paths; later patterns win.
    choice = dict.fromkeys(paths, listed[0].startswith("!"))
    for pattern in listed:
        glob = pattern.removeprefix("!")
        matched = [path for path in paths if fnmatchcase(path, glob)]
        if not matched:
            raise CompileError(
                f"{what}: pattern {pattern!r} matches no {kind}; {_near(glob, paths, kind)}"
            )
        choice.update(dict.fromkeys(matched, not pattern.startswith("!")))
    return tuple([path for path, is_chosen in choice.items() if is_chosen])


def _near(glob: str, paths: Sequence[str], kind: str) -> str:
    below = [path for path in paths if fnmatchcase(path, f"{glob}.*")]
    if below:
        return f"write {glob + '.*'!r} for the {kind}s below it"
    near = get_close_matches(glob, paths, cutoff=0.4) or paths[:3]
    return f"there is {', '.join(map(repr, near))}" if near else "the model has none"


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}

_MOST = 1 << 60
"""A larger budget is a slip of the keyboard."""


def parse_bytes(size: object) -> int:
    """Return a size in bytes: an integer as it is, a string as number and unit.

    Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024); case and
    blanks do not matter. Fractions of a byte are cut off.

    Raises:
        ValueError: it is neither, not above 0, or 2^60 bytes or more; the text says what came.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"expected bytes as an integer or a string such as '600MiB', got {size!r}")
    if isinstance(size, int):
        num_bytes = size
    else:
        match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = match.group(2).upper() if match else None
        if match is None or unit not in _UNITS:
            raise ValueError(
                f"expected a number with one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, got {size!r}"
            )
        # A Fraction is exact: int() would cut a float that lies just below a whole number.
        num_bytes = int(Fraction(match.group(1).replace("_", "")) * _UNITS[unit or ""])
    if not 0 < num_bytes < _MOST:
        raise ValueError(f"expected more than 0 and less than 2^60 bytes, got {size!r}")
    return num_bytes
