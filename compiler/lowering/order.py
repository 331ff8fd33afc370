"""Order the nodes so that the peak of live bytes is small, and no update overtakes a reader.

The launches with the bytes they read and write go to `memory.order`, which returns the better of
the given and the peak-aware order by exact simulation. Sources come first; a view stands after the
launch whose bytes it shows. Weight updates move up to where their gradient is ready when that
lowers the peak.

Guarantees: topological order, every reader of a variable before the node that overwrites it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from compiler.errors import InternalError
from compiler.facts import fact
from compiler.graph import Graph, Node
from compiler.lowering.pipelines import stage_edges
from compiler.lowering.storage import Storage, assign_storage, launch_of_values, write_after_read
from compiler.registry import is_source
from memory.order import better_order


def run(graph: Graph) -> Graph:
    """Return the graph with its nodes reordered. O(n log n)."""
    return replace(graph, nodes=place_views(graph, _order_launches(graph)))


@fact
def order_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return pairs (before, after) of launches: values, control edges, updates after old readers.

    Of a stage of a pipeline some come after what it is sent, too.

    Launches are indices of nodes. O(nodes).
    """
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
    edges += stage_edges(graph)
    return tuple(edges)


def _order_launches(graph: Graph) -> list[int]:
    storage, made_by = assign_storage(graph), launch_of_values(graph)
    edges, legal = order_edges(graph), sort_launches(graph)
    position = {node: i for i, node in enumerate(legal)}
    predecessors: list[list[int]] = [[] for _ in legal]
    for before, after in edges:
        predecessors[position[after]].append(position[before])
    sizes = [
        t.size_bytes if storage.root[v] == v and made_by[v] >= 0 else 0
        for v, t in enumerate(graph.types)
    ]
    chosen = better_order(
        len(legal),
        [_roots(storage, graph.nodes[n].inputs) for n in legal],
        [_roots(storage, graph.nodes[n].outputs) for n in legal],
        sizes,
        predecessors,
        keep_alive=[int(storage.root[o.value]) for o in graph.outputs],
    )
    return [legal[i] for i in chosen.order]


@fact
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
