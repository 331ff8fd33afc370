"""Typed readers of attribute values."""

from __future__ import annotations

from actors.kernels.kernel import Attrs
from compiler.errors import InternalError
from compiler.fusion.program import FusedProgram
from compiler.fusion.region import Region
from compiler.plan import AttrValue


def number(attrs: Attrs, name: str) -> float:
    """Return a real attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number", value)
    return float(value)


def integer(attrs: Attrs, name: str) -> int:
    """Return an integer attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "an int", value)
    return value


def text(attrs: Attrs, name: str) -> str:
    """Return a text attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, str):
        raise _wrong(name, "a str", value)
    return value


def flag(attrs: Attrs, name: str) -> bool:
    """Return a boolean attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, bool):
        raise _wrong(name, "a bool", value)
    return value


def integers(attrs: Attrs, name: str) -> tuple[int, ...]:
    """Return a tuple of ints. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, tuple):
        raise _wrong(name, "a tuple of ints", value)
    found = tuple([item for item in value if isinstance(item, int)])
    if len(found) != len(value):
        raise _wrong(name, "a tuple of ints", value)
    return found


def fused_program(attrs: Attrs, name: str) -> FusedProgram:
    """Return a program. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, FusedProgram):
        raise _wrong(name, "a program", value)
    return value


def region(attrs: Attrs, name: str) -> Region:
    """Return a region. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, Region):
        raise _wrong(name, "a region", value)
    return value


def _present(attrs: Attrs, name: str) -> AttrValue:
    if name not in attrs:
        raise InternalError(f"attribute {name!r} is missing; there are {sorted(attrs)}")
    return attrs[name]


def _wrong(name: str, expected: str, value: AttrValue) -> InternalError:
    return InternalError(f"attribute {name!r} should be {expected}, not {value!r:.60}")
