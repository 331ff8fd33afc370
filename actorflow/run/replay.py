"""A past step of a run computed again, with the range of every value: `actorflow replay`.

A run is bit-exact: from a checkpoint, the same script, data and kernels make the same steps. So
nothing has to be logged to see later what a step read and made:

    checkpoint c ──steps by the run's own plan──▶ state after step N - 1 ──▶ step N, by a plan that
                   losses held against the run's                            shows every value

The steps up to N, and on to the next line of `metrics.jsonl`, are made by the plan of the run; what
that file has of them must come out bit for bit, else the result says what differs. Step N is made
once more by a plan with `shown` (`compiler.passes.value_ranges`). All ranks of a run take part; the
first one writes the result. Nothing is written to the run's folder.

The script is started with a request set (`actorflow.run.replay_request`). Its `fit` with the run's
checkpoint directory comes here in place of training, and ends the script.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from actorflow.callbacks.protocol import Metrics, is_part_of_training
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.compile.plan_facts import losses_of
from actorflow.data import Batch, spec_of
from actorflow.environment.host import processor
from actorflow.options.run_spec import SKIP, WARN, PlanOptions, RunSpec
from actorflow.run.broken_steps import NonFiniteLoss, skips
from actorflow.run.fitting import FitResult
from actorflow.run.probes import ObservedValue
from actorflow.run.replay_request import ReplayRequest, requested
from actorflow.run.report import METRICS_FILE, RESERVED, read_metrics
from actorflow.run.restoring import start_from
from actorflow.run.run_record import RunRecordError, package_versions, read_record
from actorflow.run.runner import Runner
from compiler.contract.codec import to_json
from compiler.contract.files import replace_regular
from compiler.contract.types import TensorType

Array = np.ndarray[Any, Any]

_BINS = 16
_HEAD = 8
_MOST_ROWS = 256
"""Rows of a batch up to which the loss of each alone is computed."""
_MOST_TOLD = 5
_LAST = "_last"
"""How the name ends under which a line of metrics has the value of its step."""


class Replayed(SystemExit):
    """The steps that were asked for are replayed: the script ends here, with exit code 0."""


class ReplayableJob(Protocol):
    """What a replay asks of a job: a runner of another plan of its step."""

    def runner_like(
        self, runner: Runner, model: Any, spec: Mapping[str, TensorType], call: PlanOptions
    ) -> Runner:
        """Return a runner of the plan for some batches, on the ranks of another runner."""
        ...


def replay_if_asked(
    runner: Runner, run_spec: RunSpec, job: ReplayableJob, evaluating: ReplayableJob, model: Any
) -> FitResult | None:
    """Replay steps in place of a run, where the environment asks for steps of this one.

    Writes the result and raises Replayed, which ends the script. All ranks call it together.
    `evaluating` is the same job without training. A run that ended before these steps is followed
    by another one of the script in the same folder: it returns the result of a run with nothing to
    do, as where the script goes on. Returns None where nothing of the folder is asked for. Raises
    what `fit` does of data and checkpoints that do not fit.
    """
    request = requested(os.environ, run_spec.checkpoint)
    if request is None:
        return None
    shown = PlanOptions(on_nan=run_spec.on_nan, shown=request.shown)
    plans = _Plans(
        lambda spec: job.runner_like(runner, model, spec, shown),
        lambda spec: evaluating.runner_like(runner, model, spec, PlanOptions()),
    )
    replaying = _Replay(runner, run_spec, request, plans)
    if max(request.steps) > replaying.last_step:
        return replaying.pass_over()
    steps = [replaying.step(step) for step in request.steps]
    if runner.group.is_first:
        result = {"run": request.run, "job": runner.plan.name, "steps": steps}
        replace_regular(Path(request.result), to_json(_plain(result)))
    raise Replayed(0)


@dataclass(frozen=True, slots=True)
class _Plans:
    """Other plans of the job, for some batches, each with a runner of its own.

    `shown` shows ranges, and values of the ops that patterns name; `losses` trains nothing.
    """

    shown: Callable[[Mapping[str, TensorType]], Runner]
    losses: Callable[[Mapping[str, TensorType]], Runner]


class _Replay:
    """The replay of some steps; each begins at the newest checkpoint before it."""

    def __init__(
        self, runner: Runner, run_spec: RunSpec, request: ReplayRequest, plans: _Plans
    ) -> None:
        self._runner, self._request, self._plans = runner, request, plans
        self._outputs: dict[int, dict[str, float]] = {}
        evaluation = run_spec.evaluation
        self._spec = replace(
            run_spec.in_steps(runner.plan.batches_per_step),
            checkpoint=None,
            keep=None,
            callbacks=[one for one in run_spec.callbacks if is_part_of_training(one)],
            on_step=self._note,
            # The run may have ended by that step: here it is to be looked at.
            on_nan=run_spec.on_nan if run_spec.on_nan == SKIP else WARN,
            evaluation=None if evaluation is None else replace(evaluation, on_result=None),
            verbose=False,
        )
        self.last_step = self._spec.total_steps
        self._begin = dict(runner.given), dict(self._spec.data.state())

    def _note(self, step: int, outputs: Metrics) -> None:
        self._outputs[step] = _scalars(outputs)  # arrays of many steps would fill the memory

    def pass_over(self) -> FitResult:
        """Make no step, from the newest checkpoint that this run may have left."""
        done = self._go_back(self.last_step + 1, [])
        return self._runner.run(replace(self._spec, steps=done, on_step=None, callbacks=()))

    def step(self, step: int) -> dict[str, Any]:
        """Return what is known of a step, as it goes into the result."""
        runner, data = self._runner, self._spec.data
        notes = self._of_data(step)
        first = self._go_back(step, notes)
        position = dict(data.state())
        self._outputs.clear()
        if first < step - 1:
            self._train_to(step - 1, step - 1)
        given = dict(runner.given)
        data.restore(position)
        for _ in range((step - 1 - first) * runner.plan.batches_per_step):
            next(data)
        position, batches, origins = dict(data.state()), [], []
        for _ in range(runner.plan.batches_per_step):
            origins.append(tuple(getattr(data, "origins", tuple)()))
            batches.append(next(data))
        data.restore(position)
        rows = self._lines()
        self._train_to(min([at for at in rows if at >= step], default=step), step)
        compared = _compared(rows, self._outputs, first, is_skipping=skips(runner.plan))
        seen, outputs = self._observe(batches, given)
        own = self._outputs[step]
        return {
            "step": step,
            "first_step": first,
            "notes": notes,
            "outputs": own,
            "shown_outputs": {n: v for n, v in _scalars(outputs).items() if n in own},
            "compared": compared,
            "reasons": self._reasons(step) if compared["different"] else [],
            "batches": [
                _described(batch, where, *self._row_losses(batch, given))
                for batch, where in zip(batches, origins, strict=True)
            ],
            "values": seen,
        }

    def _of_data(self, step: int) -> list[str]:
        """Say so where another run of the folder made a step, on other data."""
        try:
            starts = read_record(self._request.run).starts
        except RunRecordError:
            return []
        made = [start.data_fingerprint for start in starts if start.first_step < step][-1:]
        if made in ([], [""], [self._spec.data.fingerprint()]):
            return []
        return [
            f"step {step} was made on other data than that of this fit, which is the first of the"
            " script that trains so far: where a later one made it, give each a folder"
        ]

    def _go_back(self, step: int, notes: list[str]) -> int:
        """Give the runner the state of the newest checkpoint before a step; return its step."""
        runner, (given, position) = self._runner, self._begin
        manager = CheckpointManager(self._request.run, report=notes.append)
        start = start_from(
            manager,
            runner.plan,
            replace(self._spec, on_step=None),
            runner.seed,
            notes.append,
            runner.group,
            at_most=step - 1,
            is_whole=True,
        )
        if start is not None:
            runner.given = dict(start.values)
            return start.step
        runner.given = dict(given)
        self._spec.data.restore(position)
        notes.append(f"there is no checkpoint before step {step}: replayed from the beginning")
        return 0

    def _train_to(self, step: int, wanted: int) -> None:
        """Train to a step; what ends the run behind the one that is wanted ended the run, too."""
        # What callbacks write to the model belongs into this run: the one before ended its lease.
        self._runner.hold_again()
        try:
            self._runner.run(replace(self._spec, steps=step))
        except NonFiniteLoss:
            if wanted not in self._outputs:
                raise

    def _lines(self) -> dict[int, dict[str, Any]]:
        """Return the lines of metrics by step; of several of one step the last one counts."""
        try:
            lines = read_metrics(Path(self._request.run) / METRICS_FILE)
        except OSError:
            return {}
        steps = [line for line in lines if type(line.get("step")) is int]
        return {line["step"]: line for line in steps if any(map(_is_last, line))}

    def _observe(
        self, batches: Sequence[Batch], given: Mapping[str, Array]
    ) -> tuple[list[dict[str, Any]], Metrics]:
        """Return the values of a step of all ranks, and its outputs."""
        seen: list[dict[str, Any]] = []
        group = self._runner.group
        rank = group.rank

        def take(when: str, values: Sequence[ObservedValue]) -> None:
            seen.extend([_row_of(value, when.partition(", ")[2], rank) for value in values])

        with closing(self._plans.shown(spec_of(batches[0]))) as runner:
            runner.given = given
            outputs = runner.observe(batches, take)
        everyone = group.all_gather_object("tell the values of a step", _tuples(seen))
        return [_dicts(row) for rows in everyone for row in cast("Any", rows)], outputs

    def _row_losses(self, batch: Batch, given: Mapping[str, Array]) -> tuple[list[float], str]:
        """Return the loss of each row of a batch, repeated to fill it; or why there are none."""
        names, plan = losses_of(self._runner.plan), self._runner.plan
        counts = {array.shape[0] if array.ndim else 0 for array in batch.values()}
        if plan.mesh.num_ranks > 1:
            return [], "they are computed on one rank alone"
        if len(names) != 1 or len(counts) != 1:
            return [], "they need one loss, and arrays of as many rows each"
        (count,) = counts
        if not 1 < count <= _MOST_ROWS:
            return [], f"a batch of {count} rows has none, expected 2 to {_MOST_ROWS}"
        losses = []
        with closing(self._plans.losses(spec_of(batch))) as runner:
            runner.given = given
            for row in range(count):
                alone = {
                    n: np.repeat(array[row : row + 1], count, axis=0) for n, array in batch.items()
                }
                outputs = runner.step([alone])
                # A job that returns its loss alone calls it "output" where it does not train.
                name = names[0] if names[0] in outputs else "output"
                if not isinstance(outputs.get(name), float):
                    return [], f"the job has no number {names[0]!r} where it does not train"
                losses.append(outputs[name])
        return losses, ""

    def _reasons(self, step: int) -> list[str]:
        """Return what is other now than when the run made a step, as far as its record says."""
        try:
            record = read_record(self._request.run)
        except RunRecordError as error:
            return [str(error)]
        reasons = []
        if record.plan != self._runner.plan.fingerprint:
            reasons.append("the plan is another: the script, its options or this machine's kernels")
        if record.data_fingerprint != self._spec.data.fingerprint():
            reasons.append("the data is another than that of the newest start")
        starts = [start for start in record.starts if start.first_step < step]
        if starts:
            then, now = starts[-1], package_versions()
            reasons += [
                f"{name} is {now.get(name, 'not here')}, was {version}"
                for name, version in then.versions.items()
                if now.get(name) != version
            ]
            if then.processor != processor():
                reasons.append(f"the processor is {processor()}, was {then.processor}")
        return reasons


def _compared(
    rows: Mapping[int, Mapping[str, Any]],
    outputs: Mapping[int, Mapping[str, float]],
    first: int,
    *,
    is_skipping: bool,
) -> dict[str, Any]:
    """Return how many values of a run's lines came out bit for bit, and the first that did not.

    Where steps are skipped the lines have the last finite values, which may be of earlier steps.
    """
    num_values, different, steps = 0, [], []
    for step in sorted(rows.keys() & outputs.keys()):
        if step <= first:
            continue
        steps.append(step)
        for name, value in outputs[step].items():
            was = _number(rows[step].get(f"{_told_name(name)}{_LAST}"))
            if was is None or (is_skipping and not math.isfinite(value)):
                continue
            num_values += 1
            if not _is_same(value, was):
                different.append({"step": step, "name": name, "was": was, "is": value})
    return {
        "steps": steps,
        "num_values": num_values,
        "num_different": len(different),
        "different": different[:_MOST_TOLD],
    }


def _number(value: object) -> float | None:
    """Return a number of a line, in which NaN and infinities are texts; None for anything else."""
    with suppress(ValueError):
        return float(value) if isinstance(value, (int, float, str)) else None
    return None


def _told_name(name: str) -> str:
    return f"metric_{name}" if name in RESERVED else name


def _is_last(name: str) -> bool:
    return name.endswith(_LAST)


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _scalars(outputs: Metrics) -> dict[str, float]:
    return {n: float(v) for n, v in outputs.items() if isinstance(v, (int, float))}


def _described(
    batch: Batch, origins: Sequence[str], losses: Sequence[float], why_none: str
) -> dict[str, Any]:
    arrays = []
    for name, array in batch.items():
        is_counted = array.dtype.kind in "fiub" and array.size
        finite = array[np.isfinite(array)] if is_counted else array[:0]
        least, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        arrays.append(
            {
                "name": name,
                "type": f"{array.dtype}{list(array.shape)}",
                "least": least,
                "most": most,
                "num_not_finite": int(array.size - finite.size) if is_counted else 0,
            }
        )
    return {
        "arrays": arrays,
        "origins": list(origins),
        "row_losses": list(losses),
        "why_no_row_losses": why_none,
    }


def _row_of(value: ObservedValue, when: str, rank: int) -> dict[str, Any]:
    """Return what is known of a value: `when` says of which batch, where a step has several."""
    return {
        "number": value.number,
        "what": value.row.what,
        "phase": value.row.phase,
        "type": value.row.type,
        "line": value.line,
        "inputs": tuple(value.row.inputs),
        "least": value.least,
        "most": value.most,
        "num_nan": value.num_nan,
        "num_inf": value.num_inf,
        "norm": value.norm,
        "iteration": tuple(value.iteration),
        "order": tuple(value.order),
        "rank": rank,
        "when": when,
        "detail": () if value.array is None else tuple(_detail(value.array).items()),
    }


def _detail(array: Array) -> dict[str, Any]:
    """Return what only the whole value tells: a histogram, where it breaks, its first elements."""
    flat = np.float64(array).ravel()
    finite = flat[np.isfinite(flat)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    # numpy takes the width of the range, which may be beyond float64.
    counts: Array = np.histogram(finite / 2, _BINS, (low / 2, high / 2))[0]
    broken = np.argwhere(~np.isfinite(array))
    return {
        "shape": tuple(array.shape),
        "histogram": tuple([int(count) for count in counts]),
        "from": low,
        "to": high,
        "num_zero": int(np.count_nonzero(flat == 0.0)),
        "first_not_finite": tuple([int(place) for place in broken[0]]) if len(broken) else None,
        "head": tuple([float(number) for number in flat[:_HEAD]]),
    }


def _tuples(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[tuple[str, Any], ...], ...]:
    return tuple([tuple(row.items()) for row in rows])


def _dicts(row: Any) -> dict[str, Any]:
    named = dict(row)
    return named | {"detail": dict(named["detail"])}


def _plain(value: Any) -> Any:
    """Return a value for JSON, in which NaN and infinities are texts that `float` reads."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
