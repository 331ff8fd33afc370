"""Reading objects and classes: attributes, slots, methods, of the class and of its bases."""

from __future__ import annotations

from enum import Enum
from typing import Any

from actorflow.nn.buffer import Buffer
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter, Stored
from actorflow.trace.code import is_users_module
from actorflow.trace.reading import Reading, shown

_NOT_READ = frozenset(
    (
        "__abstractmethods__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__hash__",
        "__match_args__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__protocol_attrs__",
        "__qualname__",
        "__slots__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
        "_is_protocol",
    )
)
"""Entries of a class that no computation reads, or that say what others say as well."""

_WHEN_MADE = frozenset(
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__str__")
)
"""Methods of a class that matter only where a trace itself makes objects of it."""

_OF_EVERY_PARAMETER = frozenset(
    ("_type", "init", "source", "is_frozen", "cell", "_layout", "_layout_source")
)
"""Attributes of which a row tells, or which are no part of a graph."""

_OWN_SLOTS = frozenset(("__dict__", "__weakref__", "_memo"))
"""Slots that hold no setting."""


def read_object(reading: Reading, what: str, value: Any) -> None:
    """Read an instance: its class, its `__dict__` and its slots."""
    read_class(reading, f"class of {what or 'the model'}", type(value), is_called=False)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        reading.guard.instance(value, attributes)
        for key, item in attributes.items():
            reading.visit(f"{what}.{key}" if what else str(key), item, str(key))
    for name in slots_of(type(value)):
        inside = f"{what}.{name}" if what else name
        reading.guard.slot(value, name)
        if hasattr(value, name):
            reading.visit(inside, getattr(value, name), name)
        else:
            reading.row(inside, "nothing")


def read_member(reading: Reading, what: str, value: Enum) -> None:
    """Read a member of an enumeration: its name, and of the user's own its attributes as well."""
    reading.row(what, shown(f"{type(value).__name__} {value!r}"))
    if not is_users_module(type(value).__module__):
        return
    read_class(reading, f"class of {what}", type(value), is_called=False)
    reading.guard.instance(value, vars(value))
    for key, item in vars(value).items():
        if key != "__objclass__":
            reading.visit(f"{what}.{key}", item, key)


def read_parameter(reading: Reading, what: str, value: Stored) -> None:
    """Read a parameter: all but its values, which are no part of a graph."""
    frozen = " frozen" if value.is_frozen else ""
    reading.row(f"parameter {what!r}", f"{value.type}{frozen}")
    reading.row(f"the initialiser of parameter {what!r}", repr(value.init))
    if value._layout:
        words = ", ".join([f"{axis}={word}" for axis, word in value._layout])
        reading.row(f"the layout of parameter {what!r}", words)
    reading.guard.parameter(value)
    if type(value) not in (Parameter, Buffer):
        read_class(reading, f"class of {what}", type(value), is_called=False)
        reading.guard.instance(value, vars(value))
        for key, item in vars(value).items():
            if key not in _OF_EVERY_PARAMETER:
                reading.visit(f"{what}.{key}", item, key)


def read_class(reading: Reading, what: str, value: type, *, is_called: bool) -> None:
    """Read a class and its bases, as far as they are the user's or modules.

    With `is_called` the trace may make objects of it, so that its `__init__` counts.
    """
    reading.row(what, f"class {reading.label(value)}")
    for part in value.__mro__:
        is_module = issubclass(part, Module) and part is not Module
        if part is not object and (is_module or is_users_module(part.__module__)):
            _read_body(reading, part, is_called=is_called)
    if type(value) is not type and is_users_module(type(value).__module__):
        _read_body(reading, type(value), is_called=False)


def _read_body(reading: Reading, value: type, *, is_called: bool) -> None:
    label = reading.label(value)
    if (id(value), is_called) in reading.done:
        return
    if (id(value), not is_called) not in reading.done:
        reading.guard.of_class(value)
    reading.done.add((id(value), is_called))
    for key, item in list(vars(value).items()):
        if key in _NOT_READ or (key in _WHEN_MADE and not is_called):
            continue
        mark = (id(value), key)
        if mark not in reading.done:
            reading.done.add(mark)
            reading.visit(f"{label}.{key}", item, key)


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases, as `getattr` takes them."""
    names: list[str] = []
    for part in reversed(kind.__mro__):
        given = part.__dict__.get("__slots__", ())
        for name in [given] if isinstance(given, str) else list(given):
            is_private = name.startswith("__") and not name.endswith("__")
            if name not in _OWN_SLOTS:
                names.append(f"_{part.__name__.lstrip('_')}{name}" if is_private else name)
    return names
