"""Attributes of a node: an immutable, hashable mapping of names to plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn, cast

AttrValue = int | float | bool | str | bytes | None | tuple["AttrValue", ...]


class Attrs(Mapping[str, AttrValue]):
    """An immutable, hashable mapping of attribute names to plain values, with typed getters."""

    __slots__ = ("_data", "_hash")

    def __init__(self, data: Mapping[str, AttrValue] | None = None) -> None:
        self._data = dict(sorted(data.items())) if data else {}
        self._hash = hash(tuple(self._data.items()))

    def __getitem__(self, key: str) -> AttrValue:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attrs) and self._data == other._data

    def __repr__(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self._data.items())

    def int_(self, key: str) -> int:
        """Return an int attribute. Raises TypeError for another kind, KeyError for none."""
        value = self._data[key]
        return value if type(value) is int else _refuse(key, "an int", value)

    def float_(self, key: str) -> float:
        """Return a float attribute; an int is one. Raises TypeError for another kind."""
        value = self._data[key]
        if type(value) is not float and type(value) is not int:
            _refuse(key, "a number", value)
        return cast("float", value)

    def bool_(self, key: str) -> bool:
        """Return a bool attribute. Raises TypeError for another kind."""
        value = self._data[key]
        return value if type(value) is bool else _refuse(key, "a bool", value)

    def str_(self, key: str) -> str:
        """Return a str attribute. Raises TypeError for another kind."""
        value = self._data[key]
        return value if type(value) is str else _refuse(key, "a text", value)

    def ints(self, key: str) -> tuple[int, ...]:
        """Return a tuple-of-int attribute. Raises TypeError for another kind."""
        value = self._data[key]
        if type(value) is not tuple or not all([type(item) is int for item in value]):
            _refuse(key, "a tuple of ints", value)
        return cast("tuple[int, ...]", value)


def _refuse(key: str, expected: str, value: AttrValue) -> NoReturn:
    """Only a plan from elsewhere has such: the builder's callers are typed."""
    raise TypeError(f"attribute {key!r} should be {expected}, not {value!a:.60}")


NO_ATTRS = Attrs()
