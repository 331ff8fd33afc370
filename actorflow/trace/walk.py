"""The walk over all that tracing a job may read, from each object to what it can reach.

It begins at the model, the job's function and its optimizer, and goes to attributes and slots,
items, classes with their methods and attributes, functions with their code, defaults, closed-over
variables and globals, and attributes of modules. Code of the user counts by content; what Python,
installed packages and this one bring counts by name. What has no content to compare (a generator,
an open file) is listed where the user's code names it, and random generators are listed for whoever
wants to know whether they were used.
"""

from __future__ import annotations

import io
import logging
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import CodeType
from typing import Any

import numpy as np

from actorflow.nn.module import Module
from actorflow.nn.parameter import Stored
from actorflow.tensor import Tensor
from actorflow.trace.classes import read_class, read_member, read_object, read_parameter, slots_of
from actorflow.trace.data import read_array, read_container, read_content, reduced
from actorflow.trace.functions import CALLABLES, read_callable, read_modules
from actorflow.trace.reading import Reading
from compiler.types import TensorType

RANDOM = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)

_HARMLESS = (logging.Logger, logging.LoggerAdapter, threading.Thread)
_HARMLESS_MODULES = frozenset(
    ("_thread", "threading", "_weakref", "weakref", "_abc", "typing", "actorflow.jobs")
)
"""What decides nothing of a graph, and changes all the time."""

_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_C_TYPE = 1 << 9
"""The flag that a class has which was made by a class statement, or like one."""


def read_job(
    function: object,
    optimizer: object,
    model: Module,
    spec: Mapping[str, TensorType],
    called: frozenset[CodeType] | None = None,
) -> Reading:
    """Return what tracing a job on this model and these types of a batch may read.

    With `called`, of the user's functions only those are followed.
    """
    reading = Reading(_walk, called)
    for key, type_ in spec.items():
        reading.row(f"batch[{key!r}]", str(type_))
    reading.visit("", model)
    reading.visit("the job's function", function)
    reading.visit("optimizer", optimizer)
    read_modules(reading)
    return reading


def _walk(reading: Reading, what: str, value: Any, key: str) -> None:
    try:
        for kinds, read in _READERS:
            if isinstance(value, kinds):
                read(reading, what, value, key)
                return
        if type(value).__module__ in _HARMLESS_MODULES:
            reading.row(what, type(value).__qualname__)
        else:
            _read_other(reading, what, value)
    except Exception:  # what cannot be copied says so in many ways, and a user's class may raise
        reading.cannot(what, value, key)


def _read_other(reading: Reading, what: str, value: Any) -> None:
    """Read an object of no kind that is known: by its attributes, or as a copy of it is made."""
    is_object = isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(type(value)))
    if is_object:
        read_object(reading, what, value)
    elif isinstance(value, Iterator):
        raise TypeError("an iterator cannot be read without taking from it")
    if not is_object or any([not c.__flags__ & _C_TYPE for c in type(value).__mro__[:-1]]):
        read_content(reading, what, value, lambda: reduced(value))


def _name_only(reading: Reading, what: str, value: Any, key: str) -> None:
    reading.row(what, f"{type(value).__name__} {getattr(value, '__name__', '')}".strip())


def _read_module_name(reading: Reading, what: str, value: Any, key: str) -> None:
    reading.row(what, f"module {value.__name__}")
    reading.modules.append(value)


def _nothing(reading: Reading, what: str, value: Any, key: str) -> None:
    """A descriptor in C stands for a slot, which is read where the object is."""


def _read_generator(reading: Reading, what: str, value: Any, key: str) -> None:
    reading.row(what, type(value).__name__)
    reading.generators.append((what if " " in what else f"attribute {what!r}", value))


def _read_reference(reading: Reading, what: str, value: Any, key: str) -> None:
    reading.row(what, "a weak reference")
    reading.visit(f"{what}()", value(), key)


_READERS: tuple[tuple[Any, Callable[[Reading, str, Any, str], None]], ...] = (
    (Module, lambda reading, what, value, key: read_object(reading, what, value)),
    (Stored, lambda reading, what, value, key: read_parameter(reading, what, value)),
    (Tensor, _name_only),
    (np.ndarray, lambda reading, what, value, key: read_array(reading, what, value)),
    (types.ModuleType, _read_module_name),
    (type, lambda reading, what, value, key: read_class(reading, what, value, is_called=True)),
    (Enum, lambda reading, what, value, key: read_member(reading, what, value)),
    (CALLABLES, read_callable),
    (_DESCRIPTORS, _nothing),
    ((list, tuple, dict, types.MappingProxyType, set, frozenset), read_container),
    (RANDOM, _read_generator),
    (weakref.ref, _read_reference),
    ((*_HARMLESS, weakref.ProxyTypes), _name_only),
    ((io.IOBase, types.GeneratorType, threading.local), Reading.cannot),
)
"""How each kind is read; the first that fits."""
