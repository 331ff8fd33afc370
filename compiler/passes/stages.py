"""Give every node its stage in a pipeline, from those that the user cut with `af.stage`.

What is called outside of every region runs on the last stage that it reads something of. What
follows from batches, constants and counters alone has no stage: each makes it that reads it. A
variable is where it is read, and what is made of variables alone where it is first read.

It runs before `autodiff`, whose nodes are where their forward nodes are: so gradients flow down the
stages as values flow up. What later passes emit elsewhere has its stage by `stages_of` when the
graph is cut (`compiler.sbp.cut`).

Guarantees: a value flows from a stage to the same or a higher one, a parameter is read on one stage
alone, and every stage of the mesh has nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.facts import fact
from compiler.graph import UNSTAGED, Graph, GraphBuilder, Node, mark_needed
from compiler.ops.channels import OVER_STAGES, STAGE
from compiler.ops.sources import CONSTANT, INPUT, NUMBERS, OF_MODEL, VARIABLE, scalar
from compiler.registry import Op
from compiler.types import DType, Phase, ValueId

_OPEN = -2
"""The stage of what is made of variables alone, until something reads it."""


def run(graph: Graph, num_stages: int) -> Graph:
    """Return the graph with nodes on stages; on none, where there is one stage. O(nodes).

    Raises CompileError, with the user's lines, where nodes do not make so many stages.
    """
    is_cut = any([node.stage != UNSTAGED for node in graph.nodes])
    if not is_cut and num_stages == 1:
        return graph
    found = (UNSTAGED,) * len(graph.nodes)
    if num_stages > 1:
        found = stages_of(graph)
        _check_used(graph, found, num_stages)
    nodes = zip(graph.nodes, found, strict=True)
    return replace(graph, nodes=tuple([replace(node, stage=own) for node, own in nodes]))


def stages_of(graph: Graph) -> tuple[int, ...]:
    """Return the stage of every node: its own, or as follows; UNSTAGED, on any. O(nodes).

    Raises CompileError, with both lines, where values flow down or a variable is read on two.
    """
    if all([node.stage == UNSTAGED for node in graph.nodes]):
        return (UNSTAGED,) * len(graph.nodes)
    return _Stages(graph).result()


@fact
def handed_on(graph: Graph) -> tuple[int, ...]:
    """Return the nodes that make what other stages get: what these read, and outputs. O(nodes)."""
    stages, makers = stages_of(graph), graph.producers()
    readers = [*[(o.value, UNSTAGED) for o in graph.outputs]]
    readers += [
        (value, own)
        for node, own in zip(graph.nodes, stages, strict=True)
        if own != UNSTAGED
        for value in node.inputs
    ]
    pairs = [(makers[value], own) for value, own in readers]
    return tuple({i: None for i, own in pairs if stages[i] not in (UNSTAGED, own)})


def edges_of_stages(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs (before, after) of nodes, of what stages of a pipeline wait for beyond values.

    One number over all stages is made when a batch has gone all the way: who waited for it before
    would keep what another stage needs to make its part of it. O(nodes x stages).
    """
    over = [i for i, node in enumerate(graph.nodes) if node.op is OVER_STAGES]
    return _edges_of_returns(graph) + [(i, j) for j in over for i in handed_on(graph)]


def _edges_of_returns(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs (before, after) of nodes: a stage goes back when gradients have come to it.

    What could begin before waits as well: it would be made, and held, for all batches under way
    (`compiler.lowering.pipelines`).
    """
    stages, makers = stages_of(graph), graph.producers()
    coming: dict[int, dict[int, None]] = {}
    for node, own in zip(graph.nodes, stages, strict=True):
        for maker in [makers[value] for value in node.inputs]:
            for passed in range(max(own, 0), stages[maker] if own != UNSTAGED else 0):
                coming.setdefault(passed, {})[maker] = None
    edges: list[tuple[int, int]] = []
    for stage, came in sorted(coming.items()):
        is_before = mark_needed(graph, [v for i in came for v in graph.nodes[i].outputs])
        late = [
            index
            for index, (node, own) in enumerate(zip(graph.nodes, stages, strict=True))
            if own == stage and node.phase is Phase.BACKWARD and not is_before[index]
        ]
        edges += [(maker, index) for index in late for maker in came]
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
    made: dict[int, ValueId] = {}
    for value, stage in values:
        own, place = max(stage, 0), b.producer_of(value)
        earlier = (made[own],) if own in made else ()
        with b.on(place.device):  # the number goes to the values, not they to it
            made[own] = b.one(op, value, *earlier)
    parts = [made[s] if s in made else scalar(b, 0, dtype) for s in range(max(last, 0) + 1)]
    if last < 1:
        return parts[0]
    turn = len([node for node in b.nodes if node.op is OVER_STAGES])
    attrs = Attrs({"num_ranks": last + 1, "group": STAGE, "bucket": turn, "order": turn, "by": by})
    return b.emit(OVER_STAGES, parts, attrs)[0]


def _check_used(graph: Graph, found: tuple[int, ...], num_stages: int) -> None:
    for node, own in zip(graph.nodes, found, strict=True):
        if own >= num_stages:
            raise CompileError(
                f"{node.source}: {node.op} is on stage {own}, and the mesh's axis {STAGE!r} has"
                f" {num_stages} ranks, for stages 0 to {num_stages - 1}; make the axis longer, or"
                " cut the job into fewer stages"
            )
    idle = [str(stage) for stage in range(num_stages) if stage not in found]
    if idle:
        # The last line that is on a stage; where none is, the last one of the job.
        nodes = zip(graph.nodes, found, strict=True)
        last = [node for node, own in nodes if own >= 0 and node.phase is Phase.FORWARD]
        raise CompileError(
            f"{(last or graph.nodes)[-1].source}: the mesh's axis {STAGE!r} has {num_stages} ranks,"
            f" and nothing of the job is on stage {', '.join(idle)}; say what is, as by"
            f" with af.stage({idle[0]}):"
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
            is_free = node.op in (INPUT, CONSTANT, OVER_STAGES) or (
                node.op is VARIABLE
                and (node.outputs[0] in counters or node.attrs["role"] == NUMBERS)
            )
            self.stage.append(UNSTAGED if is_free else self._stage(node))
            self._pin_inputs(index)
        for rule in graph.updates:
            own = self.stage[self.made_by[rule.variable]]
            for value in rule.state:
                self._pin(self.made_by[value], max(own, 0), None)
        for index, node in enumerate(graph.nodes):
            if self.stage[index] == _OPEN:  # nothing on a stage reads it
                found = self._stage(node)
                self.stage[index] = 0 if found == _OPEN else found
            self._pin_inputs(index)
        return tuple(self.stage)

    def _stage(self, node: Node) -> int:
        """Return the stage of a node whose operands have theirs."""
        read = [self.stage[self.made_by[value]] for value in node.inputs]
        highest = max(read, default=UNSTAGED)
        if node.stage == UNSTAGED:
            is_open = node.op is VARIABLE or (highest < 0 and _OPEN in read)
            return _OPEN if is_open else highest
        if highest > node.stage and node.phase is Phase.FORWARD:
            maker = self.graph.nodes[self.made_by[node.inputs[read.index(highest)]]]
            raise CompileError(
                f"{node.source}: {node.op} is on stage {node.stage} and reads what {maker.op} makes"
                f" on stage {highest} ({maker.source}); batches go through stages in order, so let"
                " it run there, or later"
            )
        return node.stage

    def _pin_inputs(self, index: int) -> None:
        node, own = self.graph.nodes[index], self.stage[index]
        for value in node.inputs if own >= 0 else ():
            maker = self.made_by[value]
            self._pin(maker, own, node)
            source = self.graph.nodes[maker]
            is_of_model = source.op is VARIABLE and source.attrs["role"] in OF_MODEL
            if is_of_model and self.stage[maker] != own and node.phase is Phase.FORWARD:
                first = self.pinned_by.get(maker, source)
                raise CompileError(
                    f"{node.source}: {source.attrs['role']!s} {source.attrs['name']!r} is read on"
                    f" stage {own}, and on stage {self.stage[maker]} ({first.source}); it lies on"
                    " one rank: read it on one stage, and hand on what is made of it"
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
    found = {
        node.outputs[0]
        for node in graph.nodes
        if node.op is VARIABLE and node.attrs["role"] not in OF_MODEL and node.stage == UNSTAGED
    } - of_rules
    while True:
        free = set(found)
        for node in graph.nodes:
            is_made_of_free = bool(node.inputs) and free.issuperset(node.inputs)
            if node.op in (CONSTANT, OVER_STAGES) or (is_made_of_free and node.stage == UNSTAGED):
                free.update(node.outputs)
        changed = {write.variable for write in graph.writes if write.value not in free}
        if found.isdisjoint(changed):
            return found
        found -= changed
