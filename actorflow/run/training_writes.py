"""What callbacks that are part of the training write, by the step whose checkpoint has it.

A snapshot of step N is copied as soon as the step is made, perhaps before a callback has heard of
it. What that callback writes then counts from step N + 1 on, and a run that goes on from N never
hears of N again. So the checkpoint of N waits for such callbacks and takes over what they wrote:
values, whoever wrote them and however often. To call them again after a resume would be wrong where
the snapshot was late and has the write already, as that of a callback that halves a rate.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from actorflow.callbacks.protocol import Callback, is_on_every_rank, is_part_of_training
from actorflow.compile.plan_facts import snapshot_rate
from compiler.contract.plan import Plan

Array = np.ndarray[Any, Any]

ON_STEP, ON_EVALUATION = "on_step", "on_evaluation"


class TrainingWrites:
    """Hears who is called when, and takes what is written meanwhile.

    Args:
        callbacks: those of this rank that are part of the training.
        together: steps that are heard of at once, of which the last one is waited for; 0 where
            later ones have begun by then.
        rate: steps between two snapshots; 0 without any, where nothing is kept.
    """

    def __init__(self, callbacks: Sequence[Callback], together: int, rate: int) -> None:
        self._periods = {
            method: steps
            for method, steps in ((ON_STEP, together), (ON_EVALUATION, 1))
            if steps and any([hasattr(one, method) for one in callbacks])
        }
        self._rate = rate
        self._heard = dict.fromkeys(self._periods, -1)
        self._written: dict[int, dict[str, Array]] = {}
        self._step: int | None = None
        self._agreed: int | None = None
        self._is_over = self._has_failed = False
        self._changed = threading.Condition()

    @classmethod
    def of(cls, callbacks: Sequence[Callback], plan: Plan) -> TrainingWrites | None:
        """Return what hears of the callbacks that a rank calls; None without one of the training.

        One that is not waited for hears of a step when later ones have begun.
        """
        trained = [one for one in callbacks if is_part_of_training(one)]
        together = plan.int_option("metrics_every", 1) if plan.option("waits_for_listener") else 0
        return cls(trained, together, snapshot_rate(plan)) if trained else None

    @contextmanager
    def hearing(self, callback: Callback, method: str, step: int) -> Iterator[None]:
        """Take what is written in this block as the work of a callback that hears of a step."""
        every = self._periods.get(method)
        if every is None:
            yield
            return
        # Outputs of several steps come together, when the last of them is made.
        self._step = -(-step // every) * every
        # All ranks stand at this step, until all have evaluated and heard of it.
        if method == ON_EVALUATION and is_on_every_rank(callback):
            self._agreed = threading.get_ident()
        try:
            yield
        finally:
            self._step = self._agreed = None

    @property
    def are_ranks_at_one_step(self) -> bool:
        """Whether the calling thread is in a callback that all ranks call at the same step."""
        return self._agreed == threading.get_ident()

    def add(self, values: Mapping[str, Array]) -> None:
        """Take what is being written to the variables of this rank; the arrays stay as they are."""
        step = self._step
        if step is None or not self._rate:
            return
        with self._changed:
            # The snapshot before the last one is saved by now, and others are never asked for, but
            # the newest: the run may end with it.
            self._written = {
                known: written
                for known, written in self._written.items()
                if known == step or (known % self._rate == 0 and known >= step - self._rate)
            }
            self._written.setdefault(step, {}).update(values)

    def heard(self, method: str, step: int) -> None:
        """Note that the callbacks of the training have heard of a step."""
        if method in self._periods:
            with self._changed:
                self._heard[method] = step
                self._changed.notify_all()

    def end(self, *, is_failure: bool = False) -> None:
        """Wait for no callback any more: after a failure none is called; from any thread."""
        with self._changed:
            self._is_over = True
            self._has_failed |= is_failure
            self._changed.notify_all()

    def after(self, step: int, *, is_evaluated: bool) -> Mapping[str, Array] | None:
        """Return what was written when a step was heard of, once it is; by variable.

        None where the run failed before that: its checkpoint would lack what is not written.

        `is_evaluated` says that an evaluation of the step was made, whose callbacks are called.
        """
        methods = [
            method
            for method, every in self._periods.items()
            if (is_evaluated if method == ON_EVALUATION else step % every == 0)
        ]
        with self._changed:
            while any([self._heard[method] < step for method in methods]):
                if self._has_failed:
                    return None
                if self._is_over:
                    break
                self._changed.wait()
            return dict(self._written.get(step, {}))
