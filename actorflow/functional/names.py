"""What arguments are called: as torch calls them, and as numpy does where torch takes that, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from actorflow.trace.tracer import find_source
from compiler.errors import CompileError

R = TypeVar("R")

_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


def with_numpy_names(function: Callable[..., R]) -> Callable[..., R]:
    """Let a function of `dim` and `keepdim` be called with `axis` and `keepdims` as well."""
    place = [*inspect.signature(function).parameters].index("dim")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> R:
        for name, torchs in _OF_NUMPY.items():
            if name in kwargs:
                if torchs in kwargs or (torchs == "dim" and len(args) > place):
                    raise CompileError(
                        f"{find_source()}: {function.__name__} got {torchs} and {name}, which are"
                        " two names of one argument; give one of them"
                    )
                kwargs[torchs] = kwargs.pop(name)
        return function(*args, **kwargs)

    return called
