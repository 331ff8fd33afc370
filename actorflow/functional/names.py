"""What arguments are called: as torch calls them, and as numpy does where torch takes that, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from actorflow.trace.tracer import find_source
from compiler.errors import CompileError

P = ParamSpec("P")
R = TypeVar("R")

_RANK = "        rank: number of spatial axes.\n"
"""What functions of ranks say of the argument that those of one rank have not."""

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


def of_ranks(
    function: Callable[Concatenate[int, P], R], name: str
) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R]]:
    """Return a function of (rank, ...) for 1, 2 and 3 axes, called `<name>1d` and so on.

    What the function says of itself it says for all of them.
    """

    def of_rank(rank: int) -> Callable[P, R]:
        @functools.wraps(function)
        def ranked(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(rank, *args, **kwargs)

        ranked.__name__ = ranked.__qualname__ = f"{name}{rank}d"
        ranked.__doc__ = (function.__doc__ or "").replace(_RANK, "")
        ranked.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect
        return ranked

    own = inspect.signature(function)
    signature = own.replace(parameters=[*own.parameters.values()][1:])
    return of_rank(1), of_rank(2), of_rank(3)
