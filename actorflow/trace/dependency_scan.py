"""The walk over all that tracing a job may read: `read_job`.

It begins at the model, the job's function and its optimizer, and goes to attributes and slots,
items, classes with their methods and attributes, functions with their code, defaults, closed-over
variables and globals, and attributes of modules. Code of the user counts by content; what Python,
installed packages and this one bring counts by name. What such a function closes over is read all
the same: a decorator holds the user's function there, a schedule its numbers. What has no content
to compare (a generator, an open file) is listed where the user's code names it, and random
generators are listed for whoever wants to know whether they were used.
"""

from __future__ import annotations

import builtins
import functools
import gc
import io
import logging
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import CodeType, MappingProxyType
from typing import Any

import numpy as np
import xxhash

from actorflow.nn.module import Module
from actorflow.nn.parameter import Buffer, ModelTensor, Parameter
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import code_facts, is_users, is_users_module
from actorflow.trace.guard import ATOMS, DependencyScan, array_digest, short_name, shown
from compiler.contract.types import TensorType

_CACHED: type = type(functools.lru_cache(len))
"""What `functools.lru_cache` makes; Python has no public name for it."""

CALLABLES = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    functools.cached_property,
    property,
    staticmethod,
    classmethod,
    _CACHED,
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
"""Kinds that `read_callable` knows."""

_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    _CACHED: ("__wrapped__",),
}
"""Attributes in which a kind of callable holds all that it does."""


def read_callable(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    """Read a function, method, property, or whatever else stands for a call."""
    if isinstance(value, types.FunctionType):
        _read_function(reading, what, value)
        return
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            reading.row(what, f"a {kind.__name__}")
            for name in parts:
                reading.visit(f"{what}.{name}", getattr(value, name), key)
            return
    owner = getattr(value, "__self__", None)
    reading.row(what, f"{getattr(value, '__module__', None)} {value.__qualname__}")
    if owner is not None and not isinstance(owner, (types.ModuleType, type)):
        reading.visit(f"{what}.__self__", owner, key)  # a C function with state: x.append, x.next


def _read_function(reading: DependencyScan, what: str, value: types.FunctionType) -> None:
    code = value.__code__
    name, facts, is_own = short_name(value), code_facts(code), is_users(code.co_filename)
    if is_own:
        reading.row(what, f"function {name} with code {facts.digest}")
        reading.codes.append(code)
        # A function that no trace called decides nothing; its own row still tells when its code
        # changes.
        if reading.called is not None and code not in reading.called:
            return
        reading.names.update(facts.names, facts.loads, code.co_freevars)
        reading.guard.function(value)
    else:
        reading.row(what, f"function {value.__module__}.{value.__qualname__}")
    defaults = dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
    for place, item in defaults.items():
        reading.visit(f"default {place!r} of {name}", item, str(place))
    for key, item in vars(value).items():
        if key != "__wrapped__":  # a closed-over variable as well, or never called
            reading.visit(f"{name}.{key}", item, key)
    for key, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        _read_cell(reading, f"variable {key!r} of {name}", cell, key)
    if is_own:
        for loaded in facts.loads:
            _read_global(reading, value.__globals__, loaded, facts.names)
        _read_imports(reading, value.__globals__, facts.imports, facts.names)


def _read_cell(reading: DependencyScan, what: str, cell: types.CellType, key: str) -> None:
    reading.guard.cell(cell)
    try:
        content = cell.cell_contents
    # An empty cell: a variable that the outer function has not assigned yet.
    except ValueError:
        reading.row(what, "nothing")
    else:
        reading.visit(what, content, key)


def read_modules(reading: DependencyScan) -> None:
    """Read the user's modules that were met as objects, kept in an attribute or a closed-over name.

    Any code may name their attributes, so this comes last.
    """
    while True:
        # A fixed point: what a module's attributes name may lead to further modules and names.
        names, count = frozenset(reading.names), len(reading.modules)
        for module in reading.modules[:count]:
            if is_users_module(module.__name__):
                read_module(reading, module, names)
        if len(reading.names) == len(names) and len(reading.modules) == count:
            return


def _read_global(
    reading: DependencyScan, namespace: dict[str, Any], name: str, attributes: frozenset[str]
) -> None:
    # The guard also holds that a name is not there: a global that appears later hides the builtin.
    reading.guard.lookup(namespace, name)
    if name not in namespace:
        reading.guard.lookup(vars(builtins), name)
        return
    value = namespace[name]
    # By id: namespaces are dicts and have no hash. All objects are kept alive while they are read.
    mark = (id(namespace), name)
    if mark not in reading.done:
        reading.done.add(mark)
        reading.visit(f"global {name!r} of {namespace.get('__name__')}", value, name)
    if isinstance(value, types.ModuleType):
        read_module(reading, value, attributes)


def _read_imports(
    reading: DependencyScan,
    namespace: dict[str, Any],
    imports: tuple[str, ...],
    attributes: frozenset[str],
) -> None:
    """Read modules that code imports while it runs, absolutely or beside itself."""
    package = namespace.get("__package__") or ""
    for name in imports:
        # The code tells the name but not whether the import was relative, so both are tried.
        for full in (name, f"{package}.{name}".strip(".")):
            module = sys.modules.get(full)
            if isinstance(module, types.ModuleType):
                read_module(reading, module, attributes)


def read_module(
    reading: DependencyScan, module: types.ModuleType, attributes: frozenset[str]
) -> None:
    """Read those attributes of a module that code names.

    Of a module that is not the user's only what the user may have put there: numbers, functions.
    """
    # By module and names: other code may name further attributes of the same module.
    if (id(module), attributes) in reading.done:
        return
    reading.done.add((id(module), attributes))
    is_own, namespace = is_users_module(module.__name__), vars(module)
    for name in sorted(attributes):
        if is_own or name in namespace:
            reading.guard.lookup(namespace, name)
        if name not in namespace:
            continue
        value, mark = namespace[name], (id(namespace), name)
        if isinstance(value, types.ModuleType):
            read_module(reading, value, attributes)
        elif mark not in reading.done and (is_own or isinstance(value, _PUT_ELSEWHERE)):
            reading.done.add(mark)
            reading.visit(f"{module.__name__}.{name}", value, name)


_PUT_ELSEWHERE = (*ATOMS, types.FunctionType)


# Objects and classes.

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


def read_object(reading: DependencyScan, what: str, value: Any) -> None:
    """Read an instance: its class, its `__dict__` and its slots."""
    # The object is there already, so its `__init__` runs in no trace.
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


def read_member(reading: DependencyScan, what: str, value: Enum) -> None:
    """Read a member of an enumeration: its name, and of the user's own its attributes as well."""
    reading.row(what, shown(f"{type(value).__name__} {value!r}"))
    if not is_users_module(type(value).__module__):
        return
    read_class(reading, f"class of {what}", type(value), is_called=False)
    reading.guard.instance(value, vars(value))
    for key, item in vars(value).items():
        if key != "__objclass__":
            reading.visit(f"{what}.{key}", item, key)


def read_parameter(reading: DependencyScan, what: str, value: ModelTensor) -> None:
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


def read_class(reading: DependencyScan, what: str, value: type, *, is_called: bool) -> None:
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


def _read_body(reading: DependencyScan, value: type, *, is_called: bool) -> None:
    label = reading.label(value)
    if (id(value), is_called) in reading.done:
        return
    # The guard of a class is the same for both readings; one is enough.
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
        slots = part.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else list(slots):
            # Python mangles a private slot to _Class__name; the class's leading underscores are
            # dropped.
            is_private = name.startswith("__") and not name.endswith("__")
            if name not in _OWN_SLOTS:
                names.append(f"_{part.__name__.lstrip('_')}{name}" if is_private else name)
    return names


# Plain data.

_ATOMS = frozenset(ATOMS)
_MOST_ROWS = 100
"""Plain items of a container that have rows of their own; of more there is one row for all."""

_PLAIN_CONTAINERS = (list, tuple, dict, set, frozenset, MappingProxyType)


def read_array(reading: DependencyScan, what: str, value: np.ndarray[Any, Any]) -> None:
    """Read an array: its type and a hash of its bytes."""
    kind = f"{value.dtype}{list(value.shape)}"
    if value.dtype.hasobject:
        read_content(reading, what, value, value.tolist)
    # A file of many GB that this process cannot change is told by its place, not by its content.
    elif isinstance(value, np.memmap) and not value.flags.writeable:
        reading.row(what, f"{kind} of {value.filename} at {value.offset}")
    else:
        digest = array_digest(value)
        reading.row(what, f"{kind} {digest:016x}")
        reading.guard.array(value, digest)


def read_container(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    """Read a list, tuple, mapping or set with its items, and with what a subclass adds."""
    if isinstance(value, MappingProxyType):
        reading.row(what, "mappingproxy")
        # The collector alone leads to the mapping behind a proxy; its only referent.
        reading.visit(what, gc.get_referents(value)[0], key)
    elif isinstance(value, dict):
        _read_mapping(reading, what, value, key)
    elif isinstance(value, (set, frozenset)):
        _read_set(reading, what, value, key)
    elif isinstance(value, (list, tuple)):
        reading.row(what, f"{type(value).__name__} of {len(value)}")
        if isinstance(value, list):
            reading.guard.items(value)
        # The base's own iteration: a subclass may have one of its own that does something.
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
    # Exact types: a subclass of int may carry attributes.
    return len(items) > _MOST_ROWS and set(map(type, items)) <= _ATOMS


def _content_hash(items: list[Any]) -> str:
    return (
        f"{len(items)} with hash {xxhash.xxh3_64_hexdigest(repr(items).encode(errors='replace'))}"
    )


def _read_mapping(reading: DependencyScan, what: str, value: dict[Any, Any], key: str) -> None:
    reading.row(what, f"{type(value).__name__} of {len(value)}")
    reading.guard.mapping(value)
    if _is_table([*dict.keys(value), *dict.values(value)]):
        reading.row(f"the items of {what}", _content_hash([*dict.items(value)]))
        return
    for name, item in dict.items(value):
        if type(name) not in ATOMS:
            reading.visit(f"a key of {what}", name, key)
        reading.visit(_inside(what, item, name), item, name if type(name) is str else key)


def _read_set(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    is_plain = all([type(item) in ATOMS for item in value])

    def read() -> list[str]:
        # Sorted digests, since a set's order differs from process to process.
        return sorted([reading.digest(item) for item in value])

    if is_plain:
        reading.guard.items(value)
        reading.row(what, f"{type(value).__name__} {sorted(map(repr, value))}")
        return
    try:
        read_content(reading, what, value, read)
    except TypeError:
        reading.cannot(what, value, key)


def read_content(
    reading: DependencyScan, what: str, value: object, parts: Callable[[], object]
) -> None:
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
    parts = value.__reduce_ex__(4)
    if isinstance(parts, str):
        return parts
    # Arguments, state, and the items of list and dict, which come as iterators: to be taken once.
    return [parts[1], *parts[2:3], *[part and list(part) for part in parts[3:5]]]


def _inside(what: str, item: object, key: object) -> str:
    """Return how an item is reached: as in the path of a parameter, or as Python writes it."""
    if isinstance(item, (Module, ModelTensor)):
        return f"{what}.{key}"
    return f"{what}[{key!r}]" if type(key) in ATOMS else f"{what}[{type(key).__qualname__}]"


# The walk: which reader an object has.


def _is_generator(value: Any) -> bool:
    """Whether a value draws random numbers. numpy.random is loaded by the first trace (20 ms)."""
    of_numpy = np.random.Generator, np.random.RandomState, np.random.BitGenerator
    return isinstance(value, (random.Random, *of_numpy))


_HARMLESS = (logging.Logger, logging.LoggerAdapter, threading.Thread)
_HARMLESS_MODULES = frozenset(
    ("_thread", "threading", "_weakref", "weakref", "_abc", "typing", "actorflow.jobs.job")
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
) -> DependencyScan:
    """Return what tracing a job on this model and these types of a batch may read.

    With `called`, of the user's functions only those are followed.
    """
    reading = DependencyScan(_walk, called)
    for key, type_ in spec.items():
        reading.row(f"batch[{key!r}]", str(type_))
    reading.visit("", model)
    reading.visit("the job's function", function)
    reading.visit("optimizer", optimizer)
    read_modules(reading)
    return reading


def _walk(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    try:
        for kinds, reader in _READERS:
            if isinstance(value, kinds):
                reader(reading, what, value, key)
                return
        if _is_generator(value):
            _read_generator(reading, what, value, key)
        elif type(value).__module__ in _HARMLESS_MODULES:
            reading.row(what, type(value).__qualname__)
        else:
            _read_other(reading, what, value)
    except Exception:  # what cannot be copied says so in many ways, and a user's class may raise
        reading.cannot(what, value, key)


def _read_other(reading: DependencyScan, what: str, value: Any) -> None:
    """Read an object of no kind that is known: by its attributes, or as a copy of it is made."""
    is_object = isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(type(value)))
    if is_object:
        read_object(reading, what, value)
    elif isinstance(value, Iterator):
        raise TypeError("an iterator cannot be read without taking from it")
    # A base made in C may hold state that no attribute shows; only a copy tells it. The last is
    # object.
    if not is_object or any([not c.__flags__ & _C_TYPE for c in type(value).__mro__[:-1]]):
        read_content(reading, what, value, lambda: reduced(value))


def _name_only(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    reading.row(what, f"{type(value).__name__} {getattr(value, '__name__', '')}".strip())


def _read_module_name(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    reading.row(what, f"module {value.__name__}")
    reading.modules.append(value)


def _nothing(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    """A descriptor in C stands for a slot, which is read where the object is."""


def _read_generator(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    reading.row(what, type(value).__name__)
    reading.generators.append((what if " " in what else f"attribute {what!r}", value))


def _read_reference(reading: DependencyScan, what: str, value: Any, key: str) -> None:
    reading.row(what, "a weak reference")
    reading.visit(f"{what}()", value(), key)


_READERS: tuple[tuple[Any, Callable[[DependencyScan, str, Any, str], None]], ...] = (
    (Module, lambda reading, what, value, key: read_object(reading, what, value)),
    (ModelTensor, lambda reading, what, value, key: read_parameter(reading, what, value)),
    (Tensor, _name_only),
    (np.ndarray, lambda reading, what, value, key: read_array(reading, what, value)),
    (types.ModuleType, _read_module_name),
    (type, lambda reading, what, value, key: read_class(reading, what, value, is_called=True)),
    (Enum, lambda reading, what, value, key: read_member(reading, what, value)),
    (CALLABLES, read_callable),
    (_DESCRIPTORS, _nothing),
    ((list, tuple, dict, types.MappingProxyType, set, frozenset), read_container),
    (weakref.ref, _read_reference),
    ((*_HARMLESS, weakref.ProxyTypes), _name_only),
    ((io.IOBase, types.GeneratorType, threading.local), DependencyScan.cannot),
)
"""How each kind is read; the first that fits."""
