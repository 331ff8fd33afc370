"""What a plan is made for: the targets of its devices, a budget's choice, the compile options.

A `Target` is what a device's kernels must tell the compiler, so that planning for a device needs no
device: `actorflow.compile.targets` answers it from `actors.kernels`. A kernel has two lives: it
plans a call here, at compile time, from shapes alone, and again at load, where the plan is bound to
addresses (`actors.machine.protocol`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from math import inf
from typing import Protocol

from compiler.contract.attrs import Attrs, PlainValue
from compiler.contract.placement import (
    HOST,
    HOST_SIDE,
    PINNED,
    RANK_SIDE,
    SHARED,
    SINGLE_RANK,
    Device,
    HostsRecord,
    Place,
    RankContext,
    StreamRole,
)
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.registry import Layout


@dataclass(frozen=True, slots=True)
class CallOperand:
    """A tensor as a kernel sees it: type and layout; strides of 0 repeat an axis."""

    type: TensorType
    layout: Layout


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch to plan: op, attributes, operands."""

    op: str
    attrs: Attrs
    inputs: tuple[CallOperand, ...]
    outputs: tuple[CallOperand, ...]


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What the planner must know of the kernel chosen for a call.

    `in_place` lists pairs (output, input) that may share bytes when both are dense, equal in size
    and the input dies here; of a value that is read at several positions, all must be listed.
    `workspace_bytes` is scratch, planned like any tensor and live during the launch only. Where it
    `keeps` the input at a place, a variable that no step writes, it is the launch's own as long as
    the plan: zeros at first, and whenever that variable is given other values.
    """

    kernel: str
    workspace_bytes: int = 0
    in_place: tuple[tuple[int, int], ...] = ()
    duration_ns: float = 0.0
    prepacked_input: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """The way between a device's memory and its host's; both directions run at once."""

    in_bytes_per_ns: float
    out_bytes_per_ns: float
    latency_ns: float

    def in_ns(self, size_bytes: int) -> float:
        """Return the time of one copy to the device."""
        return self.latency_ns + size_bytes / self.in_bytes_per_ns

    def out_ns(self, size_bytes: int) -> float:
        """Return the time of one copy to the host."""
        return self.latency_ns + size_bytes / self.out_bytes_per_ns


@dataclass(frozen=True, slots=True)
class TilingPolicy:
    """When some rows of a value are to exist at a time in place of all, and how many of them.

    Values of more than `min_bytes` are looked at. A chunk has `chunk_rows`, or more of them until
    it has the least bytes, or fewer so as to stay below the most. Where products are of bfloat16,
    logits and normalised images of more than `rounded_bytes`, as float32, are stored so; 0: never.
    `cheap_instructions`: a value of so few from one tensor is not stored where kernels alone read
    it; each computes it again.
    """

    min_bytes: int
    chunk_rows: int
    least_chunk_bytes: int
    most_chunk_bytes: int
    rounded_bytes: int = 0
    cheap_instructions: int = 0

    def choose_chunk_rows(self, rows: int, row_bytes: int) -> int:
        """Return how many rows exist at a time; the chunks are as even as can be."""
        preferred = max(self.chunk_rows, self.least_chunk_bytes // row_bytes)
        most = max(1, min(preferred, self.most_chunk_bytes // row_bytes))
        # Ceiling divisions: as few chunks as `most` allows, then the rows spread evenly over them.
        num_chunks = -(-rows // most)
        return -(-rows // num_chunks)


WideOf = Callable[[int], TilingPolicy]
"""From a device's number to what is wide there."""

WIDE_IN_CACHE = TilingPolicy(8 << 20, 512, 4 << 20, 48 << 20)
"""What suits the host. Up to 8 MiB a value fits into a cache, and others set the peak.

Each chunk reads the weight twice and its gradient once. Against the unfused graph, all rows at once
take 0.94 of its time, 512 rows 0.98, 256 rows 1.03, 128 rows 1.13, 64 rows 1.27 (one thread, 2,048
rows of width 384, 8,192 classes). With 4 MiB its calls cost nothing beside its work; with 48 MiB
all scratch stays below 64 MiB with 50,257 classes. These have 250 rows then: 1.03 of the time of
the unfused graph (128 rows 1.12, 192 rows 1.06).
"""


class Target(Protocol):
    """What is known of a device before there is one: its kernels, and what its streams cost.

    Plans depend on all of it, so the fingerprint covers it.
    """

    @property
    def fingerprint(self) -> str:
        """Everything the answers depend on (libraries, versions, costs): part of the plan's key."""
        ...

    @property
    def message_ns(self) -> float:
        """What it takes until a stream that waits for another one goes on."""
        ...

    @property
    def alignment(self) -> int:
        """Offsets in its memory are multiples of it, in bytes."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What its memory holds, or 0 where that is not known before the plan is loaded."""
        ...

    @property
    def link(self) -> Link | None:
        """The way to the host's memory; None where the device works on that memory itself."""
        ...

    @property
    def wide_values(self) -> TilingPolicy:
        """Which values its kernels are to see some rows at a time."""
        ...

    @property
    def reduced_dtypes(self) -> tuple[DType, ...] | None:
        """The types that ranks add up there, where what they exchange lies in one piece.

        None where they reduce all types, and exchange parts of any layout.
        """
        ...

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose a kernel. Raises LookupError when the device has none for this op."""
        ...

    @property
    def epilogue_ops(self) -> tuple[str, ...]:
        """Ops that the kernel of a product goes on with, and puts out what they are of as well."""
        ...

    def max_merged_updates(self, num_full: int) -> int:
        """Return how many updates, with so many operands of full size each, one launch may do.

        1 where each has a launch of its own. The launch is that of the op `joined_updates`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a plan is made for: the devices of a job in order, each with its target.

    A device is called by its number in that order; `HOST_SIDE` is the host's pinned memory, and
    `RANK_SIDE` what ranks of a host share. With several `ranks` each of them has such devices.
    `memory_bytes`: what each device's memory may hold; 0, as much as is needed. `is_bounded`:
    nothing goes where a target says that there is no room either, by estimates from above; a plan
    of them is small enough.
    """

    devices: tuple[Device, ...]
    targets: tuple[Target, ...]
    ranks: RankContext = SINGLE_RANK
    memory_bytes: int = 0
    is_bounded: bool = False

    @property
    def fingerprint(self) -> str:
        """What all answers depend on: of one device that is the host, its target's alone."""
        if self.devices == (HOST,):
            return self.targets[0].fingerprint
        pairs = zip(self.devices, self.targets, strict=True)
        return "; ".join([f"{target.fingerprint} on {device}" for device, target in pairs])

    def place(self, number: int) -> Place:
        """Return where the values of a device lie."""
        if number == RANK_SIDE:
            return SHARED
        return PINNED if number == HOST_SIDE else self.devices[number].place

    def is_apart(self, number: int) -> bool:
        """Whether this is a device with memory of its own, which no host thread works on."""
        return number >= 0 and self.devices[number].kind is not HOST.kind

    def alignment(self, number: int) -> int:
        """Return what offsets in a place are multiples of; where several meet, what suits all."""
        if number in (HOST_SIDE, RANK_SIDE):
            return max([target.alignment for target in self.targets])
        return self.targets[number].alignment

    def room_bytes(self, number: int) -> float:
        """Return what a device's memory may hold; infinite, as much as is needed."""
        limit = self.targets[number].memory_bytes if self.is_bounded else 0
        return min(self.memory_bytes or inf, limit or inf)

    def wide_values(self, number: int) -> TilingPolicy:
        """Return which values a device's kernels are to see some rows at a time."""
        return self.targets[number].wide_values

    @property
    def rounded_bytes(self) -> float:
        """The bytes from which on logits and images are rounded; infinite where none are."""
        return max([target.wide_values.rounded_bytes or math.inf for target in self.targets])

    def epilogue_ops(self, number: int) -> tuple[str, ...]:
        """Return the ops that a device's products go on with; none on the host's side."""
        return () if number == HOST_SIDE else self.targets[number].epilogue_ops

    def message_ns(self, producer: int, consumer: int) -> float:
        """Return what a wait of one device's stream for another stream, of any device, costs.

        The slower of the two sets the pace: a thread wakes up late, whoever wakes it.
        """
        return max(self.targets[producer].message_ns, self.targets[consumer].message_ns)

    def copy_stream(self, start: int, end: int) -> tuple[int, StreamRole]:
        """Return whose stream copies from place to place, and the role of that stream.

        What leaves a device that is not the host goes out by its own, whatever it goes to.
        """
        if start == HOST_SIDE or (self.is_apart(end) and not self.is_apart(start)):
            return end, StreamRole.H2D
        return start, StreamRole.D2H

    def link(self, here: int, there: int) -> Link | None:
        """Return the way between two memories, `in` leading here; None where both are the host's.

        Between two devices it leads through the host, without a stop.
        """
        near, far = [None if n == HOST_SIDE else self.targets[n].link for n in (here, there)]
        if far is None:
            return near
        if near is None:
            # Seen from the other end: its way out is the way in here.
            return Link(far.out_bytes_per_ns, far.in_bytes_per_ns, far.latency_ns)
        return Link(
            min(near.in_bytes_per_ns, far.out_bytes_per_ns),
            min(near.out_bytes_per_ns, far.in_bytes_per_ns),
            near.latency_ns + far.latency_ns,
        )


def one_device(target: Target, device: Device = HOST) -> Hardware:
    """Return what a plan of a single device is made for."""
    return Hardware((device,), (target,))


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """Launches that run again, and what lives in host memory; by default nothing of either.

    `launches` are nodes of the ordered graph in the order in which they run, some of them more than
    once; empty: each once, in its place. `state` are variables of the optimizer by name,
    `activations` values of the forward pass.
    """

    launches: tuple[int, ...] = ()
    state: tuple[str, ...] = ()
    activations: tuple[ValueId, ...] = ()


NO_CHOICE = BudgetChoice()


# The options are part of the plan's key and are recorded in the plan.

SKIPPED = "skipped"
"""The counter of steps that were skipped, and the output that shows it."""

LOSS_SCALE = "loss_scale"
"""What the loss is multiplied by, if it is: an output, and state where it follows the steps."""

GOOD_STEPS = "loss_scale/good_steps"
"""The counter of steps in a row that were not skipped, since the scale was changed."""

GRAD_NORM = "grad_norm"
"""The norm of the gradients of a step, before they are clipped: an output."""

LEARNING_RATE = "lr"
"""The learning rate of a step, where it is asked for: an output."""

_IF_GIVEN = (
    "waits_for_listener", "gpu", "deterministic", "clip_norm", "clip_value", "losses", "mesh",
    "hosts", "zero", "debug", "shown",
)  # fmt: skip
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
    "waits_for_listener": ("on_step=", lambda waits: "given" if waits else "none"),
    "is_training": ("train=", repr),
    "losses": ("loss= of the optimizers", repr),
    "devices": ("device= or devices=", repr),
    "memory_budget": ("memory_budget=", _if_any),
}
"""What the user gives the options by that have another name, and their values in his words."""


def in_words(name: str, value: PlainValue) -> tuple[str, str]:
    """Return what a user gives an option by, and its value as he knows it; None for one unset."""
    words, formatter = _IN_WORDS.get(name, (f"{name}=", repr))
    return words, "none" if value is None else formatter(value)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of one compilation.

    `snapshot_every`: steps between two snapshots of the variables for the checkpoint writer.
    `snapshot_seconds`: the same by time; lowering turns it into steps by the estimated duration of
    one, four snapshots to a period, so that the writer finds one soon after it is due. With both
    there are snapshots by time, some of them after the multiples of the steps. Both 0: no
    snapshots. `is_training`: whether the graph has an objective. `accumulate`: batches of a step,
    as the graph says too. `metrics_every`: steps whose outputs reach the metrics sink in one
    firing; with `waits_for_listener` no step begins before the sink has handed them on.
    `devices`: what the plan runs on, in order; a node's device is a number into them.
    `mesh`: the axes of the ranks that train together, by name and extent; none for one rank.
    `hosts`: the sizes and links of the hosts of these ranks; none for one host. These and the
    devices are those of the hardware, whatever is said here. `zero`: whether parameters and
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
    the counters. `debug`: what ends a run that meets it, "nan" or "inf", so that the plan shows the
    range of every value; "" for a plan that does not. `shown`: patterns of the ops whose operands
    and results such a plan shows whole. `gpu`: what a CUDA device is planned as, and
    `deterministic`: whether libraries choose by a fixed rule there; both are recorded only where
    they are given. `verify`: run the graph verifier between passes.
    """

    name: str
    is_training: bool = True
    snapshot_every: int = 0
    snapshot_seconds: float = 0.0
    accumulate: int = 1
    metrics_every: int = 1
    waits_for_listener: bool = False
    devices: tuple[str, ...] = ("host:0",)
    num_streams: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    hosts: HostsRecord | tuple[()] = ()
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
    debug: str = ""
    shown: tuple[str, ...] = ()
    gpu: str = ""
    deterministic: bool = False
    verify: bool = False

    @property
    def has_device(self) -> bool:
        """Whether any of the devices is not the host."""
        return any([Device.parse(text).kind is not HOST.kind for text in self.devices])

    @property
    def of_evaluation(self) -> CompileOptions:
        """The options for the graph that evaluates between steps."""
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
