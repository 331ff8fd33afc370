"""Installed packages that add ops, kernels or passes: those with an entry point of our group.

    [project.entry-points."actorflow.plugins"]
    mine = "my_package.actorflow_plugin"

The module is imported once, before anything is traced or a plan is read, and named in the log; what
it registers (`af.op`, `af.kernel`, `af.graph_pass`) is as good as ours.
"""

from __future__ import annotations

import functools
import os
import sys

from actorflow.logs import logger
from compiler.errors import CompileError

GROUP = "actorflow.plugins"


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Import all plugins, the first time; return their names.

    Raises CompileError, naming package and module, where one cannot be imported.
    """
    if not any([_has_entry(folder) for folder in sys.path]):
        return ()
    from importlib import metadata  # 25 ms, which only those with a plugin pay

    names = []
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist is not None else "an installed package"
        try:
            entry.load()
        except Exception as error:
            raise CompileError(
                f"plugin {entry.name!r} of {package} ({entry.value}) cannot be loaded:"
                f" {type(error).__name__}: {error}; mend or uninstall {package}"
            ) from error
        logger.info("plugin %r of %s is loaded: %s", entry.name, package, entry.value)
        names.append(entry.name)
    return tuple(names)


def _has_entry(folder: str) -> bool:
    """Whether a distribution in a folder of the path has our group; half a millisecond for all."""
    try:
        with os.scandir(folder or ".") as entries:
            return any([_names_group(entry.path) for entry in entries if _is_info(entry.name)])
    except OSError:  # an entry of the path need not exist, and may be a zip file
        return False


def _is_info(name: str) -> bool:
    return name.endswith((".dist-info", ".egg-info"))


def _names_group(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "entry_points.txt"), "rb") as file:
            return GROUP.encode() in file.read()
    except OSError:
        return False
