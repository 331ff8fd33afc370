"""What a plan is compiled for, besides the graph.

The options are part of the plan's key and are recorded in the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace

from compiler.placement import HOST, Device
from compiler.plan import PlainValue

SKIPPED = "skipped"
"""The counter of steps that were skipped, and the output that shows it."""

LOSS_SCALE = "loss_scale"
"""What the loss is multiplied by, if it is: an output, and state where it follows the steps."""

GOOD_STEPS = "loss_scale/good_steps"
"""The counter of steps in a row that were not skipped, since the scale was changed."""

GRAD_NORM = "grad_norm"
"""The norm of the gradients of a step, before they are clipped: an output."""

_IF_GIVEN = ("gpu", "deterministic", "clip_norm", "clip_value", "losses", "mesh", "zero")
"""Options that are recorded only where they are given, as most plans have none."""


def _if_any(value: PlainValue) -> str:
    return repr(value) if value else "none"


_IN_WORDS: dict[str, tuple[str, Callable[[PlainValue], str]]] = {
    "snapshot_every": ("the period of checkpoint= (every=) in steps", _if_any),
    "snapshot_seconds": ("the period of checkpoint= (every=) in s", _if_any),
    "evaluate_every": ("every= of evaluation=", _if_any),
    "evaluate_batches": ("batches= of evaluation=", _if_any),
    "evaluate_precision": ("precision= of the job of evaluation=", repr),
    "skips_broken_steps": ("on_nan=", lambda skips: "'skip'" if skips else "'raise'"),
    "num_streams": ("streams=", repr),
    "is_training": ("train=", repr),
    "losses": ("loss= of the optimizers", repr),
    "devices": ("device= or devices=", repr),
    "memory_budget": ("memory_budget=", _if_any),
}
"""What the user gives the options by that have another name, and their values in his words."""


def in_words(name: str, value: PlainValue) -> tuple[str, str]:
    """Return what a user gives an option by, and its value as he knows it; None for one unset."""
    words, shown = _IN_WORDS.get(name, (f"{name}=", repr))
    return words, "none" if value is None else shown(value)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of one compilation.

    `snapshot_every`: steps between two snapshots of the variables for the checkpoint writer.
    `snapshot_seconds`: the same by time; lowering turns it into steps by the estimated duration of
    one, four snapshots to a period, so that the writer finds one soon after it is due. Both 0: no
    snapshots. `is_training`: whether the graph has an objective. `accumulate`: batches of a step,
    as the graph says too. `metrics_every`: steps whose outputs reach the metrics sink in one
    firing. `devices`: what the plan runs on, in order; a node's device is a number into them.
    `mesh`: the axes of the ranks that train together, by name and extent; none for one rank; they
    and the devices are those of the hardware, whatever is said here. `zero`: whether parameters and
    the optimizer's state lie in parts on the ranks that have different rows of a batch.
    `num_streams`: compute streams of a device. After every `evaluate_every` steps come
    `evaluate_batches` of the graph that evaluates; 0: never. `memory_budget`: bytes the device's
    arena may take; 0: as many as it needs. `recompute`: what may run again to save bytes; "auto",
    what the budget asks for; "none"; or "blocks", whatever lies between articulation points of the
    forward graph, always. `offload`: what may live in the memory of the host; "auto", what the
    budget asks for, where the device has a link; "none"; or "optimizer", all optimizer state.
    `precision`: what products read and what lies between them is, "fp32", "bf16" or "fp16";
    `evaluate_precision` the same for the graph that evaluates. `clip_norm` and `clip_value`: what
    the norm of all gradients of a step, and each of their elements, is kept below; 0: as they are.
    `losses`: the outputs that gradients are of, where they are not just "loss".
    `skips_broken_steps`: whether a step whose loss or gradients are not finite changes nothing but
    the counters. `gpu`: what a CUDA device is planned as, and `deterministic`: whether libraries
    choose by a fixed rule there; both are recorded only where they are given. `verify`: run the
    graph verifier between passes.
    """

    name: str
    is_training: bool = True
    snapshot_every: int = 0
    snapshot_seconds: float = 0.0
    accumulate: int = 1
    metrics_every: int = 1
    devices: tuple[str, ...] = ("host:0",)
    num_streams: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    zero: bool = False
    evaluate_every: int = 0
    evaluate_batches: int = 0
    memory_budget: int = 0
    recompute: str = "auto"
    offload: str = "auto"
    precision: str = "fp32"
    evaluate_precision: str = "fp32"
    clip_norm: float = 0.0
    clip_value: float = 0.0
    losses: tuple[str, ...] = ()
    skips_broken_steps: bool = False
    gpu: str = ""
    deterministic: bool = False
    verify: bool = False

    @property
    def has_device(self) -> bool:
        """Whether any of the devices is not the host."""
        return any([Device.parse(text).kind is not HOST.kind for text in self.devices])

    @property
    def of_evaluation(self) -> CompileOptions:
        """Those of the graph that evaluates between steps."""
        return replace(self, precision=self.evaluate_precision)

    @property
    def asks_for_less(self) -> bool:
        """Whether the plan may have to differ from the one that saves everything on the device."""
        return bool(self.memory_budget) or self.recompute == "blocks" or self.offload == "optimizer"

    def recorded(self) -> tuple[tuple[str, PlainValue], ...]:
        """Return the options that change the plan, for its record and its key."""
        names = [f.name for f in fields(self)]
        pairs = zip(names, astuple(self), strict=True)
        return tuple(
            (n, v) for n, v in pairs if n not in ("name", "verify") and (v or n not in _IF_GIVEN)
        )
