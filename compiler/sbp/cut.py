"""The graph of one stage of a pipeline: its nodes, and what it hands to its neighbours.

What a stage makes and a later one reads goes up from each to the next, and what an earlier one
reads goes down; a stage in between hands it on. So do the outputs, which every rank has. All that
goes through a channel for one batch is one bucket.

    recv up -> forward of the batch -> send up -> recv down -> backward -> send down

What comes down is received when all that goes up has been sent: a launch says so by its operands.
One number over all stages is made after all of that (`compiler.lowering.pipelines.stage_edges`).
What has no stage is made on each: counters, and what follows from them.

Every stage knows all transfers, and numbers them alike, after the collectives there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compiler.attrs import Attrs, AttrValue
from compiler.errors import CompileError, InternalError
from compiler.graph import UNSTAGED, Graph, GraphBuilder, Node, Output, Write
from compiler.ops.channels import OVER_STAGES, RECEIVE, SEND, STAGE, is_collective
from compiler.ops.comm import ALL_REDUCE
from compiler.ops.shape import COPY
from compiler.ops.sources import SCRATCH, VARIABLE
from compiler.passes.stages import stages_of
from compiler.prune import prune
from compiler.rates import batches_per_step, needed_per_batch, needed_per_step
from compiler.registry import is_comm
from compiler.types import Phase, ValueId


def cut(graph: Graph, stage: int, num_stages: int) -> Graph:
    """Return the graph of one stage. O(nodes + what crosses, times the stages that it crosses).

    The graph is that of a rank with all stages, nodes of which have one. Raises CompileError where
    what one stage does once per step reads what another one makes.
    """
    return prune(_StageGraph(graph, stage, num_stages).result())


@dataclass(frozen=True, slots=True)
class _Channel:
    """What goes from one stage to its neighbour for a batch, and the place of the first of it."""

    source: int
    target: int
    values: tuple[ValueId, ...]
    order: int

    @property
    def is_up(self) -> bool:
        return self.target > self.source

    @property
    def phase(self) -> Phase:
        """When it goes through: on the way up, or back."""
        return Phase.FORWARD if self.is_up else Phase.BACKWARD


@dataclass(slots=True)
class _StageGraph:
    """The graph of a stage under construction; `held` are values by those of the whole graph."""

    graph: Graph
    stage: int
    num_stages: int
    b: GraphBuilder = field(default_factory=GraphBuilder)
    held: dict[ValueId, ValueId] = field(default_factory=dict)
    tokens: list[ValueId] = field(default_factory=list)
    counted: dict[ValueId, ValueId] = field(default_factory=dict)

    def result(self) -> Graph:
        graph, b = self.graph, self.b
        stages = stages_of(graph)
        channels = _channels(graph, stages, self.num_stages)
        mine = {(c.is_up, c.source == self.stage): c for c in channels if self._is_end(c)}
        self._receive(mine.get((True, False)))
        handed_on = self._handed_on(stages)
        is_pipelined = batches_per_step(graph) > 1 or not graph.writes
        below = mine.get((False, False))
        for node, own in zip(graph.nodes, stages, strict=True):
            # What neighbours wait for goes as soon as it is there: they may be waited for next.
            for way in [way for way, channel in mine.items() if self._can_send(way, channel)]:
                self._send(mine.pop(way))
            is_own = node.op is not OVER_STAGES and own in (UNSTAGED, self.stage)
            if is_own and any([v not in self.held for v in node.inputs]):
                self._check_sent(mine.get((True, True)), node)
                self._receive(below)
                below = None
            if node.op is OVER_STAGES:
                self._join(node)
            elif is_own:
                self._copy(_on_the_way_back(node) if is_pipelined else node)
            for value in handed_on.intersection(node.outputs):
                with b.at(node.scope, node.source):
                    self.counted[value] = b.one(COPY, self.held[value])
        self._receive(below)
        for channel in mine.values():
            if channel.source == self.stage:
                self._send(channel)
        b.outputs = [Output(o.name, self.held[o.value]) for o in graph.outputs]
        b.writes = [
            Write(self.held[w.variable], self.held[w.value])
            for w in graph.writes
            if w.value in self.held and w.variable in self.held
        ]
        if (steps := graph.accumulation) is not None:
            b.accumulation = replace(steps, batch=self.held[steps.batch])
        return b.freeze()

    def _can_send(self, way: tuple[bool, bool], channel: _Channel) -> bool:
        return way[1] and all([v in self.held for v in channel.values])

    def _is_end(self, channel: _Channel) -> bool:
        return bool(channel.values) and self.stage in (channel.source, channel.target)

    def _copy(self, node: Node) -> None:
        inputs = tuple([self.held[v] for v in node.inputs])
        if node.phase is not Phase.FORWARD:
            over = [place for _, place in node.writes]
            inputs = tuple(
                [
                    v if place in over else self.counted.get(before, v)
                    for place, (before, v) in enumerate(zip(node.inputs, inputs, strict=True))
                ]
            )
        made = self.b.copy(node, inputs, [self.graph.types[v] for v in node.outputs])
        self.held.update(zip(node.outputs, made, strict=True))

    def _handed_on(self, stages: Sequence[int]) -> set[ValueId]:
        """Return the counters of batches that are read on the way up, and on the way back.

        Other batches have been counted by then, so the way back reads a copy.
        """
        if self.stage == self.num_stages - 1 or batches_per_step(self.graph) == 1:
            return set()
        scratch = {
            n.outputs[0]
            for n, own in zip(self.graph.nodes, stages, strict=True)
            if n.op is VARIABLE and own == UNSTAGED and n.attrs["role"] == SCRATCH
        }
        read = {
            v
            for n, own in zip(self.graph.nodes, stages, strict=True)
            if own in (UNSTAGED, self.stage) and n.phase is Phase.FORWARD
            for v in n.inputs
        }
        return scratch & read

    def _join(self, node: Node) -> None:
        """Emit what all stages make of what each has made."""
        own = self.held[node.inputs[self.stage]]
        with self.b.beside(node):
            (self.held[node.outputs[0]],) = self.b.emit(ALL_REDUCE, (own,), node.attrs)

    def _send(self, channel: _Channel | None) -> None:
        if channel is None:
            return
        for number, value in enumerate(channel.values):
            with self.b.beside(self._maker(value), channel.phase):
                attrs = self._attrs(channel, number)
                self.tokens.append(self.b.one(SEND, self.held[value], **attrs))

    def _receive(self, channel: _Channel | None) -> None:
        if channel is None:
            return
        tokens = tuple(self.tokens)
        for number, value in enumerate(channel.values):
            type_, attrs = self.graph.types[value], self._attrs(channel, number)
            attrs |= {"dtype": type_.dtype.value, "shape": type_.shape}
            with self.b.beside(self._maker(value), channel.phase):
                self.held[value] = self.b.one(RECEIVE, *tokens, **attrs)

    def _maker(self, value: ValueId) -> Node:
        return self.graph.nodes[self.graph.producers()[value]]

    def _attrs(self, channel: _Channel, number: int) -> dict[str, AttrValue]:
        is_source = channel.source == self.stage
        return {
            "num_ranks": self.num_stages,
            "group": STAGE,
            "peer": channel.target if is_source else channel.source,
            "is_up": channel.is_up,
            "bucket": channel.order,
            "order": channel.order + number,
        }

    def _check_sent(self, up: _Channel | None, node: Node) -> None:
        if up is not None:
            raise InternalError(
                f"{node.op} at {node.source} reads what comes from a later stage before all is"
                " made that goes there"
            )


def _on_the_way_back(node: Node) -> Node:
    """Return a node; a collective of a backward pass says so."""
    if not is_collective(node.op) or node.phase is not Phase.BACKWARD:
        return node
    return replace(node, attrs=Attrs({**node.attrs, "is_back": True}))


def _channels(graph: Graph, stages: Sequence[int], num_stages: int) -> tuple[_Channel, ...]:
    """Return what goes through each channel, those up before those down, after all collectives."""
    lowest, highest = _reach(graph, stages, num_stages)
    made_on = {v: own for n, own in zip(graph.nodes, stages, strict=True) for v in n.outputs}
    order = 1 + max([n.attrs.int_("order") for n in graph.nodes if is_comm.get(n.op)], default=-1)
    found: list[_Channel] = []
    edges = [(s, s + 1) for s in range(num_stages - 1)]
    for source, target in [*edges, *[(b, a) for a, b in reversed(edges)]]:
        if target > source:
            values = [v for v in highest if made_on[v] <= source < highest[v]]
        else:
            values = [v for v in lowest if made_on[v] >= source > lowest[v]]
        found.append(_Channel(source, target, tuple(sorted(values)), order))
        order += len(values)
    return tuple(found)


def _reach(
    graph: Graph, stages: Sequence[int], num_stages: int
) -> tuple[dict[ValueId, int], dict[ValueId, int]]:
    """Return, by value that other stages read, the lowest and the highest one of these."""
    producers, per_step, per_batch = (
        graph.producers(),
        needed_per_step(graph),
        needed_per_batch(graph),
    )
    lowest: dict[ValueId, int] = {}
    highest: dict[ValueId, int] = {}
    reads = [
        (value, own, node)
        for node, own in zip(graph.nodes, stages, strict=True)
        if own != UNSTAGED
        for value in node.inputs
    ]
    last = graph.nodes[-1]
    reads += [(o.value, s, last) for o in graph.outputs for s in (0, num_stages - 1)]
    for value, reader, node in reads:
        maker = producers[value]
        own = stages[maker]
        if own in (UNSTAGED, reader):
            continue
        made = graph.nodes[maker]
        is_late = reader > own and made.phase is not Phase.FORWARD
        if is_late or (per_step[maker] and not per_batch[maker]):
            raise CompileError(
                f"{node.source}: {node.op} on stage {reader} reads what {made.op} makes on stage"
                f" {own} ({made.source}) when the batch has gone back already; stages hand on what"
                " the forward pass makes upwards, and gradients downwards"
            )
        if reader > own:
            highest[value] = max(highest.get(value, reader), reader)
        else:
            lowest[value] = min(lowest.get(value, reader), reader)
    return lowest, highest
