"""From ordered logical graphs to a physical plan.

What leaves no stream and keeps one rate is one actor: with one compute stream, one rank and one
batch per step, the whole step is a single chain. Actors meet only where streams, devices, ranks or
rates change: the data source, the metrics sink, the update after several batches, the snapshot of
the variables with its writer, the evaluation. The walk of one tensor: its value gets a root
(`storage`), the root a buffer (in-place pairs of the kernels merge buffers) if one chain has it to
itself, else a field of a register between chains; the buffer a register with a live interval in
launches, the register an offset in the arena (`packing`), and every launch that touches it a view.

**Firings of a step never overlap.** The chains that begin one wait for the chain that ends the one
before, so that bytes within a step need one copy only (`ChainActors.fence`).

**Two memories.** What lives on the host's side (`ops.copies`) has an arena of its own, packed and
proven like the device's; the staging of a snapshot goes there too. Copies between the two are
chains on a stream for each direction.

**What waits for n steps is a rate.** The update consumes one credit of each of k batches; a
snapshot and an evaluation consume one of each of n steps. The credits come from the actors that
begin and end a step (its gates). With just n slots, the next step cannot begin before they are
done, and nobody reads a variable while it changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.errors import InternalError
from compiler.graph import Graph, Node
from compiler.lowering.actor_graph import ActorGraph
from compiler.lowering.chain_actors import ChainActors, Span
from compiler.lowering.chains import COMPUTE, StreamKey
from compiler.lowering.plan_builder import PlanBuilder
from compiler.lowering.snapshots import snapshot_rate, snapshot_stream, stage_variables
from compiler.lowering.step_program import StepProgram, make_program
from compiler.ops.sources import CONSTANT, INPUT, VARIABLE
from compiler.options import CompileOptions
from compiler.placement import HOST, StreamRole
from compiler.plan import (
    PORTED,
    ActorKind,
    Constant,
    PlainValue,
    Plan,
    RegisterKind,
    Variable,
)
from compiler.target import Hardware
from compiler.types import RegisterId, StreamId, ValueId, Version
from memory.registers import choose_slots

IO_NS = 50_000.0
"""What a host thread is assumed to need per firing, besides its bytes; only slots depend on it."""

IO_BYTES_PER_NS = 1.0
"""Bytes that a host thread is assumed to read or write per nanosecond."""

IO_LATENCY_NS = 1e6
"""How late a source may be now and then: the batches of that time need slots.

Outputs get none for it: every step under way there is one that a check of its loss comes too late.
"""

MAX_IO_SLOTS = 16
"""Slots of an edge to or from a host thread, at most, and a power of two where more than 2.

Every slot binds the launches that touch it once more; powers of two come round together.
"""

EDGE_BUDGET_BYTES = 64 << 20
"""Slots of one edge to or from a host thread may take this much; a larger slot stays single."""


def lower(
    graph: Graph,
    hardware: Hardware,
    options: CompileOptions,
    graph_hash: str,
    evaluation: Graph | None = None,
) -> Plan:
    """Return the plan of a graph, and perhaps one that evaluates, that went through all passes.

    Raises CompileError when the target lacks a kernel.
    """
    return _Lowering(hardware, options).run(graph, evaluation, graph_hash)


@dataclass(slots=True)
class _Lowering:
    """State of one lowering: the actors so far, and where the variables live."""

    hardware: Hardware
    options: CompileOptions
    plan: PlanBuilder = field(init=False)
    actors: ActorGraph = field(init=False)
    streams: dict[StreamKey, StreamId] = field(default_factory=dict)
    state: dict[str, RegisterId] = field(default_factory=dict)
    between: dict[str, Version] = field(default_factory=dict)
    credits: set[str] = field(default_factory=set)

    def run(self, graph: Graph, evaluation: Graph | None, graph_hash: str) -> Plan:
        self.plan = PlanBuilder(self.hardware)
        self.actors = ActorGraph(self.plan)
        _ = self._compute  # the first of the plan
        program = make_program(graph, self.hardware, self.options.num_streams, 0)
        train = self._place_program(program, 0, 0)
        data = self._place_inputs(train, "data", "batch")
        sums = program.batches_per_step > 1
        train.add(lambda is_per_step: _name(sums, is_per_step), self._stream_of)
        rate = self.options.metrics_every * program.batches_per_step
        outputs = self._place_outputs(train, "metrics", rate)
        begun, ended = self._connect(train, data)
        is_flushed = self.options.metrics_every > 1
        sink = self._add_sink(train, "metrics", outputs, rate, is_flushed=is_flushed)
        if len([chain for chain in program.chains if not chain.is_beside]) > 1:
            self._tell_of_steps(sink, begun, ended, outputs)
        self._add_snapshots(train, ended)
        chains = [train]
        if evaluation is not None:
            chains.append(self._add_evaluation(evaluation, train, begun, ended))
        self._share_bytes(chains)
        self.actors.emit()
        return self.plan.finish(
            self.options.name,
            graph_hash=graph_hash,
            options=self.options.recorded(),
        )

    # -- streams and state -----------------------------------------------------------------------

    def _port(self, name: str) -> StreamId:
        """Return a new stream for a source or a sink."""
        num_ports = sum([actor.kind in PORTED for actor in self.actors.drafts])
        return self.plan.stream(name, StreamRole.PORT, HOST, num_ports)

    def _stream_of(self, key: StreamKey) -> StreamId:
        """Return the stream of a chain, which is called after its device unless that is first."""
        if key not in self.streams:
            device = self.hardware.devices[key.device]
            name = f"{key.role.value} {key.nth}" if key.nth else key.role.value
            name = f"{device} {name}" if key.device else name
            self.streams[key] = self.plan.stream(name, key.role, device, key.nth)
        return self.streams[key]

    @property
    def _compute(self) -> StreamId:
        return self._stream_of(COMPUTE)

    def _place_program(self, program: StepProgram, chain: int, launch: int) -> ChainActors:
        """Return the chains of a program with a home for its variables and constants."""
        chains = ChainActors(program, self.plan, self.actors, chain, launch)
        written = {w.variable: w.value for w in program.graph.writes}
        for node in program.graph.nodes:
            if node.op is VARIABLE:
                value = node.outputs[0]
                chains.home[value] = (self._variable(chains, node, written.get(value)), 0)
            elif node.op is CONSTANT:
                chains.home[node.outputs[0]] = (self._constant(chains, node), 0)
        return chains

    def _variable(self, chains: ChainActors, node: Node, written: ValueId | None) -> RegisterId:
        """Return the register of a variable, which holds `written` at the end of a step.

        The program that is placed first is the one that steps; another one reads between steps.
        """
        graph, value = chains.program.graph, node.outputs[0]
        name, type_ = node.attrs.str_("name"), graph.types[value]
        if name in self.state:
            chains.versions.know(value, self.between[name])
        else:
            register = self.plan.register(
                name,
                RegisterKind.VARIABLE,
                type_.size_bytes,
                reason="state: one slot",
                place=chains.place_of((value,)),
            )
            self.state[name] = register
            view = self.plan.view(register, type_)
            init = _pairs(node.attrs["init"])
            role, before = node.attrs.str_("role"), chains.versions.of(value)
            after = before if written is None else chains.versions.of(written)
            self.between[name] = before if written is None else self.plan.version()
            self.plan.variables.append(
                Variable(name, role, view, init, before, after, self.between[name])
            )
        return self.state[name]

    def _constant(self, chains: ChainActors, node: Node) -> RegisterId:
        type_ = chains.program.graph.types[node.outputs[0]]
        register = self.plan.register(
            f"constant {type_}",
            RegisterKind.CONSTANT,
            type_.size_bytes,
            reason="state: one slot",
            place=chains.place_of(node.outputs),
        )
        data = node.attrs["data"]
        if not isinstance(data, bytes):
            raise InternalError(f"constant at {node.source} has no bytes")
        version = chains.versions.of(node.outputs[0])
        self.plan.constants.append(Constant(self.plan.view(register, type_), data, version))
        return register

    # -- edges to and from host threads ----------------------------------------------------------

    def _place_inputs(self, chains: ChainActors, source: str, name: str) -> tuple[int, RegisterId]:
        """Add the source of a program's batches; return it and its register."""
        program = chains.program
        nodes = [n for n in program.graph.nodes if n.op is INPUT]
        types = [program.graph.types[n.outputs[0]] for n in nodes]
        place = chains.place_of([n.outputs[0] for n in nodes])
        offsets, size = self.plan.stack(types, place)
        ends = (source, _io_ns(size)), ("compute", program.batch_ns)
        slots, reason = self._slots(size, 1, *ends, latency_ns=IO_LATENCY_NS)
        register = self.plan.register(
            name,
            RegisterKind.DATA,
            size,
            num_slots=slots,
            reason=reason,
            place=place,
        )
        for node, offset in zip(nodes, offsets, strict=True):
            label = node.attrs.str_("name")
            chains.add_field(label, node.outputs[0], (register, offset), node.source)
        actor = self.actors.add(source, ActorKind.SOURCE, self._port(source))
        self.actors.produce(actor, register)
        return actor, register

    def _place_outputs(self, chains: ChainActors, name: str, rate: int) -> dict[int, RegisterId]:
        """Add a register of outputs for each chain that makes some; return them by chain.

        A sink will consume `rate` of each per firing.
        """
        program = chains.program
        producers = program.graph.producers()
        by_chain: dict[int, list[tuple[str, ValueId]]] = {}
        for output in program.graph.outputs:
            chain = program.maker[output.value]
            by_chain.setdefault(chain, []).append((output.name, output.value))
        registers: dict[int, RegisterId] = {}
        for chain, items in by_chain.items():
            place = chains.place_of([value for _, value in items])
            offsets, size = self.plan.stack([program.graph.types[v] for _, v in items], place)
            slots, reason = self._slots(
                size, rate, ("compute", program.batch_ns), (name, rate * _io_ns(size))
            )
            register = self.plan.register(
                name if len(by_chain) == 1 else f"{name}.{len(registers)}",
                RegisterKind.DATA,
                size,
                num_slots=slots,
                reason=reason,
                place=place,
            )
            registers[chain] = register
            for (label, value), offset in zip(items, offsets, strict=True):
                source = program.graph.nodes[producers[value]].source
                chains.add_field(label, value, (register, offset), source)
            self.actors.produce(chains.numbers[chain], register)
            for _, value in items:
                for other in chains.readers(value):
                    if other != chain and not self._reads(chains.numbers[other], register):
                        number = chains.numbers[other]
                        self.actors.consume(number, register, chains.numbers[chain])
        return registers

    def _reads(self, actor: int, register: RegisterId) -> bool:
        return any([port.register == register for port in self.actors.drafts[actor].inputs])

    def _add_sink(
        self,
        chains: ChainActors,
        name: str,
        outputs: dict[int, RegisterId],
        rate: int,
        *,
        is_flushed: bool,
    ) -> int:
        sink = self.actors.add(name, ActorKind.SINK, self._port(name), is_flushed=is_flushed)
        for chain, register in outputs.items():
            self.actors.consume(sink, register, chains.numbers[chain], rate)
        return sink

    def _tell_of_steps(
        self, sink: int, begun: Span, ended: Span, outputs: dict[int, RegisterId]
    ) -> None:
        """Have the sink wait for the end of a step, and a step for room in the sink.

        Who hears of a step's outputs may read the variables: its updates are done by then. And what
        has begun to change them can come to its end though the listener waits for just that.
        """
        every = self.options.metrics_every
        slots = [2 * every]
        if begun is ended:
            slots += [self.plan.num_slots(register) for register in outputs.values()]
        self._credits(
            "done", ended.end, {sink: every}, slots[0], f"{slots[0]}: told when it is done"
        )
        reason = f"{min(slots)}: a step that has begun can end, whoever listens"
        for number in ended.gates:
            if number != ended.end:
                self._credits("begun", number, {sink: every}, min(slots), reason)

    def _slots(
        self,
        size: int,
        consume: int,
        producer: tuple[str, float],
        consumer: tuple[str, float],
        latency_ns: float = 0.0,
    ) -> tuple[int, str]:
        """Return the slots of an edge to or from a host thread, and why so many."""
        return choose_slots(
            consume,
            producer[1],
            consumer[1],
            size_bytes=size,
            budget_bytes=max(EDGE_BUDGET_BYTES, consume * size),
            most=MAX_IO_SLOTS,
            latency_ns=latency_ns,
            names=(producer[0], consumer[0]),
        )

    # -- the step --------------------------------------------------------------------------------

    def _connect(self, chains: ChainActors, data: tuple[int, RegisterId]) -> tuple[Span, Span]:
        """Connect the chains of a program; return who begins and ends a batch, and a step."""
        chains.place_crossings()
        chains.place_temporaries()
        chains.hold_order()
        batch = chains.fence(is_per_step=False, compute=self._compute)
        if batch is None:
            raise InternalError(f"plan {self.options.name!r} does nothing with a batch")
        self._feed(chains, data, batch.begins)
        step = chains.fence(is_per_step=True, compute=self._compute)
        if step is None:
            return batch, batch
        every = chains.program.batches_per_step
        reason = f"{every}: the batches of a step"
        for number in batch.gates:
            consumers = [*(step.begins if number == batch.end else ())]
            consumers += [step.end] if number in batch.begins else []
            self._credits("accumulated", number, dict.fromkeys(consumers, every), every, reason)
        return batch, step

    def _feed(
        self, chains: ChainActors, data: tuple[int, RegisterId], begins: tuple[int, ...]
    ) -> None:
        """Let batches reach whoever reads them, and let whatever begins one wait for it."""
        source, register = data
        inputs = [n.outputs[0] for n in chains.program.graph.nodes if n.op is INPUT]
        readers = [chains.numbers[c] for value in inputs for c in chains.readers(value)]
        brought = chains.brought
        for number in sorted({*readers, *(() if brought else begins)}):
            self.actors.consume(number, register, source)
        for number in begins:
            if brought and not any([self._reads(number, there) for _, there in brought]):
                feeder, there = brought[0]
                self.actors.consume(number, there, feeder)

    def _credits(
        self, name: str, producer: int, consumers: dict[int, int], slots: int, reason: str
    ) -> None:
        """Add a control register: one credit per firing, rates by consumer."""
        label = f"{name}.{self.actors.drafts[producer].name}" if name in self.credits else name
        self.credits.add(name)
        register = self.plan.register(
            label, RegisterKind.CONTROL, 0, num_slots=slots, reason=reason
        )
        self.actors.produce(producer, register)
        for consumer, rate in consumers.items():
            self.actors.consume(consumer, register, producer, rate)

    # -- what watches the variables --------------------------------------------------------------

    def _add_snapshots(self, chains: ChainActors, step: Span) -> None:
        every = snapshot_rate(self.options, chains.program.step_ns)
        if not every:
            return
        stream = self._stream_of(snapshot_stream(chains.program.graph, self.hardware))
        snapshot = self.actors.add("snapshot", ActorKind.COPY, stream, is_flushed=True)
        reason = f"{every}: one credit per step between two snapshots"
        for number in step.gates:
            self._credits("updated", number, {snapshot: every}, every, reason)
        staging, launches = stage_variables(chains, self.hardware)
        self.actors.drafts[snapshot].launches = launches
        self.actors.produce(snapshot, staging)
        writer = self.actors.add("checkpoint", ActorKind.SINK, self._port("checkpoint"))
        self.actors.consume(writer, staging, snapshot)

    def _add_evaluation(
        self, graph: Graph, train: ChainActors, batch: Span, step: Span
    ) -> ChainActors:
        """Add the actors that evaluate between two steps.

        `evaluation` gives leave for all batches once n steps are done; `evaluated` hands the
        credits of the steps back when the last batch is, so that no step changes the variables in
        between.
        """
        steps, batches = self.options.evaluate_every, self.options.evaluate_batches
        places = train.places()
        first_rank = max([place.span[1] for place in places])
        program = make_program(graph, self.hardware, self.options.num_streams, first_rank)
        num_launches = sum([place.num_launches for place in places])
        chains = self._place_program(program, len(places), num_launches)
        due = self.actors.add("evaluation", ActorKind.COMPUTE, self._compute)
        done = self.actors.add("evaluated", ActorKind.COMPUTE, self._compute)
        reason = f"{steps}: one credit per step between two evaluations"
        for number in step.gates:
            self._credits("eval_due", number, {due: steps, done: steps}, steps, reason)
        per_batch = steps * train.program.batches_per_step
        for number in [n for n in batch.gates if n not in step.gates]:
            reason = f"{per_batch}: one credit per batch between two evaluations"
            consumers = {due: per_batch, done: per_batch}
            self._credits("eval_due", number, consumers, per_batch, reason)
        source, register = self._place_inputs(chains, "eval_data", "eval_batch")
        reason = f"{batches}: one credit per batch of an evaluation"
        leave = self.plan.register(
            "eval_leave", RegisterKind.CONTROL, 0, num_slots=batches, reason=reason
        )
        self.actors.produce(due, leave, batches)
        self.actors.consume(source, leave, due)
        chains.add(lambda is_per_step: "evaluate", self._stream_of)
        outputs = self._place_outputs(chains, "eval_metrics", batches)
        span, _ = self._connect(chains, (source, register))
        self._credits("eval_done", span.end, {done: batches}, batches, reason)
        self._add_sink(chains, "eval_metrics", outputs, batches, is_flushed=False)
        return chains

    # -- bytes -----------------------------------------------------------------------------------

    def _share_bytes(self, programs: list[ChainActors]) -> None:
        """Bind the launches, place all registers, and order the chains that share bytes."""
        for chains in programs:
            chains.bind_launches()
        before = self.plan.place([place for chains in programs for place in chains.places()])
        numbers = [number for chains in programs for number in chains.numbers]
        rates = [
            (index, chain.is_per_step)
            for index, chains in enumerate(programs)
            for chain in chains.program.chains
        ]
        for earlier, later in before:
            a, b = numbers[earlier], numbers[later]
            if self.actors.is_before(a, b):
                continue
            names = [self.actors.drafts[n].name for n in (a, b)]
            if rates[earlier] != rates[later]:
                raise InternalError(
                    f"{names[0]!r} and {names[1]!r} share bytes at different rates without a path"
                )
            self.actors.control(f"{names[0]}>{names[1]} bytes", a, b, "1: bytes used again")


def _io_ns(size_bytes: int) -> float:
    return IO_NS + size_bytes / IO_BYTES_PER_NS


def _name(sums: bool, is_per_step: bool) -> str:
    if not sums:
        return "step"
    return "update" if is_per_step else "gradient"


def _pairs(value: object) -> tuple[tuple[str, PlainValue], ...]:
    if not isinstance(value, tuple):
        raise InternalError(f"a variable's init must be pairs, got {value!r}")
    return tuple((str(k), v) for k, v in value)
