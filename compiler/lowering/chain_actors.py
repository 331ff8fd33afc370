"""The chains of one program as actors: their streams, the bytes between them, the fence around.

A value that stays in one chain is a temporary of that chain; one that other chains read is a field
of a register with one slot between its maker and all its readers. Where an order of chains follows
from no register, a control edge holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST_SIDE, RANK_SIDE
from compiler.contract.plan_tables import (
    ActorKind,
    ElidedConcat,
    Field,
    Launch,
    RegisterKind,
    launch_label,
)
from compiler.contract.types import DType, RegisterId, ShardingSpec, StreamId, TensorType, ValueId
from compiler.graph.graph import SourceLocation
from compiler.graph.registry import is_comm
from compiler.lowering.actor_graph import ActorGraph, actor_of, limit_batches_in_flight
from compiler.lowering.plan_builder import ChainPlace, PlanBuilder, ValueVersions
from compiler.lowering.step_program import StepProgram
from compiler.ops.primitives.transfer import is_copy
from compiler.storage.buffers import LaunchDraft, assign_buffers, last_uses, may_share_bytes
from compiler.storage.storage import launch_of_values
from memory.registers import choose_slots

BESIDE_BUDGET_BYTES = 1 << 30
"""Slots of one edge between a step and a copy beside it may take this much."""

Home = tuple[RegisterId, int]
"""Where a root lives: a register, and bytes from its beginning."""


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """The actors of one rate that begin a firing of all its chains, and the one that ends it.

    `before_updates`: as few of those that begin as lead to all other chains that change variables.
    """

    begins: tuple[int, ...]
    end: int
    before_updates: tuple[int, ...]

    @property
    def boundary_actors(self) -> tuple[int, ...]:
        """The actors that hold the next firing off while someone holds a credit of each."""
        return tuple(dict.fromkeys([*self.begins, self.end]))

    @property
    def update_boundary_actors(self) -> tuple[int, ...]:
        """The actors that hold the next updates off: a step may have begun by then."""
        return tuple(dict.fromkeys([*self.before_updates, self.end]))


@dataclass(slots=True)
class ChainActors:
    """Actors of the chains of a program.

    `numbers` are their ids; chain c of the program is chain `first_chain` + c of the plan. `home`
    says where roots live: state and what crosses to the outside is put there before `connect`.
    """

    program: StepProgram
    plan: PlanBuilder
    actors: ActorGraph
    first_chain: int
    first_launch: int
    numbers: list[int] = field(default_factory=list)
    home: dict[ValueId, Home] = field(default_factory=dict)
    brought: list[tuple[int, RegisterId]] = field(default_factory=list)
    """The actors that copy batches to a device beside steps, each with the register it fills."""
    handed: list[ValueId] = field(default_factory=list)
    """What one chain makes and others read, of the registers with one slot."""
    versions: ValueVersions = field(init=False)

    def __post_init__(self) -> None:
        program = self.program
        self.versions = ValueVersions(program.graph, program.storage, self.plan)

    def add(self, names: Callable[[bool], str]) -> None:
        """Add an actor per chain. `names` gives a name by whether a chain runs once per step."""
        is_first = not self.first_chain
        bound = [
            actor_of(chain, names(chain.is_per_step), is_first=is_first)
            for chain in self.program.chains
        ]
        labels = [label for label, _ in bound]
        for index, chain in enumerate(self.program.chains):
            name, kind = bound[index]
            if labels.count(name) > 1:
                name = f"{name}.{labels[:index].count(name)}"
            self.numbers.append(self.actors.add(name, kind, self.plan.stream_of(chain.stream)))

    def places(self) -> list[ChainPlace]:
        """Return where each chain stands on virtual time and among the launches of the plan."""
        places: list[ChainPlace] = []
        first = self.first_launch
        for chain in self.program.chains:
            places.append(ChainPlace(chain.span, first, len(chain.launches)))
            first += len(chain.launches)
        return places

    def readers(self, root: ValueId) -> tuple[int, ...]:
        """Return the chains that read a root."""
        return self.program.readers.get(root, ())

    # -- bytes -----------------------------------------------------------------------------------

    def place_of(self, roots: Sequence[ValueId]) -> int:
        """Return where a register with some roots lies.

        Roots in several places of the host lie pinned if a device copies some, else shared.
        """
        places = tuple(dict.fromkeys([self.program.place[root] for root in roots]))
        if len(places) == 1:
            return places[0]
        if any([self.plan.hardware.is_apart(number) for number in places]):
            raise InternalError(f"values {roots} of one register lie on several devices")
        if RANK_SIDE in places and HOST_SIDE not in places:
            return RANK_SIDE
        # A port whose register holds nothing has it on the host all the same.
        return HOST_SIDE if places or self.plan.hardware.is_apart(0) else 0

    def add_field(
        self,
        name: str,
        value: ValueId,
        home: Home,
        source: SourceLocation,
        part: ShardingSpec | None = None,
    ) -> None:
        """Let a value live in a register that a port sees, as a field of it."""
        register, offset = self.home[value] = home
        view = self.plan.view(register, self.program.graph.types[value], offset)
        line, version = self.plan.source(source), self.versions.of(value)
        self.plan.fields.append(Field(name, register, view, line, version, part))

    def place_crossings(self) -> None:
        """Add the registers between chains, one per maker and set of readers."""
        groups: dict[tuple[int, int, tuple[int, ...]], list[ValueId]] = {}
        pairs = self._met_in_place()
        results = set(pairs.values())
        for root, maker in self.program.maker.items():
            if root in results:
                continue
            readers = [*self.readers(root), *(self.readers(pairs[root]) if root in pairs else ())]
            others = tuple([c for c in dict.fromkeys(readers) if c != maker])
            if others and root not in self.home:
                groups.setdefault((self.program.place[root], maker, others), []).append(root)
        for (place, maker, others), roots in groups.items():
            ends = (maker, *others)
            offsets, size = self.plan.stack([self.program.graph.types[r] for r in roots], place)
            names = [self.actors.drafts[self.numbers[c]].name for c in ends]
            is_beside = any([self.program.chains[c].is_beside for c in ends])
            slots, reason = self.program.slots_between(maker, others)
            if is_beside:
                slots, reason = self._slots_beside(size, maker, others, names)
            register = self.plan.register(
                f"{names[0]}>{','.join(names[1:])}",
                RegisterKind.DATA,
                size,
                num_slots=slots,
                # With several slots, or beside steps, some slot is in use at any time.
                chains=()
                if slots > 1 or is_beside
                else tuple([self.first_chain + c for c in ends]),
                reason=reason,
                place=place,
            )
            self.home.update(
                {root: (register, offset) for root, offset in zip(roots, offsets, strict=True)}
            )
            self.actors.produce(self.numbers[maker], register)
            if not is_beside:
                self.handed += [root for root in roots if root not in pairs]
            if self.program.chains[maker].is_beside:
                self.brought.append((self.numbers[maker], register))
            for c in others:
                self.actors.consume(self.numbers[c], register, self.numbers[maker])
        self.home.update({after: self.home[before] for before, after in pairs.items()})

    def _met_in_place(self) -> dict[ValueId, ValueId]:
        """Return what a collective overwrites, and the value that it leaves there.

        No other chain and no later launch of its own chain reads what it overwrites. No other
        collective overwrites its result, for at most one consumer updates a token. A reader of the
        result consumes the same register, and a control edge orders it (`hold_order`).
        """
        program, storage = self.program, self.program.storage
        pairs: dict[ValueId, ValueId] = {}
        results: set[ValueId] = set()
        for c, chain in enumerate(program.chains):
            drafts = tuple([program.drafts[i] for i in chain.launches])
            last_use = last_uses(storage, drafts)
            for position, draft in enumerate(drafts):
                if not is_comm.get(draft.node.op) or not draft.info.in_place:
                    continue
                if not may_share_bytes(program.graph, storage, draft, 0, 0):
                    continue
                before, after = [
                    storage.root[v[0]] for v in (draft.node.inputs, draft.node.outputs)
                ]
                is_theirs = self.readers(before) == (c,) and program.maker.get(before, c) != c
                is_theirs &= last_use[before] == position
                # What runs beside steps waits for registers alone.
                is_theirs &= not any([program.chains[r].is_beside for r in self.readers(after)])
                if is_theirs and before not in results and not {before, after} & self.home.keys():
                    pairs[before] = after
                    results.add(after)
        return pairs

    def _slots_beside(
        self, size: int, maker: int, readers: tuple[int, ...], names: list[str]
    ) -> tuple[int, str]:
        """Return the slots of a register between a step and a copy beside it, and why so many."""
        made_ns, *read_ns = [
            sum([self.program.drafts[i].info.duration_ns for i in self.program.chains[c].launches])
            for c in (maker, *readers)
        ]
        return choose_slots(
            1,
            made_ns,
            max(read_ns),
            size_bytes=size,
            budget_bytes=max(BESIDE_BUDGET_BYTES, size),
            most=2,
            names=(names[0], names[1]),
        )

    def place_temporaries(self) -> None:
        """Give every root that no one else has placed bytes in the block of its chain."""
        program = self.program
        for c, chain in enumerate(program.chains):
            drafts = tuple([program.drafts[i] for i in chain.launches])
            handed = [root for root in self.handed if self.readers(root) == (c,)]
            leaving = {root for root in self.handed if program.maker[root] == c}
            buffers = assign_buffers(
                program.graph, program.storage, drafts, self.home, handed, leaving
            )
            producers = program.graph.producers()
            homes = [self.home[root] for root in handed]
            # The first buffers are those handed on, in the order of `handed`.
            for index, buffer in enumerate(buffers.buffers[len(handed) :], len(handed)):
                if index in buffers.left_to:
                    homes.append(self.home[buffers.left_to[index]])
                    continue
                node = program.graph.nodes[producers[buffer.root]]
                name = launch_label(node.op.name, node.attrs, node.scope)
                place = program.place[buffer.root]
                register = self._temporary(name, buffer.size_bytes, c, buffer.interval, place)
                homes.append((register, 0))
            for root, index in buffers.of_root.items():
                self.home[root] = homes[index]

    def bind_launches(self) -> None:
        """Give every actor its launches; all roots have a home by then."""
        for c, chain in enumerate(self.program.chains):
            self.actors.drafts[self.numbers[c]].launches = tuple(
                [
                    self._launch(self.program.drafts[i], c, position)
                    for position, i in enumerate(chain.launches)
                ]
            )

        for node in self.versions.joins:
            self.plan.joins.append(
                ElidedConcat(
                    axis=node.attrs.int_("axis"),
                    inputs=tuple([self.view(v) for v in node.inputs]),
                    reads=tuple([self.versions.read(v) for v in node.inputs]),
                    output=self.view(node.outputs[0]),
                    version=self.versions.of(node.outputs[0]),
                    source=self.plan.source(node.source),
                )
            )

    def view(self, value: ValueId) -> int:
        """Return the plan's view of a value."""
        storage = self.program.storage
        register, base = self.home[storage.root[value]]
        layout = storage.layout[value]
        return self.plan.view(
            register,
            self.program.graph.types[value],
            base + layout.offset_bytes,
            layout.strides_bytes,
        )

    def _launch(self, draft: LaunchDraft, chain: int, position: int) -> Launch:
        node, info = draft.node, draft.info
        # A variable that a copy writes over is none of its operands: see `write_after_read`.
        operands = node.inputs[:1] if is_copy(node) else node.inputs
        workspace = None
        if info.workspace_bytes:
            # Its bytes are live during this launch only.
            interval = (position, position + 1)
            name = f"{launch_label(node.op.name, node.attrs, node.scope)}, workspace"
            device = self.program.chains[chain].stream.device
            block = TensorType(DType.UINT8, (info.workspace_bytes,))
            if info.prepacked_input is None:
                register = self._temporary(name, info.workspace_bytes, chain, interval, device)
                workspace = self.plan.view(register, block)
            else:
                weight = self.home[self.program.storage.root[node.inputs[info.prepacked_input]]][0]
                workspace = self.plan.packed(weight, block, device)
        return Launch(
            kernel=info.kernel,
            op=node.op.name,
            attrs=tuple(node.attrs.items()),
            inputs=tuple([self.view(v) for v in operands]),
            outputs=tuple([self.view(v) for v in node.outputs]),
            workspace=workspace,
            scope=node.scope,
            source=self.plan.source(node.source),
            duration_ns=info.duration_ns,
            phase=node.phase,
            reads=tuple([self.versions.read(v) for v in operands]),
            writes=tuple([self.versions.of(v) for v in node.outputs]),
        )

    def _temporary(
        self, name: str, size_bytes: int, chain: int, interval: tuple[int, int], place: int
    ) -> RegisterId:
        return self.plan.register(
            name,
            RegisterKind.TEMPORARY,
            size_bytes,
            chains=(self.first_chain + chain,),
            interval=interval,
            place=place,
        )

    # -- order -----------------------------------------------------------------------------------

    def hold_order(self) -> None:
        """Add a control edge for every order of chains that no register holds."""
        for earlier, later in sorted(self.program.order, key=lambda pair: (pair[1], -pair[0])):
            a, b = self.numbers[earlier], self.numbers[later]
            if not self.actors.is_before(a, b):
                names = [self.actors.drafts[n].name for n in (a, b)]
                slots, _ = self.program.slots_between(earlier, (later,))
                reason = f"{slots}: order within a step"
                self.actors.control(f"{names[0]}>{names[1]}", a, b, reason, slots)

    def fence(
        self, *, is_per_step: bool, compute: StreamId, in_flight: int = 1
    ) -> StepBoundary | None:
        """Let `in_flight` firings of one rate overlap; return the actors that begin and end one.

        With 1, no byte that chains share needs a second slot: the next firing begins when the last
        is done. With more, whoever asks for them gives slots to what would be overwritten; the race
        check names what lacks one. None where the program has no chain of that rate.
        """
        reason = f"{in_flight}: steps under way" if in_flight > 1 else "1: one step at a time"
        chains = [
            n
            for n, chain in zip(self.numbers, self.program.chains, strict=True)
            if chain.is_per_step == is_per_step and not chain.is_beside
        ]
        if not chains:
            return None
        actors = self.actors
        # No other chain of this rate leads to one that begins, nor does one that ends lead to any.
        begins = [n for n in chains if not any([actors.is_before(m, n) for m in chains])]
        ends = [n for n in chains if not any([actors.is_before(n, m) for m in chains])]
        if self.program.is_pipelined and not is_per_step:
            in_flight = limit_batches_in_flight(self.program, self.actors, self.numbers)
        end = ends[0]
        # An actor without launches joins several ends, so that one credit tells of all.
        if len(ends) > 1:
            computing = [n for n in chains if actors.drafts[n].kind is ActorKind.COMPUTE]
            name = actors.drafts[computing[0]].name.partition(".")[0]
            end = actors.add(f"{name}.end", ActorKind.COMPUTE, compute)
            for n in ends:
                actors.control(f"{actors.drafts[n].name}.done", n, end, reason, in_flight)
        # No first chain can be more than `in_flight` firings ahead of the end.
        for n in begins:
            if n != end and not actors.has_edge(n, end):
                actors.control(f"{actors.drafts[n].name}.again", n, end, reason, in_flight)
        # What ends a step lets nobody pass by itself: it has no slot for its credit.
        updates = [n for n in self._updates() if n in chains and n != end]
        return StepBoundary(tuple(begins), end, actors.leading(begins, updates))

    def _updates(self) -> list[int]:
        """Return the actors of the chains that change variables."""
        graph = self.program.graph
        made_by, is_launch = launch_of_values(graph), self.program.storage.is_launch
        nodes = {made_by[write.value] for write in graph.writes}
        launches = [i for i in range(len(graph.nodes)) if is_launch[i]]
        updates = {k for k, node in enumerate(launches) if node in nodes}
        chains = zip(self.numbers, self.program.chains, strict=True)
        return [n for n, chain in chains if not updates.isdisjoint(chain.launches)]
