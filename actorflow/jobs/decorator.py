"""The decorator `af.job`, which makes a job of a function.

Its keywords are the fields of `JobOptions`, which say their types and what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import Any, ParamSpec, Protocol, cast, overload

from actorflow.environment.option_values import arguments_of, describe, signature_with
from actorflow.jobs.job import Job, M, R
from actorflow.options.job_options import JobOptions
from actorflow.options.run_spec import check_function, name_of
from actorflow.trace.job_graph import Batch, Function

P = ParamSpec("P")


class JobMaker(Protocol):
    """What `job` returns where it has options alone."""

    def __call__(self, function: Callable[[M, Batch], R]) -> Job[M, R]:
        """Return a job of a function."""


class JobDecorator(Protocol[P]):
    """What `job` is: a decorator, with or without options."""

    @overload
    def __call__(self, *none: P.args, **options: P.kwargs) -> JobMaker: ...

    @overload
    def __call__(
        self, function: Callable[[M, Batch], R], *none: P.args, **options: P.kwargs
    ) -> Job[M, R]: ...


def _decorator(options_of: Callable[P, JobOptions]) -> JobDecorator[P]:
    """Return `job`, which takes the fields of its options as keywords."""

    def job(*unnamed: Any, **named: Any) -> Any:
        """Turn a function of (model, batch) into a `Job`; a decorator when called without it."""
        arguments = arguments_of("job", signature, unnamed, named)
        is_decorator = "function" not in arguments
        function = arguments.pop("function", None)
        options = JobOptions(**arguments)

        def decorate(function: Function) -> Job:
            check_function(function)
            options.check(name_of(function))
            return Job(function, options)

        return decorate if is_decorator else decorate(function)

    function = Parameter("function", Parameter.POSITIONAL_OR_KEYWORD, default=None)
    signature = signature_with([function], JobOptions)
    describe(job, signature, JobOptions)
    return cast("JobDecorator[P]", job)


job = _decorator(JobOptions)
