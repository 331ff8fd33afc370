"""One graph on its way into a plan: launches, their chains, and which values cross between chains.

A *program* is what `compiler.lowering.lower` must know of a graph before it makes registers: the
launches with their kernels, the two rates, the chains of each with what must come before what, and
for every root the chain that makes it and the chains that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST_SIDE, RANK_SIDE, StreamRole
from compiler.contract.types import ValueId
from compiler.graph.graph import Graph, Node
from compiler.graph.registry import is_comm
from compiler.graph.target import Hardware
from compiler.lowering.chains import (
    COMPUTE,
    ChainDraft,
    Chains,
    LaunchChain,
    LaunchWork,
    StreamKey,
    form_chains,
)
from compiler.lowering.destinations import ConcatElision, elide_concats
from compiler.ops.primitives.sources import CONSTANT, SCRATCH, VARIABLE
from compiler.ops.primitives.transfer import (
    ALL_REDUCE,
    DEFERRED,
    is_copy,
    peer_operands,
    value_devices,
)
from compiler.storage.buffers import LaunchDraft, draft_launches
from compiler.storage.order import (
    CHANNELS,
    batches_in_flight,
    batches_per_step,
    comm_stream,
    has_channels,
    is_returning,
    needed_per_step,
    overlaps_steps,
    rank_edges,
)
from compiler.storage.storage import Storage, assign_storage, launch_of_values, write_after_read


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A graph with its launches and chains.

    `order` has pairs (earlier, later) of chains of one rate that must not overlap in time. Every
    chain of a batch comes before every chain of a step. `maker` and `readers` are by root: the
    chain that makes it, and those that read it, in order; so is `place`, where its register lies.
    `makespan_ns` is the estimated time of a whole step, with every chain on its stream.
    Of a stage of a pipeline, `in_flight` batches may be under way, and `late` are the chains that
    wait for what comes back from later stages; see `compiler.storage.order`.
    """

    graph: Graph
    storage: Storage
    drafts: tuple[LaunchDraft, ...]
    chains: tuple[ChainDraft, ...]
    order: tuple[tuple[int, int], ...]
    maker: dict[ValueId, int]
    readers: dict[ValueId, tuple[int, ...]]
    place: tuple[int, ...]
    batches_per_step: int
    makespan_ns: float
    in_flight: int = 1
    is_pipelined: bool = False
    late: frozenset[int] = frozenset()

    @property
    def batch_ns(self) -> float:
        """Estimated time of what runs once per batch, one launch after the other."""
        return self._time(is_per_step=False)

    @property
    def step_ns(self) -> float:
        """Estimated time of a whole step."""
        return self.batches_per_step * self.batch_ns + self._time(is_per_step=True)

    def slots_between(self, maker: int, readers: Sequence[int]) -> tuple[int, str]:
        """Return the slots of a register between chains of a step, and why so many.

        What a stage keeps until gradients come back has one for each batch under way. What leaves
        its ranks has two, and what comes from another one more than it keeps, so that the stage
        goes on meanwhile.
        """
        if not self.is_pipelined or self.chains[maker].is_per_step:
            return 1, "1: within a step"
        is_kept = maker not in self.late and any([c in self.late for c in readers])
        slots = self.in_flight if is_kept else 1
        if CHANNELS[self._comm(maker)].startswith("receive"):
            return slots + 1, f"{slots + 1}: batches under way, and one that comes in"
        if any([CHANNELS[self._comm(c)].startswith("send") for c in readers]):
            return max(slots, 2), f"{max(slots, 2)}: batches under way, or on their way out"
        return slots, f"{slots}: batches under way"

    def _comm(self, chain: int) -> int:
        stream = self.chains[chain].stream
        return stream.nth if stream.role is StreamRole.COMM else 0

    def _time(self, *, is_per_step: bool) -> float:
        return sum(
            [
                self.drafts[i].info.duration_ns
                for chain in self.chains
                if chain.is_per_step == is_per_step and not chain.is_beside
                for i in chain.launches
            ]
        )


def make_program(
    graph: Graph, hardware: Hardware, num_streams: int, first_rank: int
) -> StepProgram:
    """Return the program of a graph that went through all passes; its time starts at a rank.

    Raises CompileError when the target lacks a kernel.
    """
    storage = assign_storage(graph)
    _check_places(graph, storage)
    drafts = draft_launches(graph, storage, hardware)
    nodes = storage.launches
    launch_at = {node: index for index, node in enumerate(nodes)}
    work = _work(graph, storage, drafts, launch_at, hardware)
    is_pipelined = has_channels(graph)
    num_streams = 1 if is_pipelined else num_streams  # who is first among batches, slots say
    per_step, is_beside = needed_per_step(graph), overlaps_steps(graph)
    batches = batches_per_step(graph)
    makespan_ns = 0.0
    beside = {i: per_step[node] for i, node in enumerate(nodes) if is_beside[node]}
    chains = _chains_beside(work, beside)
    order: list[tuple[int, int]] = []
    for is_per_step in (False, True):
        launches = [
            i
            for i, node in enumerate(nodes)
            if per_step[node] == is_per_step and not is_beside[node]
        ]
        formed = form_chains(work, launches, num_streams, hardware.message_ns)
        # Without launches a batch still needs a chain that begins and ends it.
        if not formed.chains and not is_per_step:
            formed = Chains((LaunchChain((), COMPUTE, 0.0, 0.0),), ())
        end_ns = max([chain.end_ns for chain in formed.chains], default=0.0)
        # A step runs the chains of a batch once for each of its batches.
        makespan_ns += end_ns if is_per_step else batches * end_ns
        # Chains of copies beside steps, and of batches, stand before these: numbers are shifted.
        order += [(a + len(chains), b + len(chains)) for a, b in formed.order]
        spans = _spans(formed, first_rank)
        first = first_rank
        first_rank = max([first_rank, *[end for _, end in spans]])
        if is_pipelined and not is_per_step:  # any of them may run while any other one does
            spans = [(first, first_rank)] * len(spans)
        for chain, (start, end) in zip(formed.chains, spans, strict=True):
            # A link may be far slower than was assumed: nobody waits for bytes of a collective
            # that nobody waits for. But what is reduced to parts is the larger, and given back.
            is_late = not work.late.isdisjoint(chain.launches)
            is_kept = all([drafts[i].node.op is ALL_REDUCE for i in chain.launches])
            end = first_rank if is_late and is_kept else end
            chains.append(ChainDraft(chain.launches, chain.stream, is_per_step, (start, end)))
    placed = elide_concats(graph, storage, drafts, chains, hardware)
    maker, readers = _crossings(placed)
    return StepProgram(
        placed.graph,
        placed.storage,
        placed.drafts,
        placed.chains,
        tuple(order),
        maker,
        readers,
        _register_places(placed, maker, readers, hardware),
        batches,
        makespan_ns,
        batches_in_flight(graph) if is_pipelined else 1,
        is_pipelined,
        _late(drafts, work, chains),
    )


def _late(
    drafts: Sequence[LaunchDraft], work: LaunchWork, chains: Sequence[ChainDraft]
) -> frozenset[int]:
    """Return the chains that wait for what comes back from later stages."""
    is_late = [is_returning(draft.node) for draft in drafts]
    if not any(is_late):
        return frozenset()
    for index, before in enumerate(work.before):  # launches stand in an order that obeys it
        is_late[index] = is_late[index] or any([is_late[p] for p in before])
    return frozenset(
        [c for c, chain in enumerate(chains) if any([is_late[i] for i in chain.launches])]
    )


def _work(
    graph: Graph,
    storage: Storage,
    drafts: tuple[LaunchDraft, ...],
    launch_at: dict[int, int],
    hardware: Hardware,
) -> LaunchWork:
    made_by = launch_of_values(graph)
    before: list[list[int]] = [[] for _ in drafts]
    for index, draft in enumerate(drafts):
        values = (*draft.node.inputs, *draft.node.after)
        # -1: no launch makes it, so nothing waits.
        before[index] = [launch_at[made_by[v]] for v in values if made_by[v] >= 0]
    for reader, writer in write_after_read(graph):
        if storage.is_launch[reader]:
            before[launch_at[writer]].append(launch_at[reader])
    for earlier, later in rank_edges(graph):
        before[launch_at[later]].append(launch_at[earlier])
    meetings = [i for i, draft in enumerate(drafts) if is_comm.get(draft.node.op)]
    bound = [*meetings, *[i for i, draft in enumerate(drafts) if is_copy(draft.node)]]
    return LaunchWork(
        tuple([draft.info.duration_ns for draft in drafts]),
        tuple([tuple(dict.fromkeys(row)) for row in before]),
        tuple([_stream(graph, draft.node, hardware) for draft in drafts]),
        {i: drafts[i].node.attrs.int_("bucket") for i in bound},
        {i: drafts[i].node.attrs.int_("order") for i in meetings},
        frozenset([i for i in meetings if drafts[i].node.attrs.get("when") == DEFERRED]),
    )


def _stream(graph: Graph, node: Node, hardware: Hardware) -> StreamKey:
    """Return the stream of a node that is a launch."""
    if is_copy(node):
        ends = value_devices(graph)[node.inputs[0]], node.attrs.int_("to")
        return StreamKey(*hardware.copy_stream(*ends))
    if is_comm.get(node.op):
        return StreamKey(node.device, StreamRole.COMM, comm_stream(node))
    return StreamKey(node.device, StreamRole.COMPUTE)


def _chains_beside(work: LaunchWork, launches: Mapping[int, bool]) -> list[ChainDraft]:
    """Return a chain for each bucket of copies that run beside steps; launches by their rate."""
    buckets: dict[tuple[StreamKey, int], list[int]] = {}
    for i in launches:
        buckets.setdefault((work.stream[i], work.buckets[i]), []).append(i)
    return [
        ChainDraft(tuple(bucket), stream, launches[bucket[0]], (0, 1), is_beside=True)
        for (stream, _), bucket in buckets.items()
    ]


def _check_places(graph: Graph, storage: Storage) -> None:
    """Check that a launch reads what lies on its device, and a copy what lies elsewhere.

    Raises InternalError.
    """
    place = value_devices(graph)
    if not any(place):
        return
    for index, node in enumerate(graph.nodes):
        if not storage.is_launch[index]:
            continue
        if is_copy(node):
            wrong = [v for v in node.inputs[:1] if place[v] == node.attrs.int_("to")]
        else:
            wrong = [v for v in node.inputs if place[v] != node.device]
        for value in wrong:
            at = place[value]
            where = "host memory" if at == HOST_SIDE else f"the memory of device {at}"
            raise InternalError(f"{node.op} at {node.source} reads a value in {where}")


def _spans(formed: Chains, first_rank: int) -> list[tuple[int, int]]:
    """Return the spans of chains on virtual time, in ranks; none is empty."""
    # One nanosecond at least, so that no span is empty.
    spans = [(chain.start_ns, max(chain.end_ns, chain.start_ns + 1.0)) for chain in formed.chains]
    times = sorted({time for span in spans for time in span})
    rank = {time: first_rank + index for index, time in enumerate(times)}
    return [(rank[start], rank[end]) for start, end in spans]


def _crossings(placed: ConcatElision) -> tuple[dict[ValueId, int], dict[ValueId, tuple[int, ...]]]:
    """Return, by root, the chain that makes it, or its parts, and those that read it."""
    maker: dict[ValueId, int] = {}
    readers: dict[ValueId, dict[int, None]] = {}
    root = placed.storage.root
    for number, chain in enumerate(placed.chains):
        for index in chain.launches:
            node = placed.drafts[index].node
            for value in node.inputs:
                readers.setdefault(root[value], {})[number] = None
            updated = [output for output, _ in node.writes]
            for position, value in enumerate(node.outputs):
                # What is updated lies in its input's register: this chain makes no new root.
                if position not in updated:
                    maker[root[value]] = number
    return maker, {root: tuple(chains) for root, chains in readers.items()}


def _register_places(
    placed: ConcatElision,
    maker: dict[ValueId, int],
    readers: dict[ValueId, tuple[int, ...]],
    hardware: Hardware,
) -> tuple[int, ...]:
    """Return, by root, where its register lies: with the value, pinned, or shared by ranks.

    Pinned is what the host works on and the stream of another device copies, whichever way: other
    memory of the host is too slow for it, or out of its reach. Shared is what other ranks work on;
    nothing else, for shared memory has small pages and is slower.
    """
    column = list(value_devices(placed.graph))
    _share_met(placed, column, hardware)
    is_apart = [hardware.is_apart(chain.stream.device) for chain in placed.chains]
    if not any(is_apart):
        return tuple(column)
    touching = [*maker.items(), *[(root, c) for root, chains in readers.items() for c in chains]]
    for root, chain in touching:
        if is_apart[chain] and not hardware.is_apart(column[root]):
            column[root] = HOST_SIDE
    return tuple(column)


def _share_met(placed: ConcatElision, column: list[int], hardware: Hardware) -> None:
    """Let what other ranks work on lie where they see it; state stays where it is copied from."""
    graph, root = placed.graph, placed.storage.root
    values = [
        root[value]
        for draft in placed.drafts
        if is_comm.get(draft.node.op)
        for value in peer_operands(draft.node.op, draft.node.inputs, draft.node.outputs)
    ]
    if not values:
        return
    made_by = graph.producers()
    for value in values:
        maker = graph.nodes[made_by[value]]
        is_state = maker.op is CONSTANT or (maker.op is VARIABLE and not _is_sum(maker))
        if column[value] >= 0 and not hardware.is_apart(column[value]) and not is_state:
            column[value] = RANK_SIDE
    # A sum over batches is its variable's register, and met as it lies there.
    for write in graph.writes:
        is_met = column[root[write.value]] == RANK_SIDE
        if is_met and _is_sum(graph.nodes[made_by[write.variable]]):
            column[root[write.variable]] = RANK_SIDE


def _is_sum(node: Node) -> bool:
    """Whether a node is a variable that means nothing between two steps."""
    return node.op is VARIABLE and node.attrs["role"] == SCRATCH
