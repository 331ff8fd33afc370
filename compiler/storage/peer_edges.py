"""Edges that order writes of variables after launches for which every rank is needed.

A run of ranks may be cut after the last step for which every rank has data; what some ranks have
begun of the next step is dropped. The update of a trained parameter needs a gradient that the ranks
sum, so no rank has run it by then. A batch norm's count of batches, and the statistics of one in an
early stage, need nothing from the ranks that lack data: without these edges such a write would
change the state of the step before.

*Coverage.* Which ranks a launch has waited for follows from the graph of one rank, since all ranks
of a stage have equal graphs: a collective along an axis has waited for whatever each rank along it
has waited for. So a launch covers sets of axes, each for all ranks along these. What comes from a
lower stage covers all lower ones, what comes back from a higher stage all higher ones, and both
together the whole axis.

Guarantees: the edges close no circle, also with the turns of collectives. A write for which a
collective or a transfer of its own step waits gets no edge: a cut that it spoils is refused
(`changed_after` of `actorflow.run.live_variables`). So is one on a mesh with an axis along which a
stage exchanges nothing: its ranks never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compiler.graph.graph import Graph, reachable
from compiler.graph.registry import is_comm
from compiler.ops.families.updates import INCREMENT
from compiler.ops.primitives.sources import INPUT, UNSAVED
from compiler.ops.primitives.transfer import RECEIVE, SEND, STAGE, is_copy
from compiler.storage.storage import assign_storage, launch_of_values

AxisSet = frozenset[str]
"""Axes of the mesh; of the stages LOWER and HIGHER, which together are the axis."""

LOWER, HIGHER = "lower stages", "higher stages"

Coverage = frozenset[AxisSet]
"""Sets none of which is part of another one; empty for what needs no batch."""

Edge = tuple[int, int]
"""Indices of two nodes, of which the first comes before the second."""


def peer_edges(graph: Graph, per_step: Sequence[bool], edges: Sequence[Edge]) -> list[Edge]:
    """Return edges between launches for writes that cover too few ranks.

    `per_step` marks nodes that run once per step of several batches, `edges` are all others that
    order launches. O(nodes x axes).
    """
    meetings = [i for i, node in enumerate(graph.nodes) if is_comm.get(node.op)]
    if not meetings:
        return []
    coverage = _coverage(graph)
    whole = frozenset().union(*[axes for row in coverage for axes in row])
    writers = [i for i in _writers(graph) if whole not in coverage[i]]
    if not writers:
        return []
    successors: list[list[int]] = [[] for _ in graph.nodes]
    predecessors: list[list[int]] = [[] for _ in graph.nodes]
    for before, after in edges:
        successors[before].append(after)
        predecessors[after].append(before)
    before_meetings = reachable(predecessors, meetings)
    writers = [i for i in writers if i not in before_meetings]
    after_writers = reachable(successors, writers)
    is_launch = assign_storage(graph).is_launch
    covering = [
        i
        for i, node in enumerate(graph.nodes)
        # What moves tensors has a stream of its own: a write behind it would be one more actor.
        if is_launch[i] and not (is_comm.get(node.op) or is_copy(node))
        if whole in coverage[i] and i not in after_writers
    ]
    # The first of each rate: no later than need be, so that what is written is not kept for long.
    first = {per_step[i]: i for i in reversed(covering)}
    return [(first[per_step[i]], i) for i in writers if per_step[i] in first]


def _coverage(graph: Graph) -> list[Coverage]:
    """Return what each node has waited for."""
    producers = graph.producers()
    rows: list[Coverage] = []
    for node in graph.nodes:
        sets = [p for value in node.inputs for p in rows[producers[value]]]
        if node.op is INPUT:
            sets = [frozenset()]
        elif node.op is RECEIVE:
            # Also of what needs no batch: all that a stage is sent for one comes in one firing.
            sets.append(frozenset([LOWER if node.attrs.bool_("is_up") else HIGHER]))
        elif is_comm.get(node.op) and node.op is not SEND:
            axis = node.attrs.str_("group")
            parts = frozenset([LOWER, HIGHER] if axis == STAGE else [axis])
            sets = [axes | parts for axes in sets]
        rows.append(_union(sets) if len(sets) > 1 else frozenset(sets))
    return rows


def _union(sets: Iterable[AxisSet]) -> Coverage:
    """Return the sets that cover what these do together, without those that others contain."""
    ends = frozenset([LOWER, HIGHER])
    joined: dict[AxisSet, AxisSet] = {}
    for axes in sets:
        # Along equal other axes, lower and higher stages are all stages.
        joined[axes - ends] = joined.get(axes - ends, frozenset()) | axes
    rows = joined.values()
    return frozenset([p for p in rows if not any([p < other for other in rows])])


def _writers(graph: Graph) -> list[int]:
    """Return the launches that write what checkpoints hold, but for counters.

    Counters of the optimizer's steps are set back after a cut.
    """
    made_by, producers = launch_of_values(graph), graph.producers()
    writers: dict[int, None] = {}
    for write in graph.writes:
        variable = graph.nodes[producers[write.variable]]
        if variable.attrs.str_("role") not in UNSAVED:
            writers[made_by[write.value]] = None
    return [i for i in writers if i >= 0 and graph.nodes[i].op is not INCREMENT]
