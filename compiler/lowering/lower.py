"""The way from ordered logical graphs to a physical plan; bodies become plans of their own.

Launches on one stream at one rate are one actor: with one compute stream, one rank and one batch
per step, the whole step is a single chain. Actors meet only where streams, devices, ranks or
rates change: the data source, the metrics sink, the update after several batches, the snapshot of
the variables with its writer, the evaluation. The walk of one tensor: its value gets a root
(`compiler.storage.storage`), the root a buffer (in-place pairs of the kernels merge buffers) if one
chain has it to itself, else a field of a register between chains; the buffer a register with a live
interval in launches, the register an offset in the arena (`plan_builder.pack`), and every launch
that touches it a view.

**Firings of a step never overlap.** The chains that begin one wait for the chain that ends the one
before, so that bytes within a step need one copy only (`ChainActors.fence`).

**Places.** Every device of the job has an arena, and so has the host's side where anything lies
there (`compiler.ops.primitives.transfer`); each is packed and proven alone. Copies from place to
place are chains on a stream for each direction of a device.

**What waits for n steps is a rate.** The update consumes one credit of each of k batches; a
snapshot and an evaluation consume one of each of n steps. The credits come from the actors that
begin and end a step (its gates). With just n slots, the next step cannot begin before they are
done, and nobody reads a variable while it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from compiler.contract.attrs import NO_ATTRS, Attrs
from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST_SIDE
from compiler.contract.plan import Plan, SubPlan
from compiler.contract.plan_tables import EVALUATE, ActorKind, RegisterKind
from compiler.contract.types import Phase, RegisterId, TensorType, ValueId
from compiler.graph.graph import Graph, GraphBuilder, Node, Output, Write, new_value
from compiler.graph.registry import Types
from compiler.graph.target import CompileOptions, Hardware, one_device
from compiler.lowering.actor_graph import ActorGraph
from compiler.lowering.chain_actors import ChainActors, StepBoundary
from compiler.lowering.plan_builder import PlanBuilder
from compiler.lowering.snapshots import StateRegisters, add_snapshots, copy_variables
from compiler.lowering.step_program import StepProgram, make_program
from compiler.ops.families.arithmetic import ADD
from compiler.ops.families.loops import CARRY, CARRY_SUM
from compiler.ops.primitives.body import Body, bodies_in
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import (
    CONSTANT,
    INPUT,
    SCRATCH,
    VARIABLE,
    declared_part,
    declared_type,
)
from compiler.storage.storage import assign_storage, is_dense
from memory.registers import choose_slots

# Compile the bodies of nodes: each becomes a plan of its own, which its launch runs.
#
#     scan(..., body=graph)  ->  scan(copy(x), ..., body=plan)
#
# A body goes through the same passes and the same lowering as the job, for the device of its node
# and in the job's precision. So no pass over the outer graph looks into a body: precision, fusion,
# simplification and order are done within. Carries become variables, which the step writes over;
# constants become variables that it reads. Constants that the passes made within are handed in from
# outside, for a frame holds nothing from one launch to the next.
#
# Operands are made dense: a launch finds the entry of a step by an offset.
#
# Guarantees: no node has a body that is a graph; a node with a body reads dense operands.

Prepare = Callable[[Graph, Hardware, CompileOptions], Graph]
"""From a body as a job of one device to what is lowered."""

Lower = Callable[[Graph, Hardware, CompileOptions], Plan]

_ZEROS = (("kind", "zeros"),)


def run(
    graph: Graph, hardware: Hardware, options: CompileOptions, prepare: Prepare, lower: Lower
) -> Graph:
    """Return the graph with plans for bodies. O(nodes), and what the bodies take."""
    if not any([isinstance(v, Body) for node in graph.nodes for v in node.attrs.values()]):
        return graph
    layouts = assign_storage(graph).layout
    nodes: list[Node] = []
    types = list(graph.types)
    # Layers share a body: it is compiled once for each device, count of carries and operand types.
    compiled: dict[tuple[object, ...], tuple[SubPlan, tuple[Node, ...]]] = {}
    for node in graph.nodes:
        if not bodies_in(node):
            nodes.append(node)
            continue
        inputs = list(node.inputs)
        for position, value in enumerate(node.inputs):
            # An offset does no harm: dense is enough, wherever it begins.
            if not is_dense(types[value], replace(layouts[value], offset_bytes=0)):
                inputs[position] = copy = new_value(types, types[value])
                nodes.append(
                    replace(node, op=COPY, inputs=(value,), outputs=(copy,), attrs=NO_ATTRS)
                )
        attrs = dict(node.attrs)
        for name, body in node.attrs.items():
            if not isinstance(body, Body):
                continue
            # Constants that another body of this node has added before are operands of the launch,
            # too.
            before = tuple([types[v] for v in inputs[len(node.inputs) :]])
            key = (body, node.device, node.attrs.get("carries"), before)
            if key not in compiled:
                single = one_device(hardware.targets[node.device], hardware.devices[node.device])
                for_it = single, _options_on(single, options)
                compiled[key] = _compiled(body, node, before, for_it, prepare, lower)
            attrs[name], constants = compiled[key]
            for constant in constants:
                operand = new_value(types, _type(constant))
                nodes.append(
                    replace(constant, outputs=(operand,), device=node.device, phase=node.phase)
                )
                inputs.append(operand)
        nodes.append(replace(node, inputs=tuple(inputs), attrs=Attrs(attrs)))
    return replace(graph, nodes=tuple(nodes), types=tuple(types))


def _options_on(hardware: Hardware, options: CompileOptions) -> CompileOptions:
    """Return what bodies on a device are compiled for."""
    return CompileOptions(
        "body",
        is_training=False,
        precision=options.precision,
        devices=(str(hardware.devices[0]),),
        gpu=options.gpu,
        deterministic=options.deterministic,
        verify=options.verify,
    )


def _compiled(
    body: Body,
    node: Node,
    before: Types,
    for_it: tuple[Hardware, CompileOptions],
    prepare: Prepare,
    lower: Lower,
) -> tuple[SubPlan, tuple[Node, ...]]:
    """Return the plan of a body, and the constants that it wants after its other operands.

    `before` are types of constants that another body of the node wants before those.
    """
    carries, xs = [node.attrs.int_(n) if n in node.attrs else 0 for n in ("carries", "xs")]
    graph = prepare(_as_job(body, carries, xs), *for_it)
    constants = tuple([n for n in graph.nodes if n.op is CONSTANT])
    operands = body.operand_types + before
    numbers = {n.outputs[0]: len(operands) + i for i, n in enumerate(constants)}
    nodes = [
        replace(n, op=VARIABLE, attrs=_variable(numbers[n.outputs[0]], _type(n)))
        if n.op is CONSTANT
        else n
        for n in graph.nodes
    ]
    plan = lower(replace(graph, nodes=tuple(nodes)), *for_it)
    operands += tuple([_type(n) for n in constants])
    sub_plan = SubPlan(plan, operands, body.result_types, carries, xs)
    sub_plan.check()
    return sub_plan, constants


def _as_job(body: Body, carries: int, xs: int) -> Graph:
    """Return a body as the graph of a job whose steps are those of the loop."""
    graph, b = body.graph, GraphBuilder()
    numbers = {value: i for i, value in enumerate(body.operands)}
    value_of: dict[ValueId, ValueId] = {}
    for node in graph.nodes:
        attrs = node.attrs
        if node.op is INPUT:
            number, type_ = numbers[node.outputs[0]], graph.types[node.outputs[0]]
            is_x = carries <= number < carries + xs
            attrs = Attrs({**attrs, "name": str(number)}) if is_x else _variable(number, type_)
            node = replace(node, op=node.op if is_x else VARIABLE, attrs=attrs)
        # The graph of a gradient has nodes of both passes; in a step of its loop they are one.
        outputs = b.copy(
            replace(node, device=0, phase=Phase.FORWARD),
            tuple([value_of[v] for v in node.inputs]),
            [graph.types[v] for v in node.outputs],
        )
        value_of.update(zip(node.outputs, outputs, strict=True))
    # `results` go on after the carries: those are entries by the step.
    for old, new in zip(body.operands[:carries], body.results, strict=False):
        # A carry that is handed on as it came needs no write.
        if new != old:
            with b.like_node(b.producer_of(value_of[new])):
                b.writes.append(Write(value_of[old], _carried(b, value_of[old], value_of[new])))
    b.outputs = [Output(f"out{i}", value_of[v]) for i, v in enumerate(body.results) if i >= carries]
    return b.freeze()


def _carried(b: GraphBuilder, old: ValueId, new: ValueId) -> ValueId:
    """Emit the write of a carry: of a sum, what is added."""
    node = b.producer_of(new)
    adds = node.op is ADD and node.inputs[0] == old and b.type_of(old).dtype.is_float
    if adds and b.type_of(node.inputs[1]) == b.type_of(old):
        return b.emit_one(CARRY_SUM, old, node.inputs[1])
    return b.emit_one(CARRY, old, new)


def _variable(number: int, type_: TensorType) -> Attrs:
    return Attrs(
        {
            "name": str(number),
            "dtype": type_.dtype.value,
            "shape": type_.shape,
            "role": SCRATCH,
            "init": _ZEROS,
        }
    )


def _type(constant: Node) -> TensorType:
    return declared_type(constant.attrs)


# Edges to and from the threads of the host. A source fills a register of batches; sinks read
# registers of outputs, one for each chain that makes some.

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


def add_source(chains: ChainActors, source: str, name: str) -> tuple[int, RegisterId]:
    """Add the source of a program's batches; return it and its register."""
    program = chains.program
    nodes = [n for n in program.graph.nodes if n.op is INPUT]
    types = [program.graph.types[n.outputs[0]] for n in nodes]
    place = chains.place_of([n.outputs[0] for n in nodes])
    offsets, size = chains.plan.stack(types, place)
    reader = "feed" if place == HOST_SIDE else "compute"
    ends = (source, _io_ns(size)), (reader, program.batch_ns)
    slots, reason = _slots(size, 1, *ends, place, latency_ns=IO_LATENCY_NS)
    # A slot for each batch under way, and one for the source to fill meanwhile.
    if program.is_pipelined and slots < program.in_flight + 1:
        slots, reason = program.in_flight + 1, "batches under way read it until they are done"
    register = chains.plan.register(
        name,
        RegisterKind.DATA,
        size,
        num_slots=slots,
        reason=reason,
        place=place,
    )
    for node, offset in zip(nodes, offsets, strict=True):
        label = node.attrs.str_("name")
        part = declared_part(node.attrs)
        chains.add_field(label, node.outputs[0], (register, offset), node.source, part)
    actor = chains.actors.add(source, ActorKind.SOURCE, chains.plan.port(source))
    chains.actors.produce(actor, register)
    return actor, register


def place_outputs(chains: ChainActors, name: str, rate: int) -> dict[int, RegisterId]:
    """Add a register of outputs for each chain that makes some; return them by chain.

    A sink will consume those of `rate` batches per firing.
    """
    program = chains.program
    nodes, producers = program.graph.nodes, program.graph.producers()
    lines = {o.value: o.source or nodes[producers[o.value]].source for o in program.graph.outputs}
    by_chain: dict[int, list[tuple[str, ValueId]]] = {}
    for output in program.graph.outputs:
        chain = program.maker[output.value]
        by_chain.setdefault(chain, []).append((output.name, output.value))
    registers: dict[int, RegisterId] = {}
    for chain, items in by_chain.items():
        place = chains.place_of([value for _, value in items])
        offsets, size = chains.plan.stack([program.graph.types[v] for _, v in items], place)
        maker = "fetch" if place == HOST_SIDE else "compute"
        batches = _taken(chains, chain, rate)
        slots, reason = _slots(
            size, batches, (maker, program.batch_ns), (name, batches * _io_ns(size)), place
        )
        register = chains.plan.register(
            name if len(by_chain) == 1 else f"{name}.{len(registers)}",
            RegisterKind.DATA,
            size,
            num_slots=slots,
            reason=reason,
            place=place,
        )
        registers[chain] = register
        for (label, value), offset in zip(items, offsets, strict=True):
            chains.add_field(label, value, (register, offset), lines[value])
        chains.actors.produce(chains.numbers[chain], register)
        for _, value in items:
            # A chain that reads an output finds it in this register: the value has no other.
            for other in chains.readers(value):
                if other != chain and not chains.actors.reads(chains.numbers[other], register):
                    number = chains.numbers[other]
                    chains.actors.consume(number, register, chains.numbers[chain])
    return registers


def add_sink(
    chains: ChainActors,
    name: str,
    outputs: dict[int, RegisterId],
    rate: int,
    *,
    is_flushed: bool,
) -> int:
    """Add an actor that reads outputs of `rate` batches per firing; return it."""
    sink = chains.actors.add(name, ActorKind.SINK, chains.plan.port(name), is_flushed=is_flushed)
    for chain, register in outputs.items():
        number = chains.numbers[chain]
        chains.actors.consume(sink, register, number, _taken(chains, chain, rate))
    return sink


def _taken(chains: ChainActors, chain: int, batches: int) -> int:
    """Return how often a chain fires for some batches: once for all of a step, or for each."""
    program = chains.program
    return batches // (program.batches_per_step if program.chains[chain].is_per_step else 1)


def _slots(
    size: int,
    consume: int,
    producer: tuple[str, float],
    consumer: tuple[str, float],
    place: int,
    latency_ns: float = 0.0,
) -> tuple[int, str]:
    """Return the slots of an edge to or from a host thread, and why so many.

    Pinned memory always has two: a link would else stand still while a port works.
    """
    least = consume * (2 if place == HOST_SIDE else 1)
    return choose_slots(
        consume,
        producer[1],
        consumer[1],
        size_bytes=size,
        budget_bytes=max(EDGE_BUDGET_BYTES, least * size),
        most=MAX_IO_SLOTS,
        latency_ns=latency_ns,
        names=(producer[0], consumer[0]),
    )


def _io_ns(size_bytes: int) -> float:
    return IO_NS + size_bytes / IO_BYTES_PER_NS


def lower(
    graph: Graph,
    hardware: Hardware,
    options: CompileOptions,
    graph_hash: str,
    evaluation: Graph | None = None,
    in_flight: int = 1,
) -> Plan:
    """Return the plan of a graph, and perhaps one that evaluates, that went through all passes.

    `in_flight`: batches of a step that may be under way, where they are several chains.
    Raises CompileError when the target lacks a kernel.
    """
    return _Lowering(hardware, options, in_flight).run(graph, evaluation, graph_hash)


@dataclass(slots=True)
class _Lowering:
    """State of one lowering: the actors so far, and where the variables live."""

    hardware: Hardware
    options: CompileOptions
    in_flight: int
    plan: PlanBuilder = field(init=False)
    actors: ActorGraph = field(init=False)
    state: StateRegisters = field(init=False)

    def run(self, graph: Graph, evaluation: Graph | None, graph_hash: str) -> Plan:
        self.plan = PlanBuilder(self.hardware)
        self.actors = ActorGraph(self.plan)
        self.state = StateRegisters(self.plan)
        _ = self.plan.compute  # the first of the plan
        program = make_program(graph, self.hardware, self.options.num_streams, 0)
        train = self._chains(program, 0, 0)
        data = add_source(train, "data", "batch")
        sums = program.batches_per_step > 1
        train.add(lambda is_per_step: _name(sums, is_per_step))
        rate = self.options.metrics_every * program.batches_per_step
        outputs = place_outputs(train, "metrics", rate)
        begun, ended = self._connect(train, data)
        is_flushed = self.options.metrics_every > 1
        sink = add_sink(train, "metrics", outputs, rate, is_flushed=is_flushed)
        # A step of one chain is over when its outputs are there. Of several, outputs may come
        # before
        # the updates are done.
        if len([chain for chain in program.chains if not chain.is_beside]) > 1:
            self._tell_of_steps(sink, begun, ended, outputs)
        if self.options.waits_for_listener:
            self._hold_steps("heard", (sink,), train, begun, ended, self.options.metrics_every)
        snapshot = add_snapshots(train, self.options, ended.update_boundary_actors)
        chains = [train]
        if evaluation is not None:
            chains.append(self._add_evaluation(evaluation, train, begun, ended))
        # From here on only registers without bytes may be added: the others have their offsets.
        self._share_bytes(chains)
        copy_variables(train, snapshot)
        self.actors.emit()
        return self.plan.finish(
            self.options.name,
            graph_hash=graph_hash,
            options=self.options.recorded(),
        )

    def _chains(self, program: StepProgram, chain: int, launch: int) -> ChainActors:
        """Return the chains of a program, with a home for its variables and constants."""
        chains = ChainActors(program, self.plan, self.actors, chain, launch)
        self.state.place(chains)
        return chains

    # -- the step --------------------------------------------------------------------------------

    def _connect(
        self, chains: ChainActors, data: tuple[int, RegisterId]
    ) -> tuple[StepBoundary, StepBoundary]:
        """Connect the chains of a program; return the boundaries of a batch and of a step."""
        chains.place_crossings()
        chains.place_temporaries()
        chains.hold_order()
        batch = chains.fence(is_per_step=False, compute=self.plan.compute, in_flight=self.in_flight)
        if batch is None:
            raise InternalError(f"plan {self.options.name!r} does nothing with a batch")
        self._feed(chains, data, batch.begins)
        step = chains.fence(is_per_step=True, compute=self.plan.compute)
        if step is None:
            return batch, batch
        batches = chains.program.batches_per_step
        reason = f"{batches}: the batches of a step"
        # The end of a batch lets the update begin. Whoever begins a batch has as many slots as a
        # step
        # has batches, so that none of the next step begins before the update has ended.
        for number in batch.boundary_actors:
            consumers = [*(step.begins if number == batch.end else ())]
            consumers += [step.end] if number in batch.begins else []
            self.actors.credits(
                "accumulated", number, dict.fromkeys(consumers, batches), batches, reason
            )
        return batch, step

    def _feed(
        self, chains: ChainActors, data: tuple[int, RegisterId], begins: tuple[int, ...]
    ) -> None:
        """Connect the source to the chains that read batches; the first of a batch wait for it."""
        source, register = data
        inputs = [n.outputs[0] for n in chains.program.graph.nodes if n.op is INPUT]
        readers = [chains.numbers[c] for value in inputs for c in chains.readers(value)]
        feeds = chains.brought
        for number in sorted({*readers, *(() if feeds else begins)}):
            self.actors.consume(number, register, source)
        for number in begins:
            if feeds and not any([self.actors.reads(number, crossing) for _, crossing in feeds]):
                feeder, crossing = feeds[0]
                self.actors.consume(number, crossing, feeder)

    # -- what waits for steps --------------------------------------------------------------

    def _tell_of_steps(
        self, sink: int, begun: StepBoundary, ended: StepBoundary, outputs: dict[int, RegisterId]
    ) -> None:
        """Have the sink wait for the end of a step, and a step for room in the sink.

        A listener that receives a step's outputs may read the variables: the step's updates are
        done by then. Updates that have begun can end even while the listener waits for them.
        """
        rate = self.options.metrics_every
        slots = [2 * rate]
        if begun is ended:
            slots += [self.plan.num_slots(register) for register in outputs.values()]
        self.actors.credits(
            "done", ended.end, {sink: rate}, slots[0], f"{slots[0]}: told when it is done"
        )
        reason = f"{min(slots)}: a step that has begun can end, whoever listens"
        for number in ended.update_boundary_actors:
            if number != ended.end:
                self.actors.credits("begun", number, {sink: rate}, min(slots), reason)

    def _add_evaluation(
        self, graph: Graph, train: ChainActors, batch: StepBoundary, step: StepBoundary
    ) -> ChainActors:
        """Add the actors that evaluate between two steps.

        `evaluation` gives leave for all batches once n steps are done; the sink of the results
        hands the credits of the steps back, when the last batch is done and the listener has heard
        of it. So no step changes the variables in between, and whoever hears of a result reads the
        values that it is of. Of several ranks a batch may end with what is sent to others, which
        the results do not wait for: there `evaluated` holds the steps until that end, too.
        """
        steps, batches = self.options.evaluate_every, self.options.evaluate_batches
        places = train.places()
        # Ranks of evaluation come after all of training: their spans are disjoint, so bytes are
        # shared.
        first_rank = max([place.span[1] for place in places])
        program = make_program(graph, self.hardware, self.options.num_streams, first_rank)
        num_launches = sum([place.num_launches for place in places])
        chains = self._chains(program, len(places), num_launches)
        due = self.actors.add("evaluation", ActorKind.COMPUTE, self.plan.compute)
        source, register = add_source(chains, "eval_data", "eval_batch")
        reason = f"{batches}: one credit per batch of an evaluation"
        leave = self.plan.register(
            "eval_leave", RegisterKind.CONTROL, 0, num_slots=batches, reason=reason
        )
        # One firing gives leave for all batches of the evaluation.
        self.actors.produce(due, leave, batches)
        self.actors.consume(source, leave, due)
        chains.add(lambda is_per_step: EVALUATE)
        outputs = place_outputs(chains, "eval_metrics", batches)
        span, _ = self._connect(chains, (source, register))
        sink = add_sink(chains, "eval_metrics", outputs, batches, is_flushed=False)
        holders = [due, sink]
        if self.hardware.ranks.count > 1:
            evaluated = self.actors.add("evaluated", ActorKind.COMPUTE, self.plan.compute)
            self.actors.credits("eval_done", span.end, {evaluated: batches}, batches, reason)
            holders.append(evaluated)
        self._hold_steps("eval_due", tuple(holders), train, batch, step, steps)
        return chains

    def _hold_steps(
        self,
        name: str,
        holders: tuple[int, ...],
        train: ChainActors,
        batch: StepBoundary,
        step: StepBoundary,
        steps: int,
    ) -> None:
        """Let the next step begin when all holders have fired once for some steps.

        They hold a credit of each of these steps, and of each batch, until then.
        """
        per_batch = steps * train.program.batches_per_step
        for number in dict.fromkeys((*step.boundary_actors, *batch.boundary_actors)):
            count, unit = (
                (steps, "step") if number in step.boundary_actors else (per_batch, "batch")
            )
            reason = f"{count}: one credit per {unit} until {name}"
            self.actors.credits(name, number, dict.fromkeys(holders, count), count, reason)

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
            # A path orders them already; one more edge would be a message per firing.
            if self.actors.is_before(a, b):
                continue
            names = [self.actors.drafts[n].name for n in (a, b)]
            # A control edge carries one token per firing, so that both ends must fire equally
            # often.
            if rates[earlier] != rates[later]:
                raise InternalError(
                    f"{names[0]!r} and {names[1]!r} share bytes at different rates without a path"
                )
            self.actors.control(f"{names[0]}>{names[1]} bytes", a, b, "1: bytes used again")


def _name(sums: bool, is_per_step: bool) -> str:
    if not sums:
        return "step"
    return "update" if is_per_step else "gradient"
