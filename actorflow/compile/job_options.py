"""What `@af.job` was given, checked where the user wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actorflow.optim import Optimizer
from actorflow.sizes import parse_bytes
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError

MAX_TOGETHER = 1024
"""Batches whose outputs or gradients come together: each has slots that are bound and proven."""

MAX_STREAMS = 64
"""Compute streams of a job, each with a thread."""

CHOICES = {
    "recompute": ("auto", "none", "blocks"),
    "offload": ("auto", "none", "optimizer"),
    "precision": ("fp32", "bf16"),
}


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a job.

    `optimizer` changes the parameters of a training job; `train=False` makes a job that only
    computes its outputs. `seed` keys initialisers and random ops; `max_plans` bounds the input
    signatures per model. A step consumes `accumulate` batches; the outputs of `metrics_every` steps
    reach the listener together; a step runs on `streams` compute streams. Its arena takes at most
    `memory_budget` bytes (0: as many as it needs); `recompute` says what may run again for it, and
    `offload` what may live in host memory. `precision` is what products read. A `deterministic` job
    has its kernels chosen by rule, never by measured times.
    """

    optimizer: Optimizer | None
    train: bool
    seed: int
    max_plans: int
    accumulate: int
    metrics_every: int
    streams: int
    memory_budget: int
    recompute: str
    offload: str
    precision: str
    deterministic: bool


def checked_options(
    job: str,
    *,
    optimizer: Any,
    train: Any,
    seed: Any,
    max_plans: Any,
    accumulate: Any,
    metrics_every: Any,
    streams: Any,
    memory_budget: Any,
    recompute: Any,
    offload: Any,
    precision: Any,
    deterministic: Any,
) -> JobOptions:
    """Return the options of a job. Raises CompileError with the user's line."""
    where = find_source()
    if train and optimizer is None:
        raise CompileError(
            f"{where}: job {job!r} has no optimizer; give"
            " @af.job(optimizer=af.optim.AdamW(1e-3)), or train=False to evaluate only"
        )
    counts = {
        "accumulate": (accumulate, 1, MAX_TOGETHER),
        "metrics_every": (metrics_every, 1, MAX_TOGETHER),
        "streams": (streams, 1, MAX_STREAMS),
        "max_plans": (max_plans, 1, 1 << 30),
        "seed": (seed, 0, (1 << 63) - 1),
    }
    for name, (count, least, most) in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
            raise CompileError(
                f"{where}: {name} of job {job!r} must be an integer of {least} or more, and at"
                f" most {most:,}, got {count!r}"
            )
    if accumulate * metrics_every > MAX_TOGETHER:
        raise CompileError(
            f"{where}: job {job!r} would keep the outputs of accumulate x metrics_every ="
            f" {accumulate * metrics_every:,} batches before it hands them on; at most"
            f" {MAX_TOGETHER:,} are possible. Lower metrics_every"
        )
    is_optimizer = callable(getattr(optimizer, "rules", None)) and not isinstance(optimizer, type)
    if optimizer is not None and not is_optimizer:
        raise CompileError(
            f"{where}: optimizer of job {job!r} must be one, such as af.optim.AdamW(1e-3), got"
            f" {optimizer!r}"
        )
    is_training = bool(train and optimizer is not None)
    if accumulate > 1 and not is_training:
        raise CompileError(
            f"{where}: job {job!r} does not train, so it has no gradients to accumulate; leave"
            f" accumulate={accumulate} out"
        )
    choices = {"recompute": recompute, "offload": offload, "precision": precision}
    for name, choice in choices.items():
        if choice not in CHOICES[name]:
            known = ", ".join([repr(known) for known in CHOICES[name]])
            raise CompileError(
                f"{where}: {name} of job {job!r} must be one of {known}, got {choice!r}"
            )
    if not isinstance(deterministic, bool):
        raise CompileError(
            f"{where}: deterministic of job {job!r} must be True or False, got {deterministic!r}"
        )
    try:
        budget = 0 if memory_budget is None else parse_bytes(memory_budget)
    except ValueError as error:
        raise CompileError(f"{where}: memory_budget of job {job!r}: {error}") from None
    return JobOptions(
        optimizer,
        is_training,
        seed,
        max_plans,
        accumulate,
        metrics_every,
        streams,
        budget,
        recompute,
        offload,
        precision,
        deterministic,
    )
