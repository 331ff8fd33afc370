"""How messages travel: an array of msgpack, and a frame of its own for everything of bytes.

Nothing that comes is trusted: a message is decoded by the types of its fields, and whatever does
not fit them is refused in words. There is no pickle on this wire.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgpack

from actorflow.ranks import messages
from actorflow.ranks.messages import FromRank, ToRank

VERSION = 1
MOST_MESSAGE_BYTES = 256 << 20
"""Of a frame as sockets count it: whoever sends a longer one is disconnected."""
MOST_FRAME_BYTES = MOST_MESSAGE_BYTES - (1 << 10)
"""Of a value that a rank brings to a meeting, a plan has some megabytes; encryption adds to it."""
MOST_HEAD_BYTES = 1 << 20
"""Of the part of a message that is no value."""
_MOST_TEXT = 1 << 16
_MOST_INT = 1 << 62

_KINDS = {
    name: kind
    for name, kind in inspect.getmembers(messages, inspect.isclass)
    if kind.__module__ == messages.__name__
}

M = TypeVar("M")


class Malformed(Exception):
    """What came over the wire is no message; says what is wrong with it."""


def encode(message: FromRank | ToRank) -> list[bytes]:
    """Return the frames of a message. Texts that are too long are cut."""
    type_: type[Any] = type(message)
    head: list[Any] = [VERSION, type_.__name__]
    frames: list[bytes] = []
    for name, kind in _fields(type_):
        value: Any = getattr(message, name)
        if kind == "bytes":
            frames.append(value)
        elif kind == "tuple[bytes, ...]":
            frames.extend(value)
        else:
            head.append(value[:_MOST_TEXT] if kind == "str" else value)
    return [msgpack.packb(head, unicode_errors="replace"), *frames]


def decode(frames: Sequence[bytes | memoryview], kinds: Any) -> Any:
    """Return the message of some frames, one of `kinds`: a union of classes of messages.

    Raises Malformed.
    """
    if not frames:
        raise Malformed("no frame at all")
    kind, values = _head(frames[0])
    if kind is None or not issubclass(kind, kinds):
        raise Malformed("a kind of message that nobody may send here")
    rest, taken = list(frames[1:]), list[Any]()
    for name, type_ in _fields(kind):
        if type_ == "bytes":
            if not rest:
                raise Malformed(f"{kind.__name__} without its {name}")
            taken.append(bytes(rest.pop(0)))
        elif type_ == "tuple[bytes, ...]":
            taken.append(tuple([bytes(frame) for frame in rest]))
            rest = []
        elif not values:
            raise Malformed(f"{kind.__name__} without its {name}")
        else:
            taken.append(_checked(values.pop(0), type_, f"{name} of {kind.__name__}"))
    if rest or values:
        raise Malformed(f"{kind.__name__} with more than it has fields")
    return kind(*taken)


def pack_value(value: Any, name: str) -> bytes:
    """Pack what a rank brings to a meeting. Raises ValueError where it cannot travel."""
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"what a rank brings to {name!r} is made of numbers, texts, bytes, None and tuples:"
            f" {error}"
        ) from None
    if len(packed) > MOST_FRAME_BYTES:
        raise ValueError(
            f"what a rank brings to {name!r} has {len(packed):,} bytes; at most"
            f" {MOST_FRAME_BYTES:,} travel"
        )
    return packed


def unpack_value(packed: bytes) -> Any:
    """Return what was packed, with tuples for sequences. Raises Malformed."""
    try:
        return msgpack.unpackb(packed, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Malformed(f"a value that cannot be unpacked ({type(error).__name__})") from None


def _head(frame: bytes | memoryview) -> tuple[type[Any] | None, list[Any]]:
    if len(frame) > MOST_HEAD_BYTES:
        raise Malformed(f"a head of {len(frame)} bytes, where at most {MOST_HEAD_BYTES} come")
    try:
        head = msgpack.unpackb(frame)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Malformed(f"no msgpack ({type(error).__name__})") from None
    if not isinstance(head, list) or len(head) < 2:
        raise Malformed("no array of a version, a kind and fields")
    version, name, *values = head
    if type(version) is not int or version != VERSION:
        raise Malformed(f"another version than {VERSION}")
    return _KINDS.get(name) if isinstance(name, str) else None, values


def _checked(value: Any, kind: str, what: str) -> Any:
    if type(value).__name__ != kind:  # a bool is no int here
        raise Malformed(f"{what} is no {kind}")
    if kind == "int" and not 0 <= value < _MOST_INT:
        raise Malformed(f"{what} is beyond what it can be")
    if kind == "str" and len(value) > _MOST_TEXT:
        raise Malformed(f"{what} is too long")
    return value


def _fields(kind: type[Any]) -> list[tuple[str, str]]:
    return [(field.name, str(field.type)) for field in fields(kind)]
