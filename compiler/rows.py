"""Frozen dataclasses as nested tuples that msgpack carries, and back: how a plan is stored.

A dataclass is a row of its fields in order, an enum its value; a tuple of either is a tuple of
such. Everything else is carried as it is. What has to be done for a class is worked out once from
its hints, so that the many values that need nothing done are never looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from compiler.errors import PlanFormatError

T = TypeVar("T")

Convert = Callable[[Any], Any]


def to_row(value: object) -> object:
    """Return a dataclass as nested tuples of plain values."""
    hint: Any = type(value)
    convert = _writer(hint)
    return value if convert is None else convert(value)


def from_row(cls: type[T], row: object) -> T:
    """Return the dataclass that `to_row` made the row of; sequences in it must be tuples.

    Raises PlanFormatError where the row is of another class.
    """
    hint: Any = cls
    convert = _reader(hint)
    try:
        return cast("T", row if convert is None else convert(row))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanFormatError(f"damaged plan: no {cls.__name__} has such fields: {error}") from None


@functools.cache
def _writer(hint: Any) -> Convert | None:
    """Return what makes a row of a value of this type; None where it is one already."""
    if is_dataclass(hint):
        return _row_of(cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("_value_")  # `value` is a descriptor in Python, five times as slow
    return _of_tuple(hint, _writer)


@functools.cache
def _reader(hint: Any) -> Convert | None:
    """Return what makes a value of this type of a row; None where it is one already."""
    if is_dataclass(hint):
        return _instance_of(cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {member.value: member for member in hint}.__getitem__
    return _of_tuple(hint, _reader)


def _of_tuple(hint: Any, convert_of: Callable[[Any], Convert | None]) -> Convert | None:
    if get_origin(hint) is not tuple:
        return None
    args = get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        convert = convert_of(args[0])
        return None if convert is None else lambda items: tuple([convert(item) for item in items])
    converts = [convert_of(arg) for arg in args]
    return None if all([c is None for c in converts]) else functools.partial(_each, converts)


def _each(converts: list[Convert | None], items: tuple[Any, ...]) -> tuple[Any, ...]:
    pairs = zip(converts, items, strict=True)
    return tuple([item if convert is None else convert(item) for convert, item in pairs])


def _hints(cls: type) -> list[Any]:
    by_name = get_type_hints(cls)
    return [by_name[field.name] for field in fields(cls)]


def _row_of(cls: type) -> Convert:
    names = [field.name for field in fields(cls)]
    get = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    changed = [(i, c) for i, c in enumerate(map(_writer, _hints(cls))) if c is not None]
    if not changed:
        return get

    def row_of(value: Any) -> list[Any]:
        row = list(get(value))
        for index, convert in changed:
            row[index] = convert(row[index])
        return row

    return row_of


def _instance_of(cls: type) -> Convert:
    hints = _hints(cls)
    num_fields = len(hints)
    changed = [(i, c) for i, c in enumerate(map(_reader, hints)) if c is not None]

    def instance_of(row: Any) -> Any:
        if not isinstance(row, tuple) or len(row) != num_fields:
            raise PlanFormatError(f"damaged plan: {cls.__name__} has the wrong number of fields")
        if not changed:
            return cls(*row)
        columns = list(row)
        for index, convert in changed:
            columns[index] = convert(columns[index])
        return cls(*columns)

    return instance_of
