"""Several plans of one training, open on one set of variables and one memory, stepped in turn.

Each plan has its own actors, launches and threads, which rest while another one steps. To switch
waits for the step that is under way, fills constants again, and loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np

from actorflow.compile.plan_facts import (
    batch_fields,
    read_only_variables,
    state_layout,
    written_variables,
)
from actorflow.environment.settings import is_worth_a_line, logger
from actorflow.run.saving import RunContext
from actorflow.run.stepping import Stepping
from actorflow.tensor.probes import Predicates
from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan
from memory.report import format_bytes

Array = np.ndarray[Any, Any]


def batch_text(plan: Plan) -> str:
    """Return the types of a plan's batches in words: "x: float32[8, 256], y: int32[8]"."""
    return ", ".join([f"{name}: {type_}" for name, type_ in batch_fields(plan)[0].items()])


def are_at_one_place(plans: Sequence[Plan]) -> bool:
    """Whether plans have their variables at the same places, so that they can share a memory."""
    return len({state_layout(plan) for plan in plans}) == 1


def memory_lines(plans: Sequence[Plan], *, are_together: bool) -> list[str]:
    """Return what the arenas of some plans take, each by itself and, `are_together`, all."""
    sizes = [[arena.size_bytes for arena in plan.arenas] for plan in plans]
    lines = [
        f"  arenas for batches of {batch_text(plan)}: {format_bytes(sum(size))}"
        for plan, size in zip(plans, sizes, strict=True)
    ]
    if not plans:
        return []
    if not are_together:
        return [*lines, f"  {len(plans)} plans are open one at a time"]
    together = sum([max(column) for column in zip(*sizes, strict=True)])
    return [*lines, f"  {len(plans)} plans take turns on {format_bytes(together)}"]


class OpenPlans:
    """The open plans of a runner. `current` is the one that was stepped last, None before a step.

    Args:
        most: plans that stay open; of more, the one stepped least recently is closed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.current: Stepping | None = None
        # By id of the plan, which a run keeps; the least recently stepped one first.
        self._resting: dict[int, Stepping] = {}
        self._num_closed = 0
        self._arena_bytes: tuple[int, ...] = ()
        self._opened_next: list[tuple[Plan, Predicates]] = []

    def __contains__(self, plan: Plan) -> bool:
        current = self.current
        return id(plan) in self._resting or (current is not None and current.run.plan is plan)

    def shares_memory(self, plan: Plan) -> bool:
        """Whether a plan has its variables where the open ones have them."""
        current = self.current
        if current is None or state_layout(plan) != state_layout(current.run.plan):
            return False
        if current.run.memory.released:  # its packed form would be overwritten
            return False
        return self.borrowed.keys() <= {*read_only_variables(plan)}

    @property
    def borrowed(self) -> Mapping[str, Array]:
        """The values that the open plans read where they lie, by variable."""
        return {} if self.current is None else self.current.run.memory.borrowed

    @property
    def released(self) -> set[str]:
        """The borrowed variables that the open plan has packed alone."""
        return set() if self.current is None else self.current.run.memory.released

    @property
    def packed(self) -> tuple[str, ...]:
        """The borrowed variables that the open plan, if it is alone, has packed: see `release`."""
        current = self.current
        if current is None or self._resting or written_variables(current.run.plan):
            return ()
        return current.run.bound.variables.packed

    def has_room(self, plan: Plan) -> bool:
        """Whether the memory of the open plans is large enough for another one."""
        return self.current is not None and self.current.run.memory.has_room(plan)

    def reserve(self, plans: Sequence[tuple[Plan, Predicates]]) -> None:
        """Have the next memory take some plans, and those that are open now: `open` opens them."""
        open_now = [*self._resting.values(), *([] if self.current is None else [self.current])]
        self._opened_next = [(s.run.plan, s.context.predicates) for s in open_now] + [*plans]
        sizes = [[arena.size_bytes for arena in plan.arenas] for plan, _ in self._opened_next]
        self._arena_bytes = tuple([max(column) for column in zip(*sizes, strict=True)])

    def open(
        self, plan: Plan, context: RunContext, values: Mapping[str, Array], on_nan: str
    ) -> Stepping:
        """Open a plan on a memory of its own, beside those that it is reserved for.

        It is `current` once the caller says so. What is raised leaves no plan open.
        """
        context = replace(context, arena_bytes=self._arena_bytes)
        opened = Stepping(plan, context, values, on_nan)
        others, self._opened_next, self._arena_bytes = self._opened_next, [], ()
        try:
            for other, predicates in others:
                if other is not plan:
                    self._beside(opened, other, predicates)
            opened.run.bound.variables.refill()  # others have written over its constants
        except BaseException:
            with closing(opened.run):
                self.close()
            raise
        return opened

    def turn_to(self, plan: Plan, predicates: Predicates) -> Stepping:
        """Give another plan the turn; one that is not open yet is opened beside the current one."""
        before = self.current
        if before is None:
            raise InternalError(f"plan {plan.name!r} takes a turn, and no plan is open")
        opened = before if before.run.plan is plan else self._resting.get(id(plan))
        if opened is None:
            with before.run.raises_its_end():
                before.run.variables.come_to_rest()
            try:
                opened = self._beside(before, plan, predicates)
            except BaseException:  # the other plan may have written over its constants by now
                with before.run.raises_its_end():
                    before.run.variables.come_to_rest(before.run.bound.variables.refill)
                raise
        # An interrupt may leave the turn with either; the next step takes it for its plan again.
        opened.run.take_turn(before.run)
        if opened is not before:
            del self._resting[id(plan)]
            self._resting[id(before.run.plan)] = before
            self.current = opened
        self._close_oldest()
        return opened

    def close(self) -> None:
        """Close all plans but the current one."""
        resting, self._resting = self._resting, {}
        with ExitStack() as stack:
            for stepping in resting.values():
                stack.callback(stepping.run.close)

    def _beside(self, open_one: Stepping, plan: Plan, predicates: Predicates) -> Stepping:
        context = replace(
            open_one.context, predicates=predicates, monitor=open_one.run.monitor, arena_bytes=()
        )
        opened = Stepping(plan, context, {}, open_one.on_nan, open_one.run)
        self._resting[id(plan)] = opened
        return opened

    def _close_oldest(self) -> None:
        while len(self._resting) >= self.most:
            oldest = self._resting.pop(next(iter(self._resting)))
            plan = oldest.run.plan
            oldest.run.close()
            self._num_closed += 1
            if is_worth_a_line(self._num_closed):
                logger.warning(
                    "the plan of %r for %s is closed: it was used least recently, and max_plans=%d"
                    " stay open; a batch of these types loads it again (%d closed so far)",
                    plan.name,
                    batch_text(plan),
                    self.most,
                    self._num_closed,
                )
