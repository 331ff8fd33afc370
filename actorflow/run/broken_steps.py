"""Steps whose loss, or gradients, are not finite: what a run does about them, and what it says.

The policy "raise" ends the run, "warn" trains on, and "skip" goes with a plan whose steps drop
their own updates where they are broken (the pass `skip_updates`): the host learns of it when later
steps have begun, and only counts and tells. A plan with a loss scale skips under any policy, since
that is how it finds the scale; it ends where no scale helps.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from actorflow.compile.plan_facts import losses_with_lines
from actorflow.environment.settings import is_worth_a_line, once
from actorflow.options.run_spec import RAISE, SKIP
from actorflow.tensor.tracer import find_source
from compiler.contract.codec import DecodeError, from_json, to_json
from compiler.contract.errors import ActorflowError, CompileError
from compiler.contract.files import read_regular, replace_regular
from compiler.contract.plan import Plan
from compiler.contract.types import DType, TensorType
from compiler.graph.target import LOSS_SCALE, SKIPPED

MAX_SKIPPED_IN_A_ROW = 100
"""Steps that may be skipped one after the other: a run that skips all of them trains nothing."""

MAX_OVERFLOWS_IN_A_ROW = 20
"""The same where a loss is scaled: by then the scale is a millionth of what it was."""

_COUNTER = TensorType(DType.INT64, ())
_NOTE = "non_finite.json"
"""In the run's directory: the step that ended the run."""
_MOST_NOTE_BYTES = 1 << 10


class NonFiniteLoss(ActorflowError):
    """A loss became NaN or infinite, or with `debug=` a value; the message names step and line."""

    __module__ = "actorflow"  # the name that users catch it by


def check_policy(plan: Plan, on_nan: str) -> None:
    """Raise CompileError when a plan cannot run under a policy."""
    if on_nan == SKIP and plan.option("is_training") and not skips(plan):
        raise CompileError(
            f"{find_source()}: plan {plan.name!r} was compiled to make every update, so"
            " on_nan='skip' cannot drop one; compile it with job.compile(model, data,"
            " on_nan='skip')"
        )


def skips(plan: Plan) -> bool:
    """Whether the plan's steps drop their updates where loss or gradients are not finite."""
    counters = [plan.views[v.view].type for v in plan.state if v.name == SKIPPED]
    fields = [f for f in plan.fields if f.name == SKIPPED and plan.views[f.view].type == _COUNTER]
    is_counted = counters == [_COUNTER] and bool(fields)
    return is_counted and bool(plan.option("skips_broken_steps"))


def is_scaled(plan: Plan) -> bool:
    """Whether the plan's steps multiply the loss, and skip those that overflow."""
    is_shown = LOSS_SCALE in [f.name for f in plan.fields]
    return is_shown and skips(plan) and plan.option("precision") == "fp16"


def monitor_of(
    plan: Plan,
    on_nan: str,
    warn: Callable[[str], object],
    values: Mapping[str, np.ndarray[Any, Any]],
    *,
    directory: Path | None,
) -> NonFiniteMonitor | None:
    """Return what looks at the steps of a run; None for a plan without a loss.

    `values` are those that the run begins with; all else as `NonFiniteMonitor` has it.
    """
    lines = losses_with_lines(plan)
    if not lines:
        return None
    skipped = int(values[SKIPPED]) if skips(plan) and SKIPPED in values else None
    return NonFiniteMonitor(
        on_nan,
        lines,
        warn,
        skipped=skipped,
        scaled=is_scaled(plan),
        directory=directory,
    )


class NonFiniteMonitor:
    """Looks at the outputs of every step of a run, in order, on one thread.

    Args:
        policy: one of `run_spec.POLICIES`.
        lines: the user's line of each loss, by its name.
        warn: receives what is to be said.
        skipped: steps that were skipped before this run; None for a plan that skips none.
        scaled: whether the plan's steps find a loss scale by skipping.
        directory: of the run, which notes the step that ends it; None for no note. Of several
            ranks each writes the note, the same one: the first that raises ends the others, which
            may not have seen the step. What an earlier run noted is read here, before any rank of
            this one can.
    """

    def __init__(
        self,
        policy: str,
        lines: Mapping[str, str],
        warn: Callable[[str], object],
        *,
        skipped: int | None = None,
        scaled: bool = False,
        directory: Path | None = None,
    ) -> None:
        # A plan with a loss scale drops overflowing updates itself, so no policy may raise at the
        # first.
        self._policy = SKIP if scaled else policy
        self._is_scaled = scaled
        self._lines = dict(lines)
        self._warn = warn
        self._before = self._total = skipped
        self._note = directory / _NOTE if directory is not None else None
        self._ended_before = ended_at(directory)
        self._warn_once = once(warn)
        self._in_a_row = 0
        self._last = (0, 0.0)  # step and its loss
        self._name = next(iter(self._lines))  # of that loss: the first that is not finite
        self._scale = self._largest_scale = 0.0

    @property
    def num_skipped(self) -> int:
        """Steps of this run that were skipped, as far as outputs have come."""
        return (self._total or 0) - (self._before or 0)

    def see(self, step: int, outputs: dict[str, Any]) -> None:
        """Take the outputs of a step. Raises NonFiniteLoss where the policy wants that.

        That a step was skipped is among the outputs of the next one.
        """
        if self._total is not None:
            outputs[SKIPPED] = int(outputs[SKIPPED])
            self._count(outputs[SKIPPED])
        losses = {name: float(outputs[name]) for name in self._lines}
        broken = [name for name, loss in losses.items() if not math.isfinite(loss)]
        self._name = (broken or list(losses))[0]
        loss = losses[self._name]
        self._last = (step, loss)
        if self._is_scaled:
            self._scale = float(outputs[LOSS_SCALE])
            self._largest_scale = max(self._scale, self._largest_scale)
        # With SKIP the counter of the next step tells, since a gradient may break where the loss
        # does not.
        if not math.isfinite(loss) and self._policy != SKIP:
            self._report(step, f"{self._name} is {loss} at step {step}")

    @property
    def _line(self) -> str:
        return self._lines[self._name]

    def finish(self, skipped: int) -> None:
        """Take how many steps are skipped now that the run is over: the last may be one."""
        self._count(skipped)

    def _count(self, total: int) -> None:
        # The counter only grows; at most one step lies between two looks at it.
        if total == self._total:
            self._in_a_row = 0
            return
        self._total = total
        self._in_a_row += 1
        step, loss = self._last
        what = f"{self._name} is {loss}"
        if math.isfinite(loss):
            what = f"a gradient or the learning rate is not finite ({self._name} is {loss})"
        if self._policy != SKIP:
            if math.isfinite(loss):  # else it was told with the loss
                self._report(step, f"{what} at step {step}")
            return
        count = self.num_skipped
        if self._is_scaled:
            what += f" at a loss scale of {self._scale:g}"
            self._check_scale(step, what)
        if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLoss(
                f"the last {self._in_a_row} steps up to {step} were all skipped, so nothing is"
                f" trained any more; of step {step}, {what} ({self._line}). Lower the learning"
                " rate, clip gradients with @af.job(clip_norm=1.0), or look at the data and at what"
                " the job computes from it"
            )
        if is_worth_a_line(count):
            self._warn(
                f"step {step} is skipped: {what} ({self._line}); parameters and optimizer state"
                f" stay as they were; {count} skipped in this run"
            )

    def _check_scale(self, step: int, what: str) -> None:
        """Raise NonFiniteLoss where another scale will not help."""
        # A scale below 1 shrinks the loss: float16 then overflows by the values themselves. A scale
        # that began below 1 was the user's choice.
        has_fallen = self._scale < 1 <= self._largest_scale
        if self._in_a_row < MAX_OVERFLOWS_IN_A_ROW and not has_fallen:
            return
        raise NonFiniteLoss(
            f"steps overflow float16 whatever the loss scale: {self._in_a_row} in a row up to"
            f" {step} were skipped; of step {step}, {what} ({self._line}). Look at the data and at"
            " what the job computes from it, lower the learning rate, give precision='bf16', which"
            " has the range of float32, or loss_scale=af.LossScale(init_scale=...)"
        )

    def _report(self, step: int, what: str) -> None:
        text = (
            f"{what} ({self._line}){self._again(step)}; @af.job(debug='nan') or"
            " ACTORFLOW_DEBUG=nan names the op that made the first NaN, debug='inf' the first"
            " infinity. An op outside of its domain, such as the log of a negative number, needs"
            " other operands; a loss that grew until then a lower learning rate, or gradients that"
            " @af.job(clip_norm=1.0) clips. fit(..., on_nan='skip') skips the update of such a"
            " batch, and on_nan='warn' continues with it"
        )
        if self._policy == RAISE:
            if self._note is not None:
                run = shlex.quote(str(self._note.parent))
                text += f". 'actorflow replay {run}' shows what the step read and made"
            raise NonFiniteLoss(text)
        self._warn_once(text)

    def _again(self, step: int) -> str:
        """Note the step that ends the run; say so if it has ended a run before."""
        if self._policy != RAISE:
            return ""
        if self._ended_before == step:
            return (
                ", as in an earlier run in this directory: a resumed run computes the same"
                " values from the same batch, so it will end here each time"
            )
        if self._note is not None:
            with suppress(OSError):  # a courtesy to the next run
                replace_regular(self._note, to_json({"step": step}), is_shared=True)
        return ""


def ended_at(directory: Path | None) -> int | None:
    """Return the step whose loss ended a run in a directory before, or None."""
    step: object = None
    if directory is not None:
        # The file may be anything: a list in it raises TypeError.
        with suppress(OSError, DecodeError, TypeError, KeyError):
            step = from_json(read_regular(directory / _NOTE, _MOST_NOTE_BYTES))["step"]
    return step if type(step) is int else None
