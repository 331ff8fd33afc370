"""The tables of the physical plan: the one contract between compiler and actors.

A plan (`compiler.contract.plan.Plan`) is a value. It serialises to msgpack and back unchanged,
hashes, and runs in another process without the user's code: actors with their launches, registers
with their slots and offsets, streams, variables with their initialisers, and the lines of the
user's program for every message.

How to read it: `Actor.launches` is a chain, run in order on the actor's stream. A launch names its
kernel and its operands as indices into `Plan.views`; a view is a typed, strided window on a
register. A register lives in an arena at one offset per slot. Actors meet only at registers of kind
DATA and CONTROL: those are the edges of a synchronous dataflow graph (Lee & Messerschmitt, 1987),
with a rate at either end. All other registers belong to one actor or to the plan: TEMPORARY bytes
of a chain, VARIABLE and CONSTANT state.

**Versions.** Bytes are used again and again, so a view alone does not say what lies there. Every
value that something makes is a *version*, a number of its own, and a launch names the version that
it expects under each input and the one it leaves under each output. The numbers come from the
values of the logical graph, never from the order or the place that lowering gave them; so
`compiler.verify.versions` can prove from the plan that every read finds what it is meant to find.

Slot of a firing: firing k of a producer with rate p writes slots (k*p .. k*p+p-1) mod num_slots,
and consumers read tokens in the same order; so slots need no bookkeeping beyond counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import compiler.contract.region  # noqa: F401  # the structures that a plan's attributes may hold
from compiler.contract.attrs import AttrValue, PlainValue
from compiler.contract.codec import Bounds, Bytes, Count, Duration, Index
from compiler.contract.placement import Device, DeviceKind, Memory, Place, StreamRole
from compiler.contract.types import (
    ActorId,
    DType,
    Phase,
    RegisterId,
    ShardingSpec,
    StreamId,
    TensorType,
    Version,
)

__all__ = [
    "PORTED",
    "Actor",
    "ActorKind",
    "Arena",
    "AttrValue",
    "Constant",
    "DType",
    "ElidedConcat",
    "Field",
    "Launch",
    "PlainValue",
    "Port",
    "Register",
    "RegisterKind",
    "SourceLine",
    "Stream",
    "Variable",
    "VersionSlice",
    "View",
]


# What plans, memory maps, timelines and errors call a launch, and whose an actor is.

EVALUATE = "evaluate"
"""The first word of the names of actors whose launches evaluate between steps."""


def is_evaluation_actor(actor: str) -> bool:
    """Whether an actor of this name is of the evaluation between steps, and not of the steps."""
    return actor.partition(".")[0] == EVALUATE


def member_ops(op: str, attrs: Mapping[str, object]) -> tuple[str, ...]:
    """Return the user's ops that an op computes: several where it is fused, else itself."""
    members = attrs.get("members")
    return tuple(map(str, members)) if isinstance(members, tuple) else (op,)


def launch_label(op: str, attrs: Mapping[str, object], scope: str) -> str:
    """Return where in the model an op belongs and what it computes: "mlp.up + gelu", "head: sum".

    The scope of a product says which one it is, so it takes the place of its name.
    """
    first, *rest = member_ops(op, attrs)
    if scope and first == "matmul" and rest:
        return " + ".join([scope, *rest])
    text = " + ".join([first, *rest])
    return f"{scope}: {text}" if scope else text


class ActorKind(Enum):
    """What an actor does.

    SOURCE and SINK are bound to a host port by name; the others run launches.
    """

    SOURCE = "source"
    COMPUTE = "compute"
    COPY = "copy"
    COMM = "comm"
    SINK = "sink"


PORTED = (ActorKind.SOURCE, ActorKind.SINK)
"""Kinds of actors that run a port of `actorflow` and have no launches."""


class RegisterKind(Enum):
    """What a register is for. DATA and CONTROL are edges between actors."""

    DATA = "data"
    CONTROL = "control"
    TEMPORARY = "temporary"
    VARIABLE = "variable"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Stream:
    """An order of execution on a device; `index` counts those of one role there."""

    id: StreamId
    device: Device
    role: StreamRole
    index: Index
    name: str

    @property
    def has_thread(self) -> bool:
        """Whether its firings run on a thread of their own.

        A device's streams are fed by the dispatcher; on the host a stream is a thread, but for the
        first that computes: where it is the only one, the dispatcher runs it itself.
        """
        is_first = self.role is StreamRole.COMPUTE and self.index == 0
        return self.device.kind is DeviceKind.HOST and not is_first


@dataclass(frozen=True, slots=True)
class Arena:
    """One block of memory of a device, allocated at load; offsets are multiples of `alignment`."""

    device: Device
    memory: Memory
    size_bytes: Bytes
    alignment: Annotated[int, Bounds(1, 1 << 20)]

    @property
    def place(self) -> Place:
        """Where its registers lie."""
        return Place(self.device, self.memory)


@dataclass(frozen=True, slots=True)
class Port:
    """One end of an edge: a register, and tokens (slots) produced or consumed per firing."""

    register: RegisterId
    rate: Count


@dataclass(frozen=True, slots=True)
class Register:
    """Bytes with an owner. `offsets_bytes[s]` is where slot s begins in arena `arena`.

    `interval` is [first, last) in launches of the owning chain for TEMPORARY registers and the
    whole step otherwise. A CONTROL register has no bytes: its slots are credits. `reason` says why
    it has as many slots as it has, for the reader of the plan.
    """

    id: RegisterId
    name: str
    kind: RegisterKind
    arena: Index
    size_bytes: Bytes
    num_slots: Count
    offsets_bytes: tuple[Bytes, ...]
    interval: tuple[Index, Index]
    reason: str


@dataclass(frozen=True, slots=True)
class View:
    """A typed, strided window on a register; the same in every slot."""

    register: RegisterId
    offset_bytes: Bytes
    type: TensorType
    strides_bytes: tuple[Bytes, ...]

    @property
    def extent(self) -> tuple[int, int]:
        """The smallest range of bytes of the register that holds all elements; (0, 0) for none."""
        start = end = self.offset_bytes
        for length, stride in zip(self.type.shape, self.strides_bytes, strict=True):
            if length == 0:
                return (0, 0)
            if stride > 0:
                end += (length - 1) * stride
            else:
                start += (length - 1) * stride
        return start, end + self.type.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Field:
    """A named tensor inside a DATA register: what a port of a source or sink sees.

    `version` is what a source leaves there, or what a sink finds; `part` as in `Variable`.
    """

    name: str
    register: RegisterId
    view: Index
    source: Index
    version: Version
    sharding: ShardingSpec | None = None


@dataclass(frozen=True, slots=True)
class VersionSlice:
    """A window on a version, wherever that lies: what a launch reads that wants a part of a value.

    Offset and strides count from where the version begins.
    """

    version: Version
    offset_bytes: Bytes
    strides_bytes: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class ElidedConcat:
    """A tensor whose parts were written where they belong in it, so that no launch joins them.

    View `output`, a version of its own, is the views `inputs` one after another along `axis`, while
    each of these has what `reads` names, as for a launch.
    """

    axis: Index
    inputs: tuple[Index, ...]
    reads: tuple[int, ...]
    output: Index
    version: Version
    source: Index


@dataclass(frozen=True, slots=True)
class Launch:
    """One prebound kernel call. Operands index `Plan.views`; `source` indexes `Plan.sources`.

    `reads` has a number for each input: a version of which it reads the whole, row by row; or
    -1 - k for `Plan.parts[k]`. `writes` has the version of each output. A launch writes versions
    whole.
    """

    kernel: str
    op: str
    attrs: tuple[tuple[str, AttrValue], ...]
    inputs: tuple[Index, ...]
    outputs: tuple[Index, ...]
    workspace: Index | None
    scope: str
    source: Index
    duration_ns: Duration
    phase: Phase = Phase.FORWARD
    reads: tuple[int, ...] = ()
    writes: tuple[Version, ...] = ()

    @property
    def made_of(self) -> tuple[str, ...]:
        """The user's ops that it computes: several where it is fused, else its own."""
        return member_ops(self.op, dict(self.attrs))

    @property
    def label(self) -> str:
        """Where in the model it belongs and what it computes: see `launch_label`."""
        return launch_label(self.op, dict(self.attrs), self.scope)


@dataclass(frozen=True, slots=True)
class Actor:
    """A static thread of launches with ports.

    It fires when every input port has `rate` ready tokens and every output port `rate` free slots.
    `is_flushed`: at the end of the run it fires once more, with the tokens that are left (perhaps
    none).
    """

    id: ActorId
    name: str
    kind: ActorKind
    stream: StreamId
    launches: tuple[Launch, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    is_flushed: bool
    duration_ns: Duration


@dataclass(frozen=True, slots=True)
class Variable:
    """State that outlives the step. `init` names an initialiser of `actorflow` with its parameters.

    Three versions: who reads `before` reads what the last firing of its writer left; who reads
    `after` reads what this one wrote; who reads `between` is no part of the step (a snapshot, an
    evaluation) and reads all variables as one step left them. All are the same where nothing writes
    it. `part`: of which whole tensor it is one rank's part; None: it is that itself.
    """

    name: str
    role: str
    view: Index
    init: tuple[tuple[str, PlainValue], ...]
    before: Version
    after: Version
    between: Version
    sharding: ShardingSpec | None = None


@dataclass(frozen=True, slots=True)
class Constant:
    """A register filled once at load with `data` (dense, row-major)."""

    view: Index
    data: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's program."""

    file: str
    line: Index

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


# What a plan says of its memory: the account of an arena, and what was done to fit a budget.


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The account of one arena, and what is proven about its peak.

    `peak_bytes` is the size of the arena. The parts from `parameter_bytes` to `unused_bytes` are
    bytes by address and add up to it exactly, padding to the alignment included; temporaries
    include workspaces. The rest is by time: launch `peak_launch`, counted over all chains in the
    order of the plan, has the most live bytes, of which workspaces hold `peak_workspace_bytes`.
    `lower_bound_bytes` holds for this order of launches; `text` is the certificate in words.
    """

    peak_bytes: Bytes
    lower_bound_bytes: Bytes
    parameter_bytes: Bytes
    optimizer_bytes: Bytes
    scratch_bytes: Bytes
    other_variable_bytes: Bytes
    constant_bytes: Bytes
    staging_bytes: Bytes
    slot_bytes: Bytes
    crossing_bytes: Bytes
    temporary_bytes: Bytes
    unused_bytes: Bytes
    largest_workspace_bytes: Bytes
    peak_launch: Index
    peak_live_bytes: Bytes
    peak_workspace_bytes: Bytes
    text: str

    @property
    def variable_bytes(self) -> int:
        """What outlives a batch: parameters, optimizer state, gradient sums, counters."""
        return (
            self.parameter_bytes
            + self.optimizer_bytes
            + self.scratch_bytes
            + self.other_variable_bytes
        )

    @property
    def step_bytes(self) -> int:
        """The arena without the variables."""
        return self.peak_bytes - self.variable_bytes

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The parts that add up to the arena, each with its name for people."""
        return (
            ("parameters", self.parameter_bytes),
            ("optimizer", self.optimizer_bytes),
            ("gradient sums", self.scratch_bytes),
            ("other variables", self.other_variable_bytes),
            ("constants", self.constant_bytes),
            ("staging", self.staging_bytes),
            ("slots", self.slot_bytes),
            ("between chains", self.crossing_bytes),
            ("temporaries", self.temporary_bytes),
            ("unused", self.unused_bytes),
        )


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What was decided so that the plan fits its byte budget.

    `budget_bytes` is 0 where none was given. `store_all_bytes` is the arena without recomputation.
    `num_launches` run again in every step, for `extra` of the step's estimated time (0.05: 5 %).
    `method` found the order, and `certificate` says what is proved about it.
    """

    budget_bytes: Bytes
    store_all_bytes: Bytes
    num_launches: Index
    extra: Annotated[float, Bounds(0.0, 1e9)]
    method: str
    certificate: str
