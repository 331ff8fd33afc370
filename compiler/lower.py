"""From an ordered logical graph to a physical plan.

One compute actor holds the whole step as one chain, because nothing in it leaves its stream; actors
meet only where streams, devices, ranks or rates change: the data source, the metrics sink, and the
snapshot of the variables with its writer. The walk of one tensor: its value gets a root
(`storage`), the root a buffer (in-place pairs of the kernels merge buffers), the buffer a register
with a live interval in launches, the register an offset in the arena (`memory.offsets`), and every
launch that touches it a view.

Snapshots are a rate: the step produces one `updated` credit per firing, the snapshot actor consumes
`snapshot_every` of them, copies the variables into a staging register and hands it to the writer.
With just that many slots, the next update cannot start before the copy is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.attrs import NO_ATTRS
from compiler.buffers import LaunchDraft, assign_buffers, draft_launches
from compiler.errors import InternalError
from compiler.graph import Graph, Node, Source
from compiler.ops.shape import COPY
from compiler.ops.sources import CONSTANT, INPUT, VARIABLE
from compiler.options import CompileOptions
from compiler.placement import HOST
from compiler.plan import (
    ActorKind,
    Constant,
    Field,
    Launch,
    PlainValue,
    Plan,
    Port,
    RegisterKind,
    Variable,
)
from compiler.plan_builder import PlanBuilder, align_up
from compiler.storage import Storage, assign_storage, dense_layout
from compiler.target import KernelCall, KernelInfo, Operand, Target
from compiler.types import DType, RegisterId, TensorType, ValueId
from memory.registers import choose_slots

IO_LATENCY_NS = 1e6
"""What a host thread is assumed to need per firing; only slot counts depend on it."""

EDGE_BUDGET_BYTES = 64 << 20
"""Slots of one edge to or from a host thread may take this much; a larger slot stays single."""

SNAPSHOTS_PER_PERIOD = 4
"""Snapshots offered to the writer per period of seconds; it writes the first one that is due."""

MAX_SNAPSHOT_RATE = 16
"""Steps between two snapshots by time: an estimate knows nothing of a slow data source.

A copy of the variables moves fewer bytes than the update that made them, so one in 16 steps costs
next to nothing.
"""


def lower(graph: Graph, target: Target, options: CompileOptions, graph_hash: str) -> Plan:
    """Return the plan of a graph that went through all passes.

    Raises CompileError when the target lacks a kernel.
    """
    lowering = _Lowering(graph, target, options)
    return lowering.run(graph_hash)


@dataclass(slots=True)
class _Lowering:
    """State of one lowering: where each root lives."""

    graph: Graph
    target: Target
    options: CompileOptions
    storage: Storage = field(init=False)
    plan: PlanBuilder = field(init=False)
    home: dict[ValueId, tuple[RegisterId, int]] = field(init=False)

    def run(self, graph_hash: str) -> Plan:
        self.storage = assign_storage(self.graph)
        self.plan = PlanBuilder(HOST, self.options.alignment)
        self.home = {}
        drafts = draft_launches(self.graph, self.storage, self.target)
        step_ns = sum(d.info.duration_ns for d in drafts)
        self._place_state()
        batch = self._place_inputs(step_ns)
        metrics = self._place_outputs(step_ns)
        self._place_temporaries(drafts)
        launches = tuple([self._launch(d.node, d.info, index) for index, d in enumerate(drafts)])
        self._connect(launches, batch, metrics, _snapshot_rate(self.options, step_ns))
        return self.plan.finish(
            self.options.name,
            len(launches),
            graph_hash=graph_hash,
            target=self.target.fingerprint,
            options=self.options.recorded(),
        )

    def _place_state(self) -> None:
        for node in self.graph.nodes:
            if node.op is VARIABLE:
                name = node.attrs.str_("name")
                view = self._own_register(node, name, RegisterKind.VARIABLE)
                init = _pairs(node.attrs["init"])
                self.plan.variables.append(Variable(name, node.attrs.str_("role"), view, init))
            elif node.op is CONSTANT:
                type_ = self.graph.types[node.outputs[0]]
                view = self._own_register(node, f"constant {type_}", RegisterKind.CONSTANT)
                data = node.attrs["data"]
                if not isinstance(data, bytes):
                    raise InternalError(f"constant at {node.source} has no bytes")
                self.plan.constants.append(Constant(view, data))

    def _own_register(self, node: Node, name: str, kind: RegisterKind) -> int:
        value = node.outputs[0]
        type_ = self.graph.types[value]
        register = self.plan.register(name, kind, type_.size_bytes, reason="state: one slot")
        self.home[value] = (register, 0)
        return self.plan.view(register, type_)

    def _place_inputs(self, step_ns: float) -> RegisterId:
        nodes = [n for n in self.graph.nodes if n.op is INPUT]
        items = [(n.attrs.str_("name"), n.outputs[0], n.source) for n in nodes]
        return self._place_edge("batch", items, ("data", IO_LATENCY_NS), ("compute", step_ns))

    def _place_outputs(self, step_ns: float) -> RegisterId:
        producers = self.graph.producers()
        items = [
            (o.name, o.value, self.graph.nodes[producers[o.value]].source)
            for o in self.graph.outputs
        ]
        return self._place_edge("metrics", items, ("compute", step_ns), ("metrics", IO_LATENCY_NS))

    def _place_edge(
        self,
        name: str,
        items: list[tuple[str, ValueId, Source]],
        producer: tuple[str, float],
        consumer: tuple[str, float],
    ) -> RegisterId:
        """Add the DATA register between a host thread and the compute chain, one field per item."""
        offsets: list[int] = []
        size = 0
        for _, value, _ in items:
            offsets.append(size)
            size += align_up(self.graph.types[value].size_bytes, self.options.alignment)
        slots, reason = choose_slots(
            1,
            1,
            producer[1],
            consumer[1],
            is_same_stream=False,
            size_bytes=size,
            budget_bytes=max(EDGE_BUDGET_BYTES, size),
            names=(producer[0], consumer[0]),
        )
        register = self.plan.register(name, RegisterKind.DATA, size, num_slots=slots, reason=reason)
        for (field_name, value, source), offset in zip(items, offsets, strict=True):
            self.home[value] = (register, offset)
            view = self.plan.view(register, self.graph.types[value], offset)
            index = self.plan.source(source)
            self.plan.fields.append(Field(field_name, register, view, index))
        return register

    def _place_temporaries(self, drafts: tuple[LaunchDraft, ...]) -> None:
        outputs = [o.value for o in self.graph.outputs]
        buffers = assign_buffers(self.graph, self.storage, drafts, outputs)
        registers: list[RegisterId] = []
        makers = self.graph.producers()
        for buffer in buffers.buffers:
            node = self.graph.nodes[makers[buffer.root]]
            name = f"{node.scope}:{node.op}" if node.scope else str(node.op)
            registers.append(
                self.plan.register(
                    name, RegisterKind.TEMPORARY, buffer.size_bytes, interval=buffer.interval
                )
            )
        for root, index in buffers.of_root.items():
            self.home[root] = (registers[index], 0)

    def _launch(self, node: Node, info: KernelInfo, index: int) -> Launch:
        workspace = None
        if info.workspace_bytes:
            register = self.plan.register(
                f"{node.scope}:{node.op} workspace",
                RegisterKind.TEMPORARY,
                info.workspace_bytes,
                interval=(index, index + 1),
            )
            workspace = self.plan.view(register, _byte_block(info.workspace_bytes))
        return Launch(
            kernel=info.kernel,
            op=node.op.name,
            attrs=tuple(node.attrs.items()),
            inputs=tuple([self._view(v) for v in node.inputs]),
            outputs=tuple([self._view(v) for v in node.outputs]),
            workspace=workspace,
            scope=node.scope,
            source=self.plan.source(node.source),
            duration_ns=info.duration_ns,
        )

    def _view(self, value: ValueId) -> int:
        register, base = self.home[self.storage.root[value]]
        layout = self.storage.layout[value]
        return self.plan.view(
            register,
            self.graph.types[value],
            base + layout.offset_bytes,
            layout.strides_bytes,
        )

    def _connect(
        self, launches: tuple[Launch, ...], batch: RegisterId, metrics: RegisterId, every: int
    ) -> None:
        plan = self.plan
        compute = plan.stream("compute", is_host_thread=False)
        step_outputs = [Port(metrics, 1)]
        updated = None
        if every:
            reason = f"{every}: one credit per step between two snapshots"
            updated = plan.register(
                "updated", RegisterKind.CONTROL, 0, num_slots=every, reason=reason
            )
            step_outputs.append(Port(updated, 1))
        plan.actor(
            "data",
            ActorKind.SOURCE,
            plan.stream("data", is_host_thread=True),
            outputs=(Port(batch, 1),),
        )
        plan.actor(
            "step",
            ActorKind.COMPUTE,
            compute,
            launches=launches,
            inputs=(Port(batch, 1),),
            outputs=tuple(step_outputs),
        )
        plan.actor(
            "metrics",
            ActorKind.SINK,
            plan.stream("metrics", is_host_thread=True),
            inputs=(Port(metrics, 1),),
        )
        if updated is not None:
            staging, copies = self._stage_variables()
            plan.actor(
                "snapshot",
                ActorKind.COPY,
                compute,
                launches=copies,
                inputs=(Port(updated, every),),
                outputs=(Port(staging, 1),),
                is_flushed=True,
            )
            plan.actor(
                "checkpoint",
                ActorKind.SINK,
                plan.stream("checkpoint", is_host_thread=True),
                inputs=(Port(staging, 1),),
            )

    def _stage_variables(self) -> tuple[RegisterId, tuple[Launch, ...]]:
        """Add the staging register, one field per variable, and the launches that fill it."""
        nodes = [n for n in self.graph.nodes if n.op is VARIABLE]
        sizes = [
            align_up(self.graph.types[n.outputs[0]].size_bytes, self.options.alignment)
            for n in nodes
        ]
        reason = "1: a second snapshot waits until the first is written"
        staging = self.plan.register("staging", RegisterKind.DATA, sum(sizes), reason=reason)
        launches: list[Launch] = []
        offset = 0
        for node, size in zip(nodes, sizes, strict=True):
            type_ = self.graph.types[node.outputs[0]]
            operand = Operand(type_, dense_layout(type_))
            info = self.target.query(KernelCall(COPY.name, NO_ATTRS, (operand,), (operand,)))
            view = self.plan.view(staging, type_, offset)
            offset += size
            name, source = node.attrs.str_("name"), self.plan.source(node.source)
            self.plan.fields.append(Field(name, staging, view, source))
            launches.append(
                Launch(
                    info.kernel,
                    COPY.name,
                    (),
                    (self._view(node.outputs[0]),),
                    (view,),
                    None,
                    name,
                    source,
                    info.duration_ns,
                )
            )
        return staging, tuple(launches)


def _snapshot_rate(options: CompileOptions, step_ns: float) -> int:
    """Return the steps per snapshot; 0 for a plan without snapshots."""
    if options.snapshot_every or not options.snapshot_seconds:
        return options.snapshot_every
    steps = options.snapshot_seconds * 1e9 / max(step_ns, 1.0)
    return int(min(max(steps / SNAPSHOTS_PER_PERIOD, 1), MAX_SNAPSHOT_RATE))


def _byte_block(size_bytes: int) -> TensorType:
    return TensorType(DType.UINT8, (size_bytes,))


def _pairs(value: object) -> tuple[tuple[str, PlainValue], ...]:
    if not isinstance(value, tuple):
        raise InternalError(f"a variable's init must be pairs, got {value!r}")
    return tuple((str(k), v) for k, v in value)
