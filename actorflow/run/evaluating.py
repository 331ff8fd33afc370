"""The ports of a run through which an evaluation gets its batches and tells its results."""

from __future__ import annotations

from collections.abc import Callable

from actorflow.evaluation import EvaluationDataPort
from actorflow.run.plan_facts import batch_fields, batch_parts
from actorflow.run.ports import Metrics, MetricsPort, check_fields_of
from actorflow.run.run_options import RunOptions
from compiler.errors import CompileError
from compiler.plan import Plan


def evaluation_ports(
    plan: Plan, options: RunOptions, ask: Callable[[str], object]
) -> tuple[EvaluationDataPort, MetricsPort] | None:
    """Return the ports for data and for results; None for a plan that does not evaluate.

    `ask` ends the run, with the reason. Raises CompileError where plan and options disagree.
    """
    every, evaluation = plan.int_option("evaluate_every", 0), options.evaluation
    if not every:
        if evaluation is not None:
            raise CompileError(
                f"plan {plan.name!r} does not evaluate; compile it with"
                " job.compile(model, data, evaluation=...)"
            )
        return None
    if evaluation is None:
        raise CompileError(
            f"plan {plan.name!r} evaluates every {every} steps; give fit the evaluation that it was"
            " compiled with"
        )
    fields, lines = batch_fields(plan, "eval_data")
    check_fields_of(evaluation.data, fields, lines)
    batches = plan.int_option("evaluate_batches", 0)
    data = EvaluationDataPort(
        evaluation.data,
        fields,
        lines,
        batches,
        lambda: ask("the evaluation's data failed"),
        batch_parts(plan, options.among.rank, "eval_data"),
    )
    on_result, before = evaluation.on_result, options.first_step - options.first_step % every

    def tell(number: int, means: Metrics) -> None:
        # One whose source was given up lacks some of its batches.
        if on_result is not None and number <= data.num_whole:
            on_result(before + number * every, means)

    return data, MetricsPort(tell, 0, batches_per_step=batches, is_evaluation=True)
