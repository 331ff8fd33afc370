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

**Places.** Every device of the job has an arena, and so has the host's side (`ops.copies`) where
anything lies there; each is packed and proven alone. Copies from place to place are chains on a
stream for each direction of a device.

**What waits for n steps is a rate.** The update consumes one credit of each of k batches; a
snapshot and an evaluation consume one of each of n steps. The credits come from the actors that
begin and end a step (its gates). With just n slots, the next step cannot begin before they are
done, and nobody reads a variable while it changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.errors import InternalError
from compiler.graph import Graph
from compiler.labels import EVALUATE
from compiler.lowering.actor_graph import ActorGraph
from compiler.lowering.chain_actors import ChainActors, Span
from compiler.lowering.plan_builder import PlanBuilder
from compiler.lowering.ports import add_sink, add_source, place_outputs
from compiler.lowering.snapshots import add_snapshots, copy_variables
from compiler.lowering.state import StateRegisters
from compiler.lowering.step_program import StepProgram, make_program
from compiler.ops.sources import INPUT
from compiler.options import CompileOptions
from compiler.plan import ActorKind, Plan, RegisterKind
from compiler.target import Hardware
from compiler.types import RegisterId


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
        if len([chain for chain in program.chains if not chain.is_beside]) > 1:
            self._tell_of_steps(sink, begun, ended, outputs)
        snapshot = add_snapshots(train, self.options, ended.update_gates)
        chains = [train]
        if evaluation is not None:
            chains.append(self._add_evaluation(evaluation, train, begun, ended))
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

    def _connect(self, chains: ChainActors, data: tuple[int, RegisterId]) -> tuple[Span, Span]:
        """Connect the chains of a program; return who begins and ends a batch, and a step."""
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
        every = chains.program.batches_per_step
        reason = f"{every}: the batches of a step"
        for number in batch.gates:
            consumers = [*(step.begins if number == batch.end else ())]
            consumers += [step.end] if number in batch.begins else []
            self.actors.credits(
                "accumulated", number, dict.fromkeys(consumers, every), every, reason
            )
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
            if brought and not any([self.actors.reads(number, there) for _, there in brought]):
                feeder, there = brought[0]
                self.actors.consume(number, there, feeder)

    # -- what waits for steps --------------------------------------------------------------

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
        self.actors.credits(
            "done", ended.end, {sink: every}, slots[0], f"{slots[0]}: told when it is done"
        )
        reason = f"{min(slots)}: a step that has begun can end, whoever listens"
        for number in ended.update_gates:
            if number != ended.end:
                self.actors.credits("begun", number, {sink: every}, min(slots), reason)

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
        chains = self._chains(program, len(places), num_launches)
        due = self.actors.add("evaluation", ActorKind.COMPUTE, self.plan.compute)
        done = self.actors.add("evaluated", ActorKind.COMPUTE, self.plan.compute)
        reason = f"{steps}: one credit per step between two evaluations"
        for number in step.gates:
            self.actors.credits("eval_due", number, {due: steps, done: steps}, steps, reason)
        per_batch = steps * train.program.batches_per_step
        for number in [n for n in batch.gates if n not in step.gates]:
            reason = f"{per_batch}: one credit per batch between two evaluations"
            consumers = {due: per_batch, done: per_batch}
            self.actors.credits("eval_due", number, consumers, per_batch, reason)
        source, register = add_source(chains, "eval_data", "eval_batch")
        reason = f"{batches}: one credit per batch of an evaluation"
        leave = self.plan.register(
            "eval_leave", RegisterKind.CONTROL, 0, num_slots=batches, reason=reason
        )
        self.actors.produce(due, leave, batches)
        self.actors.consume(source, leave, due)
        chains.add(lambda is_per_step: EVALUATE)
        outputs = place_outputs(chains, "eval_metrics", batches)
        span, _ = self._connect(chains, (source, register))
        self.actors.credits("eval_done", span.end, {done: batches}, batches, reason)
        add_sink(chains, "eval_metrics", outputs, batches, is_flushed=False)
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


def _name(sums: bool, is_per_step: bool) -> str:
    if not sums:
        return "step"
    return "update" if is_per_step else "gradient"
