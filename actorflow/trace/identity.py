"""Facts about objects that are neither hashable nor ours, kept only as long as the objects live."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """A map from objects to values, by identity; an entry goes when its object does.

    A model may be a dataclass, which is not hashable, and two equal models are still two.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[object], V]] = {}

    def get(self, owner: object) -> V | None:
        """Return the value of an object, or None."""
        entry = self._entries.get(id(owner))
        return None if entry is None else entry[1]

    def set(self, owner: object, value: V) -> V:
        """Set and return the value of an object."""
        key = id(owner)
        entries = self._entries
        self._entries[key] = (weakref.ref(owner, lambda _: entries.pop(key, None)), value)
        return value

    def pop(self, owner: object) -> V | None:
        """Take the value of an object away and return it, or None."""
        entry = self._entries.pop(id(owner), None)
        return None if entry is None else entry[1]


class Memo(ByIdentity[V]):
    """What jobs know about one owner, by job. It is kept in the owner, and no copy of it has it.

    So it goes with its owner also where an entry leads back to it, as a method that a model keeps
    as an attribute does: from elsewhere such an entry would keep the owner alive for good.
    """

    def __init__(self, owner: object) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)

    def belongs_to(self, owner: object) -> bool:
        """Whether it was made for this object."""
        return self._owner() is owner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the owner, deep or from a file, begins without a memo."""
        return type(None), ()
