"""The variables that a checkpoint of a job holds: those of all ranks together, as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from actorflow.initialise import whole_type
from actorflow.run.among import ONE_RANK, Among
from actorflow.run.plan_facts import saved_variables, written_variables
from compiler.plan import Plan


@dataclass(frozen=True, slots=True)
class JobState:
    """What is saved of a job, by name.

    `types` are texts such as "float32[2, 3]", of whole tensors; `roles` say what each is for;
    `written` are those that a step changes.
    """

    types: Mapping[str, str]
    roles: Mapping[str, str]
    written: frozenset[str]


def job_state(plan: Plan, among: Among = ONE_RANK) -> JobState:
    """Return what is saved of a plan's job; ranks in stages have variables of their own each.

    All ranks call it at the same place.
    """
    saved, written = {*saved_variables(plan)}, {*written_variables(plan)}
    own = [
        (v.name, v.role, str(whole_type(plan, v)), v.name in written)
        for v in plan.state
        if v.name in saved
    ]
    said = cast("list[Any]", among.gather("tell its variables for checkpoints", tuple(own)))
    rows = [row for rows in said for row in rows]
    return JobState(
        {name: type_ for name, _, type_, _ in rows},
        {name: role for name, role, _, _ in rows},
        frozenset([name for name, _, _, is_written in rows if is_written]),
    )
