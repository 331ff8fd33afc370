"""Collect the parts of a plan, intern views and source lines, place the registers at the end."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.graph import Source
from compiler.placement import Device
from compiler.plan import (
    Actor,
    ActorKind,
    Arena,
    Constant,
    Field,
    Launch,
    MemoryCertificate,
    PlainValue,
    Plan,
    Port,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    Variable,
    View,
)
from compiler.types import ActorId, RegisterId, StreamId, TensorType, contiguous_strides
from memory.offsets import plan_offsets


@dataclass(slots=True)
class _Draft:
    name: str
    kind: RegisterKind
    size_bytes: int
    num_slots: int
    interval: tuple[int, int] | None
    reason: str


class PlanBuilder:
    """Grow a plan for one device. Ids are dense in order of creation."""

    def __init__(self, device: Device, alignment: int) -> None:
        self._device = device
        self._alignment = alignment
        self._registers: list[_Draft] = []
        self._streams: list[Stream] = []
        self._actors: list[Actor] = []
        self._views: dict[View, int] = {}
        self._sources: dict[SourceLine, int] = {}
        self.fields: list[Field] = []
        self.variables: list[Variable] = []
        self.constants: list[Constant] = []

    def stream(self, name: str, *, is_host_thread: bool) -> StreamId:
        """Add a stream on the device."""
        stream = Stream(StreamId(len(self._streams)), self._device, name, is_host_thread)
        self._streams.append(stream)
        return stream.id

    def register(
        self,
        name: str,
        kind: RegisterKind,
        size_bytes: int,
        *,
        num_slots: int = 1,
        interval: tuple[int, int] | None = None,
        reason: str = "",
    ) -> RegisterId:
        """Add a register; `interval` None means that it lives through the whole step."""
        self._registers.append(_Draft(name, kind, size_bytes, num_slots, interval, reason))
        return RegisterId(len(self._registers) - 1)

    def view(
        self,
        register: RegisterId,
        type_: TensorType,
        offset_bytes: int = 0,
        strides_bytes: tuple[int, ...] | None = None,
    ) -> int:
        """Return the index of a view, adding it if it is new. Default: dense from the offset."""
        strides = (
            contiguous_strides(type_.shape, type_.dtype.itemsize)
            if strides_bytes is None
            else strides_bytes
        )
        return self._views.setdefault(
            View(register, offset_bytes, type_, strides), len(self._views)
        )

    def source(self, source: Source) -> int:
        """Return the index of a line of the user's program."""
        return self._sources.setdefault(SourceLine(source.file, source.line), len(self._sources))

    def actor(
        self,
        name: str,
        kind: ActorKind,
        stream: StreamId,
        *,
        launches: tuple[Launch, ...] = (),
        inputs: tuple[Port, ...] = (),
        outputs: tuple[Port, ...] = (),
        is_flushed: bool = False,
    ) -> ActorId:
        """Add an actor; its duration is the sum of its launches."""
        duration = float(sum(launch.duration_ns for launch in launches))
        actor = Actor(
            ActorId(len(self._actors)),
            name,
            kind,
            stream,
            launches,
            inputs,
            outputs,
            is_flushed,
            duration,
        )
        self._actors.append(actor)
        return actor.id

    def finish(
        self,
        name: str,
        num_launches: int,
        *,
        graph_hash: str,
        target: str,
        options: tuple[tuple[str, PlainValue], ...],
    ) -> Plan:
        """Place every slot of every register in one arena and return the plan."""
        horizon = max(num_launches, 1)
        lower: list[int] = []
        upper: list[int] = []
        size: list[int] = []
        for draft in self._registers:
            start, end = draft.interval or (0, horizon)
            for _ in range(draft.num_slots):
                lower.append(start)
                upper.append(end)
                size.append(draft.size_bytes)
        placed = plan_offsets(lower, upper, size, alignment=self._alignment)
        registers: list[Register] = []
        first = 0
        for index, draft in enumerate(self._registers):
            offsets = tuple(int(o) for o in placed.offsets[first : first + draft.num_slots])
            first += draft.num_slots
            registers.append(
                Register(
                    RegisterId(index),
                    draft.name,
                    draft.kind,
                    0,
                    draft.size_bytes,
                    draft.num_slots,
                    offsets,
                    draft.interval or (0, horizon),
                    draft.reason,
                )
            )
        variable_bytes = sum(
            align_up(d.size_bytes, self._alignment)
            for d in self._registers
            if d.kind is RegisterKind.VARIABLE
        )
        certificate = MemoryCertificate(
            placed.peak_bytes,
            placed.lower_bound_bytes,
            variable_bytes,
            placed.peak_bytes - variable_bytes,
            placed.certificate,
        )
        return Plan(
            name=name,
            streams=tuple(self._streams),
            arenas=(Arena(self._device, placed.peak_bytes, self._alignment),),
            registers=tuple(registers),
            views=tuple(self._views),
            actors=tuple(self._actors),
            fields=tuple(self.fields),
            variables=tuple(self.variables),
            constants=tuple(self.constants),
            sources=tuple(self._sources),
            memory=(certificate,),
            graph_hash=graph_hash,
            target=target,
            options=options,
        )


def align_up(size_bytes: int, alignment: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-size_bytes // alignment) * alignment
