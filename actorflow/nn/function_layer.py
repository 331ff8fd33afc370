"""A function of `functional` as a layer: activations, losses and pools are no more than that."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from actorflow.nn.module import Module
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError


class FunctionLayer(Module):
    """Base of layers that call a function: operands are given in the call, all else is held.

    What is held are attributes of the names that the function's arguments have.

        class MSELoss(FunctionLayer, function=functional.mse_loss, operands=2): ...
    """

    _function: ClassVar[Callable[..., Any]]
    _held: ClassVar[inspect.Signature]

    def __init_subclass__(
        cls, function: Callable[..., Any] | None = None, operands: int = 1, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if function is not None:
            own = inspect.signature(function)
            cls._function = staticmethod(function)
            cls._held = own.replace(parameters=[*own.parameters.values()][operands:])
        if cls.__init__ is FunctionLayer.__init__ and function is not None:
            cls.__signature__ = cls._held  # type: ignore[attr-defined]  # what help() shows

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Keep what the function takes after its operands. Raises CompileError for all else."""
        try:
            held = self._held.bind(*args, **kwargs)
        except TypeError as error:
            raise CompileError(
                f"{find_source()}: {type(self).__name__}: {error}; it takes {self._held}"
            ) from None
        vars(self).update(held.arguments)

    def __call__(self, *operands: Any) -> Any:
        """Return the function of the operands."""
        own = vars(self)  # which may have attributes of the user's own, too
        held = {name: own[name] for name in self._held.parameters if name in own}
        return type(self)._function(*operands, **held)
