"""Stages of a pipeline: every node gets its stage, and each stage a graph of its own.

`run` goes by what the user cut with `af.stage`. What is called outside of every region runs on the
last stage that it reads something of. What follows from batches, constants and counters alone has
no stage: each makes it that reads it. A variable is where it is read, and what is made of variables
alone where it is first read.

It runs before `autodiff`, whose nodes are where their forward nodes are: so gradients flow down the
stages as values flow up. What later passes emit elsewhere has its stage by `stages_of` when the
graph is cut (`extract_stage`).

Guarantees: a value flows from a stage to the same or a higher one, a parameter is read on one stage
alone, and every stage of the mesh has nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.types import DType, Phase, ValueId
from compiler.graph.graph import (
    UNSTAGED,
    Graph,
    GraphBuilder,
    Node,
    Write,
    cached_analysis,
    mark_needed,
    prune,
)
from compiler.graph.registry import Op, is_comm
from compiler.ops.families.updates import ASSIGN
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import (
    CONSTANT,
    INPUT,
    NUMBERS,
    OF_MODEL,
    SCRATCH,
    VARIABLE,
    scalar,
)
from compiler.ops.primitives.transfer import (
    ALL_REDUCE,
    OVER_STAGES,
    RECEIVE,
    SEND,
    STAGE,
    is_collective,
)
from compiler.storage.order import batches_per_step, needed_per_batch, needed_per_step

_OPEN = -2
"""The stage of what is made of variables alone, until something reads it."""


def run(graph: Graph, num_stages: int) -> Graph:
    """Return the graph with nodes on stages; on none, where there is one stage. O(nodes).

    Raises CompileError, with the user's lines, where nodes do not make so many stages.
    """
    is_cut = any([node.stage != UNSTAGED for node in graph.nodes])
    if not is_cut and num_stages == 1:
        return graph
    stages = (UNSTAGED,) * len(graph.nodes)
    if num_stages > 1:
        stages = stages_of(graph)
        _check_used(graph, stages, num_stages)
    nodes = zip(graph.nodes, stages, strict=True)
    return replace(graph, nodes=tuple([replace(node, stage=stage) for node, stage in nodes]))


def stages_of(graph: Graph) -> tuple[int, ...]:
    """Return the stage of every node: its own, or as follows; UNSTAGED, on any. O(nodes).

    Raises CompileError, with both lines, where values flow down or a variable is read on two.
    """
    if all([node.stage == UNSTAGED for node in graph.nodes]):
        return (UNSTAGED,) * len(graph.nodes)
    return _Stages(graph).result()


@cached_analysis
def cross_stage_nodes(graph: Graph) -> tuple[int, ...]:
    """Return the nodes whose values go to other stages: what these read, and outputs. O(nodes)."""
    stages, makers = stages_of(graph), graph.producers()
    readers = [*[(o.value, UNSTAGED) for o in graph.outputs]]
    readers += [
        (value, stage)
        for node, stage in zip(graph.nodes, stages, strict=True)
        if stage != UNSTAGED
        for value in node.inputs
    ]
    pairs = [(makers[value], stage) for value, stage in readers]
    return tuple({i: None for i, stage in pairs if stages[i] not in (UNSTAGED, stage)})


def edges_of_stages(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs (before, after) of nodes, of what stages of a pipeline wait for beyond values.

    One number over all stages is made when a batch has gone all the way: who waited for it before
    would keep what another stage needs to make its part of it. O(nodes x stages).
    """
    over = [i for i, node in enumerate(graph.nodes) if node.op is OVER_STAGES]
    return _edges_of_returns(graph) + [(i, j) for j in over for i in cross_stage_nodes(graph)]


def _edges_of_returns(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs (before, after) of nodes: gradients arrive before a stage's backward pass.

    What could begin before waits as well: it would be made, and held, for all batches under way
    (`compiler.storage.order`).
    """
    stages, makers = stages_of(graph), graph.producers()
    coming: dict[int, dict[int, None]] = {}
    for node, at in zip(graph.nodes, stages, strict=True):
        for maker in [makers[value] for value in node.inputs]:
            # It comes down through every stage from below its maker's to its reader's.
            for between in range(max(at, 0), stages[maker] if at != UNSTAGED else 0):
                coming.setdefault(between, {})[maker] = None
    edges: list[tuple[int, int]] = []
    for stage, arrivals in sorted(coming.items()):
        is_before = mark_needed(graph, [v for i in arrivals for v in graph.nodes[i].outputs])
        late = [
            index
            for index, (node, at) in enumerate(zip(graph.nodes, stages, strict=True))
            if at == stage and node.phase is Phase.BACKWARD and not is_before[index]
        ]
        edges += [(maker, index) for index in late for maker in arrivals]
    return edges


def over_stages(
    b: GraphBuilder,
    op: Op,
    values: Sequence[tuple[ValueId, int]],
    by: str,
    dtype: DType,
) -> ValueId:
    """Emit one number of many tensors, each with the stage that it is on: "sum" or "max" of theirs.

    `op` makes such a number of a tensor and, perhaps, of the number of those before. It is 0 where
    there is none.
    """
    last = max([node.stage for node in b.nodes], default=UNSTAGED)
    totals: dict[int, ValueId] = {}
    for value, stage in values:
        home, place = max(stage, 0), b.producer_of(value)
        earlier = (totals[home],) if home in totals else ()
        with b.on(place.device):  # the number goes to the values, not they to it
            totals[home] = b.emit_one(op, value, *earlier)
    parts = [totals[s] if s in totals else scalar(b, 0, dtype) for s in range(max(last, 0) + 1)]
    if last < 1:
        return parts[0]
    turn = len([node for node in b.nodes if node.op is OVER_STAGES])
    attrs = Attrs({"num_ranks": last + 1, "group": STAGE, "bucket": turn, "order": turn, "by": by})
    return b.emit(OVER_STAGES, parts, attrs)[0]


def _check_used(graph: Graph, found: tuple[int, ...], num_stages: int) -> None:
    for node, at in zip(graph.nodes, found, strict=True):
        if at >= num_stages:
            raise CompileError(
                f"{node.source}: {node.op} is on stage {at}, and the mesh's axis {STAGE!r} has"
                f" {num_stages} ranks, for stages 0 to {num_stages - 1}; make the axis longer, or"
                " cut the job into fewer stages"
            )
    idle = [str(stage) for stage in range(num_stages) if stage not in found]
    if idle:
        # The last line that is on a stage; where none is, the last one of the job.
        nodes = zip(graph.nodes, found, strict=True)
        last = [node for node, at in nodes if at >= 0 and node.phase is Phase.FORWARD]
        raise CompileError(
            f"{(last or graph.nodes)[-1].source}: the mesh's axis {STAGE!r} has {num_stages}"
            f" ranks, and the job has no op on stage {', '.join(idle)}; assign some with"
            f" af.stage({idle[0]}):"
        )


@dataclass(slots=True)
class _Stages:
    """Stages by node while they are found; `pinned_by` is the reader that gave a node its own."""

    graph: Graph
    made_by: tuple[int, ...] = ()
    stage: list[int] = field(default_factory=list)
    pinned_by: dict[int, Node] = field(default_factory=dict)

    def result(self) -> tuple[int, ...]:
        graph = self.graph
        self.made_by = graph.producers()
        counters = _counters(graph)
        for index, node in enumerate(graph.nodes):
            # Equal on all ranks: each stage makes these itself.
            is_free = node.op in (INPUT, CONSTANT, OVER_STAGES) or (
                node.op is VARIABLE
                and (node.outputs[0] in counters or node.attrs["role"] == NUMBERS)
            )
            self.stage.append(UNSTAGED if is_free else self._stage(node))
            self._pin_inputs(index)
        # The optimizer's state lies on the stage of its variable.
        for rule in graph.updates:
            home = self.stage[self.made_by[rule.variable]]
            for value in rule.state:
                self._pin(self.made_by[value], max(home, 0), None)
        for index, node in enumerate(graph.nodes):
            if self.stage[index] == _OPEN:  # nothing on a stage reads it
                stage = self._stage(node)
                self.stage[index] = 0 if stage == _OPEN else stage
            self._pin_inputs(index)
        return tuple(self.stage)

    def _stage(self, node: Node) -> int:
        """Return the stage of a node whose operands have theirs."""
        stages = [self.stage[self.made_by[value]] for value in node.inputs]
        highest = max(stages, default=UNSTAGED)
        if node.stage == UNSTAGED:
            is_open = node.op is VARIABLE or (highest < 0 and _OPEN in stages)
            return _OPEN if is_open else highest
        if highest > node.stage and node.phase is Phase.FORWARD:
            maker = self.graph.nodes[self.made_by[node.inputs[stages.index(highest)]]]
            raise CompileError(
                f"{node.source}: {node.op} is on stage {node.stage} and reads what {maker.op} makes"
                f" on stage {highest} ({maker.source}); batches go through stages in order, so let"
                " it run there, or later"
            )
        return node.stage

    def _pin_inputs(self, index: int) -> None:
        node, stage = self.graph.nodes[index], self.stage[index]
        for value in node.inputs if stage >= 0 else ():
            maker = self.made_by[value]
            self._pin(maker, stage, node)
            source = self.graph.nodes[maker]
            is_of_model = source.op is VARIABLE and source.attrs["role"] in OF_MODEL
            if is_of_model and self.stage[maker] != stage:
                self._check_readers(node, stage, maker)

    def _check_readers(self, node: Node, stage: int, maker: int) -> None:
        """Raise CompileError where a node on a stage needs a variable that is on another one."""
        variable, home = self.graph.nodes[maker], self.stage[maker]
        first = self.pinned_by.get(maker, variable)
        what = f"{node.source}: {variable.attrs['role']!s} {variable.attrs['name']!r}"
        if node.op is ASSIGN:
            raise CompileError(
                f"{what} is assigned what stage {stage} makes, and read on stage {home}"
                f" ({first.source}); it is stored on one rank: assign it on that stage, or keep a"
                " buffer for each"
            )
        if node.phase is Phase.FORWARD:
            raise CompileError(
                f"{what} is read on stage {stage}, and on stage {home} ({first.source}); it is"
                " stored on one rank: read it on one stage, and pass on what is computed from it"
            )

    def _pin(self, index: int, own: int, reader: Node | None) -> None:
        """Give an open node a stage, and what it is made of."""
        waiting = [index]
        while waiting:
            index = waiting.pop()
            if self.stage[index] == _OPEN:
                self.stage[index] = own
                if reader is not None:
                    self.pinned_by[index] = reader
                waiting += [self.made_by[value] for value in self.graph.nodes[index].inputs]


def _counters(graph: Graph) -> set[ValueId]:
    """Return the variables that follow from themselves and constants alone: equal on all ranks."""
    of_rules = {value for rule in graph.updates for value in rule.state}
    counters = {
        node.outputs[0]
        for node in graph.nodes
        if node.op is VARIABLE and node.attrs["role"] not in OF_MODEL and node.stage == UNSTAGED
    } - of_rules
    # To a fixed point: a counter that is written from what is not free is no counter, and then
    # neither is what follows from it. `counters` only shrinks.
    while True:
        free = set(counters)
        for node in graph.nodes:
            is_made_of_free = bool(node.inputs) and free.issuperset(node.inputs)
            if node.op in (CONSTANT, OVER_STAGES) or (is_made_of_free and node.stage == UNSTAGED):
                free.update(node.outputs)
        dropped = {write.variable for write in graph.writes if write.value not in free}
        if counters.isdisjoint(dropped):
            return counters
        counters -= dropped


# What a stage makes and a later one reads goes up from each to the next, and what an earlier one
# reads goes down; a stage in between hands it on. So do the outputs, which every rank has. All that
# goes through a channel for one batch is one bucket.
#
#     recv up -> forward of the batch -> send up -> recv down -> backward -> send down
#
# What comes down is received when all that goes up has been sent: a launch says so by its operands.
# One number over all stages is made after all of that (`compiler.storage.order.rank_edges`).
# What has no stage is made on each: counters, and what follows from them.
#
# Every stage knows all transfers, and numbers them alike, after the collectives there are.


def extract_stage(graph: Graph, stage: int, num_stages: int) -> Graph:
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
        # Keys are (goes up, leaves here): a stage is at the end of at most one channel of each
        # kind.
        ends = {(c.is_up, c.source == self.stage): c for c in channels if self._is_end(c)}
        self._receive(ends.get((True, False)))
        handed_on = self._handed_on(stages)
        is_pipelined = batches_per_step(graph) > 1 or not graph.writes
        below = ends.get((False, False))
        for node, stage in zip(graph.nodes, stages, strict=True):
            # What neighbours wait for goes as soon as it is there: they may be waited for next.
            for way in [way for way, channel in ends.items() if self._can_send(way, channel)]:
                self._send(ends.pop(way))
            is_own = node.op is not OVER_STAGES and stage in (UNSTAGED, self.stage)
            # The first node that lacks an operand needs what comes down. That is received only
            # after all
            # that goes up has been sent.
            if is_own and any([v not in self.held for v in node.inputs]):
                self._check_sent(ends.get((True, True)), node)
                self._receive(below)
                below = None
            if node.op is OVER_STAGES:
                self._join(node)
            elif is_own:
                self._copy(_on_the_way_back(node) if is_pipelined else node)
            for value in handed_on.intersection(node.outputs):
                with b.at(node.scope, node.source):
                    self.counted[value] = b.emit_one(COPY, self.held[value])
        self._receive(below)
        for channel in ends.values():
            if channel.source == self.stage:
                self._send(channel)
        b.outputs = [replace(o, value=self.held[o.value]) for o in graph.outputs]
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
        copies = self.b.copy(node, inputs, [self.graph.types[v] for v in node.outputs])
        self.held.update(zip(node.outputs, copies, strict=True))

    def _handed_on(self, stages: Sequence[int]) -> set[ValueId]:
        """Return the counters of batches that are read on the way up, and on the way back.

        Other batches have been counted by then, so the way back reads a copy.
        """
        if self.stage == self.num_stages - 1 or batches_per_step(self.graph) == 1:
            return set()
        scratch = {
            n.outputs[0]
            for n, stage in zip(self.graph.nodes, stages, strict=True)
            if n.op is VARIABLE and stage == UNSTAGED and n.attrs["role"] == SCRATCH
        }
        reads = {
            v
            for n, stage in zip(self.graph.nodes, stages, strict=True)
            if stage in (UNSTAGED, self.stage) and n.phase is Phase.FORWARD
            for v in n.inputs
        }
        return scratch & reads

    def _join(self, node: Node) -> None:
        """Emit what all stages make of what each has made."""
        part = self.held[node.inputs[self.stage]]
        with self.b.like_node(node):
            (self.held[node.outputs[0]],) = self.b.emit(ALL_REDUCE, (part,), node.attrs)

    def _send(self, channel: _Channel | None) -> None:
        if channel is None:
            return
        for number, value in enumerate(channel.values):
            with self.b.like_node(self._maker(value), channel.phase):
                attrs = self._attrs(channel, number)
                self.tokens.append(self.b.emit_one(SEND, self.held[value], **attrs))

    def _receive(self, channel: _Channel | None) -> None:
        if channel is None:
            return
        # The sends are operands of each receive, which therefore runs after them.
        tokens = tuple(self.tokens)
        for number, value in enumerate(channel.values):
            type_, attrs = self.graph.types[value], self._attrs(channel, number)
            attrs |= {"dtype": type_.dtype.value, "shape": type_.shape}
            with self.b.like_node(self._maker(value), channel.phase):
                self.held[value] = self.b.emit_one(RECEIVE, *tokens, **attrs)

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
    made_on = {v: stage for n, stage in zip(graph.nodes, stages, strict=True) for v in n.outputs}
    order = 1 + max([n.attrs.int_("order") for n in graph.nodes if is_comm.get(n.op)], default=-1)
    channels: list[_Channel] = []
    edges = [(s, s + 1) for s in range(num_stages - 1)]
    for source, target in [*edges, *[(b, a) for a, b in reversed(edges)]]:
        if target > source:
            values = [v for v in highest if made_on[v] <= source < highest[v]]
        else:
            values = [v for v in lowest if made_on[v] >= source > lowest[v]]
        channels.append(_Channel(source, target, tuple(sorted(values)), order))
        order += len(values)
    return tuple(channels)


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
        (value, at, node)
        for node, at in zip(graph.nodes, stages, strict=True)
        if at != UNSTAGED
        for value in node.inputs
    ]
    last = graph.nodes[-1]
    # Every rank has the outputs: they go to the first and the last stage, and so past all others.
    reads += [(o.value, s, last) for o in graph.outputs for s in (0, num_stages - 1)]
    for value, reader, node in reads:
        maker = producers[value]
        at = stages[maker]
        if at in (UNSTAGED, reader):
            continue
        source = graph.nodes[maker]
        is_late = reader > at and source.phase is not Phase.FORWARD
        if is_late or (per_step[maker] and not per_batch[maker]):
            raise CompileError(
                f"{node.source}: {node.op} on stage {reader} reads the result of {source.op} on"
                f" stage {at} ({source.source}) after the backward pass has left this stage; the"
                " forward pass sends values to later stages, and the backward pass sends"
                " gradients to earlier ones"
            )
        if reader > at:
            highest[value] = max(highest.get(value, reader), reader)
        else:
            lowest[value] = min(lowest.get(value, reader), reader)
    return lowest, highest
