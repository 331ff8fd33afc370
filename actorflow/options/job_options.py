"""What `@af.job` takes: stated once, checked where the user wrote it; and the scale of a loss.

The loss of a job in float16 is multiplied by a scale, so that small gradients do not become 0:
`scaled` adds it to the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real

import numpy as np

from actorflow.environment.default_seed import SEEDS, default_seed
from actorflow.environment.option_values import (
    IntRange,
    OneOfValues,
    Patterns,
    check_fields,
    parse_bytes,
    wrong_patterns,
)
from actorflow.optim import EMA, Optimizer, OptimizerPart
from actorflow.optim.recipes import parts_of
from actorflow.tensor.literals import checked_number
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import Trace, find_source
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import Device, Mesh, distinct_devices
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import Output, SourceLocation, Write
from compiler.graph.target import GOOD_STEPS, LOSS_SCALE
from compiler.ops.families.updates import RESCALE

_LARGEST = 2.0**126
"""A scale of float32, whose inverse is a normal number, too."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A scale that follows how steps go, as torch.amp.GradScaler has it.

    Args:
        init_scale: the scale of the first step.
        growth_factor: what the scale is multiplied by after `growth_interval` steps in a row whose
            gradients were finite; above 1.
        backoff_factor: what it is multiplied by after a step whose loss or gradients were not, and
            which was skipped; between 0 and 1.
        growth_interval: steps, as above.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        where = find_source()
        for name, least, most in (
            ("init_scale", 0.0, _LARGEST),
            ("growth_factor", 1.0, _LARGEST),
            ("backoff_factor", 0.0, 1.0),
        ):
            number = getattr(self, name)
            if not _is_between(checked_number(number, name), least, most):
                raise CompileError(
                    f"{where}: {name} of a loss scale must be above {least:g} and below {most:g},"
                    f" got {number!r}"
                )
        interval = IntRange(1, (1 << 31) - 1).expected(self.growth_interval)
        if interval:
            raise CompileError(
                f"{where}: growth_interval of a loss scale must be {interval}, got"
                f" {self.growth_interval!r}"
            )


def _is_between(number: float, least: float, most: float) -> bool:
    return least < number < most


def is_scale(value: object) -> bool:
    """Whether something is a loss scale: a `LossScale`, or a number for one that stays."""
    if isinstance(value, LossScale):
        return True
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0.0 < float(value) < _LARGEST  # type: ignore[arg-type]  # a Real


def scaled(
    trace: Trace, losses: Mapping[str, Tensor], scaling: LossScale | float
) -> dict[str, Tensor]:
    """Return losses times a scale, which becomes an output of the job and state of its plan."""
    single, counter = TensorType(DType.FLOAT32, ()), TensorType(DType.INT64, ())
    if isinstance(scaling, LossScale):
        init = (("kind", "constant"), ("value", float(scaling.init_scale)))
        scale = trace.variable(LOSS_SCALE, single, "counter", init)
        good = trace.variable(GOOD_STEPS, counter, "counter", (("kind", "zeros"),))
        attrs = {
            "growth_factor": float(scaling.growth_factor),
            "backoff_factor": float(scaling.backoff_factor),
            "growth_interval": scaling.growth_interval,
        }
        # `compiler.passes.autodiff` replaces this 0 by whether the step is skipped.
        unknown = as_tensor(0, DType.INT64)._value_in(trace)
        with trace.scope("optimizer"):
            news = trace.emit(RESCALE, [scale, good, unknown], Attrs(attrs))
        trace.builder.writes += [
            Write(old, new) for old, new in zip((scale, good), news, strict=True)
        ]
    else:
        scale = as_tensor(float(scaling))._value_in(trace)
    trace.builder.outputs.append(Output(LOSS_SCALE, scale))
    return {name: _times(loss, Tensor(trace, scale)) for name, loss in losses.items()}


def _times(loss: Tensor, scale: Tensor) -> Tensor:
    wide = DType.FLOAT64 if loss.dtype is DType.FLOAT64 else DType.FLOAT32
    return loss.to(wide) * scale.to(wide)


MAX_TOGETHER = 1024
"""Batches whose outputs or gradients come together: each has slots that are bound and proven."""

MAX_STREAMS = 64
"""Compute streams of a job, each with a thread."""

BATCH_AXIS = "data"
"""The axis of a mesh whose ranks have different rows of a batch."""

_LARGEST_VALUE = float(np.finfo(np.float32).max)
"""Of an element of a gradient."""

_TOGETHER = {"rule": IntRange(1, MAX_TOGETHER)}


_OF_COMPUTATION = (
    "seed", "max_plans", "streams", "device", "devices", "gpu", "mesh", "precision", "debug",
    "deterministic",
)  # fmt: skip
"""Options of a job that hold of what it computes, whether it trains or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job.

    Args:
        optimizer: changes the model's parameters; a training job needs one. Or a list of
            `af.optim.on(patterns, optimizer, loss=...)`: several of them, each with parameters and
            a loss of its own; all are computed from the values before the step.
        train: False for a job that only computes its outputs.
        trainable: patterns over paths of parameters, such as ["head.*", "!*.bias"]: only these are
            trained by this job, and others read as if frozen
            (`actorflow.environment.option_values`).
        seed: of initialisers and random ops; the same seed gives the same run, bit by bit. It is no
            part of the plan: another seed costs no compilation. By default that of `af.seed`, or 0.
        max_plans: plans of a model, for batches of several shapes, that stay open between steps; of
            more the one that was used least recently is closed. Memory is that of the largest.
        accumulate: batches per step; the update uses the mean of their gradients, and the outputs
            of a step are the means of theirs, element by element.
        clip_norm: what the norm of the gradients of a step, of all parameters together, is kept
            below, as by torch.nn.utils.clip_grad_norm_. The norm before that is the output
            `grad_norm`; float("inf") gives it and clips nothing.
        clip_value: what every element of a gradient is kept within, from minus that to that; before
            clip_norm, if both are given. Gradients are clipped when those of a step's batches, and
            of all ranks, are together; all of them are alive at once then.
        ema: averages of the weights, as they are after every step: `af.optim.EMA(...)`, or its
            decay, such as 0.999. `fit` returns them, an `af.Evaluation(..., ema=True)` reads them,
            and checkpoints have them.
        metrics_every: steps whose outputs reach the listener together, so that a listener costs
            one wake-up in so many steps. Every step's outputs still arrive, in order; what depends
            on them (the check for NaN) is up to so many steps late.
        streams: compute streams, at most. Branches of a step that do not depend on each other may
            overlap. On the host each has a thread of its own and all of them share the cores, so a
            plan has as many streams as pay by the planner's estimate, and says so; on other devices
            it has as many as the branches can use.
        device: what the job runs on: "host", "cuda", "cuda:1", "sim" or "sim:1". A simulated device
            computes with the host's kernels and is late as a seed likes; see `docs/devices.md`. By
            default what ACTORFLOW_DEVICE says, and that is the host. An evaluation runs where its
            training does.
        devices: several of them, instead of `device`. The job says what runs where (`af.device`,
            `tensor.to`); one that does not is placed by cost, so that a step ends early and each
            device's memory suffices.
        gpu: what the GPU of a job on CUDA is, such as "h200"; by default what ACTORFLOW_GPU says,
            and that is the GPU that is here. With a name, plans are made without one
            (`docs/cuda.md`).
        memory_budget: bytes that the arena of the plan may take, parameters, optimizer state,
            batches and everything else included: 600_000_000, "600MiB", "2GB". Where a step needs
            more, parts of the forward pass run again after the loss; the results stay the same,
            bit by bit. Compiling fails where nothing fits, and names the smallest budget that does.
        recompute: "auto", what the budget asks for, and nothing without one; "none", never;
            "blocks", always everything between the articulation points of the forward graph.
        offload: what may live in the memory of the host, copied in and out while the device
            computes: "auto", what the budget asks for, where the device has a link and copies cost
            less than running launches again; "none"; "optimizer", all optimizer state, always.
            What lives there is no part of memory_budget. A job on the host itself gains nothing.
        mesh: the ranks that train together, such as `af.Mesh(data=2, model=2)`; by default one. The
            job computes with whole tensors and the whole batch, and the compiler says what each
            rank has of them: rows of the batch along the axis "data"; along others what layouts
            say (`sbp=`, `to_sbp`), and what is cheap. See `docs/ranks.md`.
        zero: True keeps parameters and the state of the optimizer in parts, cut along their first
            axis over the axis "data" of the mesh: less memory on each rank, for bytes between them.
        precision: "fp32"; or "bf16": products read bfloat16, and what lies between them lives in
            it, while parameters, their gradients and updates, norms, softmax and losses stay
            float32. Outputs and checkpoints are float32 as ever: a run may go on in another
            precision. An evaluation computes in the precision of its own job. Or "fp16": float16 in
            place of bfloat16, with a loss scale.
        loss_scale: what the loss of a job with precision="fp16" is multiplied by, and its gradients
            are divided by, so that small ones are not lost: `af.LossScale(...)`, which is what
            there is by default, follows how steps go, and a number stays. A step that overflows is
            skipped. The outputs `loss_scale` and `skipped` tell the scale of a step and the steps
            skipped before it.
        debug: "nan" ends a run by an error that names the first op whose result has a NaN, with the
            user's line, its module and the ranges of what it reads; "inf" the first one that has a
            NaN or an infinity. Each value of a step is read once more for that, and none is fused
            away. By default what ACTORFLOW_DEBUG says, and that is nothing (`docs/debugging.md`).
        deterministic: True chooses the library of each matrix product by a fixed rule. False, by
            default, chooses the one that was measured to be the fastest on this machine; another
            machine, or `--tune`, may then choose another, whose last bits differ.
    """

    optimizer: Optimizer | OptimizerPart | Sequence[OptimizerPart] | None = None
    train: bool = True
    trainable: Patterns | None = None
    seed: int | None = field(default=None, metadata={"rule": SEEDS})
    max_plans: int = field(default=8, metadata={"rule": IntRange(1, 1 << 30)})
    accumulate: int = field(default=1, metadata=_TOGETHER)
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: EMA | float | None = None
    metrics_every: int = field(default=1, metadata=_TOGETHER)
    streams: int = field(default=1, metadata={"rule": IntRange(1, MAX_STREAMS)})
    device: str | None = None
    devices: Sequence[str] | None = None
    gpu: str | None = None
    memory_budget: str | int | None = None
    recompute: str = field(
        default="auto", metadata={"rule": OneOfValues(("auto", "none", "blocks"))}
    )
    offload: str = field(
        default="auto", metadata={"rule": OneOfValues(("auto", "none", "optimizer"))}
    )
    mesh: Mesh | None = None
    zero: bool = field(default=False, metadata={"rule": OneOfValues((True, False))})
    precision: str = field(default="fp32", metadata={"rule": OneOfValues(("fp32", "bf16", "fp16"))})
    loss_scale: LossScale | float | None = None
    debug: str | None = field(default=None, metadata={"rule": OneOfValues(("nan", "inf"))})
    deterministic: bool = field(default=False, metadata={"rule": OneOfValues((True, False))})

    def changed(self) -> dict[str, str]:
        """Return each option that is not its default, as Python would write its value."""
        values = [(option, getattr(self, option.name)) for option in fields(self)]
        return {o.name: repr(value) for o, value in values if value != o.default}

    def without_training(self) -> JobOptions:
        """Return the options of a job that computes the same, and trains nothing."""
        return JobOptions(train=False, **{name: getattr(self, name) for name in _OF_COMPUTATION})

    @property
    def effective_seed(self) -> int:
        """The seed of a call that begins now: the job's own, else that of `af.seed`."""
        return default_seed() if self.seed is None else self.seed

    @property
    def has_ranks(self) -> bool:
        """Whether several ranks run the job, so that layouts mean something."""
        return self.mesh is not None and self.mesh.num_ranks > 1

    @property
    def scaling(self) -> LossScale | float | None:
        """What the loss is multiplied by; None where it is not."""
        if not self.train or self.precision != "fp16":
            return None
        return LossScale() if self.loss_scale is None else self.loss_scale

    @property
    def averaging(self) -> EMA | None:
        """How the job averages weights; None where it does not."""
        return self.ema if self.ema is None or isinstance(self.ema, EMA) else EMA(self.ema)

    @property
    def parts(self) -> tuple[OptimizerPart, ...]:
        """The optimizers, each with what it trains; one for everything where there is only one."""
        return parts_of(self.optimizer, find_source()) or ()

    @property
    def losses(self) -> tuple[str, ...]:
        """The keys of what is trained on, in order; none where the job does not train."""
        return tuple(dict.fromkeys([part.loss for part in self.parts])) if self.train else ()

    @property
    def budget_bytes(self) -> int:
        """The memory budget in bytes; 0: as many as a step needs. Raises ValueError."""
        return 0 if self.memory_budget is None else parse_bytes(self.memory_budget)

    @property
    def placed_on(self) -> tuple[Device, ...]:
        """The devices that the job names, in order; none where it leaves that open.

        Raises ValueError.
        """
        if self.device is not None and self.devices is not None:
            raise ValueError("give device, for one, or devices, for several, but not both")
        devices = self.devices if self.device is None else (self.device,)
        if devices is None:
            return ()
        if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
            raise ValueError(f'devices must be a list such as ["sim:0", "sim:1"], got {devices!r}')
        return distinct_devices(devices)

    def check(self, job: str) -> None:
        """Raise CompileError, with the user's line, for what no job can be made with."""
        where, optimizer = find_source(), self.optimizer
        if self.train and optimizer is None:
            raise CompileError(
                f"{where}: job {job!r} has no optimizer; give"
                " @af.job(optimizer=af.optim.AdamW(1e-3)), or train=False to evaluate only"
            )
        check_fields(self, where, f" of job {job!r}")
        if self.accumulate * self.metrics_every > MAX_TOGETHER:
            raise CompileError(
                f"{where}: job {job!r} would keep the outputs of accumulate x metrics_every ="
                f" {self.accumulate * self.metrics_every:,} batches before it hands them on; at"
                f" most {MAX_TOGETHER:,} are possible. Lower metrics_every"
            )
        if optimizer is not None and parts_of(optimizer, where) is None:
            raise CompileError(
                f"{where}: optimizer of job {job!r} must be one, such as af.optim.AdamW(1e-3), or a"
                f" list of af.optim.on(patterns, optimizer, loss=...), got {optimizer!r}"
            )
        if self.accumulate > 1 and not self.train:
            raise CompileError(
                f"{where}: job {job!r} does not train, so it has no gradients to accumulate; leave"
                f" accumulate={self.accumulate} out"
            )
        self._check_trainable(f"{where}: trainable of job {job!r}")
        self._check_clip(where, job)
        if self.averaging is not None and not self.train:
            raise CompileError(
                f"{where}: ema of job {job!r}: the job does not train, so it has no weights to"
                " average; leave it out, and give its Evaluation ema=True"
            )
        self._check_scale(f"{where}: loss_scale of job {job!r}")
        self._check_mesh(where, job)
        try:
            self._check_gpu(self.placed_on)
        except (ValueError, CompileError) as error:
            raise CompileError(f"{where}: job {job!r}: {error}") from None
        try:
            _ = self.budget_bytes
        except ValueError as error:
            raise CompileError(f"{where}: memory_budget of job {job!r}: {error}") from None

    def _check_trainable(self, what: str) -> None:
        if self.trainable is None:
            return
        if wrong := wrong_patterns(self.trainable):
            raise CompileError(f"{what} must be {wrong}")
        if not self.train:
            raise CompileError(f"{what}: the job does not train; leave it out")

    def _check_clip(self, where: SourceLocation, job: str) -> None:
        for name, most in (("clip_norm", math.inf), ("clip_value", _LARGEST_VALUE)):
            value = getattr(self, name)
            if value is None:
                continue
            what = f"{where}: {name} of job {job!r}"
            if not 0.0 < checked_number(value, name) <= most:
                extra = " or float('inf')" if most == math.inf else ""
                raise CompileError(
                    f"{what} must be a finite number above 0{extra}, got {value!r}; leave it out to"
                    " clip nothing"
                )
            if not self.train:
                raise CompileError(
                    f"{what}: the job does not train, so it has no gradients; leave it out"
                )

    def _check_mesh(self, where: SourceLocation, job: str) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise CompileError(
                f"{where}: mesh of job {job!r} must be made by af.Mesh, such as"
                f" af.Mesh(data=2, model=2), got {self.mesh!r}"
            )
        if not self.zero:
            return
        what = f"{where}: zero of job {job!r}"
        if not self.train:
            raise CompileError(
                f"{what}: the job does not train, so it has no optimizer; leave it out"
            )
        if self.mesh is None or BATCH_AXIS not in self.mesh.names:
            came = "no mesh" if self.mesh is None else f"the mesh {self.mesh}"
            raise CompileError(
                f"{what}: parameters are split over the mesh axis {BATCH_AXIS!r}, and the job has"
                f" {came}; give it one, such as mesh=af.Mesh({BATCH_AXIS}=2)"
            )

    def _check_scale(self, what: str) -> None:
        if self.loss_scale is None:
            return
        if not is_scale(self.loss_scale):
            raise CompileError(
                f"{what} must be af.LossScale(...), or a finite number above 0 for a scale that"
                f" stays, got {self.loss_scale!r}"
            )
        if not self.train:
            raise CompileError(
                f"{what}: the job does not train, so it has no gradients; leave it out"
            )
        if self.precision != "fp16":
            raise CompileError(
                f"{what}: only precision='fp16' needs one, as {self.precision} has the range of"
                " float32; leave it out, or ask for that precision"
            )

    def _check_gpu(self, devices: tuple[Device, ...]) -> None:
        if self.gpu is None:
            return
        from actorflow.environment.host import (
            check_gpu,  # descriptions, which other jobs never read
        )

        check_gpu(self.gpu, devices)
