"""Passes and kernels from outside, beside `af.op`: what a script or an installed package adds.

    @af.graph_pass(after="simplify")
    def without_abs(graph):
        ...
        return graph  # another one, or the same

    @af.kernel
    class FastSoftmax:
        name, op = "mine.softmax", "softmax"
        ...

Both are part of the identity of every plan: another file, or none, is another plan.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from actorflow.compile.targets import is_taken_elsewhere
from actorflow.environment.settings import logger
from actors.kernels.host import catalogue
from compiler.contract.errors import CompileError
from compiler.graph.graph import Graph
from compiler.graph.program_builder import expand, has_plugin_kernel
from compiler.graph.registry import all_ops, find_op
from compiler.pipeline import rewrites

Rewriting = Callable[[Graph], Graph]
K = TypeVar("K", bound=type)


def graph_pass(
    run: Rewriting | None = None,
    /,
    *,
    name: str | None = None,
    needs: Sequence[str] = (),
    provides: Sequence[str] = (),
    before: str = "",
    after: str = "",
) -> Any:
    """Let a function from a graph to a graph run in every compilation that follows; a decorator.

    It stands as early as `needs` (facts that passes provide), `after` and `before` (names of
    passes, see `actorflow passes`) allow; where none is given, it sees the graph as it was traced.
    The outputs keep their names and types. It runs while a job is compiled, so it must not compile.
    Raises ValueError for what is no function, and where another file has a pass of that name; a
    compilation raises CompileError where it has no place, or returns no graph.
    """
    # The file of the caller: a cache key covers its content.
    where = sys._getframe(1).f_code.co_filename

    def known(run: Rewriting) -> Rewriting:
        if not callable(run):
            raise ValueError(f"a pass is a function from a graph to a graph, got {run!r:.60}")
        called: Any = name or getattr(run, "__name__", type(run).__name__)
        texts = [called, *_facts(needs), *_facts(provides), before, after]
        if not all([isinstance(text, str) for text in texts]):
            raise ValueError(f"names of passes and facts are texts, got {texts}")
        facts = {"needs": _facts(needs), "provides": _facts(provides)}
        rewrites.register(called, run, **facts, before=before, after=after, where=where)
        return run

    return known if run is None else known(run)


def _facts(given: Any) -> tuple[str, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def kernel(cls: K) -> K:
    """Add a kernel of a class (`actors.kernels.common.kernel.Kernel`); a decorator.

    It is asked before ours.

    The class is called without arguments. A node that the kernel takes is not fused with others.
    Raises ValueError for what is no kernel, a name that is taken, and an op that is not defined.
    """
    called = getattr(cls, "__qualname__", repr(cls))
    if not isinstance(cls, type):
        raise ValueError(
            f"af.kernel decorates a class that can be called without arguments, got {cls!r:.60}"
        )
    try:
        new = cls()
    except TypeError as error:
        raise ValueError(f"{called} is made without arguments: {error}") from error
    texts = [part for part in ("name", "op") if not isinstance(getattr(new, part, None), str)]
    calls = [part for part in ("query", "bind") if not callable(getattr(new, part, None))]
    if texts or calls:
        raise ValueError(
            f"{called} is no kernel: it has no {' and no '.join(texts + calls)}; a kernel has texts"
            " `name` and `op`, and functions `query` and `bind`"
        )
    if new.op not in [op.name for op in all_ops()]:
        near = get_close_matches(new.op, [op.name for op in all_ops()], 1)
        hint = f"; did you mean {near[0]!r}?" if near else "; define the op before its kernel"
        raise ValueError(f"{cls.__qualname__} is for an op {new.op!r}, and there is none{hint}")
    for older in catalogue.registered(new.op):
        kind = type(older)  # one that is defined anew, as in a notebook, takes the place of the old
        if (kind.__module__, kind.__qualname__) == (cls.__module__, cls.__qualname__):
            catalogue.unregister(older.name)
    catalogue.register(new, where=sys._getframe(1).f_code.co_filename)
    op = find_op(new.op)
    if expand.has(op) and not has_plugin_kernel.has(op):
        has_plugin_kernel.register(op, is_taken_elsewhere)
    return cls


# Plugins: installed packages with an entry point of our group.
#
#     [project.entry-points."actorflow.plugins"]
#     mine = "my_package.actorflow_plugin"
#
# What such a module registers (`af.op`, `af.kernel`, `af.graph_pass`) is as good as ours.

GROUP = "actorflow.plugins"


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Import all plugins, the first time; return their names.

    Raises CompileError, naming package and module, where one cannot be imported.
    """
    # Text search before the import of importlib.metadata: almost nobody has a plugin.
    if not any([_has_entry(folder) for folder in sys.path]):
        return ()
    from importlib import metadata  # 25 ms, which only those with a plugin pay

    names = []
    # Sorted: the order of registration decides which kernel is asked first.
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist is not None else "an installed package"
        try:
            entry.load()
        # Any: a plugin's module runs code of somebody else at import.
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
