"""Old names of modules that our pages showed: each still works, and warns with the new name.

`compiler` and `actors` put `OldNames` at the end of `sys.meta_path`, where it is asked only for
modules that nobody else finds. An import by an old name gives a module that looks its attributes up
in the new one. All of this is removed in version 0.3.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "actors.kernels.catalogue": ("actors.kernels.host.catalogue",),
        "actors.kernels.kernel": ("actors.kernels.common.kernel",),
        "actors.kernels.native.prepare": ("actors.kernels.host.catalogue",),
        "actors.kernels.native.runtime": ("actors.kernels.library.runtime",),
        "actors.simulate": ("actors.simulation.simulate",),
        "compiler.added_passes": ("compiler.pipeline.rewrites",),
        "compiler.attrs": ("compiler.contract.attrs",),
        "compiler.errors": ("compiler.contract.errors",),
        "compiler.options": ("compiler.graph.target",),
        "compiler.placement": ("compiler.contract.placement",),
        "compiler.plan": ("compiler.contract.plan", "compiler.contract.plan_tables"),
        "compiler.registry": ("compiler.graph.registry",),
        "compiler.types": ("compiler.contract.types",),
    }
)
"""The modules that have the names of an old one now, the likelier first."""

NAMES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("compiler.pipeline", "PASSES"): "compiler.pipeline.pipeline",
        ("compiler.verify", "verify_plan"): "compiler.verify.verify",
    }
)
"""Names of modules that are packages now: (package, name) and the module that has it."""


class OldNames:
    """Finds the modules of `MODULES`, and loads them as views of the new ones.

    A finder and a loader by their methods: the classes of `importlib.abc` take 5 ms to import.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, None for all others."""
        return ModuleSpec(fullname, cast("Loader", self)) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Warn where the import stands, and let the module look its attributes up."""
        new = MODULES[module.__name__]
        _warn(module.__name__, " and ".join(new), stacklevel=3)
        modules = [import_module(name) for name in new]

        def attribute(name: str) -> Any:
            for candidate in modules:
                if hasattr(candidate, name):
                    return getattr(candidate, name)
            raise AttributeError(f"module {new[0]!r} has no attribute {name!r}", name=name)

        module.__dict__["__getattr__"] = attribute


def install() -> None:
    """Let imports by old names work in this process; a second call changes nothing."""
    if not any([isinstance(finder, OldNames) for finder in sys.meta_path]):
        sys.meta_path.append(OldNames())


def name_of_package(package: str, name: str) -> Any:
    """Return a name of `NAMES` with a warning; for the `__getattr__` of a package.

    Raises:
        AttributeError: the package never had the name.
    """
    new = NAMES.get((package, name))
    if new is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
    _warn(f"{package}.{name}", f"{new}.{name}", stacklevel=4)
    return getattr(import_module(new), name)


def _warn(old: str, new: str, stacklevel: int) -> None:
    """Warn at the import statement; frames of the import system do not count as levels."""
    warnings.warn(
        f"{old} is now {new}; the old name is removed in version 0.3",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
