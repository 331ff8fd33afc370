"""Updates of variables as fused programs: each carries its program, and many become one launch.

    sgd_update(w, dw, lr), ..., sgd_update(b, db, lr)  ->  ..., joined_updates(w, b, dw, db, lr)

`update_programs` runs before fusion. `merge_updates` runs last, where a device takes joined
updates: a call costs more than most updates.

Updates stand right after their gradients, which so end early. Those of one kind (the same program,
numbers, device and rate) wait for one another, and their gradients with them, as long as no launch
has more live bytes by it than the fullest launch had before. So the peak stays what the budget's
passes left. Nothing waits beyond a reader of what it makes, or a writer of what it reads.

Guarantees: every variable has the bits that it had; the peak of live bytes is none higher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from compiler.contract.attrs import NO_ATTRS, Attrs, AttrValue
from compiler.contract.program import GRADIENT, FusedProgram, Kind, ProgramInput, is_by_elements
from compiler.contract.spaces import Space, row_stride
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.graph import Graph, Node, new_value, sole_readers
from compiler.graph.program_builder import ProgramBuilder, expand, frame, pointwise_frame
from compiler.graph.registry import Layout, Op, Types, kernel_op
from compiler.graph.target import Hardware
from compiler.ops.families.updates import ends_step, is_update
from compiler.ops.language.define import update
from compiler.ops.language.program_ops import (
    FUSED,
    JOINED_UPDATES,
    MOST_WRITTEN,
    fused_attrs,
    joined_members,
    member_operands,
    program_of,
)
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import VARIABLE
from compiler.storage.buffers import Buffers, assign_buffers, draft_launches
from compiler.storage.order import needed_per_step
from compiler.storage.storage import Storage, assign_storage, is_dense

# What can be joined: an op of its own that has its program, or a `joined_updates` of one member.


@dataclass(frozen=True, slots=True)
class MergeableUpdate:
    """A program on its operands; `over` are those that its outputs lie over.

    `rest`: perhaps what says to skip it. `rule` is what users call it.
    """

    program: FusedProgram
    over: tuple[int, ...]
    operands: tuple[ValueId, ...]
    rest: tuple[ValueId, ...]
    rule: str

    @property
    def full(self) -> tuple[ValueId, ...]:
        """The operands of full size."""
        return tuple([v for i, v in enumerate(self.operands) if self.program.is_full(i)])

    @property
    def numbers(self) -> tuple[ValueId, ...]:
        """The operands that are numbers, and what says to skip it."""
        scalars = [v for i, v in enumerate(self.operands) if not self.program.is_full(i)]
        return (*scalars, *self.rest)


def mergeable_update(graph: Graph, node: Node) -> MergeableUpdate | None:
    """Return an update that works element by element on dense tensors; None for any other node.

    Counters, and sums over batches, are none: by their ops rates are told apart.
    """
    if not ends_step(node):
        return None
    if node.op is JOINED_UPDATES and node.attrs.int_("count") == 1:
        (member,) = joined_members(node.attrs)
        operands = tuple([node.inputs[place] for place in member])
        rest, over = node.inputs[len(member) :], node.attrs.ints("over")
        (rule,) = node.attrs.texts("members")
    elif kernel_op.get(node.op) == FUSED.name:
        count = len(program_of(node.attrs).inputs)
        operands, rest, rule = node.inputs[:count], node.inputs[count:], node.op.name
        over = tuple([operand for _, operand in sorted(node.writes)])
    else:
        return None
    candidate = MergeableUpdate(program_of(node.attrs), over, operands, rest, rule)
    storage = assign_storage(graph)
    # Elements are walked by address, so that all operands must lie in one order.
    is_whole = all([is_dense(graph.types[v], storage.layout[v]) for v in candidate.full])
    is_taken = is_by_elements(candidate.program) and len(over) == len(candidate.program.outputs)
    return candidate if is_whole and is_taken else None


def merge_nodes(
    graph: Graph, node: Node, updates: Sequence[MergeableUpdate], outputs: tuple[ValueId, ...]
) -> Node:
    """Return one node for updates of one program and the same numbers; all else is of `node`."""
    first, count = updates[0], len(updates)
    operand_at: dict[int, ValueId] = {}
    for lone, member in zip(
        updates, member_operands(first.program, first.over, count), strict=True
    ):
        operand_at |= dict(zip(member, lone.operands, strict=True))
    makers = [graph.nodes[graph.producers()[update.operands[0]]] for update in updates]
    attrs: dict[str, AttrValue] = {
        "program": first.program,
        "over": first.over,
        "count": count,
        "members": (first.rule if count == 1 else f"{count} x {first.rule}",),
        "variables": tuple([n.attrs.str_("name") for n in makers if n.op is VARIABLE]),
    }
    inputs = (*[operand_at[place] for place in range(len(operand_at))], *first.rest)
    return replace(node, op=JOINED_UPDATES, inputs=inputs, outputs=outputs, attrs=Attrs(attrs))


def merge_updates(graph: Graph, hardware: Hardware) -> Graph:
    """Return an ordered graph with updates joined. O(launches + updates)."""
    kinds = _kinds(graph, hardware)
    # A single update has nothing to be joined with.
    if len(kinds) < 2:
        return graph
    join = _UpdateOrder(graph, hardware, kinds)
    for index, node in enumerate(graph.nodes):
        join.take(index, node)
    join.flush()
    return replace(graph, nodes=tuple(join.nodes))


@dataclass(frozen=True, slots=True)
class _WaitingUpdate:
    """An update that may wait, and what it has in common with others: `most` are one launch."""

    alone: MergeableUpdate
    key: tuple[object, ...]
    most: int


def _kinds(graph: Graph, hardware: Hardware) -> dict[int, _WaitingUpdate]:
    """Return every update that may wait for others, by its node."""
    if all([target.max_merged_updates(1) <= 1 for target in hardware.targets]):
        return {}
    per_step = needed_per_step(graph)
    waiting: dict[int, _WaitingUpdate] = {}
    for index, node in enumerate(graph.nodes):
        mergeable = mergeable_update(graph, node)
        if mergeable is None:
            continue
        most = hardware.targets[node.device].max_merged_updates(len(mergeable.full))
        # `MOST_WRITTEN` limits the outputs of one launch, and each update has as many as it writes
        # over.
        most = min(most, MOST_WRITTEN // len(mergeable.over))
        if most > 1:
            same = node.device, per_step[index], node.phase
            key = (mergeable.program, mergeable.over, mergeable.rule, mergeable.numbers, *same)
            waiting[index] = _WaitingUpdate(mergeable, key, most)
    return waiting


@dataclass(slots=True)
class _UpdateOrder:
    """The new order of the nodes, and the updates that wait, by their kind."""

    graph: Graph
    hardware: Hardware
    kinds: dict[int, _WaitingUpdate]
    nodes: list[Node] = field(default_factory=list)
    waiting: dict[tuple[object, ...], list[int]] = field(default_factory=dict)
    storage: Storage = field(init=False)
    live: _LiveBytes = field(init=False)
    held: int = 0
    made: set[ValueId] = field(default_factory=set)
    read: set[ValueId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.storage = assign_storage(self.graph)
        self.live = _LiveBytes.of(self.graph, self.storage, self.hardware)

    def take(self, index: int, node: Node) -> None:
        """Put a node at its place, or let it wait."""
        written = [self.storage.root[node.outputs[output]] for output, _ in node.writes]
        is_met = not self.made.isdisjoint((*node.inputs, *node.after))
        # A node that reads what waits, or overwrites what it reads, may not pass it.
        if is_met or not self.read.isdisjoint(written):
            self.flush()
        # Gradients live on while updates wait: the peak must not rise by that.
        if self.storage.is_launch[index] and not self.live.has_room(index, self.held):
            self.flush()
        kind = self.kinds.get(index)
        if kind is None:
            self.nodes.append(node)
            return
        group = self.waiting.setdefault(kind.key, [])
        group.append(index)
        self.held += self.live.held_by(node)
        self.made.update(node.outputs)
        self.read.update([self.storage.root[v] for v in node.inputs])
        if len(group) == kind.most:
            self._put(self.waiting.pop(kind.key))

    def flush(self) -> None:
        """Put all that waits."""
        for group in self.waiting.values():
            self._put(group)
        self.waiting, self.held = {}, 0
        self.made, self.read = set(), set()

    def _put(self, own: Sequence[int]) -> None:
        """Put some updates of a kind as one node, with the line of the first."""
        nodes = [self.graph.nodes[index] for index in own]
        self.held -= sum([self.live.held_by(node) for node in nodes])
        if len(nodes) == 1:
            self.nodes.append(nodes[0])
            return
        outputs = tuple([value for node in nodes for value in node.outputs])
        after = tuple(dict.fromkeys([value for node in nodes for value in node.after]))
        first = replace(nodes[0], after=after)
        updates = [self.kinds[index].alone for index in own]
        self.nodes.append(merge_nodes(self.graph, first, updates, outputs))


@dataclass(frozen=True, slots=True)
class _LiveBytes:
    """The bytes that live while each launch runs, and what of them an update alone holds."""

    graph: Graph
    storage: Storage
    buffers: Buffers
    of_launch: dict[int, int]
    peak: int

    @classmethod
    def of(cls, graph: Graph, storage: Storage, hardware: Hardware) -> _LiveBytes:
        """Return those of a graph in its order, all devices together."""
        drafts = draft_launches(graph, storage, hardware)
        buffers = assign_buffers(graph, storage, drafts, ())
        # Differences at both ends of each interval: their running sum is the live bytes.
        change = np.zeros(len(drafts) + 1, np.int64)
        for buffer in buffers.buffers:
            change[buffer.interval[0]] += buffer.size_bytes
            change[buffer.interval[1]] -= buffer.size_bytes
        live = np.cumsum(change)[: len(drafts)]
        live += np.array([draft.info.workspace_bytes for draft in drafts], np.int64)
        by_node = dict(zip(storage.launches, live.tolist(), strict=True))
        return cls(graph, storage, buffers, by_node, int(live.max(initial=0)))

    def has_room(self, launch: int, held: int) -> bool:
        """Whether a launch may run while so many bytes more are held."""
        return self.of_launch[launch] + held <= self.peak

    def held_by(self, node: Node) -> int:
        """Return the bytes that live on while an update waits."""
        roots = [self.storage.root[v] for v in node.inputs]
        ids = dict.fromkeys([self.buffers.of_root[r] for r in roots if r in self.buffers.of_root])
        return sum([self.buffers.buffers[b].size_bytes for b in ids])


# Put the program of every update into its node, and let its operands lie as kernels read them.
#
#     sgd_update(param, grad, lr)       ->  sgd_update(param, copy(grad), lr), with program, space
#     sgd_update(param, grad * c, lr)   ->  sgd_update(param, grad, lr, c), whose program multiplies
#
# Updates join no cluster, since they write over what others read. So what is done to a gradient
# element by element for its update alone, such as clipping it, becomes part of the update's
# program: numbers that it needs follow the operands that the update has anyway. A gradient whose
# rows lie unevenly, as a transposed one, is copied first.
#
# Guarantees: every op with an `update` cell carries a fused program on operands in even rows.


def update_programs(graph: Graph) -> Graph:
    """Return the graph with updates that carry their programs. O(nodes)."""
    if not any([update.has(node.op) for node in graph.nodes]):
        return graph
    layout, types = assign_storage(graph).layout, list(graph.types)
    taken_in = {i: _taken_in(graph, i) for i, node in enumerate(graph.nodes) if _has_program(node)}
    # By identity: equal nodes may stand in the graph twice.
    step_ids = {id(step) for steps in taken_in.values() for step in steps}
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        if id(node) in step_ids:
            continue
        if not update.has(node.op):
            nodes.append(node)
        elif index in taken_in:
            steps = taken_in[index]
            node = _with_operands_of(node, steps)
            copies, inputs = _in_rows(node, layout, types)
            operand_types = tuple([types[v] for v in inputs])
            before = tuple([(step.op, step.attrs, len(step.inputs)) for step in steps])
            attrs = _attrs(node.op, operand_types, node.attrs, before)
            nodes += [*copies, replace(node, inputs=inputs, attrs=attrs)]
        else:  # the gradient of a table is made row by row, and lies as the table
            table, _, _, *rest = [types[v] for v in node.inputs]
            nodes.append(replace(node, attrs=_attrs(node.op, (table, table, *rest), node.attrs)))
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _has_program(node: Node) -> bool:
    return update.has(node.op) and kernel_op.get(node.op) == FUSED.name


def _taken_in(graph: Graph, index: int) -> tuple[Node, ...]:
    """Return what is done to the gradient of an update for it alone, in order.

    Each step reads the gradient first, and numbers besides.
    """
    node, sole_reader, makers = graph.nodes[index], sole_readers(graph), graph.producers()
    if not is_update(node):  # a counter
        return ()
    value, reader, steps = node.inputs[GRADIENT], index, list[Node]()
    while sole_reader[value] == reader:
        reader = makers[value]
        step = graph.nodes[reader]
        if (
            step.phase is not Phase.UPDATE
            or step.device != node.device
            or not _is_by_numbers(graph, step)
        ):
            break
        steps.insert(0, step)
        value = step.inputs[0]
    return tuple(steps)


def _is_by_numbers(graph: Graph, step: Node) -> bool:
    if (
        not expand.has(step.op)
        or frame.get(step.op) is not pointwise_frame
        or len(step.outputs) != 1
    ):
        return False
    first, *others = [graph.types[v] for v in step.inputs]
    return first == graph.types[step.outputs[0]] and not any([t.shape for t in others])


def _with_operands_of(node: Node, steps: tuple[Node, ...]) -> Node:
    """Return an update that reads what its steps read."""
    if not steps:
        return node
    count = update.get(node.op).num_operands
    # The first operand of each step is the gradient; the others are numbers, and come after the
    # update's own operands.
    numbers = [v for step in steps for v in step.inputs[1:]]
    operands = (*node.inputs[:GRADIENT], steps[0].inputs[0], *node.inputs[GRADIENT + 1 : count])
    return replace(node, inputs=(*operands, *numbers, *node.inputs[count:]))


_Steps = tuple[tuple[Op, Attrs, int], ...]
"""Ops that come before an update, their attributes, and how many operands they have."""


@lru_cache(maxsize=4096)  # layers repeat, and share what they are alike in
def _attrs(op: Op, operands: Types, attrs: Attrs, before: _Steps = ()) -> Attrs:
    """Return what a fused kernel of the update has as attributes, and its own."""
    rule, shape = update.get(op), operands[0].shape
    space = Space(math.prod(shape[:-1]), math.prod(shape[-1:]))
    program = rule.program_for(operands, attrs)
    if before:
        program = _after(program, before, operands)
    fused = fused_attrs(program, space, (shape,) * len(rule.over), (op.name,))
    return Attrs({**attrs, **fused})


def _after(program: FusedProgram, before: _Steps, operands: Types) -> FusedProgram:
    """Return a program on a gradient to which other steps are done before."""
    p = ProgramBuilder(1, 1)
    values = [p.input(operand) for operand in program.inputs]
    gradient, at = values[GRADIENT], len(values)
    numbers = sum([count - 1 for _, _, count in before])
    more = [p.input(ProgramInput(t.dtype, Kind.SCALAR)) for t in operands[at : at + numbers]]
    for op, attrs, count in before:
        types = (operands[GRADIENT], *operands[at : at + count - 1])
        (gradient,) = expand.get(op)(p, attrs, types, (gradient, *more[: count - 1]))
        at, more = at + count - 1, more[count - 1 :]
    values[GRADIENT] = gradient
    return p.whole(p.replay(program, tuple(values)))


def _in_rows(
    node: Node, layout: tuple[Layout, ...], types: list[TensorType]
) -> tuple[list[Node], tuple[ValueId, ...]]:
    """Return the inputs of an update, with copies of those whose rows lie unevenly."""
    copies: list[Node] = []
    inputs: list[ValueId] = []
    columns = math.prod(types[node.inputs[0]].shape[-1:])
    for value in node.inputs:
        type_ = types[value]
        strides = tuple([step // type_.dtype.itemsize for step in layout[value].strides_bytes])
        if type_.shape and row_stride(Kind.FULL, columns, type_.shape, strides) is None:
            copy = new_value(types, type_)
            copies.append(replace(node, op=COPY, inputs=(value,), outputs=(copy,), attrs=NO_ATTRS))
            value = copy
        inputs.append(value)
    return copies, tuple(inputs)
