"""Modules that hold modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from actorflow import functional
from actorflow.nn.module import Module
from actorflow.tensor import Tensor, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError


class ModuleList(Module):
    """A list of modules; their paths are their numbers, `blocks.0`, as in a plain list."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self.extend(modules)

    def append(self, module: Module) -> ModuleList:
        """Add a module at the end; return this list."""
        if not isinstance(module, Module):
            raise CompileError(
                f"{find_source()}: {type(self).__name__} holds modules, got"
                f" {type(module).__name__}; for functions write a Module, or call them yourself"
            )
        vars(self)[str(len(self))] = module
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        """Add modules at the end; return this list."""
        try:
            given = list(modules)
        except TypeError:
            raise CompileError(
                f"{find_source()}: {type(self).__name__} is made of a list of modules, got"
                f" {type(modules).__name__}"
            ) from None
        for module in given:
            self.append(module)
        return self

    def __len__(self) -> int:
        return len(vars(self))

    def __iter__(self) -> Iterator[Any]:
        return iter([*vars(self).values()])

    def __getitem__(self, index: int | slice) -> Any:
        found = [*vars(self).values()][index]
        return type(self)(found) if isinstance(found, list) else found


class Sequential(ModuleList):
    """Modules one after the other: each takes what the one before returned."""

    def __init__(self, *modules: Module | Sequence[Module]) -> None:
        given = modules[0] if len(modules) == 1 and isinstance(modules[0], list) else modules
        super().__init__(given)  # type: ignore[arg-type]  # a slice gives a list of modules

    def __call__(self, x: Any) -> Any:
        """Return what the last module returns."""
        for module in self:
            x = module(x)
        return x


class ModuleDict(Module):
    """Modules by name, in order."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        if not isinstance(modules, Mapping | None):
            raise CompileError(
                f"{find_source()}: a ModuleDict is made of a dict, got {type(modules).__name__}"
            )
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if not isinstance(name, str) or not isinstance(module, Module):
            raise CompileError(
                f"{find_source()}: a ModuleDict holds modules by text, got {name!r} and"
                f" {type(module).__name__}"
            )
        vars(self)[name] = module

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter([*vars(self)])

    def __len__(self) -> int:
        return len(vars(self))

    def items(self) -> list[tuple[str, Any]]:
        """Return names with their modules."""
        return [*vars(self).items()]


class Identity(Module):
    """What comes, goes."""

    def __call__(self, x: Any) -> Any:
        """Return x."""
        return x


class Flatten(Module):
    """Make one axis of those from `start_dim` to `end_dim`; the batch stays."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same elements under another shape."""
        return functional.flatten(x, self.start_dim, self.end_dim)


class Unflatten(Module):
    """Make several axes of one."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim = dim
        self.unflattened_size = integers(unflattened_size, what="a size of Unflatten")

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same elements under another shape."""
        return functional.unflatten(x, self.dim, self.unflattened_size)
