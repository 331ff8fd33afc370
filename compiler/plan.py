"""The physical plan: the one contract between compiler and actors.

A plan is a value. It serialises to msgpack and back unchanged, hashes, and runs in another process
without the user's code: actors with their launches, registers with their slots and offsets,
streams, variables with their initialisers, and the lines of the user's program for every message.

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
`compiler.versions` can prove from the plan that every read finds what it is meant to find.

Slot of a firing: firing k of a producer with rate p writes slots (k*p .. k*p+p-1) mod num_slots,
and consumers read tokens in the same order; so slots need no bookkeeping beyond counters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import compiler.fusion.region  # noqa: F401  # the structures that a plan's attributes may hold
from compiler.attrs import AttrValue, PlainValue
from compiler.errors import InternalError, PlanFormatError
from compiler.labels import launch_label, made_of
from compiler.mesh import Mesh, mesh_of
from compiler.placement import Device, DeviceKind, Memory, Place, StreamRole
from compiler.plan_file import opened, sealed, unpacked
from compiler.plan_memory import DeviceMemory, Recomputation
from compiler.plan_numbers import Bytes, Count, Duration, Index
from compiler.row_values import Bounds
from compiler.rows import from_row, packed, to_row
from compiler.types import ActorId, DType, PartOf, Phase, RegisterId, StreamId, TensorType, Version

PLAN_FORMAT = 6


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
"""Kinds of actors that run a port of the roof and have no launches."""


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
    part: PartOf | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A window on a version, wherever that lies: what a launch reads that wants a part of a value.

    Offset and strides count from where the version begins.
    """

    version: Version
    offset_bytes: Bytes
    strides_bytes: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class Join:
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
        return made_of(self.op, dict(self.attrs))

    @property
    def label(self) -> str:
        """Where in the model it belongs and what it computes; see `compiler.labels`."""
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
    """State that outlives the step. `init` names an initialiser of the roof with its parameters.

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
    part: PartOf | None = None


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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """Everything the runtime obeys. See the module's docstring."""

    name: str
    streams: tuple[Stream, ...]
    arenas: tuple[Arena, ...]
    registers: tuple[Register, ...]
    views: tuple[View, ...]
    actors: tuple[Actor, ...]
    fields: tuple[Field, ...]
    variables: tuple[Variable, ...]
    constants: tuple[Constant, ...]
    sources: tuple[SourceLine, ...]
    memory: tuple[DeviceMemory, ...]
    graph_hash: str
    target: str
    options: tuple[tuple[str, PlainValue], ...]
    recomputation: tuple[Recomputation, ...] = ()
    parts: tuple[Part, ...] = ()
    joins: tuple[Join, ...] = ()

    def to_bytes(self) -> bytes:
        """Serialise. Equal plans give equal bytes."""
        return sealed(packed(to_row(self)), PLAN_FORMAT)

    @property
    def fingerprint(self) -> str:
        """Hash of the whole plan, 32 hexadecimal digits."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_bytes(self.to_bytes())

    @staticmethod
    def from_bytes(data: bytes, where: str = "plan") -> Plan:
        """Read a plan back.

        Raises PlanFormatError when it is damaged or of another format version.
        """
        body = opened(data, PLAN_FORMAT, where)
        from compiler.references import check_references  # which looks at plans

        try:
            plan = from_row(Plan, unpacked(body))
            check_references(plan)
        except (PlanFormatError, InternalError) as error:
            reason = str(error).partition(" (this is a bug")[0]
            raise PlanFormatError(f"{where}: {reason}; compile the job again") from None
        return plan

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file. Raises PlanFormatError, or OSError when it cannot be read."""
        return Plan.from_bytes(Path(path).read_bytes(), str(path))

    @property
    def state(self) -> tuple[Variable, ...]:
        """The variables that mean something of their own between two steps."""
        others = ("scratch", "rounded", "packed", "numbers")
        return tuple([v for v in self.variables if v.role not in others])

    @property
    def mesh(self) -> Mesh:
        """The ranks that train together, of which some have this plan."""
        return mesh_of(self.option("mesh", ()))

    def option(self, name: str, default: PlainValue = None) -> PlainValue:
        """Return a compile option recorded in the plan."""
        return dict(self.options).get(name, default)

    def int_option(self, name: str, default: int) -> int:
        """Return a compile option that is a number."""
        value = self.option(name, default)
        return value if isinstance(value, int) else default


__all__ = [
    "PLAN_FORMAT",
    "PORTED",
    "Actor",
    "ActorKind",
    "Arena",
    "AttrValue",
    "Constant",
    "DType",
    "Field",
    "Join",
    "Launch",
    "Part",
    "PlainValue",
    "Plan",
    "Port",
    "Register",
    "RegisterKind",
    "SourceLine",
    "Stream",
    "Variable",
    "View",
]
