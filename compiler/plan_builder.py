"""Collect the parts of a plan, intern views and source lines, place the registers at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.errors import InternalError
from compiler.graph import Source
from compiler.packing import Item, Packing, pack
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


@dataclass(frozen=True, slots=True)
class ChainPlace:
    """Where a chain stands: its span on virtual time, in ranks, and its first launch.

    `first_launch` counts the launches of all chains before it in the plan.
    """

    span: tuple[int, int]
    first_launch: int
    num_launches: int


@dataclass(slots=True)
class _Draft:
    name: str
    kind: RegisterKind
    item: Item
    reason: str


class PlanBuilder:
    """Grow a plan for one device. Ids are dense in order of creation."""

    def __init__(self, device: Device, alignment: int) -> None:
        self._device = device
        self._alignment = alignment
        self._registers: list[_Draft] = []
        self._packing: Packing | None = None
        self._chains: tuple[ChainPlace, ...] = ()
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
        chains: tuple[int, ...] = (),
        interval: tuple[int, int] | None = None,
        reason: str = "",
    ) -> RegisterId:
        """Add a register; see `compiler.packing.Item` for `chains` and `interval`."""
        item = Item(size_bytes, num_slots, chains, interval)
        self._registers.append(_Draft(name, kind, item, reason))
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

    def stack(self, types: Sequence[TensorType]) -> tuple[tuple[int, ...], int]:
        """Return an aligned offset for each of some tensors in one register, and its size."""
        offsets: list[int] = []
        size = 0
        for type_ in types:
            offsets.append(size)
            size += align_up(type_.size_bytes, self._alignment)
        return tuple(offsets), size

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

    def place(self, chains: Sequence[ChainPlace]) -> tuple[tuple[int, int], ...]:
        """Place every slot of every register in one arena.

        Returns the pairs of chains that share bytes one after the other. Registers without bytes
        may still be added.
        """
        items = [draft.item for draft in self._registers]
        self._packing = pack(items, [chain.span for chain in chains], self._alignment)
        self._chains = tuple(chains)
        return self._packing.before

    def finish(
        self,
        name: str,
        *,
        graph_hash: str,
        target: str,
        options: tuple[tuple[str, PlainValue], ...],
    ) -> Plan:
        """Return the plan, once everything is placed."""
        packing = self._packing
        if packing is None:
            raise InternalError(f"plan {name!r} was finished before it was placed")
        variable_bytes = sum(
            align_up(d.item.size_bytes, self._alignment)
            for d in self._registers
            if d.kind is RegisterKind.VARIABLE
        )
        certificate = MemoryCertificate(
            packing.peak_bytes,
            packing.lower_bound_bytes,
            variable_bytes,
            packing.peak_bytes - variable_bytes,
            packing.certificate,
        )
        return Plan(
            name=name,
            streams=tuple(self._streams),
            arenas=(Arena(self._device, packing.peak_bytes, self._alignment),),
            registers=tuple([self._placed(i, packing) for i in range(len(self._registers))]),
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

    def _placed(self, index: int, packing: Packing) -> Register:
        draft = self._registers[index]
        item = draft.item
        if index < len(packing.offsets):
            offsets = packing.offsets[index]
        elif item.size_bytes:
            raise InternalError(f"register {draft.name!r} was added after the others were placed")
        else:
            offsets = (0,) * item.num_slots
        return Register(
            RegisterId(index),
            draft.name,
            draft.kind,
            0,
            item.size_bytes,
            item.num_slots,
            offsets,
            self._interval(item),
            draft.reason,
        )

    def _interval(self, item: Item) -> tuple[int, int]:
        """Return when an item lives, in launches of all chains one after the other."""
        chains = self._chains
        if not item.chains:
            return 0, max(1, sum([chain.num_launches for chain in chains]))
        if item.interval is None:
            touched = [chains[c] for c in item.chains]
            ends = [chain.first_launch + chain.num_launches for chain in touched]
            return min([chain.first_launch for chain in touched]), max(ends)
        base = chains[item.chains[0]].first_launch
        return base + item.interval[0], base + item.interval[1]


def align_up(size_bytes: int, alignment: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-size_bytes // alignment) * alignment
