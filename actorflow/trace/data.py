"""Reading plain data: arrays, containers, and what tells its content only as a whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from actorflow.nn.module import Module
from actorflow.nn.parameter import Stored
from actorflow.trace.classes import read_object
from actorflow.trace.guard import array_digest
from actorflow.trace.reading import ATOMS, Reading

_ATOMS = frozenset(ATOMS)
_MOST_ROWS = 100
"""Plain items of a container that have rows of their own; of more there is one row for all."""

_PLAIN_CONTAINERS = (list, tuple, dict, set, frozenset, MappingProxyType)


def read_array(reading: Reading, what: str, value: np.ndarray[Any, Any]) -> None:
    """Read an array: its type and a hash of its bytes."""
    kind = f"{value.dtype}{list(value.shape)}"
    if value.dtype.hasobject:
        read_content(reading, what, value, value.tolist)
    elif isinstance(value, np.memmap) and not value.flags.writeable:
        reading.row(what, f"{kind} of {value.filename} at {value.offset}")
    else:
        digest = array_digest(value)
        reading.row(what, f"{kind} {digest:016x}")
        reading.guard.array(value, digest)


def read_container(reading: Reading, what: str, value: Any, key: str) -> None:
    """Read a list, tuple, mapping or set with its items, and with what a subclass adds."""
    if isinstance(value, MappingProxyType):
        reading.row(what, "mappingproxy")
        reading.visit(what, gc.get_referents(value)[0], key)
    elif isinstance(value, dict):
        _read_mapping(reading, what, value, key)
    elif isinstance(value, (set, frozenset)):
        _read_set(reading, what, value, key)
    elif isinstance(value, (list, tuple)):
        reading.row(what, f"{type(value).__name__} of {len(value)}")
        if isinstance(value, list):
            reading.guard.items(value)
        items = [*(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value))]
        if _is_table(items):
            reading.row(f"the items of {what}", _content_hash(items))
            items = []
        for index, item in enumerate(items):
            reading.visit(_inside(what, item, index), item, key)
    if type(value) not in _PLAIN_CONTAINERS:
        read_object(reading, what, value)


def _is_table(items: list[Any]) -> bool:
    """Whether there are so many plain items that each of them is not worth a row."""
    return len(items) > _MOST_ROWS and set(map(type, items)) <= _ATOMS


def _content_hash(items: list[Any]) -> str:
    return (
        f"{len(items)} with hash {xxhash.xxh3_64_hexdigest(repr(items).encode(errors='replace'))}"
    )


def _read_mapping(reading: Reading, what: str, value: dict[Any, Any], key: str) -> None:
    reading.row(what, f"{type(value).__name__} of {len(value)}")
    reading.guard.mapping(value)
    if _is_table([*dict.keys(value), *dict.values(value)]):
        reading.row(f"the items of {what}", _content_hash([*dict.items(value)]))
        return
    for name, item in dict.items(value):
        if type(name) not in ATOMS:
            reading.visit(f"a key of {what}", name, key)
        reading.visit(_inside(what, item, name), item, name if type(name) is str else key)


def _read_set(reading: Reading, what: str, value: Any, key: str) -> None:
    is_plain = all([type(item) in ATOMS for item in value])

    def read() -> list[str]:
        return sorted([reading.digest(item) for item in value])

    if is_plain:
        reading.guard.items(value)
        reading.row(what, f"{type(value).__name__} {sorted(map(repr, value))}")
        return
    try:
        read_content(reading, what, value, read)
    except TypeError:
        reading.cannot(what, value, key)


def read_content(reading: Reading, what: str, value: object, parts: Callable[[], object]) -> None:
    """Read what only its parts tell about; to compare it they are read again each time.

    Raises TypeError where a part cannot be compared.
    """
    text = reading.digest(parts())
    reading.row(what, f"{type(value).__qualname__} {text}")
    reading.guard.content(lambda: reading.digest(parts()), text)


def reduced(value: Any) -> object:
    """Return what a copy of an object would be made of.

    Raises whatever an object raises that cannot be copied.
    """
    made = value.__reduce_ex__(4)
    if isinstance(made, str):
        return made
    return [made[1], *made[2:3], *[part and list(part) for part in made[3:5]]]


def _inside(what: str, item: object, key: object) -> str:
    """Return how an item is reached: as in the path of a parameter, or as Python writes it."""
    if isinstance(item, (Module, Stored)):
        return f"{what}.{key}"
    return f"{what}[{key!r}]" if type(key) in ATOMS else f"{what}[{type(key).__qualname__}]"
