"""Reads of what another actor updates in place.

Which version such a read finds depends on how often the writer has fired by then. That is counted
while a period is played. One order of firings stands for all: no plan runs unless `actors.race`
finds that every two conflicting accesses come in the same order in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from compiler.errors import InternalError
from compiler.ops.sources import SCRATCH
from compiler.plan import Plan
from compiler.types import RegisterId


class When(Enum):
    """Which version a read names: see `compiler.plan.Variable`."""

    BEFORE = "before"
    AFTER = "after"
    BETWEEN = "between"


@dataclass(frozen=True, slots=True)
class CarriedRead:
    """An actor reads, in every firing, what another actor updates in each of its own."""

    actor: int
    launch: int
    writer: int
    register: RegisterId
    when: When


@dataclass(frozen=True, slots=True)
class Carried:
    """What goes from firing to firing: such reads, and pairs (variable, actor that writes it)."""

    reads: tuple[CarriedRead, ...]
    writers: tuple[tuple[int, int], ...]


class CarriedCount:
    """Counts the firings of writers at every firing that reads what they carry over.

    Raises InternalError, at once, where variables are written at other rates than their roles say.
    """

    def __init__(self, plan: Plan, carried: Carried, repetitions: Sequence[int]) -> None:
        self._plan = plan
        self._repetitions = repetitions
        self._check_rates(carried.writers)
        self._fired = [0] * len(plan.actors)
        # All that one writer updates is alike to one reader.
        first = {(r.actor, r.writer, r.when): r for r in reversed(carried.reads)}
        self._reads: dict[int, list[CarriedRead]] = {}
        for read in first.values():
            self._reads.setdefault(read.actor, []).append(read)

    def visit(self, actor: int, firing: int, times: int) -> None:
        """Take some firings in a row, the first one `firing`. Raises InternalError."""
        reads = self._reads.get(actor, ())
        for read in reads:
            fired = self._fired[read.writer]
            if read.when is When.BETWEEN:
                self._check_between(read, reads, firing)
            else:
                for k in dict.fromkeys((firing, firing + times - 1)):
                    expected = self._expected(read, k)
                    if fired != expected:
                        raise self._error(
                            read,
                            f"{k} wants {expected} firings of it before, and comes after {fired}",
                        )
        self._fired[actor] = firing + times

    def skip(self, fired: Sequence[int], times: int) -> None:
        """Take some rounds, each like the one before: what held in it holds in these.

        What is found and what is expected grow alike where both actors fire, and where only one
        does the round that is visited next tells, because neither ever shrinks.
        """
        self._fired = [n + times * more for n, more in zip(self._fired, fired, strict=True)]

    def _check_rates(self, writers: tuple[tuple[int, int], ...]) -> None:
        """Check that scratch is written at one rate, and all other state at one."""
        plan, every = self._plan, self._repetitions
        first: dict[bool, tuple[int, int]] = {}
        for index, actor in writers:
            other, rate = first.setdefault(plan.variables[index].role == SCRATCH, (index, actor))
            if every[actor] != every[rate]:
                names = [plan.variables[i].name for i in (index, other)]
                raise InternalError(
                    f"{plan.actors[actor].name!r} writes variable {names[0]!r} {every[actor]} times"
                    f" in a period, and {plan.actors[rate].name!r} writes {names[1]!r}"
                    f" {every[rate]} times"
                )

    def _expected(self, read: CarriedRead, firing: int) -> int:
        """Return how often the writer has to have fired before this firing of the reader."""
        own, its = self._repetitions[read.actor], self._repetitions[read.writer]
        is_after = read.when is When.AFTER
        if own % its == 0:
            return firing // (own // its) + is_after
        if its % own == 0:
            return (firing + is_after) * (its // own)
        raise self._error(
            read, f"{firing} is one of {own} in a period, which has {its} of the writer's"
        )

    def _check_between(self, read: CarriedRead, reads: Sequence[CarriedRead], firing: int) -> None:
        """Check that all writers have done the same share of their period."""
        one = self._fired[read.writer], self._repetitions[read.writer]
        for other in reads:
            two = self._fired[other.writer], self._repetitions[other.writer]
            if other.when is When.BETWEEN and one[0] * two[1] != two[0] * one[1]:
                name = self._plan.actors[other.writer].name
                raise self._error(
                    read,
                    f"{firing} comes after {one[0]} firings of it and {two[0]} of {name!r}, which"
                    " are not of the same step",
                )

    def _error(self, read: CarriedRead, problem: str) -> InternalError:
        plan = self._plan
        actor = plan.actors[read.actor]
        launch = actor.launches[read.launch]
        return InternalError(
            f"launch {read.launch} ({launch.op}, {plan.sources[launch.source]}) of {actor.name!r}"
            f" reads {plan.registers[read.register].name!r} as it is {read.when.value} what"
            f" {plan.actors[read.writer].name!r} writes: firing {problem}"
        )
