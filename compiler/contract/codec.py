"""How a plan is stored: frozen dataclasses as nested tuples that msgpack carries, and back.

A dataclass is a row of its fields in order, an enum its value; a tuple of either is a tuple of
such. Everything else is carried as it is. The conversion of a class is derived once from its hints,
so that values that need no conversion are never visited on the way out.

On the way back everything is looked at, for a file may come from anywhere: each value has the type
that its hint names, and lies within the `Bounds` that an `Annotated` hint gives it. Texts hold no
control characters, so that none can draw on a terminal or break out of a line. The first value that
is wrong is named with its way from the outermost row: "registers[3].size_bytes".

An attribute of a launch has no hint that says what it is. So a `PlanAttribute` among them is a
mapping with one entry, from its kind to its row; nothing else in a file is a mapping.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import math
import re
from collections.abc import Callable, Sequence
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
)
from typing import (
    get_type_hints as hints_of,
)

import msgpack

from compiler.contract.errors import PlanFormatError

# Readers of single values of a row.

Convert = Callable[[Any], Any]

_NUMBERS = (int, float)

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Also what separates lines or turns their direction, and halves of surrogates."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest value of a number. For an int the comparison is exact."""

    low: float
    high: float


class DecodeError(Exception):
    """A value that is not what was expected; each reader it passes through extends its path."""

    def __init__(self, value: object, expected: str) -> None:
        super().__init__()
        self.said = f"is {shown(value)}, expected {expected}"
        self.way = ""


def member_of(cls: type[Enum]) -> Convert:
    """Return the reader of the value of an enum."""
    members = {member.value: member for member in cls}

    def member_of(item: Any) -> Enum:
        # Only a str is looked up: a mapping from a broken file has no hash.
        member = members.get(item) if type(item) is str else None
        if member is None:
            raise DecodeError(item, f"one of {', '.join(members)}")
        return member

    return member_of


def int_in(bounds: Bounds | None, item: Any) -> int:
    """Return a whole number within bounds. Raises DecodeError."""
    # Exactly int: `isinstance` would let True pass as 1.
    if type(item) is not int:
        raise DecodeError(item, "a whole number")
    if bounds is not None and not bounds.low <= item <= bounds.high:
        raise DecodeError(item, f"a whole number from {bounds.low} to {bounds.high}")
    return item


def float_in(bounds: Bounds | None, item: Any) -> float:
    """Return a finite number within bounds. Raises DecodeError."""
    if type(item) not in _NUMBERS or not math.isfinite(item):
        raise DecodeError(item, "a finite number")
    if bounds is not None and not bounds.low <= item <= bounds.high:
        raise DecodeError(item, f"a number from {bounds.low} to {bounds.high}")
    return cast("float", item)


def decode_number(item: Any) -> int | float:
    """Return a number. Raises DecodeError."""
    if type(item) not in _NUMBERS:
        raise DecodeError(item, "a number")
    return cast("int | float", item)


def decode_str(item: Any) -> str:
    """Return a text without control characters. Raises DecodeError."""
    if type(item) is not str:
        raise DecodeError(item, "a text")
    # `isprintable` runs in C and holds for almost all texts. It is false of odd spaces, too,
    # which are allowed, so the pattern decides.
    if not item.isprintable() and _CONTROL.search(item):
        raise DecodeError(item, "a text without control characters")
    return item


def decode_bool(item: Any) -> bool:
    """Return true or false. Raises DecodeError."""
    if type(item) is not bool:
        raise DecodeError(item, "true or false")
    return item


def bytes_(item: Any) -> bytes:
    """Return bytes. Raises DecodeError."""
    if type(item) is not bytes:
        raise DecodeError(item, "bytes")
    return item


def shown(value: object) -> str:
    """Return any value in a few words, for an error message."""
    if isinstance(value, tuple):
        return f"a sequence of {len(value)}"
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    # ASCII only, so that a value from a file can draw nothing on a terminal.
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


MOST_SHOWN = 200
"""Characters of a text from elsewhere that are shown."""


def printable(item: str) -> str:
    """Return a text from elsewhere as it may be shown: cut, and on a terminal nothing but text.

    A character that is none of a text, such as an escape, a line's end, half a surrogate or a mark
    that turns the direction, becomes its escape sequence in Python.
    """
    cut = item if len(item) <= MOST_SHOWN else f"{item[:MOST_SHOWN]}..."
    if cut.isprintable():
        return cut
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in cut])


T = TypeVar("T")


MAX_DEPTH = 16
"""Tuples within tuples of a plain value; those of the compiler's own have three."""
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


def to_msgpack(value: object) -> bytes:
    """Return plain values and structures, in tuples and lists of any depth, as msgpack."""
    # `use_bin_type` keeps bytes and texts apart, as `raw=False` expects when they are read.
    return cast("bytes", msgpack.packb(value, use_bin_type=True, default=_named_row))


def _named_row(value: object) -> dict[str, object]:
    if not isinstance(value, PlanAttribute):
        raise TypeError(f"a plan cannot hold {value!r:.60}")
    try:
        return value._row
    except AttributeError:  # made once, as what it is packed to: layers share a structure
        object.__setattr__(value, "_row", {_KIND_OF[type(value)]: to_row(value)})
        return value._row


def to_row(value: object) -> object:
    """Return a dataclass as nested tuples of plain values."""
    hint: Any = type(value)
    convert = _writer(hint)
    return value if convert is None else convert(value)


def from_row(cls: type[T], row: object) -> T:
    """Return the dataclass that `to_row` made the row of; sequences in it must be tuples.

    Raises PlanFormatError where the row is of another class, naming the first value that is wrong.
    """
    hint: Any = cls
    try:
        return cast("T", _reader(hint)(row))
    except DecodeError as wrong:
        where = wrong.way.lstrip(".") or cls.__name__
        raise PlanFormatError(f"damaged plan: {where} {wrong.said}") from None


@functools.cache
def _writer(hint: Any) -> Convert | None:
    """Return what makes a row of a value of this type; None where it is one already."""
    if get_origin(hint) is Annotated:
        return _writer(get_args(hint)[0])
    if is_dataclass(hint):
        return _row_of(cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("_value_")  # `value` is a descriptor in Python, five times as slow
    if get_origin(hint) in (Union, UnionType):
        return _optional_writer(hint)
    if get_origin(hint) is not tuple:
        return None
    args = get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        convert = _writer(args[0])
        return None if convert is None else lambda items: tuple([convert(item) for item in items])
    converts = [_writer(arg) for arg in args]
    return None if all([c is None for c in converts]) else functools.partial(_each, converts)


def _optional_writer(hint: Any) -> Convert | None:
    """Return the writer of a type or None; of other unions nothing needs to be done."""
    some = [kind for kind in get_args(hint) if kind is not type(None)]
    convert = _writer(some[0]) if len(some) == 1 else None
    if convert is None:
        return None
    write = convert
    return lambda item: None if item is None else write(item)


def _each(converts: list[Convert | None], items: tuple[Any, ...]) -> tuple[Any, ...]:
    pairs = zip(converts, items, strict=True)
    return tuple([item if convert is None else convert(item) for convert, item in pairs])


def _names(cls: type) -> list[str]:
    """Return the fields that a row has: those that make up the value."""
    # `Plan.proofs` has init=False: what is kept for one process is not stored.
    return [field.name for field in fields(cls) if field.init]


def _hints(cls: type) -> list[Any]:
    by_name = hints_of(cls, include_extras=True)
    return [by_name[name] for name in _names(cls)]


def _row_of(cls: type) -> Convert:
    names = _names(cls)
    # attrgetter returns the bare value for one name, and a tuple for several.
    get = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    writers = [(i, c) for i, c in enumerate(map(_writer, _hints(cls))) if c is not None]
    if not writers:
        return get

    def row_of(value: Any) -> list[Any]:
        row = list(get(value))
        for index, convert in writers:
            row[index] = convert(row[index])
        return row

    return row_of


@functools.cache
def _reader(hint: Any, bounds: Bounds | None = None) -> Convert:
    """Return what makes a value of this type of a row, or raises DecodeError."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        return _reader(inner, next((n for n in notes if isinstance(n, Bounds)), None))
    if isinstance(hint, NewType):
        return _reader(hint.__supertype__, bounds)
    if is_dataclass(hint):
        return _instance_of(cast("type", hint))
    if get_origin(hint) is tuple:
        return _tuple_of(*get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return _one_of(hint)
    if issubclass(hint, Enum):
        return member_of(hint)
    simple = {int: int_in, float: float_in}.get(hint)
    if simple is not None:
        return functools.partial(simple, bounds)
    return {str: decode_str, bool: decode_bool, bytes: bytes_}[hint]


def _instance_of(cls: type) -> Convert:
    names = _names(cls)
    readers = [_reader(hint) for hint in _hints(cls)]

    def instance_of(row: Any) -> Any:
        if type(row) is not tuple or len(row) != len(names):
            raise DecodeError(row, f"a row of {len(names)} fields ({', '.join(names)})")
        return cls(*_read(readers, row, ".{}", names))

    return instance_of


def _tuple_of(*hints: Any) -> Convert:
    if len(hints) == 2 and hints[1] is Ellipsis:
        reader = _reader(hints[0])
        # Two passes in C over the whole sequence instead of a call for each number.
        if isinstance(reader, functools.partial) and reader.func is int_in and reader.args[0]:
            return _ints_in(reader.args[0], reader)
        return functools.partial(_items, reader)
    readers = [_reader(hint) for hint in hints]

    def tuple_of(row: Any) -> tuple[Any, ...]:
        if type(row) is not tuple or len(row) != len(readers):
            raise DecodeError(row, f"a sequence of {len(readers)}")
        return tuple(_read(readers, row, "[{}]", range(len(row))))

    return tuple_of


def _items(read: Convert, row: Any) -> tuple[Any, ...]:
    if type(row) is not tuple:
        raise DecodeError(row, "a sequence")
    return tuple(_read([read] * len(row), row, "[{}]", range(len(row))))


def _ints_in(bounds: Bounds, read: Convert) -> Convert:
    """Return the reader of shapes, strides, places: all at once, for half of a plan is such."""
    low, high = bounds.low, bounds.high

    def ints_in(row: Any) -> tuple[Any, ...]:
        # Types are compared, for a bool is an instance of int.
        is_ints = type(row) is tuple and set(map(type, row)) <= _INTS
        if is_ints and (not row or low <= min(row) <= max(row) <= high):
            return cast("tuple[Any, ...]", row)
        return _items(read, row)

    return ints_in


def _read(
    readers: Sequence[Convert], row: tuple[Any, ...], step: str, places: Sequence[object]
) -> list[Any]:
    """Return the items of a row as read; what is wrong in one gets a step of its way.

    Each is read once: a second time, to find which it was, would be two times at every depth.
    """
    items: list[Any] = []
    try:
        for reader, item in zip(readers, row, strict=True):
            items.append(reader(item))  # how many there are tells which is wrong
    except DecodeError as wrong:
        wrong.way = f"{step.format(places[len(items)])}{wrong.way}"
        raise
    return items


def _one_of(hint: Any) -> Convert:
    """Return the reader of a union: of plain values where tuples are among them."""
    kinds = get_args(hint)
    if PlanAttribute in kinds:
        return _attribute
    if any([get_origin(kind) is tuple for kind in kinds]):
        return _plain
    if set(kinds) == {int, float}:
        return decode_number
    types = [kind for kind in kinds if kind is not type(None)]
    if len(types) != 1 or len(kinds) != 2:
        raise TypeError(f"no reader of {hint}: only of a number, or one type or None")
    reader = _reader(types[0])
    return lambda item: None if item is None else reader(item)


def _attribute(value: Any) -> Any:
    """Return a plain value, or the structure of a mapping of its kind to its row."""
    if type(value) is not dict:
        return _plain(value)
    kind, row = next(iter(value.items())) if len(value) == 1 else ("", None)
    cls = _KINDS.get(kind)
    if cls is None:
        raise DecodeError(value, f"a structure of a kind that is known here: {', '.join(_KINDS)}")
    # Layers repeat. The bytes tell 1, True and 1.0 apart, which a key of the row itself would not;
    # version 2 is the last that writes equal rows alike, whoever else holds parts of them.
    hint: Any = cls
    try:
        return _structure_in(hint, marshal.dumps(row, 2))
    except ValueError:  # nothing that a row holds: the reader says what it is
        return _reader(hint)(row)


# Frozen, so that all launches with equal rows may share one object.
@functools.lru_cache(1 << 8)
def _structure_in(cls: Any, row: bytes) -> Any:
    return _reader(cls)(marshal.loads(row))


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a plain value: numbers, texts, bytes, None, and tuples of such."""
    kind = type(value)
    if kind is tuple:
        if depth == MAX_DEPTH:
            raise DecodeError(value, f"at most {MAX_DEPTH} sequences within each other")
        for item in value:
            # A number needs no check of its own: no call for it.
            if type(item) not in _NUMBERS:
                _plain(item, depth + 1)
    elif kind is str:
        decode_str(value)
    elif kind not in (int, float, bool, bytes, type(None)):
        raise DecodeError(value, "a number, a text, bytes, nothing or a sequence of them")
    return value


# The envelope of a plan in a file: a magic word, the format, and a hash of the body.

_MAGIC = "actorflow-plan"


def wrap_plan_file(body: bytes, plan_format: int) -> bytes:
    """Return the bytes of a file that holds a body."""
    # Against damage, not forgery: anyone can compute it. The readers check every value besides.
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    head = {"magic": _MAGIC, "format": plan_format, "digest": digest, "body": body}
    return to_msgpack(head)


def unwrap_plan_file(data: bytes, plan_format: int, where: str) -> bytes:
    """Return the body in the bytes of a file.

    Raises PlanFormatError, which begins with `where`, when it is damaged or of another format.
    """
    try:
        head = unpacked(data)
    except PlanFormatError as error:
        raise PlanFormatError(f"{where} is not a plan file, or it is damaged: {error}") from None
    if not isinstance(head, dict) or head.get("magic") != _MAGIC:
        raise PlanFormatError(f"{where} is not an actorflow plan file")
    # Before the hash: another format may hash something else.
    if head.get("format") != plan_format:
        raise PlanFormatError(
            f"{where} has plan format {head.get('format')!a:.40}, this actorflow reads"
            f" format {plan_format}; compile the job again with this version"
        )
    body = head.get("body")
    if not isinstance(body, bytes) or hashlib.blake2b(body, digest_size=16).hexdigest() != head.get(
        "digest"
    ):
        raise PlanFormatError(f"{where} is damaged: its content does not match its hash")
    return body


def unpacked(data: bytes) -> object:
    """Return what msgpack makes of some bytes. Raises PlanFormatError, whatever they are."""
    try:
        # `use_list=False`: rows are tuples, which the readers require.
        return msgpack.unpackb(data, raw=False, use_list=False)
    # Of broken input it raises ValueError and kin; of odd keys and times, these others.
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise PlanFormatError(f"damaged plan: no msgpack: {error}") from None


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
