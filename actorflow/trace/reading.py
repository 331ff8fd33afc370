"""What a walk over the things that a trace may read has found so far.

Rows (what, value) of plain text decide whether two traces read the same; a `Guard` holds the
objects behind them. A walk is one `Reading`; how each kind of object is walked over is said in
`data`, `classes` and `functions`, and `walk` puts them together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import PurePath
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from actorflow.nn.parameter import Stored
from actorflow.trace.guard import Guard
from compiler.types import TensorType

Row = tuple[str, str]

ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_BY_TEXT = (
    *(np.number, np.bool_, np.character, np.datetime64, np.dtype, np.ufunc),
    *(range, slice, PurePath, TensorType),
)
"""What cannot change: its text says all. (A record of a structured array can.)"""

_LONG = 100
"""Characters of a text that are shown; a longer one is told by its hash."""

_DEEPEST = 8
"""Readings inside readings: parts of parts of what can only be compared as a whole."""


class Reading:
    """One walk: `visit` each thing to begin with, then use the attributes.

    Args:
        walk: reads one object.
        called: code of the functions that traces have called, where that is known: what others
            would look up is of no concern, as long as nobody calls them.
        depth: readings around this one.

    Attributes:
        rows: (what, value), in order of the walk.
        guard: the objects behind the rows.
        generators: (what, random generator) of the user that were met.
        names: what the user's code that was met names: globals, attributes, variables.
        codes: code of the user's functions that were met.
        modules: modules that were met.
        done: marks of what the walkers have been at, for the walkers.
    """

    def __init__(
        self,
        walk: Callable[[Reading, str, Any, str], None],
        called: frozenset[CodeType] | None = None,
        depth: int = 0,
    ) -> None:
        self.rows: list[Row] = []
        self.guard = Guard()
        self.generators: list[tuple[str, Any]] = []
        self.names: set[str] = set()
        self.codes: list[CodeType] = []
        self.modules: list[ModuleType] = []
        self.done: set[object] = set()
        self.called = called
        self._walk = walk
        self._depth = depth
        self._kept: list[object] = []
        self._first: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._opaque: list[tuple[str, str, str]] = []

    def row(self, what: str, value: str) -> None:
        """Add a fact."""
        self.rows.append((what, value))

    def visit(self, what: str, value: Any, key: str = "") -> None:
        """Walk over `value`, which is reached as `what`; `key` is the name that code has for it.

        What is reached twice says so: sharing is part of what a trace reads. For a tuple it makes
        no difference.
        """
        if type(value) in ATOMS:
            self.row(what, shown(repr(value)))
        elif isinstance(value, _BY_TEXT):
            self.row(what, shown(f"{type(value).__name__} {value!r}"))
        elif (first := self._first.get(id(value))) is not None:
            is_parameter = isinstance(value, Stored)
            self.row(f"parameter {what!r}" if is_parameter else what, f"the same as {first}")
        else:
            if not isinstance(value, tuple):
                self._first[id(value)] = what or "the model"
            self.keep(value)
            self._walk(self, what, value, key)

    def keep(self, value: object) -> None:
        """Keep an object as long as this reading, or the id of a temporary one comes again."""
        self._kept.append(value)

    def label(self, value: type) -> str:
        """Return a name for a class that no other class of this walk has."""
        name = self._labels.get(id(value))
        if name is None:
            self.keep(value)
            name = short_name(value)
            if name in self._labels.values():
                name = f"{name} (another, {len(self._labels)})"
            self._labels[id(value)] = name
        return name

    def cannot(self, what: str, value: object, key: str) -> None:
        """Note what has no content to compare."""
        kind = type(value).__qualname__
        self.row(what, f"some {kind}")
        self._opaque.append((what if " " in what else f"attribute {what!r}", key, kind))

    @property
    def opaque(self) -> tuple[str, ...]:
        """What the user's code names and cannot be compared, each with its kind."""
        named = [f"{what} ({kind})" for what, key, kind in self._opaque if key in self.names]
        return tuple(dict.fromkeys(named))

    def digest(self, value: Any) -> str:
        """Return a hash of the content of a value. Raises TypeError where it has none to read."""
        if self._depth >= _DEEPEST:
            raise TypeError("too deep to compare")
        inner = Reading(self._walk, self.called, self._depth + 1)
        inner.visit("", value)
        if inner._opaque:
            raise TypeError(f"{inner._opaque[0][0]} cannot be compared")
        return digest_of(inner.rows)


def digest_of(rows: list[Row]) -> str:
    """Return a hash of rows."""
    return hashlib.blake2b(repr(rows).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def shown(text: str) -> str:
    """Return a text, the end of a long one as its hash."""
    if len(text) <= _LONG:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{text[:_LONG]}... {digest}"


def short_name(value: Any) -> str:
    """Return the name of a class or function without those of the functions it was made in."""
    return str(value.__qualname__).rpartition("<locals>.")[2]
