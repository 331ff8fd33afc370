"""The actors of a plan while it is lowered: ports, control edges, and who comes before whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.lowering.chains import ChainDraft
from compiler.lowering.pipelines import CHANNELS
from compiler.lowering.plan_builder import PlanBuilder
from compiler.placement import StreamRole
from compiler.plan import Actor, ActorKind, Launch, Port, RegisterKind
from compiler.types import ActorId, RegisterId, StreamId

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
        """Let actors wait for firings of another one: a credit for each, rates by consumer."""
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
        """Return those of `starts` without whom no path leads to some of `ends`: as few as do."""
        kept = list(starts)
        for start in reversed(starts):
            others = [other for other in kept if other != start]
            if all([any([o == end or self.is_before(o, end) for o in others]) for end in ends]):
                kept = others
        return tuple(kept)

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
        gained = self._reach[later] | 1 << later
        for actor, reach in enumerate(self._reach):
            if actor == earlier or reach >> earlier & 1:
                self._reach[actor] = reach | gained
