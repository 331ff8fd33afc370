"""What one walk over the objects of a trace has read: rows of text, and the objects as a guard.

The guard answers a cheap question before each step: is everything still the same object? It holds
what was read, so that no id is used twice, and compares by identity, in loops of C alone: for
settings, children, class attributes, globals, cells and code alike. Whatever differs is looked at
again in full; a guard may say no without need, and never yes without truth. Equality would not do:
1, 1.0 and True are equal, and so are two lists of which the old one is watched.

What the containers hold comes from the garbage collector's own walk, `gc.get_referents`: one call
for all of them, at a sixth of the time of iterating over each (70 values: 0.45 instead of 2.5 us).
Arrays have no identity of their content: each is hashed, about 0.1 ms per MiB.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import xxhash

from actorflow.nn.parameter import ModelTensor
from compiler.contract.types import TensorType

_ATTRIBUTES = attrgetter("__dict__")
_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_IS_FROZEN, _INIT, _LAYOUT = map(attrgetter, ("is_frozen", "init", "_layout"))
_CELL = attrgetter("cell_contents")
_MRO = attrgetter("__mro__")


def array_digest(array: np.ndarray[Any, Any]) -> int:
    """Return a hash of the bytes of an array without objects."""
    if not array.size:
        return 0
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return int(xxhash.xxh3_64_intdigest(flat.data))


_Kind = tuple[np.dtype[Any], tuple[int, ...]]


def _kind(array: np.ndarray[Any, Any]) -> _Kind:
    return array.dtype, array.shape


class Guard:
    """What a trace read, noted while it is walked over; `close` it, then ask `holds`."""

    def __init__(self) -> None:
        self.stamp = object()
        """Stands for this guard where the guard itself would keep too much alive."""
        self._instances: list[object] = []
        self._attributes: list[dict[str, Any]] = []
        self._containers: list[Collection[Any]] = []
        self._keyed: list[Iterable[str]] = []
        self._functions: list[FunctionType] = []
        self._cells: list[CellType] = []
        self._parameters: list[object] = []
        self._classes: list[type] = []
        self._looked_up: dict[int, tuple[Mapping[str, Any], dict[str, None]]] = {}
        self._slots: list[tuple[object, str]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], _Kind, int]] = []
        self._contents: list[tuple[Callable[[], str], str]] = []

    def instance(self, value: object, attributes: dict[str, Any]) -> None:
        """Note an object with its `__dict__`."""
        self._instances.append(value)
        self._attributes.append(attributes)
        self.mapping(attributes)

    def mapping(self, value: Mapping[Any, Any]) -> None:
        """Note a dict, or a view of one: keys, their order, and values."""
        (keyed,) = (value,) if isinstance(value, dict) else gc.get_referents(value)
        self.items(keyed)
        if all([type(key) is str for key in keyed]):  # the walk over the values has other keys too
            self._keyed.append(keyed)

    def items(self, value: Collection[Any]) -> None:
        """Note a list or set."""
        self._containers.append(value)

    def slot(self, value: object, name: str) -> None:
        """Note an attribute that lives in a slot."""
        self._slots.append((value, name))

    def function(self, value: FunctionType) -> None:
        """Note a function: its code, defaults and attributes."""
        self._functions.append(value)
        self.mapping(vars(value))
        if value.__kwdefaults__:
            self.mapping(value.__kwdefaults__)

    def cell(self, value: CellType) -> None:
        """Note a variable that a function closes over."""
        self._cells.append(value)

    def parameter(self, value: object) -> None:
        """Note a parameter: whether it is frozen, its initialiser and layout, but no values."""
        self._parameters.append(value)

    def of_class(self, value: type) -> None:
        """Note a class: its attributes and its bases."""
        self._classes.append(value)
        self.mapping(vars(value))

    def lookup(self, names: Mapping[str, Any], name: str) -> None:
        """Note a name that is looked up in a namespace, whether it is there or missing."""
        self._looked_up.setdefault(id(names), (names, {}))[1][name] = None

    def array(self, value: np.ndarray[Any, Any], digest: int) -> None:
        """Note an array. Its shape and dtype can be set in place, and change none of its bytes."""
        self._arrays.append((value, _kind(value), digest))

    def content(self, read: Callable[[], str], text: str) -> None:
        """Note what can only be compared by reading it again."""
        self._contents.append((read, text))

    def close(self) -> Guard:
        """Take the picture that `holds` compares with; return the guard."""
        self._types = list(map(type, self._instances))
        self._lengths = list(map(len, self._containers))
        self._keys = list(chain.from_iterable(self._keyed))
        self._names = [(tuple(names), space) for space, names in self._looked_up.values()]
        # One call into C returns all items of all containers, and keeps them: `is` then cannot
        # mistake a new object for a freed one with the same id.
        self._held = gc.get_referents(*self._containers)
        self._rest = list(self._read_rest())
        return self

    def holds(self) -> bool:
        """Whether all is as it was. False as well where that cannot be told."""
        try:
            return (
                # Cheapest first; maps over C functions, since this runs before every step.
                list(map(type, self._instances)) == self._types
                and all(map(is_, map(_ATTRIBUTES, self._instances), self._attributes))
                and list(map(len, self._containers)) == self._lengths
                and list(chain.from_iterable(self._keyed)) == self._keys
                and all(map(is_, gc.get_referents(*self._containers), self._held))
                and all(map(is_, self._read_rest(), self._rest))
                and all([_kind(a) == k and array_digest(a) == d for a, k, d in self._arrays])
                and all([reader() == text for reader, text in self._contents])
            )
        except Exception:  # a slot or cell that is empty now, a property of the user that raises
            return False

    def _read_rest(self) -> Iterator[object]:
        """Return what was read and is in no container, in an order and number that stay."""
        return chain(
            map(_IS_FROZEN, self._parameters),  # a getter of each: a tuple less
            map(_INIT, self._parameters),
            map(_LAYOUT, self._parameters),
            chain.from_iterable(map(_FUNCTION, self._functions)),
            map(_CELL, self._cells),
            map(_MRO, self._classes),
            chain.from_iterable([map(s.get, names, repeat(_MISSING)) for names, s in self._names]),
            [getattr(value, name, _MISSING) for value, name in self._slots],
        )


_MISSING = object()
"""In place of a name or slot that has no value."""


# Rows (what, value) of plain text decide whether two traces read the same; a `Guard` holds the
# objects behind them. How each kind of object is walked over is in dependency_scan.py.

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


class DependencyScan:
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
        walk: Callable[[DependencyScan, str, Any, str], None],
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
        # By id, which is unique while `keep` holds the object.
        elif (first := self._first.get(id(value))) is not None:
            is_parameter = isinstance(value, ModelTensor)
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
        inner = DependencyScan(self._walk, self.called, self._depth + 1)
        inner.visit("", value)
        # Whoever asks for a digest compares by it alone, so a part without content is an error
        # here.
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
