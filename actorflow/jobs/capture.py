"""What modules return, seen and replaced from outside: `af.capture` and `af.patch`.

    activations = af.capture(evaluate, "blocks.*.attn").step(model, batch)

    with af.patch("blocks.1.attn", lambda y: y * 0.0):  # in a job
        scores = model(batch.x)

    ablated = af.patch("blocks.1.attn", lambda y: y * 0.0)(evaluate)

Both are other jobs, with plans of their own, on the model as it is: a trace hears of what each
module returns (`Trace.returned`). Patterns are those of `trainable` (`option_values`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

from actorflow.environment.option_values import Patterns, chosen, wrong_patterns
from actorflow.functional.control import (
    names_of,
    shown,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)
from actorflow.jobs.job import Job
from actorflow.tensor.tensor import as_tensor
from actorflow.tensor.tracer import Trace, current_trace, find_source, source_of
from compiler.contract.errors import CompileError
from compiler.graph.graph import SourceLocation


def capture(job: Job, paths: Patterns) -> Job:
    """Return a job that returns what modules return, by their paths.

    `paths` are patterns, such as "blocks.*.attn" or ["encoder.*", "!*.norm"]. A module that returns
    several tensors gives one output for each, as "lstm[0]"; one that is called again gives
    "head#2". The job does not train, so dropout is the identity. Raises CompileError, when it is
    traced, for a pattern that matches no module, and for a module that the job does not call.
    """
    _check(job, paths, "af.capture")
    where, function = find_source(), job.function

    def captured(model: Any, batch: Any) -> dict[str, Any]:
        hook = _Capture(_tracing(where, "af.capture"), paths, where)
        with hook:
            function(model, batch)
        return hook.outputs

    captured.__name__ = f"capture of {job.name}"
    return Job(captured, job.options.without_training())


def patch(paths: Patterns, function: Callable[[Any], Any]) -> Patch:
    """Return what replaces the results of modules: a region of a job, and a decorator of jobs.

    `function` gets what a module returned and returns the same form and types: zeros, noise, or
    what another run captured. The model is not touched. Raises CompileError for what are no
    patterns; when a job is traced, for those that match no module, for modules that are not called
    in the region, and for results of another form or type.
    """
    _check(None, paths, "af.patch")
    if not callable(function):
        raise CompileError(
            f"{find_source()}: af.patch takes a function of what a module returned, got"
            f" {function!r:.60}"
        )
    return Patch(paths, function)


def _check(job: object, paths: object, what: str) -> None:
    if job is not None and not isinstance(job, Job):
        raise CompileError(
            f"{find_source()}: {what} takes a job, which @af.job makes of a function, got"
            f" {job!r:.60}"
        )
    if expected := wrong_patterns(paths):
        raise CompileError(f"{find_source()}: {what} takes {expected}")


def _tracing(where: SourceLocation, what: str) -> Trace:
    trace = current_trace()
    if trace is None:
        raise CompileError(
            f"{where}: {what} is about modules that a job calls, and none is traced; use it inside"
            " of a function decorated with @af.job, or on such a job"
        )
    return trace


class _Hook:
    """Hears of what the modules of some paths return, as long as it is entered."""

    what = ""

    def __init__(self, trace: Trace, paths: Patterns, where: SourceLocation) -> None:
        self._trace, self._where = trace, where
        self._patterns = [paths] if isinstance(paths, str) else list(paths)
        self._paths = chosen(paths, trace.module_paths, f"{where}: {self.what}", "module")
        self._calls: dict[str, int] = {}

    def __enter__(self) -> None:
        self._trace.hooks.append(self)

    def __exit__(self, *raised: object) -> None:
        self._trace.hooks.remove(self)
        for pattern in self._patterns if raised[0] is None else ():
            if not pattern.startswith("!") and not fnmatch.filter(self._calls, pattern):
                raise CompileError(
                    f"{self._where}: {self.what} is of {pattern!r}, and the job calls no such"
                    " module; name one that it calls"
                )

    def __call__(self, path: str, result: Any) -> Any:
        """Return what a module gives in place of a result."""
        if path not in self._paths:
            return result
        self._calls[path] = self._calls.get(path, 0) + 1
        return self.take(path, result)

    def take(self, path: str, result: Any) -> Any:
        """Return what is given in place of the result of a module of these paths."""
        raise NotImplementedError


class _Capture(_Hook):
    """Keeps results, and leaves them as they are."""

    what = "af.capture"

    def __init__(self, trace: Trace, paths: Patterns, where: SourceLocation) -> None:
        super().__init__(trace, paths, where)
        self.outputs: dict[str, Any] = {}

    def take(self, path: str, result: Any) -> Any:
        """Keep a result by its path."""
        if current_trace() is not self._trace:
            raise CompileError(
                f"{find_source()}: af.capture ({self._where}) cannot give what {path!r} returns"
                " inside of the function of a scan, a loop or a choice; capture what is around it"
            )
        count = self._calls[path]
        name = path if count == 1 else f"{path}#{count}"
        leaves = tree_leaves(result, f"what {path!r} returns")
        self.outputs |= zip(names_of(result, name), map(as_tensor, leaves), strict=True)
        return result


class _Patching(_Hook):
    """Gives a function of each result in its place."""

    what = "af.patch"

    def __init__(
        self, trace: Trace, paths: Patterns, where: SourceLocation, function: Callable[[Any], Any]
    ) -> None:
        super().__init__(trace, paths, where)
        self._function = function

    def take(self, path: str, result: Any) -> Any:
        """Return the function of a result. Raises CompileError for another form or type."""
        made, line = self._function(result), source_of(self._function)
        if tree_structure(made) != tree_structure(result):
            raise CompileError(
                f"{line}: the function of af.patch returns what it got in form: {path!r} gave"
                f" {shown(result)}, and it returns {shown(made)}"
            )
        olds = [as_tensor(leaf) for leaf in tree_leaves(result, path)]
        leaves = zip(olds, tree_leaves(made, path), strict=True)
        news = [as_tensor(new, old.dtype) for old, new in leaves]
        for name, old, new in zip(names_of(result, path), olds, news, strict=True):
            if old.type != new.type:
                raise CompileError(
                    f"{line}: the function of af.patch keeps types: {name} is {old.type}, and it"
                    f" returns {new.type}; convert it with .to(...), or reshape it"
                )
        return tree_unflatten(result, list(news))


class Patch:
    """What `patch` returns: a region in a job, or a decorator of one. May be entered many times."""

    def __init__(self, paths: Patterns, function: Callable[[Any], Any]) -> None:
        self._paths, self._function = paths, function
        self._where = find_source()
        self._open: list[_Patching] = []

    def __enter__(self) -> None:
        trace = _tracing(self._where, "af.patch")
        self._open.append(_Patching(trace, self._paths, self._where, self._function))
        self._open[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._open.pop().__exit__(*raised)

    def __call__(self, job: Job) -> Job:
        """Return a job that does what another does, with these results replaced."""
        _check(job, self._paths, "af.patch")
        function, paths, replaced, where = job.function, self._paths, self._function, self._where

        def patched(model: Any, batch: Any) -> Any:
            with _Patching(_tracing(where, "af.patch"), paths, where, replaced):
                return function(model, batch)

        patched.__name__ = f"{job.name}, patched"
        return Job(patched, job.options)
