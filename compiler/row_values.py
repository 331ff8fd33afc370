"""Single values of a row, read back: each of the type that is wanted, and within its bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

Convert = Callable[[Any], Any]

_NUMBERS = (int, float)

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a number: the least and the largest it may be. Of an int they hold exactly."""

    low: float
    high: float


class WrongValue(Exception):
    """What came in place of what; the way to it grows while it passes through the readers."""

    def __init__(self, value: object, expected: str) -> None:
        super().__init__()
        self.said = f"is {shown(value)}, expected {expected}"
        self.way = ""


def member_of(cls: type[Enum]) -> Convert:
    """Return the reader of the value of an enum."""
    members = {member.value: member for member in cls}

    def member_of(item: Any) -> Enum:
        found = members.get(item) if type(item) is str else None
        if found is None:
            raise WrongValue(item, f"one of {', '.join(members)}")
        return found

    return member_of


def int_in(bounds: Bounds | None, item: Any) -> int:
    """Return a whole number within bounds. Raises WrongValue."""
    if type(item) is not int:
        raise WrongValue(item, "a whole number")
    if bounds is not None and not bounds.low <= item <= bounds.high:
        raise WrongValue(item, f"a whole number from {bounds.low} to {bounds.high}")
    return item


def float_in(bounds: Bounds | None, item: Any) -> float:
    """Return a finite number within bounds. Raises WrongValue."""
    if type(item) not in _NUMBERS or not math.isfinite(item):
        raise WrongValue(item, "a finite number")
    if bounds is not None and not bounds.low <= item <= bounds.high:
        raise WrongValue(item, f"a number from {bounds.low} to {bounds.high}")
    return cast("float", item)


def number(item: Any) -> int | float:
    """Return a number. Raises WrongValue."""
    if type(item) not in _NUMBERS:
        raise WrongValue(item, "a number")
    return cast("int | float", item)


def text(item: Any) -> str:
    """Return a text without control characters. Raises WrongValue."""
    if type(item) is not str:
        raise WrongValue(item, "a text")
    if not item.isprintable() and _CONTROL.search(item):
        raise WrongValue(item, "a text without control characters")
    return item


def flag(item: Any) -> bool:
    """Return true or false. Raises WrongValue."""
    if type(item) is not bool:
        raise WrongValue(item, "true or false")
    return item


def bytes_(item: Any) -> bytes:
    """Return bytes. Raises WrongValue."""
    if type(item) is not bytes:
        raise WrongValue(item, "bytes")
    return item


def shown(value: object) -> str:
    """Return a value in a few words, whatever it is."""
    if isinstance(value, tuple):
        return f"a sequence of {len(value)}"
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    said = ascii(value)
    return said if len(said) <= 60 else f"{said[:60]}..."
