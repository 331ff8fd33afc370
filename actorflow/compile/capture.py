"""Asking a script for its plan: its first `fit` ends it, with the plan that it would run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from compiler.mesh import ALONE, Ranks
from compiler.plan import Plan
from compiler.types import TensorType

if TYPE_CHECKING:
    from actorflow.compile.compiling import Compilation


class PlanCaptured(BaseException):
    """Ends a script at its first `fit` while a plan is only asked for; see `capturing_plan`.

    `store_all` is the same plan without recomputation, where the job asks for some; `asked` is what
    the plan was compiled of.
    """

    def __init__(self, plan: Plan, store_all: Plan | None, asked: Compilation) -> None:
        super().__init__("plan captured")
        self.plan = plan
        self.store_all = store_all
        self.asked = asked


CAPTURING: ContextVar[Ranks | None] = ContextVar("actorflow_capturing", default=None)
"""The ranks of the plan that is asked for; None where a `fit` is to run.

Where that is one, ranks are those of the job's mesh, and its `rank` says whose plan of them.
"""


@contextmanager
def capturing_plan(ranks: Ranks = ALONE) -> Iterator[None]:
    """Make the next `fit` raise PlanCaptured, with the plan of one of some ranks, and not run."""
    token = CAPTURING.set(ranks)
    try:
        yield
    finally:
        CAPTURING.reset(token)


def asked_rows(spec: dict[str, TensorType]) -> dict[str, TensorType]:
    """Return the types of a batch of all ranks that a plan is asked for: each has one of these."""
    ranks = CAPTURING.get()
    if ranks is None or ranks.count == 1:
        return spec
    return {
        name: replace(type_, shape=(type_.shape[0] * ranks.count, *type_.shape[1:]))
        if type_.rank
        else type_
        for name, type_ in spec.items()
    }
