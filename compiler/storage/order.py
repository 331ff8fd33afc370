"""Order the nodes so that the peak of live bytes is small, and no update overtakes a reader.

The launches with the bytes they read and write go to `memory.order`, which returns the better of
the given and the peak-aware order by exact simulation. Sources come first; a view stands after the
launch whose bytes it shows. Weight updates move up to where their gradient is ready when that
lowers the peak.

What the order rests on is asked by other rooms, too: which nodes run once per batch and which once
per step, and how many batches a pipeline stage has under way.

Guarantees: topological order, every reader of a variable before the node that overwrites it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST_SIDE
from compiler.contract.types import Phase, ValueId
from compiler.graph.graph import Graph, Node, cached_analysis, mark_needed
from compiler.graph.registry import is_source
from compiler.ops.families.updates import ACCUMULATE, PER_BATCH
from compiler.ops.primitives.sources import INPUT, SCRATCH, VARIABLE
from compiler.ops.primitives.transfer import RECEIVE, SEND, is_copy, is_over_stages, value_devices
from compiler.storage.peer_edges import peer_edges
from compiler.storage.storage import Storage, assign_storage, launch_of_values, write_after_read
from memory.order import better_order


@cached_analysis
def overlaps_steps(graph: Graph) -> tuple[bool, ...]:
    """Mark the nodes that bring a batch to a device, or outputs from one. O(nodes)."""
    place, producers = value_devices(graph), graph.producers()
    out = {output.value for output in graph.outputs}
    marks: list[bool] = []
    for node in graph.nodes:
        is_in = is_copy(node) and graph.nodes[producers[node.inputs[0]]].op is INPUT
        is_out = is_copy(node) and node.outputs[0] in out and place[node.outputs[0]] == HOST_SIDE
        marks.append(is_in or is_out)
    return tuple(marks)


# Where a step sums gradients over several batches, the graph falls into two parts that meet only in
# the sums: forward, backward and the additions run once per batch; what needs the finished sums,
# and whatever only updates need, runs once per step. So does an output that is made of the sums,
# such as their norm: there is one of it per step. What all stages of a pipeline make together is
# made of the sums of some of them, though a stage without trained parameters has none. Everywhere
# else a step is one batch, and there is one part.


@cached_analysis
def batches_per_step(graph: Graph) -> int:
    """Return how many batches one update of the parameters consumes, 1 without accumulation."""
    return 1 if graph.accumulation is None else graph.accumulation.every


@cached_analysis
def needed_per_step(graph: Graph) -> tuple[bool, ...]:
    """Mark the nodes that the writes of a step need, as far back as what batches leave. O(nodes).

    All False where a step is one batch.
    """
    if graph.accumulation is None:
        return (False,) * len(graph.nodes)
    scratch = _scratch(graph)
    values = [w.value for w in graph.writes if w.variable not in scratch]
    # ACCUMULATE and its kin run per batch: the walk back ends there.
    return mark_needed(graph, [*values, *outputs_per_step(graph)], ends_at=PER_BATCH)


@cached_analysis
def needed_per_batch(graph: Graph) -> tuple[bool, ...]:
    """Mark the nodes that outputs, and the writes of a batch, need. O(nodes)."""
    scratch, per_step = _scratch(graph), outputs_per_step(graph)
    values = [w.value for w in graph.writes if w.variable in scratch]
    values += graph.effects()
    return mark_needed(graph, values + [o.value for o in graph.outputs if o.value not in per_step])


@cached_analysis
def outputs_per_step(graph: Graph) -> tuple[ValueId, ...]:
    """Return the values of outputs that are made of the sums over batches. O(nodes)."""
    if graph.accumulation is None:
        return ()
    of_sums: set[ValueId] = set()
    for node in graph.nodes:
        is_sum = node.op is ACCUMULATE or is_over_stages(node)
        if is_sum or not of_sums.isdisjoint(node.inputs):
            of_sums.update(node.outputs)
    return tuple([o.value for o in graph.outputs if o.value in of_sums])


def _scratch(graph: Graph) -> set[ValueId]:
    """Return the variables that are written once per batch."""
    return {
        node.outputs[0]
        for node in graph.nodes
        if node.op is VARIABLE and node.attrs.str_("role") == SCRATCH
    }


# Stage s of P has up to P - s batches whose forward pass is done and whose backward pass is not: so
# many slots have the registers between the two. Nothing else makes the schedule "one forward, one
# backward" (Narayanan et al., PipeDream, 2019): a stage goes forward while it has slots, and then
# as slots come home. What a neighbour sends has one more, to come in while the stage computes.
#
# Between such firings there is no order. So what is used within one has bytes of its own, and
# batches that hand on a variable do so in turn (`compiler.lowering.actor_graph`).

CHANNELS = ("all_reduce", "send_up", "send_down", "receive_up", "receive_down", "all_reduce_back")
"""What the streams of a device between ranks are for, by number: collectives, ends of channels.

The last one is for collectives of a stage's backward pass: those of its forward pass belong to
later batches, and which of the two come first ranks need not agree on.
"""


def comm_stream(node: Node) -> int:
    """Return the number of the stream of what moves tensors between ranks."""
    if node.op not in (SEND, RECEIVE):
        return 5 if node.attrs.get("is_back") else 0
    return 1 + 2 * (node.op is RECEIVE) + (not node.attrs.bool_("is_up"))


def batches_in_flight(graph: Graph) -> int:
    """Return how many batches a stage may have under way: 1 where that changes nothing.

    That is so for the last stage, without a pipeline, and where every batch changes what the next
    one reads.
    """
    stage, num_stages = 0, 1
    for node in graph.nodes:
        if node.op in (SEND, RECEIVE):
            is_to_last = node.attrs.bool_("is_up") is (node.op is SEND)
            stage = node.attrs.int_("peer") + (-1 if is_to_last else 1)
            num_stages = node.attrs.int_("num_ranks")
            break
    most = num_stages - stage
    return min(most, batches_per_step(graph)) if graph.writes else most


@cached_analysis
def has_channels(graph: Graph) -> bool:
    """Whether a graph is that of a stage, some batches of which may be under way."""
    is_stage = any([node.op in (SEND, RECEIVE) for node in graph.nodes])
    return is_stage and (batches_per_step(graph) > 1 or not graph.writes)


def is_returning(node: Node) -> bool:
    """Whether a launch receives what comes back from later stages."""
    return node.op is RECEIVE and not node.attrs.bool_("is_up")


@cached_analysis
def rank_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return pairs (before, after) of launches: what a rank waits for beyond values.

    What all stages make together comes after all that it sends and receives for a batch: its end
    would wait for it else, and with it what another stage needs for its part. For writes see
    `peer_edges`. Launches are indices of nodes. O(nodes).
    """
    nodes = list(enumerate(graph.nodes))
    over = [i for i, node in nodes if is_over_stages(node)]
    moves = [i for i, node in nodes if node.op in (SEND, RECEIVE)]
    stages = [*_return_edges(graph), *[(i, j) for i in moves for j in over]]
    return (*stages, *peer_edges(graph, needed_per_step(graph), [*_value_edges(graph), *stages]))


def _return_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return pairs (before, after) of launches: the backward pass begins when gradients have come.

    What could begin before would be made, and lie in slots, for all batches under way.
    """
    back = [i for i, node in enumerate(graph.nodes) if is_returning(node)]
    if not back:
        return ()
    is_launch = assign_storage(graph).is_launch
    is_before = mark_needed(graph, [graph.nodes[i].outputs[0] for i in back])
    late = [
        i
        for i, node in enumerate(graph.nodes)
        if node.phase is Phase.BACKWARD and is_launch[i] and not is_before[i]
    ]
    return tuple([(i, j) for i in back for j in late])


def run(graph: Graph) -> Graph:
    """Return the graph with its nodes reordered. O(n log n)."""
    return replace(graph, nodes=place_views(graph, _order_launches(graph)))


@cached_analysis
def order_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return pairs (before, after) of launches: values, control edges, updates after old readers.

    On a rank some wait for other ranks, too.

    Launches are indices of nodes. O(nodes).
    """
    return (*_value_edges(graph), *rank_edges(graph))


@cached_analysis
def _value_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return what orders launches on a rank alone: all of `order_edges` but `rank_edges`."""
    storage, made_by = assign_storage(graph), launch_of_values(graph)
    edges = [
        (made_by[v], n)
        for n in storage.launches
        for v in (*graph.nodes[n].inputs, *graph.nodes[n].after)
        if made_by[v] >= 0
    ]
    edges += [
        (reader, writer) for reader, writer in write_after_read(graph) if storage.is_launch[reader]
    ]
    return tuple(edges)


def _order_launches(graph: Graph) -> list[int]:
    storage, made_by = assign_storage(graph), launch_of_values(graph)
    edges, legal = order_edges(graph), sort_launches(graph)
    # `better_order` numbers launches by a legal order, so that it has one to start from.
    position = {node: i for i, node in enumerate(legal)}
    predecessors: list[list[int]] = [[] for _ in legal]
    for before, after in edges:
        predecessors[position[after]].append(position[before])
    sizes = [
        t.size_bytes if storage.root[v] == v and made_by[v] >= 0 else 0
        for v, t in enumerate(graph.types)
    ]
    better = better_order(
        len(legal),
        [_roots(storage, graph.nodes[n].inputs) for n in legal],
        [_roots(storage, graph.nodes[n].outputs) for n in legal],
        sizes,
        predecessors,
        keep_alive=[int(storage.root[o.value]) for o in graph.outputs],
    )
    return [legal[i] for i in better.order]


@cached_analysis
def sort_launches(graph: Graph) -> tuple[int, ...]:
    """Return the launches in an order that obeys all edges, nearest to the given one.

    Raises InternalError when an update must run both before and after something.
    """
    return launches_in_order(graph, [False] * len(graph.nodes))


def launches_in_order(graph: Graph, is_late: Sequence[bool]) -> tuple[int, ...]:
    """Return the launches in an order that obeys all edges, late nodes last (Kahn, 1962).

    Raises InternalError when an update must run both before and after something.
    """
    launches, num_nodes = assign_storage(graph).launches, len(graph.nodes)
    waiting = dict.fromkeys(launches, 0)
    successors: dict[int, list[int]] = {n: [] for n in launches}
    for before, after in order_edges(graph):
        waiting[after] += 1
        successors[before].append(after)
    # Plain numbers, which a heap sorts in two thirds of the time of pairs.
    ready = [n + is_late[n] * num_nodes for n in launches if waiting[n] == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        # The remainder takes the mark of lateness off again.
        order.append(heapq.heappop(ready) % num_nodes)
        for after in successors[order[-1]]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, after + is_late[after] * num_nodes)
    if len(order) < len(launches):
        stuck = next(n for n in launches if waiting[n])
        raise InternalError(f"{graph.nodes[stuck].op} at {graph.nodes[stuck].source} waits forever")
    return tuple(order)


def _roots(storage: Storage, values: tuple[int, ...]) -> list[int]:
    return list(dict.fromkeys([int(storage.root[v]) for v in values]))


def place_views(graph: Graph, order: Sequence[int]) -> tuple[Node, ...]:
    """Return the nodes of an order of launches: sources first, views after what they show."""
    storage, made_by = assign_storage(graph), launch_of_values(graph)
    views_after: dict[int, list[Node]] = {}
    for index, node in enumerate(graph.nodes):
        if not storage.is_launch[index] and not is_source.get(node.op):
            views_after.setdefault(made_by[node.outputs[0]], []).append(node)
    nodes = [n for n in graph.nodes if is_source.get(n.op)]
    nodes += views_after.get(-1, [])
    for index in order:
        nodes.append(graph.nodes[index])
        nodes += views_after.get(index, [])
    return tuple(nodes)
