"""Run forward nodes again after the loss, so that their bytes are free in between.

`describe` turns the launches of an ordered graph into the planner's problem (`memory.recompute`):
buffers are the roots that launches make, workspaces and in-place pairs are what the target's
kernels say. `run` makes a graph of the chosen launches: one that runs again is a new node with new
values, views included, and whoever reads later reads those.

A repeated node, or one that runs for the first time among backward nodes, gets a control edge from
the node before it in the sequence that runs for the first time: on several streams it would else
run at once, and nothing would be saved. That is never an update, for an update that stands before a
repeated reader of its variable moves after it. Nor is it a member of a bucket that has not run all:
members begin together, and one that is yet to come may read what is made again.

A collective runs once, in its place: what ranks meet for must be the same on all of them, and which
launches run again each rank chooses by its own kernels. What it makes is kept instead.

Guarantees: the same values as before, bit by bit; random ops replay, for their bits follow from
seed, step and key; ops that write, and ops whose column `recompute` is False, run once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.graph import Graph, Node, new_value
from compiler.graph.registry import input_output_aliases, is_comm, is_source, recompute
from compiler.ops.primitives.transfer import DEFERRED, is_collective
from compiler.storage.buffers import LaunchDraft, may_share_bytes
from compiler.storage.order import needed_per_step, overlaps_steps, place_views, sort_launches
from compiler.storage.storage import Storage, assign_storage, launch_of_values
from memory.recompute.problem import Problem, ProblemOp


@dataclass(frozen=True, slots=True)
class Described:
    """A graph as the planner sees it: op i of the problem is node `nodes[i]` of the graph."""

    problem: Problem
    nodes: tuple[int, ...]


def may_repeat(node: Node) -> bool:
    """Whether a node makes the same bytes whenever it runs, and at no one else's cost."""
    return (
        recompute.get(node.op)
        and not input_output_aliases.get(node.op)
        and not is_comm.get(node.op)
    )


def describe(graph: Graph, drafts: Sequence[LaunchDraft]) -> Described:
    """Return the planner's problem of a graph: what runs once per batch, forward launches first.

    A forward launch that may not repeat, and whatever it feeds, counts among the others; but for
    collectives of the forward pass, which stand there and run once.
    `drafts` are the launches of the graph, in order. O(launches).
    """
    storage = assign_storage(graph)
    per_step = needed_per_step(graph)
    rows = [(node, draft) for node, draft in zip(storage.launches, drafts, strict=True)]
    # What brings a batch is like a source to the planner, and what takes outputs out like a sink.
    is_beside = overlaps_steps(graph)
    rows = [(node, draft) for node, draft in rows if not (per_step[node] or is_beside[node])]
    is_forward = _forward(graph, storage)
    # The problem has all forward launches first, each half in its own order.
    ordered = [row for row in rows if is_forward[row[0]]]
    num_forward = len(ordered)
    ordered += [row for row in rows if not is_forward[row[0]]]
    buffer_of, sizes = _buffers(graph, storage, [node for node, _ in ordered])
    ops = [_op(graph, storage, draft, buffer_of) for _, draft in ordered]
    return Described(
        Problem(tuple(ops), tuple(sizes), num_forward),
        tuple([node for node, _ in ordered]),
    )


def _forward(graph: Graph, storage: Storage) -> list[bool]:
    """Mark the forward launches that may repeat and that only such launches feed, or collectives.

    Of collectives those of the forward pass, with all that they wait for, up to the first one that
    nothing of the batch waits for, or that waits for what writes: so all keep their order. One that
    is late may be a loss in one row with gradients, and wait for all of the backward pass.
    """
    made_by, is_beside = launch_of_values(graph), overlaps_steps(graph)
    marks, may_meet = [False] * len(graph.nodes), True
    for index, node in enumerate(graph.nodes):
        is_forward = storage.is_launch[index] and node.phase is Phase.FORWARD
        # Once one collective is not taken, no later one is: their order is that of all ranks.
        if is_comm.get(node.op) and may_meet:
            is_there = [a or b for a, b in zip(marks, is_beside, strict=True)]
            needed = _waited_for(graph, made_by, is_there, index) if is_forward else ()
            is_late = is_collective(node.op) and node.attrs.get("when") == DEFERRED
            is_fed = not any([input_output_aliases.get(graph.nodes[n].op) for n in needed])
            may_meet = is_forward and is_fed and not is_late
            for launch in (index, *needed) if may_meet else ():
                marks[launch] = True
        elif is_forward and may_repeat(node):
            makers = [made_by[v] for v in node.inputs]
            marks[index] = all([m < 0 or is_beside[m] or marks[m] for m in makers])
    return marks


def _waited_for(
    graph: Graph, made_by: Sequence[int], is_there: Sequence[bool], index: int
) -> tuple[int, ...]:
    """Return the launches that one waits for, but for those that are there already."""
    launches, todo = dict[int, None](), [index]
    for at in todo:  # grows while it is walked
        node = graph.nodes[at]
        for maker in [made_by[v] for v in (*node.inputs, *node.after)]:
            if maker >= 0 and not is_there[maker] and maker not in launches:
                launches[maker] = None
                todo.append(maker)
    return tuple(launches)


def _buffers(
    graph: Graph, storage: Storage, nodes: Sequence[int]
) -> tuple[dict[ValueId, int], list[int]]:
    """Number the roots that launches make; outputs have bytes elsewhere, so they count none."""
    outputs = {o.value for o in graph.outputs}
    pairs = zip(graph.nodes, overlaps_steps(graph), strict=True)
    outputs |= {storage.root[v] for node, is_one in pairs if is_one for v in node.inputs}
    buffer_of: dict[ValueId, int] = {}
    sizes: list[int] = []
    for index in nodes:
        for value in graph.nodes[index].outputs:
            if storage.root[value] == value:
                buffer_of[value] = len(sizes)
                # Outputs lie in registers outside the block, so that they cost the planner nothing.
                size = 0 if value in outputs else graph.types[value].size_bytes
                sizes.append(size)
    return buffer_of, sizes


def _op(
    graph: Graph,
    storage: Storage,
    draft: LaunchDraft,
    buffer_of: dict[ValueId, int],
) -> ProblemOp:
    node = draft.node
    roots = dict.fromkeys([storage.root[v] for v in node.inputs])
    pairs = [
        (node.outputs[output], storage.root[node.inputs[source]])
        for output, source in draft.info.in_place
        if may_share_bytes(graph, storage, draft, output, source)
    ]
    return ProblemOp(
        reads=tuple([buffer_of[r] for r in roots if r in buffer_of]),
        writes=tuple([buffer_of[v] for v in node.outputs if v in buffer_of]),
        temp_bytes=draft.info.workspace_bytes,
        duration=draft.info.duration_ns,
        in_place=tuple(
            [
                (buffer_of[out], buffer_of[source])
                for out, source in pairs
                if out in buffer_of and source in buffer_of
            ]
        ),
        is_once=node.phase is not Phase.FORWARD or not may_repeat(node),
        may_wait=node.phase is Phase.BACKWARD and may_repeat(node),
    )


def run(graph: Graph, launches: Sequence[int]) -> Graph:
    """Return the graph whose launches run in this order, by their nodes. O(E).

    Those that are not named follow in their own order: what runs once per step is no part of the
    planner's problem.
    """
    if not launches:
        return graph
    again = _Repetition(graph, assign_storage(graph))
    for node in launches:
        again.run(node)
    again.run_rest()
    repeated = replace(graph, nodes=tuple(again.nodes), types=tuple(again.types))
    return replace(repeated, nodes=place_views(repeated, sort_launches(repeated)))


def _bucket_of(node: Node) -> tuple[int, ...]:
    """Return (bucket,) for a launch that communicates with other ranks, else ()."""
    return (node.attrs.int_("bucket"),) if is_comm.get(node.op) else ()


class _Repetition:
    """The new graph while it grows; `current[v]` is the value that now stands for v."""

    def __init__(self, graph: Graph, storage: Storage) -> None:
        self.graph = graph
        self.types: list[TensorType] = list(graph.types)
        self.nodes: list[Node] = []
        self.current = [ValueId(v) for v in range(len(graph.types))]
        self._has_run = [False] * len(graph.nodes)
        self._is_launch = storage.is_launch
        self._producers = graph.producers()
        self._views: dict[tuple[int, ValueId], ValueId] = {}
        self._latest: tuple[ValueId, ...] = ()
        self._is_after_loss = False
        self._is_forward = _forward(graph, storage)
        is_beside = overlaps_steps(graph)
        for index, node in enumerate(graph.nodes):
            is_fed = is_beside[index] and self._has_run[self._producers[node.inputs[0]]]
            if is_source.get(node.op) or is_fed:
                self.nodes.append(node)
                self._has_run[index] = True
        self._to_meet = Counter([bucket for node in graph.nodes for bucket in _bucket_of(node)])

    def run(self, index: int) -> None:
        """Append a launch: itself the first time, a copy with values of its own after that."""
        node = self.graph.nodes[index]
        inputs = tuple([self._find(v) for v in node.inputs])
        if not self._has_run[index]:
            self._has_run[index] = True
            is_late = self._is_after_loss and node.phase is Phase.FORWARD
            after = self._latest if is_late and may_repeat(node) else node.after
            self.nodes.append(replace(node, inputs=inputs, after=after))
            self._is_after_loss |= node.phase is Phase.BACKWARD and not self._is_forward[index]
            self._to_meet.subtract(_bucket_of(node))
            # A bucket is one firing: only after its last launch there is something to wait for.
            is_whole = not any([self._to_meet[bucket] for bucket in _bucket_of(node)])
            if (
                node.phase is not Phase.UPDATE
                and not input_output_aliases.get(node.op)
                and is_whole
            ):
                self._latest = node.outputs[:1]
            return
        outputs = tuple([self._new_value(v) for v in node.outputs])
        for value, new in zip(node.outputs, outputs, strict=True):
            self.current[value] = new
        self.nodes.append(
            replace(
                node,
                inputs=inputs,
                outputs=outputs,
                phase=Phase.RECOMPUTE,
                after=self._latest,
            )
        )

    def run_rest(self) -> None:
        """Append every launch that has not run, and the views that no launch reads."""
        for index, node in enumerate(self.graph.nodes):
            if self._has_run[index]:
                continue
            if self._is_launch[index]:
                self.run(index)
            else:
                self._find(node.outputs[0])

    def _find(self, value: ValueId) -> ValueId:
        """Return the value that now stands for `value`, after its views have been made anew."""
        index = self._producers[value]
        node = self.graph.nodes[index]
        if self._is_launch[index] or is_source.get(node.op):
            return self.current[value]
        # A view of a value that was made again is a view of the new one.
        base = self._find(node.inputs[0])
        key = (index, base)
        if key not in self._views:
            if not self._has_run[index]:
                self._has_run[index] = True
                self.nodes.append(replace(node, inputs=(base, *node.inputs[1:])))
                self._views[key] = value
            else:
                copy = self._new_value(value)
                phase = Phase.RECOMPUTE
                self.nodes.append(
                    replace(node, inputs=(base, *node.inputs[1:]), outputs=(copy,), phase=phase)
                )
                self._views[key] = copy
        return self._views[key]

    def _new_value(self, like: ValueId) -> ValueId:
        return new_value(self.types, self.graph.types[like])
