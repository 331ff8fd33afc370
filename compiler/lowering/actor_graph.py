"""The actors of a plan while it is lowered: ports, control edges, and their partial order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.contract.placement import StreamRole
from compiler.contract.plan_tables import Actor, ActorKind, Launch, Port, RegisterKind
from compiler.contract.types import ActorId, RegisterId, StreamId, ValueId
from compiler.lowering.chains import ChainDraft, StreamKey
from compiler.lowering.plan_builder import PlanBuilder
from compiler.lowering.step_program import StepProgram
from compiler.ops.primitives.sources import VARIABLE
from compiler.storage.order import CHANNELS

_MOVING = {
    (StreamRole.H2D, False): ("copy_in", ActorKind.COPY),
    (StreamRole.D2H, False): ("copy_out", ActorKind.COPY),
    (StreamRole.H2D, True): ("feed", ActorKind.COPY),
    (StreamRole.D2H, True): ("fetch", ActorKind.COPY),
}
"""Names and kind of the actors on streams of copies, by whether they are beside steps."""


def actor_of(chain: ChainDraft, program: str, *, is_first: bool) -> tuple[str, ActorKind]:
    """Return the name and kind of the actor of a chain; `program` is a name of all its program.

    But for the first program of a plan, what moves something has that in front, too: whose it is
    does not follow from what the other one moves.
    """
    moving = _MOVING.get((chain.stream.role, chain.is_beside))
    if chain.stream.role is StreamRole.COMM:
        moving = CHANNELS[chain.stream.nth], ActorKind.COMM
    if moving is None:
        return program, ActorKind.COMPUTE
    label, kind = moving
    return (label if is_first else f"{program}.{label}"), kind


@dataclass(slots=True)
class ActorDraft:
    """An actor to be; its number is its id in the plan."""

    name: str
    kind: ActorKind
    stream: StreamId
    is_flushed: bool = False
    launches: tuple[Launch, ...] = ()
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)


class ActorGraph:
    """Grow the actor graph of a plan. It has no cycles: every edge leads to a later firing."""

    def __init__(self, plan: PlanBuilder) -> None:
        self.drafts: list[ActorDraft] = []
        self._plan = plan
        # Bit m of entry n: a path of edges leads from actor n to actor m.
        self._reach: list[int] = []
        self._edges: set[tuple[int, int]] = set()
        self._credits: set[str] = set()

    def add(self, name: str, kind: ActorKind, stream: StreamId, *, is_flushed: bool = False) -> int:
        """Add an actor and return its number."""
        self.drafts.append(ActorDraft(name, kind, stream, is_flushed))
        self._reach.append(0)
        return len(self.drafts) - 1

    def produce(self, actor: int, register: RegisterId, rate: int = 1) -> None:
        """Let an actor fill `rate` slots of a register per firing. Call it before `consume`."""
        self.drafts[actor].outputs.append(Port(register, rate))

    def consume(self, actor: int, register: RegisterId, producer: int, rate: int = 1) -> None:
        """Let an actor read `rate` slots of a register per firing."""
        self.drafts[actor].inputs.append(Port(register, rate))
        self._order(producer, actor)

    def control(self, name: str, producer: int, consumer: int, reason: str, slots: int = 1) -> None:
        """Let the consumer wait for each firing of the producer, which waits for the consumer's.

        With more slots the producer may be so many firings ahead.
        """
        register = self._plan.register(
            name, RegisterKind.CONTROL, 0, num_slots=slots, reason=reason
        )
        self.produce(producer, register)
        self.consume(consumer, register, producer)

    def credits(
        self, name: str, producer: int, consumers: Mapping[int, int], slots: int, reason: str
    ) -> None:
        """Let consumers wait for firings of a producer: a credit per firing, rates by consumer."""
        label = f"{name}.{self.drafts[producer].name}" if name in self._credits else name
        self._credits.add(name)
        register = self._plan.register(
            label, RegisterKind.CONTROL, 0, num_slots=slots, reason=reason
        )
        self.produce(producer, register)
        for consumer, rate in consumers.items():
            self.consume(consumer, register, producer, rate)

    def reads(self, actor: int, register: RegisterId) -> bool:
        """Whether an actor consumes a register."""
        return any([port.register == register for port in self.drafts[actor].inputs])

    def is_before(self, earlier: int, later: int) -> bool:
        """Whether a path of edges leads from one actor to another."""
        return bool(self._reach[earlier] >> later & 1)

    def has_edge(self, producer: int, consumer: int) -> bool:
        """Whether a register leads from one actor straight to another."""
        return (producer, consumer) in self._edges

    def leading(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
        """Return a minimal subset of `starts` from which paths lead to all of `ends`."""
        subset = list(starts)
        # From the last to the first: a start is dropped while the others still lead to all ends.
        for start in reversed(starts):
            others = [other for other in subset if other != start]
            if all([any([o == end or self.is_before(o, end) for o in others]) for end in ends]):
                subset = others
        return tuple(subset)

    def emit(self) -> None:
        """Add all actors to the plan."""
        for number, draft in enumerate(self.drafts):
            self._plan.actors.append(
                Actor(
                    ActorId(number),
                    draft.name,
                    draft.kind,
                    draft.stream,
                    draft.launches,
                    tuple(draft.inputs),
                    tuple(draft.outputs),
                    draft.is_flushed,
                    duration_ns=float(sum([launch.duration_ns for launch in draft.launches])),
                )
            )

    def _order(self, earlier: int, later: int) -> None:
        self._edges.add((earlier, later))
        if self.is_before(earlier, later):
            return
        # All that reaches `earlier` gains what `later` reaches, and `later`. O(actors) per new
        # edge.
        gained = self._reach[later] | 1 << later
        for actor, reach in enumerate(self._reach):
            if actor == earlier or reach >> earlier & 1:
                self._reach[actor] = reach | gained


# Fences around the batches of a pipeline's stage: `compiler.storage.order` says how many fit.


def limit_batches_in_flight(
    program: StepProgram, actors: ActorGraph, numbers: Sequence[int]
) -> int:
    """Let a stage go forward while it has slots; return how far its ends may be apart.

    `numbers` are the actors of the program's chains. What a batch sends back may still be on its
    way when the next one takes its slot, and what comes for one more may be on its way before.
    """
    of_batch = [
        n
        for n, chain in zip(numbers, program.chains, strict=True)
        if not chain.is_per_step and not chain.is_beside
    ]
    stage = [n for n in of_batch if actors.drafts[n].kind is not ActorKind.COMM]
    first = [n for n in stage if not any([actors.is_before(m, n) for m in stage])]
    last = [n for n in stage if not any([actors.is_before(n, m) for m in stage])]
    reason = f"{program.in_flight}: batches under way"
    for n in first:
        for m in [m for m in last if m != n]:
            name = f"{actors.drafts[n].name}.next.{actors.drafts[m].name}"
            actors.control(name, n, m, reason, program.in_flight)
    for one, other in _turns(program):
        a, b = numbers[one], numbers[other]
        name = f"{actors.drafts[a].name}.turn.{actors.drafts[b].name}"
        actors.control(name, a, b, "1: one batch after the other hands a variable on")
    for chains in _meetings(program):
        a, b = numbers[chains[0]], numbers[chains[-1]]
        if not actors.has_edge(a, b):
            name = f"{actors.drafts[a].name}.turn.{actors.drafts[b].name}"
            actors.control(name, a, b, "1: ranks meet for one batch after the other")
    return program.in_flight + 2


def _meetings(program: StepProgram) -> list[list[int]]:
    """Return the chains of a batch on each stream between ranks, in order, where they are several.

    Within a batch they go in their order; ranks must come to the next batch's after these.
    """
    by_stream: dict[StreamKey, list[int]] = {}
    for number, chain in enumerate(program.chains):
        if chain.stream.role is StreamRole.COMM and not chain.is_per_step:
            by_stream.setdefault(chain.stream, []).append(number)
    return [chains for chains in by_stream.values() if len(chains) > 1]


def _turns(program: StepProgram) -> list[tuple[int, int]]:
    """Return pairs of chains of a batch, of which the first waits for the other of the last batch.

    They touch one variable that batches write, and one of them writes it.
    """
    root = program.storage.root
    variables = {n.outputs[0] for n in program.graph.nodes if n.op is VARIABLE}
    touching: dict[ValueId, dict[int, bool]] = {}
    for number, chain in enumerate(program.chains):
        if chain.is_per_step:
            continue
        for node in [program.drafts[i].node for i in chain.launches]:
            written = {root[node.inputs[over]] for _, over in node.writes}
            for value in variables.intersection([root[v] for v in node.inputs]):
                writes = touching.setdefault(value, {})
                writes[number] = writes.get(number, False) or value in written
    pairs = {
        (one, other): None
        for writes in touching.values()
        for one in writes
        for other in writes
        if one < other and (writes[one] or writes[other])
    }
    return list(pairs)
