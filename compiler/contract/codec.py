"""The one codec: frozen dataclasses as plain values, which msgpack or JSON carries, and back.

Two forms. A *row* is a tuple of the fields in order: plans, messages between ranks, what ranks say
of their memory, in msgpack. An *object* is a mapping by the names of the fields: manifests, the
status of a run, what was measured of a machine, in JSON. In both an enum is its value and a tuple
of either is a sequence of such; everything else is carried as it is. The conversion of a class is
derived once from its hints, so that values that need no conversion are never visited on the way
out.

On the way back everything is looked at, for a file may come from anywhere: each value has the type
that its hint names, and lies within the `Bounds` that an `Annotated` hint gives it; a sequence has
the length that such a hint gives it. A row or an object has exactly the fields of its class. Texts
hold no control characters, so that none can draw on a terminal or break out of a line, unless an
`Annotated` hint names a function that takes any text (`Text`). The first value that is wrong is
named with its path from the outermost one: "registers[3].size_bytes". The errors are
`DecodeError`s, which every caller raises as its own.

An attribute of a launch has no hint that says what it is. So a `PlanAttribute` among them is a
mapping with one entry, from its kind to its row; nothing else in a row is a mapping.
"""

from __future__ import annotations

import functools
import json
import marshal
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import UnionType
from typing import (
    Annotated,
    Any,
    NewType,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

Convert = Callable[[Any], Any]

_NUMBERS = (int, float)
_LARGEST = sys.float_info.max

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Also what separates lines or turns their direction, and halves of surrogates."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest value of a number. For an int the comparison is exact."""

    low: float
    high: float


Text = Annotated[str, str]
"""A text of any characters."""

JsonObject = Mapping[Text, Any]
"""What JSON carries, by name: see `plain_json`."""


class DecodeError(Exception):
    """What was read is not what was expected; each reader it passes through extends its path."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return f"{self.path.lstrip('.')} {self.reason}".lstrip()


def unexpected(value: object, expected: str, path: str = "") -> DecodeError:
    """Return the error of a value in place of which something else was expected."""
    return DecodeError(f"is {shown(value)}, expected {expected}", path)


def text_where(is_right: Callable[[str], object], expected: str) -> Callable[[str], str]:
    """Return what an `Annotated` text names, so that others than `expected` are refused."""

    def take(text: str) -> str:
        if not is_right(text):
            raise unexpected(text, expected)
        return text

    return take


# Readers of single values.


def _member_of(members: Mapping[str, Enum], item: Any) -> Enum:
    # Only a str is looked up: a mapping from a broken file has no hash.
    if type(item) is not str or item not in members:
        raise unexpected(item, f"one of {', '.join(members)}")
    return members[item]


def _int_in(bounds: Bounds | None, item: Any) -> int:
    # Exactly int: `isinstance` would let True pass as 1.
    if type(item) is not int:
        raise unexpected(item, "a whole number")
    if bounds is not None and not bounds.low <= item <= bounds.high:
        raise unexpected(item, f"a whole number from {bounds.low} to {bounds.high}")
    return item


def _float_in(bounds: Bounds | None, item: Any) -> float:
    # Compared, for `isfinite` takes no whole number beyond all floats.
    if type(item) not in _NUMBERS or not -_LARGEST <= item <= _LARGEST:
        raise unexpected(item, "a finite number")
    if bounds is not None and not bounds.low <= item <= bounds.high:
        raise unexpected(item, f"a number from {bounds.low} to {bounds.high}")
    return cast("float", item)


def _number(item: Any) -> int | float:
    if type(item) not in _NUMBERS:
        raise unexpected(item, "a number")
    return cast("int | float", item)


def _text(take: Callable[[str], str] | None, item: Any) -> str:
    if type(item) is not str:
        raise unexpected(item, "a text")
    if take is not None:
        return take(item)
    # `isprintable` runs in C and holds for almost all texts. It is false of odd spaces, too,
    # which are allowed, so the pattern decides.
    if not item.isprintable() and _CONTROL.search(item):
        raise unexpected(item, "a text without control characters")
    return item


def _exactly(kind: type, name: str, item: Any) -> Any:
    if type(item) is not kind:
        raise unexpected(item, name)
    return item


def shown(value: object) -> str:
    """Return any value in a few words, for an error message."""
    if isinstance(value, tuple | list):
        return f"a sequence of {len(value)}"
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    # ASCII only, so that a value from a file can draw nothing on a terminal.
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


MOST_SHOWN = 200
"""Characters of a text from elsewhere that are shown."""


def printable(item: str, most: int = MOST_SHOWN) -> str:
    """Return a text from elsewhere as it may be shown: cut, and on a terminal nothing but text.

    A character that is none of a text, such as an escape, a line's end, half a surrogate or a mark
    that turns the direction, becomes its escape sequence in Python.
    """
    cut = item if len(item) <= most else f"{item[:most]}..."
    if cut.isprintable():
        return cut
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in cut])


T = TypeVar("T")

MAX_DEPTH = 16
"""Tuples within tuples of a plain value; those of the compiler's own have three."""
_MAX_JSON_DEPTH = 64
_INTS = {int}


class PlanAttribute:
    """The base of the frozen dataclasses that attributes of launches may hold.

    Two are equal where a file would hold the same bytes of them. So 0.0 is not -0.0 and 1 is not
    True, as they are to `==`: a kernel that is made for one must not be found for the other.
    """

    __slots__ = ("_packed", "_row")
    _packed: bytes
    _row: dict[str, object]

    @property
    def packed(self) -> bytes:
        """What a file holds of it; made once."""
        try:
            return self._packed
        except AttributeError:
            # Frozen for everyone else: this is not a field, and always the same.
            object.__setattr__(self, "_packed", to_msgpack(to_row(self)))
            return self._packed

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, PlanAttribute) and (type(self), self.packed) == (
            type(other),
            other.packed,
        )

    def __hash__(self) -> int:
        return hash(self.packed)


_KINDS: dict[str, type[PlanAttribute]] = {}
_KIND_OF: dict[type[PlanAttribute], str] = {}

S = TypeVar("S", bound=PlanAttribute)


def register_attribute(kind: str) -> Callable[[type[S]], type[S]]:
    """Let plan files hold a class of structures, under a name of its own.

    A decorator, above `@dataclass(frozen=True, slots=True, eq=False)`. Raises ValueError where
    another class has the name.
    """

    def known(cls: type[S]) -> type[S]:
        other = _KINDS.setdefault(kind, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{cls.__module__} and {other.__module__} both define {kind!r}")
        _KINDS[kind], _KIND_OF[cls] = cls, kind  # a module that is run again defines it anew
        return cls

    return known


def _named_row(value: object) -> dict[str, object]:
    if not isinstance(value, PlanAttribute):
        raise TypeError(f"a plan cannot hold {value!r:.60}")
    try:
        return value._row
    except AttributeError:  # made once, as what it is packed to: layers share a structure
        object.__setattr__(value, "_row", {_KIND_OF[type(value)]: to_row(value)})
        return value._row


def to_row(value: object) -> tuple[Any, ...]:
    """Return a dataclass as nested tuples of plain values."""
    cls: Any = type(value)
    return cast("tuple[Any, ...]", _converted(cls, tuple).write(value))


def to_object(value: object) -> dict[str, Any]:
    """Return a dataclass as nested mappings. Raises DecodeError for what JSON does not carry."""
    cls: Any = type(value)
    return cast("dict[str, Any]", _converted(cls, list).write(value))


def from_row(cls: type[T], row: object) -> T:
    """Return the dataclass that `to_row` made the row of; sequences in it must be tuples.

    Raises DecodeError where the row is of another class, naming the first value that is wrong.
    """
    return cast("T", _whole(cls, tuple, row))


def from_object(cls: type[T], value: object) -> T:
    """Return the dataclass that `to_object` made the mapping of; sequences in it must be lists.

    Raises DecodeError as `from_row` does.
    """
    return cast("T", _whole(cls, list, value))


def _whole(cls: Any, sequence: Any, value: object) -> object:
    try:
        return _converted(cls, sequence).read(value)
    except DecodeError as wrong:
        wrong.path = wrong.path or cls.__name__
        raise


@dataclass(frozen=True, slots=True)
class _Conversion:
    """How a value becomes what a file holds, None where it is that already; and how it is read."""

    store: Convert | None
    read: Convert

    @property
    def write(self) -> Convert:
        return self.store or (lambda value: value)


# A hint is `Any`, for some are no types: unions, and what `Annotated` returns. `sequence` is the
# form: `tuple` for rows, `list` for objects.


@functools.cache
def _converted(hint: Any, sequence: Any, note: Any = None) -> _Conversion:
    """Return the conversion of values of a hint; `note` is what `Annotated` says of them."""
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _converted(args[0], sequence, args[1])
    if isinstance(hint, NewType):
        return _converted(hint.__supertype__, sequence, note)
    if kind is tuple:
        # `tuple[float, ...]` with a length is that many floats.
        return _sequences(args if note is None else args[:1] * note, sequence)
    if kind is Mapping:
        return _mappings(args, sequence)
    if kind in (Union, UnionType):
        return _unions(args, sequence)
    if is_dataclass(hint):
        return _records(cast("type", hint), sequence)
    if hint is Any:
        return _Conversion(plain_json, plain_json)
    if issubclass(hint, Enum):
        # `value` is a descriptor in Python, five times as slow.
        members = {member.value: member for member in hint}
        return _Conversion(attrgetter("_value_"), functools.partial(_member_of, members))
    read: dict[Any, Convert] = {
        int: functools.partial(_int_in, note),
        float: functools.partial(_float_in, note),
        str: functools.partial(_text, note),
        bool: functools.partial(_exactly, bool, "true or false"),
        bytes: functools.partial(_exactly, bytes, "bytes"),
    }
    return _Conversion(None, read[hint])


def _records(cls: type, sequence: Any) -> _Conversion:
    # `Plan.proofs` has init=False: what is kept for one process is not stored.
    names = [field.name for field in fields(cls) if field.init]
    hints = get_type_hints(cls, include_extras=True)
    parts = [_converted(hints[name], sequence) for name in names]
    readers, keys = [part.read for part in parts], {*names}
    writers = [(index, part.store) for index, part in enumerate(parts) if part.store is not None]
    # attrgetter returns the bare value for one name, and a tuple for several.
    get = attrgetter(*names) if len(names) > 1 else functools.partial(_few, names)

    def row_of(value: Any) -> Any:
        if not writers:
            return get(value)
        row = list(get(value))
        try:
            for index, store in writers:
                row[index] = store(row[index])
        except DecodeError as wrong:
            wrong.path = f".{names[index]}{wrong.path}"
            raise
        return tuple(row)

    def from_row(row: Any) -> Any:
        if type(row) is not tuple or len(row) != len(names):
            raise unexpected(row, f"a row of {len(names)} fields ({', '.join(names)})")
        return cls(*_read(readers, row, ".{}", names))

    def object_of(value: Any) -> dict[str, Any]:
        return dict(zip(names, row_of(value), strict=True))

    def from_object(item: Any) -> Any:
        # Exactly these keys: a field that is not known might change what the others mean.
        if type(item) is not dict or item.keys() != keys:
            raise unexpected(item, f"an object with {', '.join(names)}")
        return cls(*_read(readers, [item[name] for name in names], ".{}", names))

    return (
        _Conversion(row_of, from_row) if sequence is tuple else _Conversion(object_of, from_object)
    )


def _few(names: Sequence[str], value: object) -> tuple[Any, ...]:
    return tuple([getattr(value, name) for name in names])


def _sequences(hints: tuple[Any, ...], sequence: Any) -> _Conversion:
    if len(hints) == 2 and hints[1] is Ellipsis:
        store, read = (part := _converted(hints[0], sequence)).store, part.read
        all_of = None if store is None else lambda items: tuple([store(item) for item in items])
        # Two passes in C over the whole sequence instead of a call for each number.
        if isinstance(read, functools.partial) and read.func is _int_in and read.args[0]:
            return _Conversion(all_of, _ints_in(read.args[0], read, sequence))
        return _Conversion(all_of, functools.partial(_items, read, sequence))
    parts = [_converted(hint, sequence) for hint in hints]
    readers, writers = [part.read for part in parts], [part.write for part in parts]

    def each_of(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([write(item) for write, item in zip(writers, items, strict=True)])

    def from_items(row: Any) -> tuple[Any, ...]:
        if type(row) is not sequence or len(row) != len(parts):
            raise unexpected(row, f"a sequence of {len(parts)}")
        return tuple(_read(readers, row, "[{}]", range(len(row))))

    is_plain = all([part.store is None for part in parts])
    return _Conversion(None if is_plain else each_of, from_items)


def _items(read: Convert, sequence: Any, row: Any) -> tuple[Any, ...]:
    if type(row) is not sequence:
        raise unexpected(row, "a sequence")
    return tuple(_read([read] * len(row), row, "[{}]", range(len(row))))


def _ints_in(bounds: Bounds, read: Convert, sequence: Any) -> Convert:
    """Return the reader of shapes, strides, places: all at once, for half of a plan is such."""
    low, high = bounds.low, bounds.high

    def ints_in(row: Any) -> tuple[Any, ...]:
        # Types are compared, for a bool is an instance of int.
        is_ints = type(row) is sequence and set(map(type, row)) <= _INTS
        if is_ints and (not row or low <= min(row) <= max(row) <= high):
            return tuple(row)
        return _items(read, sequence, row)

    return ints_in


def _mappings(hints: tuple[Any, ...], sequence: Any) -> _Conversion:
    key, value = [_converted(hint, sequence) for hint in hints]

    def from_mapping(item: Any) -> dict[Any, Any]:
        if type(item) is not dict:
            raise unexpected(item, "an object")
        rows = _read([value.read] * len(item), [*item.values()], "[{}]", [*map(shown, item)])
        return dict(zip(map(key.read, item), rows, strict=True))

    # Nothing but plain JSON is stored as a mapping: what else is one has values as they are.
    return _Conversion(plain_json if hints[1] is Any else None, from_mapping)


def _unions(kinds: tuple[Any, ...], sequence: Any) -> _Conversion:
    """Return the conversion of a union: of plain values where tuples are among them."""
    if PlanAttribute in kinds:
        return _Conversion(None, _attribute)
    if any([get_origin(kind) is tuple for kind in kinds]):
        return _Conversion(None, _plain)
    if set(kinds) == {int, float}:
        return _Conversion(None, _number)
    types = [kind for kind in kinds if kind is not type(None)]
    if len(types) != 1 or len(kinds) != 2:
        raise TypeError(f"no reader of {kinds}: only of a number, or one type or None")
    store, read = (part := _converted(types[0], sequence)).store, part.read
    write = None if store is None else lambda item: None if item is None else store(item)
    return _Conversion(write, lambda item: None if item is None else read(item))


def _read(
    readers: Sequence[Convert], row: Sequence[Any], step: str, places: Sequence[object]
) -> list[Any]:
    """Return the items of a row as read; what is wrong in one gets a step of its path.

    Each is read once: a second time, to find which it was, would be two times at every depth.
    """
    items: list[Any] = []
    try:
        for reader, item in zip(readers, row, strict=True):
            items.append(reader(item))  # how many there are tells which is wrong
    except DecodeError as wrong:
        wrong.path = f"{step.format(places[len(items)])}{wrong.path}"
        raise
    return items


def _attribute(value: Any) -> Any:
    """Return a plain value, or the structure of a mapping of its kind to its row."""
    if type(value) is not dict:
        return _plain(value)
    kind, row = next(iter(value.items())) if len(value) == 1 else ("", None)
    cls: Any = _KINDS.get(kind)
    if cls is None:
        raise unexpected(value, f"a structure of a kind that is known here: {', '.join(_KINDS)}")
    # Layers repeat. The bytes tell 1, True and 1.0 apart, which a key of the row itself would not;
    # version 2 is the last that writes equal rows alike, whoever else holds parts of them.
    try:
        return _structure_in(cls, marshal.dumps(row, 2))
    except ValueError:  # nothing that a row holds: the reader says what it is
        return _converted(cls, tuple).read(row)


# Frozen, so that all launches with equal rows may share one object.
@functools.lru_cache(1 << 8)
def _structure_in(cls: Any, row: bytes) -> Any:
    return _converted(cls, tuple).read(marshal.loads(row))


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a plain value: numbers, texts, bytes, None, and tuples of such."""
    kind = type(value)
    if kind is tuple:
        if depth == MAX_DEPTH:
            raise unexpected(value, f"at most {MAX_DEPTH} sequences within each other")
        for item in value:
            # A number needs no check of its own: no call for it.
            if type(item) not in _NUMBERS:
                _plain(item, depth + 1)
    elif kind is str:
        _text(None, value)
    elif kind not in (int, float, bool, bytes, type(None)):
        raise unexpected(value, "a number, a text, bytes, nothing or a sequence of them")
    return value


def plain_json(value: object, depth: int = 0) -> Any:
    """Return a copy made of dict, list, str, int, float, bool and None, which JSON keeps exactly.

    Tuples become lists. Keys must be text: JSON would turn them into text without a word, and a
    reader would get back something else than was given.

    Raises DecodeError, with the path of the first value that has no place in JSON.
    """
    if depth > _MAX_JSON_DEPTH:
        raise DecodeError(f"is nested deeper than {_MAX_JSON_DEPTH} levels")
    inner = functools.partial(plain_json, depth=depth + 1)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DecodeError(f"has the key {key!a}, expected keys of type str")
        places = [*map(shown, value)]
        items = _read([inner] * len(value), [*value.values()], "[{}]", places)
        return dict(zip(map(str, value), items, strict=True))
    if isinstance(value, list | tuple):
        return _read([inner] * len(value), value, "[{}]", range(len(value)))
    if isinstance(value, float) and not math.isfinite(value):
        raise DecodeError(f"is {value}, and JSON has no {value}; store it as text or None")
    # bool first: it is an int as well. Numbers of numpy that derive from float become plain.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is not None:
        raise DecodeError(
            f"is a {type(value).__module__}.{type(value).__qualname__}, expected a JSON value"
            " (dict, list, str, int, float, bool or None)"
        )
    return None


# What carries rows and objects.


def to_msgpack(value: object) -> bytes:
    """Return plain values and structures, in tuples and lists of any depth, as msgpack."""
    # `use_bin_type` keeps bytes and texts apart, as `raw=False` expects when they are read.
    return cast("bytes", msgpack.packb(value, use_bin_type=True, default=_named_row))


def from_msgpack(data: bytes | memoryview) -> object:
    """Return what msgpack makes of some bytes, with tuples for sequences. Raises DecodeError."""
    try:
        return msgpack.unpackb(data, raw=False, use_list=False)
    # Of broken input it raises ValueError and kin; of odd keys and times, these others.
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        raise DecodeError(f"the bytes are not msgpack ({why})") from None


def to_json(value: object) -> bytes:
    """Return what JSON carries, on one line. Raises ValueError for NaN and infinities."""
    # With an indent, json would call Python functions of its own for every value.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def from_json(data: bytes) -> Any:
    """Return what a text in JSON says. Raises DecodeError, also where a key occurs twice."""
    try:
        # Strict, unlike json.loads: half a surrogate could not be printed. It can still come from
        # an escape; a text without one need not be encoded again, which took half of the time.
        text = data.decode(json.detect_encoding(data))
        value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the text is not JSON: {error}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return mapping


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


# json.loads makes one for each call, which takes as long as a short line.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


# Hints of the numbers of a plan, with the bounds that a plan from a file is held to.

MAX_BYTES = 1 << 48
"""Of an arena, a register, an offset: more than any machine has, and sums of them are no trouble
for 64 bits."""

Bytes = Annotated[int, Bounds(0, MAX_BYTES)]
Index = Annotated[int, Bounds(0, (1 << 31) - 1)]
"""A place in a tuple of the plan; `check_references` knows whether that is long enough."""

Count = Annotated[int, Bounds(1, 1 << 24)]
"""Slots, and tokens per firing."""

Duration = Annotated[float, Bounds(0.0, 1e18)]
"""Nanoseconds."""
