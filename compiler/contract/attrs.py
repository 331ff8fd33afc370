"""Attributes of a node: an immutable, hashable mapping of names to values.

A value is plain (what every file format has), or a `PlanAttribute`: a frozen dataclass, such as the
program of a fused op, that stands there as itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn, TypeVar, cast

from compiler.contract.codec import PlanAttribute, to_msgpack

PlainValue = int | float | bool | str | bytes | None | tuple["PlainValue", ...]
"""What msgpack carries as it is, with tuples for sequences."""

AttrValue = PlainValue | PlanAttribute
"""What an attribute may be."""

S = TypeVar("S", bound=PlanAttribute)


class Attrs(Mapping[str, AttrValue]):
    """An immutable, hashable mapping of attribute names to values, with typed getters.

    Two are equal where a file would hold the same bytes of them: 0.0 is not -0.0, 1 is not True.
    """

    __slots__ = ("_data", "_hash", "_packed")

    def __init__(self, data: Mapping[str, AttrValue] | None = None) -> None:
        self._data = dict(sorted(data.items())) if data else {}
        self._packed: bytes | None = None  # most are never compared
        self._hash: int | None = None

    def __getitem__(self, key: str) -> AttrValue:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def packed(self) -> bytes:
        """What a file holds of them; made once."""
        if self._packed is None:
            self._packed = to_msgpack(list(self._data.items()))
        return self._packed

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.packed)
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Attrs) and self.packed == other.packed)

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

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a tuple-of-str attribute. Raises TypeError for another kind."""
        value = self._data[key]
        if type(value) is not tuple or not all([type(item) is str for item in value]):
            _refuse(key, "a tuple of texts", value)
        return cast("tuple[str, ...]", value)

    def shapes(self, key: str) -> tuple[tuple[int, ...], ...]:
        """Return an attribute that is a tuple of shapes. Raises TypeError for another kind."""
        value = self._data[key]
        if type(value) is not tuple or not all([_is_shape(item) for item in value]):
            _refuse(key, "a tuple of shapes", value)
        return cast("tuple[tuple[int, ...], ...]", value)

    def structure(self, key: str, cls: type[S]) -> S:
        """Return an attribute that is of a class. Raises TypeError for another kind."""
        value = self._data[key]
        return value if isinstance(value, cls) else _refuse(key, f"a {cls.__name__}", value)


def _is_shape(value: AttrValue) -> bool:
    return type(value) is tuple and all([type(n) is int and n >= 0 for n in value])


def _refuse(key: str, expected: str, value: AttrValue) -> NoReturn:
    """Only a plan from elsewhere has such: the builder's callers are typed."""
    raise TypeError(f"attribute {key!r} should be {expected}, not {value!a:.60}")


NO_ATTRS = Attrs()
