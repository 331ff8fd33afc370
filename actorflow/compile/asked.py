"""What a job asks of its plan, in the compiler's words."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow.checkpoint.policy import Every
from actorflow.compile.job_options import JobOptions
from actorflow.evaluation import Evaluation
from compiler.options import CompileOptions
from compiler.placement import Device


def compile_options(
    name: str,
    options: JobOptions,
    devices: Sequence[Device],
    metrics_every: int,
    every: str | int | None,
    evaluation: Evaluation | None,
) -> CompileOptions:
    """Return what a plan of a job is compiled for."""
    cadence = Every.parse(every) if every is not None else None
    return CompileOptions(
        name=name,
        devices=tuple([str(device) for device in devices]),
        is_training=options.train,
        snapshot_every=(cadence.steps or 0) if cadence else 0,
        snapshot_seconds=(cadence.seconds or 0.0) if cadence else 0.0,
        accumulate=options.accumulate,
        metrics_every=metrics_every,
        num_streams=options.streams,
        evaluate_every=evaluation.every if evaluation else 0,
        evaluate_batches=evaluation.batches if evaluation else 0,
        memory_budget=options.budget_bytes,
        recompute=options.recompute,
        offload=options.offload,
        zero=options.zero,
        precision=options.precision,
        clip_norm=options.clip_norm or 0.0,
        clip_value=options.clip_value or 0.0,
        losses=() if options.losses == ("loss",) else options.losses,
        evaluate_precision=evaluation.job.options.precision if evaluation else "fp32",
    )
