"""The variables of a plan: their registers, and the copies that snapshot them between two steps.

On the host the stream that computes copies them. What a device holds goes to the host's side on the
stream out of it, in one of two ways. A device that holds all and may take what it likes copies them
within its memory first, which takes it a moment between two steps; from there they go out beside
the next steps. Where its bytes have a budget, or there are several devices, they go out straight
away, and the next change of a variable waits for that.

**Neighbours go as one.** The copies are made once everything has its place: what is filled has the
variables in the order of their addresses, and those that lie side by side are one launch. It names
the version of each variable that it reads, and of each copy that it leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from compiler.contract.attrs import Attrs, PlainValue
from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST_SIDE, StreamRole
from compiler.contract.plan_tables import ActorKind, Constant, Field, Launch, RegisterKind, Variable
from compiler.contract.types import RegisterId, TensorType, ValueId, Version
from compiler.graph.graph import Node
from compiler.graph.target import CallOperand, CompileOptions, Hardware, KernelCall, KernelInfo
from compiler.lowering.chain_actors import ChainActors
from compiler.lowering.chains import COMPUTE, StreamKey
from compiler.lowering.plan_builder import PlanBuilder
from compiler.ops.primitives.sources import CONSTANT, NUMBERS, UNSAVED, VARIABLE, declared_part
from compiler.ops.primitives.transfer import COPY_BLOCK, value_device
from compiler.storage.storage import dense_layout


class StateRegisters:
    """The variables of a plan by name, with the version that a reader between steps finds."""

    def __init__(self, plan: PlanBuilder) -> None:
        self._plan = plan
        self._registers: dict[str, RegisterId] = {}
        self._between: dict[str, Version] = {}

    def place(self, chains: ChainActors) -> None:
        """Give the variables and constants of a program a home, where their nodes say.

        The program that comes first is the one that steps; another one reads between its steps.
        What a snapshot copies comes first: registers that live as long lie in this order, and
        neighbours are copied as one. Constants come last, and the numbers of rows: so the variables
        lie alike in the plans of a job for batches of several shapes, which can be open on one
        memory.
        """
        graph = chains.program.graph
        written = {w.variable: w.value for w in graph.writes if not w.is_of_itself}
        homeless = [node for node in graph.nodes if node.op in (VARIABLE, CONSTANT)]
        # Stable: False sorts first, so each kind stands in graph order.
        for node in sorted(homeless, key=lambda node: (not is_kept(node), _is_of_shapes(node))):
            value = node.outputs[0]
            if node.op is VARIABLE:
                chains.home[value] = (self._variable(chains, node, written.get(value)), 0)
            else:
                chains.home[value] = (self._constant(chains, node), 0)

    def _variable(self, chains: ChainActors, node: Node, written: ValueId | None) -> RegisterId:
        """Return the register of a variable, which holds `written` at the end of a step."""
        graph, value = chains.program.graph, node.outputs[0]
        name, type_ = node.attrs.str_("name"), graph.types[value]
        if name in self._registers:
            chains.versions.know(value, self._between[name])
        else:
            register = self._plan.register(
                name,
                RegisterKind.VARIABLE,
                type_.size_bytes,
                reason="state: one slot",
                place=chains.program.place[value],
            )
            self._registers[name] = register
            view = self._plan.view(register, type_)
            init = _pairs(node.attrs["init"])
            role, before = node.attrs.str_("role"), chains.versions.of(value)
            after = before if written is None else chains.versions.of(written)
            # A variable that is written has a version of its own between steps; else all three are
            # one.
            self._between[name] = before if written is None else self._plan.version()
            between, part = self._between[name], declared_part(node.attrs)
            self._plan.variables.append(
                Variable(name, role, view, init, before, after, between, part)
            )
        return self._registers[name]

    def _constant(self, chains: ChainActors, node: Node) -> RegisterId:
        type_ = chains.program.graph.types[node.outputs[0]]
        register = self._plan.register(
            f"constant {type_}",
            RegisterKind.CONSTANT,
            type_.size_bytes,
            reason="state: one slot",
            place=chains.program.place[node.outputs[0]],
        )
        data = node.attrs["data"]
        if not isinstance(data, bytes):
            raise InternalError(f"constant at {node.source} has no bytes")
        version = chains.versions.of(node.outputs[0])
        self._plan.constants.append(Constant(self._plan.view(register, type_), data, version))
        return register


def _is_of_shapes(node: Node) -> bool:
    """Whether a node is a constant or numbers of rows, which follow from the shapes of a batch."""
    return node.op is CONSTANT or node.attrs.str_("role") == NUMBERS


def is_kept(node: Node) -> bool:
    """Whether a node is a variable that means something of its own between two steps."""
    return node.op is VARIABLE and node.attrs.str_("role") not in UNSAVED


def _pairs(value: object) -> tuple[tuple[str, PlainValue], ...]:
    if not isinstance(value, tuple):
        raise InternalError(f"a variable's init must be pairs, got {value!r}")
    return tuple((str(k), v) for k, v in value)


SNAPSHOTS_PER_PERIOD = 4
"""Snapshots offered to the writer per period of seconds; it writes the first one that is due."""

MAX_SNAPSHOT_RATE = 16
"""Steps between two snapshots by time: an estimate knows nothing of a slow data source.

A copy of the variables moves fewer bytes than the update that made them, so one in 16 steps costs
next to nothing.
"""

SHARED_SNAPSHOT_RATE = 4
"""The same on several ranks: an estimate of one rank's steps is no other's, and all take snapshots
after the same steps. One in four costs little, and a period of some steps is kept to."""


def snapshot_rate(options: CompileOptions, step_ns: float) -> int:
    """Return the steps per snapshot; 0 for a plan without snapshots."""
    every = options.snapshot_every
    if not options.snapshot_seconds:
        return every
    # Seconds to ns. One step at least, so that the rate is never 0.
    steps = options.snapshot_seconds * 1e9 / max(step_ns, 1.0)
    rate = int(min(max(steps / SNAPSHOTS_PER_PERIOD, 1), MAX_SNAPSHOT_RATE))
    rate = SHARED_SNAPSHOT_RATE if options.mesh else rate
    return max([n for n in range(1, rate + 1) if every % n == 0]) if every else rate


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """A copy of all variables: its actor, its stream, the register it fills, and its place."""

    actor: str
    stream: StreamKey
    register: str
    place: int


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """A variable, or a copy of it, as the next copy reads it."""

    name: str
    type: TensorType
    source: int
    view: int
    version: Version
    place: int


@dataclass(frozen=True, slots=True)
class PlannedSnapshot:
    """A stage of a plan: the actor that makes its copies, and the register that they fill."""

    stage: SnapshotCopy
    copier: int
    register: RegisterId


_Pair = tuple[SnapshotSource, SnapshotSource]
"""A variable, and what a copy leaves of it."""


def add_snapshots(
    chains: ChainActors, options: CompileOptions, gates: Sequence[int]
) -> tuple[PlannedSnapshot, ...]:
    """Add what copies the variables every so many steps, and the sink that writes them.

    `gates` are the actors that let no step change a variable while a snapshot has their credits.
    Returns what `copy_variables` fills, stage by stage: nothing where no snapshots are taken.
    """
    plan, actors = chains.plan, chains.actors
    interval = snapshot_rate(options, chains.program.step_ns)
    if not interval:
        return ()
    variables = _kept_variables(chains)
    types = [variable.type for variable in variables]
    filled: list[PlannedSnapshot] = []
    for stage in _stages(variables, plan.hardware, options):
        is_first = not filled
        copier = actors.add(
            # The first copy runs once more at the end, so that the last steps are written, too.
            stage.actor,
            ActorKind.COPY,
            plan.stream_of(stage.stream),
            is_flushed=is_first,
        )
        if is_first:
            reason = f"{interval}: one credit per step between two snapshots"
            for gate in gates:
                actors.credits("updated", gate, {copier: interval}, interval, reason)
        else:
            actors.consume(copier, filled[-1].register, filled[-1].copier)
        register = plan.register(
            stage.register,
            RegisterKind.DATA,
            plan.stack(types, stage.place)[1],
            reason="1: a second snapshot waits until the first is written",
            place=stage.place,
        )
        actors.produce(copier, register)
        filled.append(PlannedSnapshot(stage, copier, register))
    writer = actors.add("checkpoint", ActorKind.SINK, plan.port("checkpoint"))
    actors.consume(writer, filled[-1].register, filled[-1].copier)
    return tuple(filled)


def copy_variables(chains: ChainActors, filled: Sequence[PlannedSnapshot]) -> None:
    """Give the actors of a snapshot their copies, and the sink its fields: all has its place."""
    if not filled:
        return
    plan, variables = chains.plan, _kept_variables(chains)
    for planned in filled:
        pairs = _copied(plan, planned, variables)
        launches = [_launch(plan, planned.stage, block) for block in _blocks(plan, pairs)]
        chains.actors.drafts[planned.copier].launches = tuple(launches)
        copies = {variable.name: copy for variable, copy in pairs}
        # The next stage copies the copies of this one.
        variables = tuple([copies[variable.name] for variable in variables])
    register = filled[-1].register
    plan.fields += [
        Field(row.name, register, row.view, row.source, row.version) for row in variables
    ]


def _stages(
    kept: Sequence[SnapshotSource], hardware: Hardware, options: CompileOptions
) -> tuple[SnapshotCopy, ...]:
    """Return the copies of a snapshot, one after the other; the last one is what is written."""
    places = dict.fromkeys([variable.place for variable in kept])
    devices = [p for p in places if hardware.is_apart(p)]
    if not devices:
        # What the device shall not hold all the time it shall not hold for a snapshot either.
        return (
            SnapshotCopy("snapshot", COMPUTE, "staging", HOST_SIDE if HOST_SIDE in places else 0),
        )
    out = StreamKey(*hardware.copy_stream(devices[0], HOST_SIDE))
    if len(places) > 1 or options.memory_budget:
        return (SnapshotCopy("snapshot", out, "staging", HOST_SIDE),)
    within = StreamKey(devices[0], StreamRole.COMPUTE)
    return (
        SnapshotCopy("snapshot", within, "snapshot", devices[0]),
        SnapshotCopy("snapshot.fetch", out, "staging", HOST_SIDE),
    )


def _kept_variables(chains: ChainActors) -> tuple[SnapshotSource, ...]:
    """Return the variables of a program as they are between two steps, but for what is no state."""
    graph, plan = chains.program.graph, chains.plan
    between = {variable.name: variable.between for variable in plan.variables}
    nodes = [node for node in graph.nodes if is_kept(node)]
    return tuple(
        [
            SnapshotSource(
                node.attrs.str_("name"),
                graph.types[value],
                plan.source(node.source),
                chains.view(value),
                between[node.attrs.str_("name")],
                value_device(graph, value),
            )
            for node in nodes
            for value in node.outputs
        ]
    )


def _copied(
    plan: PlanBuilder, filled: PlannedSnapshot, kept: Sequence[SnapshotSource]
) -> tuple[_Pair, ...]:
    """Return the variables in the order of their addresses, each with its copy."""
    # What has no elements lies at the beginning, as something else does, and is no end of it.
    in_order = sorted(kept, key=lambda v: (v.place, plan.address(v.view), v.type.size_bytes))
    offsets, _ = plan.stack([variable.type for variable in in_order], filled.stage.place)
    pairs: list[_Pair] = []
    for variable, offset in zip(in_order, offsets, strict=True):
        view = plan.view(filled.register, variable.type, offset)
        copy = replace(variable, view=view, version=plan.version(), place=filled.stage.place)
        pairs.append((variable, copy))
    return tuple(pairs)


def _blocks(plan: PlanBuilder, pairs: Sequence[_Pair]) -> Iterator[tuple[_Pair, ...]]:
    """Yield the runs of variables that lie as their copies do, one right after another."""
    begun = 0
    for index, neighbours in enumerate(pairwise(pairs), start=1):
        (here, there), (next_here, next_there) = neighbours
        steps = [
            plan.address(after.view) - plan.address(before.view)
            for before, after in ((here, next_here), (there, next_there))
        ]
        # Neighbours only where both sides step alike: one block copy keeps all distances.
        if here.place != next_here.place or steps[0] != steps[1]:
            yield tuple(pairs[begun:index])
            begun = index
    yield tuple(pairs[begun:])


def _launch(plan: PlanBuilder, stage: SnapshotCopy, block: Sequence[_Pair]) -> Launch:
    """Return the copy of neighbours."""
    first, last = block[0], block[-1]
    size_bytes = plan.address(last[1].view) + last[1].type.size_bytes
    size_bytes -= plan.address(first[1].view)
    attrs = (("size_bytes", size_bytes),)
    info = _block_info(plan.hardware, stage, [variable for variable, _ in block], size_bytes)
    names = [first[0].name, last[0].name] if len(block) > 1 else [first[0].name]
    return Launch(
        info.kernel,
        COPY_BLOCK.name,
        attrs,
        tuple([variable.view for variable, _ in block]),
        tuple([copy.view for _, copy in block]),
        None,
        " to ".join(names),
        first[0].source,
        info.duration_ns,
        reads=tuple([variable.version for variable, _ in block]),
        writes=tuple([copy.version for _, copy in block]),
    )


def _block_info(
    hardware: Hardware, stage: SnapshotCopy, block: Sequence[SnapshotSource], size_bytes: int
) -> KernelInfo:
    """Return the kernel that copies a block, and how long that takes: over a link, the link's."""
    operands = tuple([CallOperand(v.type, dense_layout(v.type)) for v in block])
    attrs = Attrs({"size_bytes": size_bytes})
    target = hardware.targets[stage.stream.device]
    info = target.query(KernelCall(COPY_BLOCK.name, attrs, operands, operands))
    start, end = block[0].place, stage.place
    link = None if start == end else hardware.link(end, start)
    if link is None:
        return info
    return replace(info, duration_ns=link.in_ns(size_bytes))
