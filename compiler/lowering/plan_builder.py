"""The tables of a plan while they grow: registers with offsets, views, versions, source lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.contract.accounting import account
from compiler.contract.attrs import PlainValue
from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST, Device, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    Arena,
    Constant,
    ElidedConcat,
    Field,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    Variable,
    VersionSlice,
    View,
)
from compiler.contract.types import (
    RegisterId,
    StreamId,
    TensorType,
    ValueId,
    Version,
    contiguous_strides,
)
from compiler.graph.graph import Graph, Node, SourceLocation
from compiler.graph.target import Hardware
from compiler.lowering.chains import COMPUTE, StreamKey
from compiler.ops.primitives.sources import PACKED
from compiler.storage.storage import Storage, is_dense
from memory.liveness import align_up, lower_bound
from memory.offsets import OffsetPlan, certificate, plan_offsets

# Offsets for all registers of a plan, and the order of actors that sharing bytes asks for.
#
# Two levels. The temporaries of one chain are packed by their live intervals in launches; the block
# that comes out, like every register between two chains, lives on the virtual time of the schedule,
# from the start of the first chain that touches it to the end of the last. Blocks and registers are
# packed again by these spans. So two chains that are meant to run at the same time never share
# bytes. Chains that share bytes run one after the other in the schedule anyway: `Packing.before`
# names those pairs, and the plan must hold an edge, or a path, for each.

SEARCH_WORK = 40_000
"""Work of the searches for a smaller peak, all blocks together: see `memory.offsets`.

Some 0.7 s at most. Above some 3,600 buffers in a chain first-fit stands alone, which came within
0.3 % of the bound on all graphs of that size that were measured.
"""


@dataclass(frozen=True, slots=True)
class Item:
    """A register to place.

    `chains` touch it: the chain of a temporary, with its live `interval` in launches of that chain;
    or the producer and then the consumers of a register between chains. Without chains it lives as
    long as the plan.
    """

    size_bytes: int
    num_slots: int
    chains: tuple[int, ...]
    interval: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each slot of each item lies.

    `before` are pairs of chains (earlier, later) that use the same bytes one after the other. The
    lower bound holds for this order of launches and this schedule of chains.
    """

    offsets: tuple[tuple[int, ...], ...]
    peak_bytes: int
    lower_bound_bytes: int
    before: tuple[tuple[int, int], ...]
    certificate: str


@dataclass(frozen=True, slots=True)
class _PackedPart:
    """Bytes of the outer level: whole slots of an item, or the block of a chain."""

    size_bytes: int
    span: tuple[int, int]
    chains: tuple[int, ...]


def pack(items: Sequence[Item], spans: Sequence[tuple[int, int]], alignment: int) -> Packing:
    """Place all items; `spans[c]` is chain c's half-open place on virtual time, in ranks."""
    # At least 1: what lives as long as the plan has a span even where there are no chains.
    horizon = max([1, *[end for _, end in spans]])
    members: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        if item.interval is not None:
            members.setdefault(item.chains[0], []).append(index)
    num_inner = sum([len(indices) for indices in members.values()])
    # The work is shared out by buffers, so that compile time does not grow with the chains.
    inner = {
        chain: _pack_block(items, indices, alignment, SEARCH_WORK * len(indices) // num_inner)
        for chain, indices in members.items()
    }
    parts: list[_PackedPart] = []
    first_part: dict[int, int] = {}
    for index, item in enumerate(items):
        if item.interval is None:
            first_part[index] = len(parts)
            span = _span(item.chains, spans) or (0, horizon)
            # Credits have no bytes, and there are millions where something is due that seldom.
            num_parts = item.num_slots if item.size_bytes else 1
            parts += [_PackedPart(item.size_bytes, span, item.chains)] * num_parts
    # Blocks of chains follow the items in `parts`, in the order of `inner`.
    block_part = {chain: len(parts) + i for i, chain in enumerate(inner)}
    parts += [_PackedPart(plan.peak_bytes, spans[chain], (chain,)) for chain, plan in inner.items()]
    lower, upper = [p.span[0] for p in parts], [p.span[1] for p in parts]
    sizes = [p.size_bytes for p in parts]
    outer = plan_offsets(lower, upper, sizes, alignment=alignment, max_work=SEARCH_WORK)
    offsets: list[tuple[int, ...]] = []
    for index, item in enumerate(items):
        first = first_part.get(index, 0)
        own_offsets = outer.offsets[first : first + item.num_slots]
        offsets.append(own_offsets if item.size_bytes else own_offsets[:1] * item.num_slots)
    for chain, indices in members.items():
        base = outer.offsets[block_part[chain]]
        for index, offset in zip(indices, inner[chain].offsets, strict=True):
            offsets[index] = (base + offset,)
    bound = outer.lower_bound_bytes
    # Blocks count as packed so far. With each block's own bound in its place, the result bounds
    # every packing of both levels.
    if any([plan.peak_bytes > plan.lower_bound_bytes for plan in inner.values()]):
        least = [p.size_bytes for p in parts]
        for chain, plan in inner.items():
            least[block_part[chain]] = plan.lower_bound_bytes
        rounded = [align_up(size, alignment) for size in least]
        bound = lower_bound(lower, upper, rounded)[0]
    before = _reuse(parts, outer.offsets, spans)
    proof = _proof(outer, tuple(inner.values()), bound)
    return Packing(tuple(offsets), outer.peak_bytes, bound, before, proof)


def _pack_block(items: Sequence[Item], own: list[int], alignment: int, work: int) -> OffsetPlan:
    intervals = [items[i].interval or (0, 0) for i in own]
    return plan_offsets(
        [start for start, _ in intervals],
        [end for _, end in intervals],
        [items[i].size_bytes for i in own],
        alignment=alignment,
        max_work=work,
    )


def _span(chains: tuple[int, ...], spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    if not chains:
        return None
    return min([spans[c][0] for c in chains]), max([spans[c][1] for c in chains])


def _reuse(
    parts: list[_PackedPart], offsets: tuple[int, ...], spans: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return the pairs of chains that use the same bytes, by a sweep over addresses."""
    order = sorted(
        [i for i, part in enumerate(parts) if part.chains and part.size_bytes],
        key=lambda i: offsets[i],
    )
    pairs: dict[tuple[int, int], None] = {}
    active: list[int] = []
    for i in order:
        # What reaches above this offset shares an address with part i.
        active = [j for j in active if offsets[j] + parts[j].size_bytes > offsets[i]]
        for j in active:
            # Parts that share bytes have disjoint spans: the one with the earlier span is done
            # first.
            earlier, later = sorted([parts[i], parts[j]], key=lambda part: part.span)
            for a in earlier.chains:
                for b in later.chains:
                    if a != b:
                        pairs[a, b] = None
        active.append(i)
    return tuple(sorted(pairs, key=lambda pair: (spans[pair[1]], spans[pair[0]], pair)))


def _proof(outer: OffsetPlan, inner: tuple[OffsetPlan, ...], bound: int) -> str:
    """Say what is proved of both levels together.

    One block under a stack of what lives as long is as small as the block is. With several chains
    all holds for their cut: blocks live for whole chains, and another cut may be smaller.
    """
    is_stack = outer.peak_bytes == outer.lower_bound_bytes
    if outer.peak_bytes == bound or (is_stack and not inner):
        return outer.certificate if len(inner) < 2 else f"{outer.certificate} and cut into chains"
    if is_stack and len(inner) == 1 and inner[0].is_optimal:
        return inner[0].certificate
    return certificate(outer.peak_bytes, bound, bound)


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
        # Device n has arena n; other places follow in the order in which they are first used.
        self._arenas: dict[int, int] = {n: n for n in range(len(hardware.devices))}
        self._registers: list[_RegisterDraft] = []
        self._packings: tuple[Packing, ...] = ()
        self._offsets: list[tuple[int, ...]] = []
        self._chains: tuple[ChainPlace, ...] = ()
        self._streams: list[Stream] = []
        self._stream_ids: dict[StreamKey, StreamId] = {}
        self._views: list[View] = []
        self._view_ids: dict[tuple[object, ...], int] = {}
        self._parts: dict[VersionSlice, int] = {}
        self._num_versions = 0
        self._sources: dict[SourceLine, int] = {}
        self.fields: list[Field] = []
        self.variables: list[Variable] = []
        self.constants: list[Constant] = []
        self.joins: list[ElidedConcat] = []
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
        """Add a register; see `Item` for `chains` and `interval`."""
        item = Item(size_bytes, num_slots, chains, interval)
        self._arenas.setdefault(place, len(self._arenas))
        self._registers.append(_RegisterDraft(name, kind, item, reason, place))
        return RegisterId(len(self._registers) - 1)

    def packed(self, register: RegisterId, type_: TensorType, place: int) -> int:
        """Add what a launch keeps of a variable's register; return the view on it."""
        source = self._registers[register].name
        name = f"{PACKED}/{len(self.variables)}/{source}"
        kind, reason = RegisterKind.VARIABLE, "kept from step to step: one slot"
        packed_register = self.register(name, kind, type_.size_bytes, reason=reason, place=place)
        # One number for all three versions: no launch of the step writes it.
        view, version = self.view(packed_register, type_), self.version()
        init = (("kind", PACKED), ("of", source))
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
        window = self._views[view]
        return self._offsets[window.register][0] + window.offset_bytes

    def version(self) -> Version:
        """Return a number for a value that something is going to make."""
        self._num_versions += 1
        return Version(self._num_versions - 1)

    def part(self, version: Version, offset_bytes: int, strides_bytes: tuple[int, ...]) -> int:
        """Return what a launch reads that wants a part of a version: see `Launch.reads`."""
        part = VersionSlice(version, offset_bytes, strides_bytes)
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
            indices = [index for index, other in enumerate(places) if other == place]
            items = [self._registers[index].item for index in indices]
            packing = pack(items, spans, self.hardware.alignment(place))
            for index, offsets in zip(indices, packing.offsets, strict=True):
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
        # The account is made of the plan's own tables, so it is put in after them.
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
            # Never empty, even in a plan without launches.
            return 0, max(1, sum([chain.num_launches for chain in chains]))
        if item.interval is None:
            places = [chains[c] for c in item.chains]
            ends = [chain.first_launch + chain.num_launches for chain in places]
            return min([chain.first_launch for chain in places]), max(ends)
        base = chains[item.chains[0]].first_launch
        return base + item.interval[0], base + item.interval[1]


# The versions of a program's values: what its launches say they read and write.
#
# Every value that a source or a launch makes is a version. A value that only shows another one is a
# window on that one's version. A value joined of parts in place is a version, too, and the plan
# says its parts (`ElidedConcat`). All follow from the logical graph alone. Nothing here knows in
# which order launches run, or which values share bytes: an error there must not find its way into
# the numbers that are to reveal it.


class ValueVersions:
    """The versions of one program's values, numbered on first use."""

    def __init__(self, graph: Graph, storage: Storage, plan: PlanBuilder) -> None:
        self._graph = graph
        self._storage = storage
        self._plan = plan
        self._made: dict[ValueId, Version] = {}
        self._shown: list[ValueId] = [ValueId(v) for v in range(len(graph.types))]
        self.joins: list[Node] = []
        for index, node in enumerate(graph.nodes):
            # A node without a launch shows its one input, or joins several that were written in
            # place.
            if len(node.inputs) > 1 and not storage.is_launch[index]:
                self.joins.append(node)
            elif node.inputs and not storage.is_launch[index]:
                self._shown[node.outputs[0]] = self._shown[node.inputs[0]]

    def of(self, value: ValueId) -> Version:
        """Return the version that a value is, or shows."""
        base = self._shown[value]
        if base not in self._made:
            self._made[base] = self._plan.version()
        return self._made[base]

    def know(self, value: ValueId, version: Version) -> None:
        """Let a value be a version that has a number already, such as a variable's."""
        self._made[value] = version

    def read(self, value: ValueId) -> int:
        """Return what a launch that reads a value states: see `Launch.reads`."""
        version, base = self.of(value), self._shown[value]
        if value == base:
            return version
        types, layout = self._graph.types, self._storage.layout[value]
        base_layout = self._storage.layout[base]
        # All bytes in the same dense order are the version itself, whatever shape shows them.
        is_whole = types[value].size_bytes == types[base].size_bytes
        are_dense = is_dense(types[value], layout) and is_dense(types[base], base_layout)
        if is_whole and are_dense:
            return version
        offset_bytes = layout.offset_bytes - base_layout.offset_bytes
        return self._plan.part(version, offset_bytes, layout.strides_bytes)
