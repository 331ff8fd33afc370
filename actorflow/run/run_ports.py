"""The host's ends of one run: its data, its outputs, its snapshots, its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from actorflow.compile.plan_facts import output_lines, takes_snapshots
from actorflow.data import DataSource
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.options.run_spec import RunSpec
from actorflow.run.broken_steps import monitor_of
from actorflow.run.checkpoint_port import CheckpointPort
from actorflow.run.evaluation import EvaluationDataPort, evaluation_ports
from actorflow.run.ports import (
    DataPort,
    FedSteps,
    MetricsPort,
    ReadFields,
    positions_of,
)
from actorflow.run.probes import ProbeOptions, ProbeReader
from actorflow.run.saving import CheckpointScheduler, RunContext
from actors.machine.protocol import HostPort
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan

Array = np.ndarray[Any, Any]


class RunPorts:
    """The ports of one run, and who decides about them.

    `by_name` are all of them, by actor. `data` feeds the steps, of which there are `total_steps`
    (None where each is admitted by itself); `scheduler` says which snapshots are saved; `monitor`
    looks at losses, None for a plan without one; `metrics` counts the steps.

    Args:
        plan: what is run.
        run_spec: what the run was asked.
        context: where it begins, its ranks, who saves.
        values: that the run begins with, by variable.
        distributed: the run on all ranks; None for a run that no other rank is on.
        ask: asks for the end of the run, with the reason.

    Raises:
        DataError: a source does not give what the plan was compiled for.
        CompileError: checkpoints, or an evaluation, are asked of a plan that has none.
    """

    def __init__(
        self,
        plan: Plan,
        run_spec: RunSpec,
        context: RunContext,
        values: Mapping[str, Array],
        distributed: DistributedRun | None,
        ask: Callable[[str], object],
    ) -> None:
        self.plan, self._context = plan, context
        self.total_steps = (
            None if context.is_stepped else max(run_spec.total_steps, context.first_step)
        )
        self._distributed = distributed
        period = run_spec.plan_options.period
        self.scheduler = CheckpointScheduler(plan, period, context, distributed)
        self.data = self._data_port(run_spec.data)
        self.monitor = context.monitor or monitor_of(
            plan,
            run_spec.on_nan,
            context.warn,
            values,
            directory=context.directory,
        )
        self.checkpoint: CheckpointPort | None = None
        self.evaluated: EvaluationDataPort | None = None
        self.by_name = self._ports(run_spec, ask)

    def _ports(self, run_spec: RunSpec, ask: Callable[[str], object]) -> dict[str, HostPort]:
        plan, context = self.plan, self._context
        self.metrics = metrics = MetricsPort(
            run_spec.on_step or (lambda step, metrics: None),
            context.first_step,
            ProbeReader(plan, "metrics", self._probe_options("metrics", run_spec.on_nan)),
            watch=None if self.monitor is None else self.monitor.see,
            batches_per_step=plan.batches_per_step,
            lines=output_lines(plan, "metrics"),
        )
        ports: dict[str, HostPort] = {"data": self.data, "metrics": metrics}
        if takes_snapshots(plan):
            # Without a saver it lets every snapshot go.
            self.checkpoint = CheckpointPort(
                self._save, self._is_due, context.first_step, self._stop
            )
            ports["checkpoint"] = self.checkpoint
        elif context.saver is not None:
            raise CompileError(
                f"plan {plan.name!r} takes no snapshots, so it cannot write checkpoints;"
                " compile it with job.compile(model, data, every='5s')"
            )
        rank, first_step = context.group.rank, context.first_step
        probes = self._probe_options("eval_metrics", run_spec.on_nan)
        awaited = None if context.saver is None else context.saver.results
        evaluating = evaluation_ports(
            plan, run_spec.evaluation, rank, first_step, ask, probes, awaited
        )
        if evaluating is None:
            return ports
        self.evaluated, eval_metrics = evaluating
        return ports | {"eval_data": self.evaluated, "eval_metrics": eval_metrics}

    def _probe_options(self, sink: str, on_nan: str) -> ProbeOptions:
        group, context = self._context.group, self._context
        rank = f"[rank {group.rank}] " if self.plan.mesh.num_ranks > 1 else ""
        return ProbeOptions(
            context.predicates.get(sink, {}), on_nan, rank, context.warn, context.on_ranges
        )

    def _data_port(self, source: DataSource) -> DataPort:
        plan, context = self.plan, self._context
        first_step, each = context.first_step, plan.batches_per_step
        # The first rank's position is saved.
        has_positions = context.saver is not None and context.group.is_first
        return DataPort(
            source,
            ReadFields.of(plan, context.group.rank, source),
            FedSteps(first_step, self.total_steps, each, is_resumed=context.is_resumed),
            self._on_source_end,
            positions=positions_of(plan, source, first_step) if has_positions else None,
            distributed=self._distributed,
        )

    def end_at(self, step: int) -> None:
        """Take the snapshot of a step as the last one of the run, before the loop may run it."""
        if self.checkpoint is not None:
            self.checkpoint.last_step = step

    def raise_failure(self) -> None:
        """Raise what a source of the run raised, if one did; the batches before it are used."""
        if self.data.failure is not None:
            raise self.data.failure
        if self.evaluated is not None and self.evaluated.failure is not None:
            raise self.evaluated.failure

    def _on_source_end(self) -> None:
        if self._distributed is not None:
            if self.data.failure is None:
                self._distributed.data_ended(self.data.num_steps, self.data.stopped_by)
            elif self.scheduler.needs_others:
                return  # they are at other steps, and end without a last checkpoint
        self.end_at(self.data.num_steps)

    def save_cut(self, step: int, arrays: Mapping[str, Array]) -> None:
        """Save the state that a run was cut back to, of which nobody is to hear any more."""
        self.expect_no_calls()
        if self.checkpoint is not None:
            self.checkpoint.finish(step, arrays)

    def expect_no_calls(self) -> None:
        """Let no checkpoint wait for an evaluation or a callback any more; from any thread."""
        if self._context.saver is not None:
            self._context.saver.expect_no_results()
        if self._context.writes is not None:
            self._context.writes.end()

    def release(self, error: BaseException) -> None:
        """Have a checkpoint wait for nothing that does not come any more: the run has failed."""
        self.scheduler.hurry(error)
        if self._context.writes is not None:
            self._context.writes.end(is_failure=True)

    def _stop(self) -> None:
        self.scheduler.close()
        if self._context.writes is not None:
            self._context.writes.end()

    def _save(self, step: int, arrays: Mapping[str, Array]) -> None:
        saver, writes = self._context.saver, self._context.writes
        if saver is not None and writes is not None:
            is_evaluated = saver.results is not None and saver.results.of(step) is not None
            written = writes.after(step, is_evaluated=is_evaluated)
            if written is None:
                return
            arrays = {**arrays, **{n: a for n, a in written.items() if n in arrays}}
        self.scheduler.save(step, arrays, self.data.position_after)

    def _is_due(self, step: int) -> bool:
        # The last snapshot of a rank whose source failed: others are at other steps, and would not
        # vote for it.
        is_broken = self.data.failure is not None and self.scheduler.needs_others
        if is_broken and step >= self.data.num_steps:
            return False
        if step == self.total_steps or self.scheduler.is_due(step):
            return True
        self.data.forget_before(step)
        return False
