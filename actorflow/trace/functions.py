"""Reading functions: their code, and all they can reach: closed-over variables, globals, modules.

A function that Python, an installed package or this one brings counts by its name; what it closes
over is read all the same: a decorator holds the user's function there, a schedule its numbers.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from typing import Any

from actorflow.trace.code import code_facts, is_users, is_users_module
from actorflow.trace.reading import ATOMS, Reading, short_name

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


def read_callable(reading: Reading, what: str, value: Any, key: str) -> None:
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


def _read_function(reading: Reading, what: str, value: types.FunctionType) -> None:
    code = value.__code__
    name, facts, is_own = short_name(value), code_facts(code), is_users(code.co_filename)
    if is_own:
        reading.row(what, f"function {name} with code {facts.digest}")
        reading.codes.append(code)
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


def _read_cell(reading: Reading, what: str, cell: types.CellType, key: str) -> None:
    reading.guard.cell(cell)
    try:
        content = cell.cell_contents
    except ValueError:
        reading.row(what, "nothing")
    else:
        reading.visit(what, content, key)


def read_modules(reading: Reading) -> None:
    """Read the user's modules that were met as objects, kept in an attribute or a closed-over name.

    Any code may name their attributes, so this comes last.
    """
    while True:
        names, count = frozenset(reading.names), len(reading.modules)
        for module in reading.modules[:count]:
            if is_users_module(module.__name__):
                read_module(reading, module, names)
        if len(reading.names) == len(names) and len(reading.modules) == count:
            return


def _read_global(
    reading: Reading, namespace: dict[str, Any], name: str, attributes: frozenset[str]
) -> None:
    reading.guard.lookup(namespace, name)
    if name not in namespace:
        reading.guard.lookup(vars(builtins), name)
        return
    value = namespace[name]
    mark = (id(namespace), name)
    if mark not in reading.done:
        reading.done.add(mark)
        reading.visit(f"global {name!r} of {namespace.get('__name__')}", value, name)
    if isinstance(value, types.ModuleType):
        read_module(reading, value, attributes)


def _read_imports(
    reading: Reading,
    namespace: dict[str, Any],
    imports: tuple[str, ...],
    attributes: frozenset[str],
) -> None:
    """Read modules that code imports while it runs, absolutely or beside itself."""
    package = namespace.get("__package__") or ""
    for name in imports:
        for full in (name, f"{package}.{name}".strip(".")):
            module = sys.modules.get(full)
            if isinstance(module, types.ModuleType):
                read_module(reading, module, attributes)


def read_module(reading: Reading, module: types.ModuleType, attributes: frozenset[str]) -> None:
    """Read those attributes of a module that code names.

    Of a module that is not the user's only what the user may have put there: numbers, functions.
    """
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
