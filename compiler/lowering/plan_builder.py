"""Collect the parts of a plan, intern views and source lines, place the registers at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.accounting import account
from compiler.errors import InternalError
from compiler.graph import SourceLocation
from compiler.lowering.chains import COMPUTE, StreamKey
from compiler.lowering.packing import Item, Packing, pack
from compiler.ops.sources import PACKED
from compiler.placement import HOST, Device, StreamRole
from compiler.plan import (
    Actor,
    Arena,
    Constant,
    Field,
    Join,
    Part,
    PlainValue,
    Plan,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    Variable,
    View,
)
from compiler.target import Hardware
from compiler.types import (
    RegisterId,
    StreamId,
    TensorType,
    Version,
    contiguous_strides,
)
from memory.liveness import align_up


@dataclass(frozen=True, slots=True)
class ChainPlace:
    """Where a chain stands: its span on virtual time, in ranks, and its first launch.

    `first_launch` counts the launches of all chains before it in the plan.
    """

    span: tuple[int, int]
    first_launch: int
    num_launches: int


@dataclass(slots=True)
class _RegisterDraft:
    name: str
    kind: RegisterKind
    item: Item
    reason: str
    place: int


class PlanBuilder:
    """Grow a plan. Ids are dense in order of creation.

    There is an arena for each device of the hardware, in that order, then one for each other place
    where a register lies. Places are called by the number of a device, or HOST_SIDE.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._arenas: dict[int, int] = {n: n for n in range(len(hardware.devices))}
        self._registers: list[_RegisterDraft] = []
        self._packings: tuple[Packing, ...] = ()
        self._offsets: list[tuple[int, ...]] = []
        self._chains: tuple[ChainPlace, ...] = ()
        self._streams: list[Stream] = []
        self._stream_ids: dict[StreamKey, StreamId] = {}
        self._views: list[View] = []
        self._view_ids: dict[tuple[object, ...], int] = {}
        self._parts: dict[Part, int] = {}
        self._num_versions = 0
        self._sources: dict[SourceLine, int] = {}
        self.fields: list[Field] = []
        self.variables: list[Variable] = []
        self.constants: list[Constant] = []
        self.joins: list[Join] = []
        self.actors: list[Actor] = []

    def stream_of(self, key: StreamKey) -> StreamId:
        """Return the stream of a chain, which is called after its device unless that is first."""
        if key not in self._stream_ids:
            device = self.hardware.devices[key.device]
            name = f"{key.role.value} {key.nth}" if key.nth else key.role.value
            name = f"{device} {name}" if key.device else name
            self._stream_ids[key] = self._stream(name, key.role, device, key.nth)
        return self._stream_ids[key]

    @property
    def compute(self) -> StreamId:
        """The first compute stream of the first device."""
        return self.stream_of(COMPUTE)

    def port(self, name: str) -> StreamId:
        """Add a stream for a source or a sink."""
        num_ports = sum([stream.role is StreamRole.PORT for stream in self._streams])
        return self._stream(name, StreamRole.PORT, HOST, num_ports)

    def _stream(self, name: str, role: StreamRole, device: Device, index: int) -> StreamId:
        stream = Stream(StreamId(len(self._streams)), device, role, index, name)
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
        place: int = 0,
    ) -> RegisterId:
        """Add a register; see `compiler.lowering.packing.Item` for `chains` and `interval`."""
        item = Item(size_bytes, num_slots, chains, interval)
        self._arenas.setdefault(place, len(self._arenas))
        self._registers.append(_RegisterDraft(name, kind, item, reason, place))
        return RegisterId(len(self._registers) - 1)

    def packed(self, register: RegisterId, type_: TensorType, place: int) -> int:
        """Add what a launch keeps of a variable's register; return the view on it."""
        of = self._registers[register].name
        name = f"{PACKED}/{len(self.variables)}/{of}"
        kind, reason = RegisterKind.VARIABLE, "kept from step to step: one slot"
        own = self.register(name, kind, type_.size_bytes, reason=reason, place=place)
        view, version = self.view(own, type_), self.version()
        init = (("kind", PACKED), ("of", of))
        self.variables.append(Variable(name, PACKED, view, init, version, version, version))
        return view

    def num_slots(self, register: RegisterId) -> int:
        """Return how many slots a register has."""
        return self._registers[register].item.num_slots

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
        # Parts that hash in C, and no object for a view that is known: 4 of 5 are.
        key = (register, offset_bytes, type_.dtype, type_.shape, strides)
        index = self._view_ids.setdefault(key, len(self._views))
        if index == len(self._views):
            self._views.append(View(register, offset_bytes, type_, strides))
        return index

    def address(self, view: int) -> int:
        """Return where a view begins in its arena, in slot 0, once everything is placed."""
        shown = self._views[view]
        return self._offsets[shown.register][0] + shown.offset_bytes

    def version(self) -> Version:
        """Return a number for a value that something is going to make."""
        self._num_versions += 1
        return Version(self._num_versions - 1)

    def part(self, version: Version, offset_bytes: int, strides_bytes: tuple[int, ...]) -> int:
        """Return what a launch reads that wants a part of a version: see `Launch.reads`."""
        part = Part(version, offset_bytes, strides_bytes)
        return -1 - self._parts.setdefault(part, len(self._parts))

    def stack(self, types: Sequence[TensorType], place: int) -> tuple[tuple[int, ...], int]:
        """Return an aligned offset for each of some tensors in one register, and its size."""
        alignment = self.hardware.alignment(place)
        offsets: list[int] = []
        size = 0
        for type_ in types:
            offsets.append(size)
            size += align_up(type_.size_bytes, alignment)
        return tuple(offsets), size

    def source(self, source: SourceLocation) -> int:
        """Return the index of a line of the user's program."""
        return self._sources.setdefault(SourceLine(source.file, source.line), len(self._sources))

    def place(self, chains: Sequence[ChainPlace]) -> tuple[tuple[int, int], ...]:
        """Give every slot of every register an offset in its arena.

        Returns the pairs of chains that share bytes one after the other. Registers without bytes
        may still be added.
        """
        spans = [chain.span for chain in chains]
        places = [draft.place for draft in self._registers]
        self._offsets = [()] * len(places)
        packings: list[Packing] = []
        before: dict[tuple[int, int], None] = {}
        for place in self._arenas:
            own = [index for index, other in enumerate(places) if other == place]
            items = [self._registers[index].item for index in own]
            packing = pack(items, spans, self.hardware.alignment(place))
            for index, offsets in zip(own, packing.offsets, strict=True):
                self._offsets[index] = offsets
            before |= dict.fromkeys(packing.before)
            packings.append(packing)
        self._packings = tuple(packings)
        self._chains = tuple(chains)
        return tuple(sorted(before, key=lambda pair: (spans[pair[1]], spans[pair[0]], pair)))

    def finish(
        self,
        name: str,
        *,
        graph_hash: str,
        options: tuple[tuple[str, PlainValue], ...],
    ) -> Plan:
        """Return the plan, once everything is placed."""
        if not self._packings:
            raise InternalError(f"plan {name!r} was finished before it was placed")
        plan = Plan(
            name=name,
            streams=tuple(self._streams),
            arenas=tuple(
                [
                    self._arena(place, packing)
                    for place, packing in zip(self._arenas, self._packings, strict=True)
                ]
            ),
            registers=tuple([self._placed(index) for index in range(len(self._registers))]),
            views=tuple(self._views),
            actors=tuple(self.actors),
            fields=tuple(self.fields),
            variables=tuple(self.variables),
            constants=tuple(self.constants),
            sources=tuple(self._sources),
            memory=(),
            graph_hash=graph_hash,
            target=self.hardware.fingerprint,
            options=options,
            parts=tuple(self._parts),
            joins=tuple(self.joins),
        )
        proven = [
            account(plan, arena, packing.lower_bound_bytes, packing.certificate)
            for arena, packing in enumerate(self._packings)
        ]
        return replace(plan, memory=tuple(proven))

    def _arena(self, number: int, packing: Packing) -> Arena:
        place, alignment = self.hardware.place(number), self.hardware.alignment(number)
        return Arena(place.device, place.memory, packing.peak_bytes, alignment)

    def _placed(self, index: int) -> Register:
        draft = self._registers[index]
        item = draft.item
        if index < len(self._offsets):
            offsets = self._offsets[index]
        elif item.size_bytes:
            raise InternalError(f"register {draft.name!r} was added after the others were placed")
        else:
            offsets = (0,) * item.num_slots
        return Register(
            RegisterId(index),
            draft.name,
            draft.kind,
            self._arenas[draft.place],
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
