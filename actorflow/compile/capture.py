"""Asking a script for its plan: its first `fit` ends it, with the plan that it would run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from compiler.plan import Plan


class PlanCaptured(BaseException):
    """Ends a script at its first `fit` while a plan is only asked for; see `capturing_plan`.

    `store_all` is the same plan without recomputation, where the job asks for some.
    """

    def __init__(self, plan: Plan, store_all: Plan | None) -> None:
        super().__init__("plan captured")
        self.plan = plan
        self.store_all = store_all


CAPTURING: ContextVar[int] = ContextVar("actorflow_capturing", default=0)
"""Ranks of the plan that is asked for; 0 where a `fit` is to run."""


@contextmanager
def capturing_plan(num_ranks: int = 1) -> Iterator[None]:
    """Make the next `fit` raise PlanCaptured, with the plan of one of some ranks, and not run."""
    token = CAPTURING.set(num_ranks)
    try:
        yield
    finally:
        CAPTURING.reset(token)
