"""Attributes of a node: an immutable, hashable mapping of names to plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

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
        """Return an int attribute."""
        return cast("int", self._data[key])

    def float_(self, key: str) -> float:
        """Return a float attribute."""
        return cast("float", self._data[key])

    def bool_(self, key: str) -> bool:
        """Return a bool attribute."""
        return cast("bool", self._data[key])

    def str_(self, key: str) -> str:
        """Return a str attribute."""
        return cast("str", self._data[key])

    def ints(self, key: str) -> tuple[int, ...]:
        """Return a tuple-of-int attribute."""
        return cast("tuple[int, ...]", self._data[key])


NO_ATTRS = Attrs()
