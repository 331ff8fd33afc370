"""What a user hands to a job, checked before anything is traced or opened.

Each error has the user's line, what was expected, what came, and how to mend it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from actorflow.data import DataError, DataSource
from actorflow.data.source import checked_spec
from actorflow.nn.module import Module
from actorflow.trace.tracer import find_source, source_of
from compiler.errors import CompileError
from compiler.mesh import Mesh
from compiler.types import TensorType

ENDLESS = 1 << 40
"""Steps of a stream without an end: at a microsecond each, two weeks."""

_READ = ("spec", "__next__", "state", "restore")
_SOURCE = (*_READ, "fingerprint")


def check_model(model: object) -> None:
    """Raise CompileError for what is no model."""
    if isinstance(model, Module):
        return
    if isinstance(model, type) and issubclass(model, Module):
        mend = f"make one of it: {model.__name__}(...)"
    elif all([callable(getattr(model, name, None)) for name in _SOURCE]):
        mend = "the model comes first, the data after it"
    elif isinstance(model, (list, tuple, dict)):
        mend = "keep the parts as attributes of one class derived from af.nn.Module"
    else:
        mend = "derive its class from af.nn.Module"
    raise CompileError(f"{find_source()}: expected a model, came {came(model)}; {mend}")


def check_source(data: object, *, is_kept: bool = True) -> None:
    """Raise DataError for what is no data source; one of an evaluation is never kept on disk."""
    _check_methods(data, _SOURCE if is_kept else _READ)


def _check_methods(data: object, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not callable(getattr(data, name, None))]
    if missing or isinstance(data, type):
        raise DataError(
            f"{find_source()}: expected a data source, came {came(data)}"
            f"{_lacking(data, missing)}; {_source_for(data)}"
        )


def spec_of_source(data: DataSource | Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Return the types of a source's batches, or those that were given. Raises DataError."""
    if not isinstance(data, Mapping):
        _check_methods(data, ("spec",))
        data = _typed(data.spec(), f"spec() of the {type(data).__name__}")
    try:
        return checked_spec(data)
    except DataError as error:
        raise DataError(f"{find_source()}: {error}") from None


def check_steps(steps: object) -> None:
    """Raise CompileError for what is no number of steps."""
    if not isinstance(steps, (int, np.integer)) or isinstance(steps, bool):
        raise CompileError(
            f"{find_source()}: steps must be an integer, got {steps!r} of type"
            f" {type(steps).__name__}"
        )
    if not 0 <= steps < ENDLESS:
        raise CompileError(
            f"{find_source()}: steps must be >= 0 and below {ENDLESS:,}, got {steps}"
        )


def check_directory(checkpoint: object) -> None:
    """Raise CompileError for what is no directory of a run."""
    is_path = isinstance(checkpoint, (str, os.PathLike)) and os.fspath(checkpoint)
    if checkpoint is not None and not is_path:
        raise CompileError(
            f"{find_source()}: checkpoint must be a directory for the run, or None, got"
            f" {checkpoint!r}"
        )


def check_listener(name: str, listener: object) -> None:
    """Raise CompileError for what can neither be called with (step, results) nor left out."""
    if listener is None:
        return
    if not callable(listener):
        raise CompileError(
            f"{find_source()}: {name} must be a function, or None, got {came(listener)}"
        )
    why = _refusal_of_two(listener)
    if why:
        raise CompileError(f"{find_source()}: {name} is called with (step, results): {why}")


def check_count(name: str, count: object) -> None:
    """Raise CompileError for what is no number of things."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise CompileError(
            f"{find_source()}: {name} must be an integer of 1 or more, got {count!r}"
        )


def check_rank(rank: object, mesh: Mesh) -> None:
    """Raise CompileError for what is no rank of a mesh."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < mesh.num_ranks:
        raise CompileError(
            f"{find_source()}: rank must be an integer from 0 to {mesh.num_ranks - 1}, as the job's"
            f" mesh has {mesh.num_ranks}; got {rank!r}"
        )


def check_function(function: object) -> None:
    """Raise CompileError for what cannot be a job's function of (model, batch)."""
    if not callable(function):
        raise CompileError(
            f"{find_source()}: expected a function of (model, batch), came {came(function)};"
            " write @af.job(...) above the function"
        )
    why = _refusal_of_two(function)
    if why:
        raise CompileError(
            f"{source_of(function)}: a job's function takes (model, batch), and"
            f" {name_of(function)!r} does not: {why}"
        )


def _refusal_of_two(function: Callable[..., Any]) -> str:
    """Return why a function cannot be called with two arguments, or nothing."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        return str(error)
    except ValueError:  # of a function in C nothing is known
        return ""
    return ""


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of what a partial or an object stands for."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def came(value: object) -> str:
    """Return what a value is, in words."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if inspect.isfunction(value):
        return f"the function {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _lacking(data: object, missing: list[str]) -> str:
    """Return what an object lacks that is nearly a source, or nothing."""
    is_near = 0 < len(missing) < len(_SOURCE) - 1 and not isinstance(data, type)
    return f", which has no {', '.join([f'{name}()' for name in missing])}" if is_near else ""


def _source_for(data: object) -> str:
    if isinstance(data, type):
        return f"make one of it: {data.__name__}(...)"
    if isinstance(data, (np.ndarray, Mapping)):
        return 'wrap arrays: af.data.ArraySource({"x": x, "y": y}, batch=32)'
    if isinstance(data, Module):
        return "the model comes first, the data after it"
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        return "wrap what yields batches: af.data.from_iterable(make_iterator, spec)"
    return "use af.data.Tokens, af.data.ArraySource or af.data.from_iterable, or a class of yours"


def _typed(spec: object, what: str) -> Mapping[str, TensorType]:
    """Return a spec as sources give it. Raises DataError for another."""
    if not isinstance(spec, Mapping) or not spec:
        raise DataError(
            f"{find_source()}: {what}: expected {{name: af.TensorType}} of one entry or more, came"
            f" {came(spec) if spec else repr(spec)}"
        )
    for name, type_ in spec.items():
        if not isinstance(name, str) or not isinstance(type_, TensorType):
            raise DataError(
                f"{find_source()}: {what}: expected {{name: af.TensorType(dtype, shape)}}, came"
                f" {name!r}: {came(type_)}"
            )
    return spec
