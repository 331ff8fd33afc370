"""What the machine must know of a plan, in columns of ints.

Every pair (register of kind DATA or CONTROL, consumer) is an *edge* with a rate at either end and a
number of slots; a register with several consumers is several edges with the same producer, so a
slot is free only when every consumer has freed it. Every source without inputs has one more edge
from outside, its *admission*: a token on it is the permission for one firing, and its end is the
end of the run. A source with inputs is driven by them like any other actor.

Repetition counts are the smallest integer solution of the balance equations, one per connected part
(`memory.registers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType

from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST, STAGE
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED, ActorKind, RegisterKind
from memory.registers import RateEdge, RatesError, repetition_vector

OUTSIDE = -1
"""The producer of an admission edge."""

ENDLESS = 1 << 62
"""Slots of an edge that only orders: its producer never waits for one to be free."""

_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Edge:
    """One consumer's view of one register: tokens per firing at either end, and slots between.

    `initial` tokens are ready before the first firing. Only credits can be (registers of kind
    CONTROL): a run that resumes at step s of something due every N steps starts with s mod N.
    """

    name: str
    producer: int
    consumer: int
    produce: int
    consume: int
    num_slots: int
    initial: int = 0

    @property
    def is_one_way(self) -> bool:
        """Whether it holds up its consumer only."""
        return self.num_slots >= ENDLESS

    def made_by(self, firing: int) -> int:
        """Return the producer's firing that makes the last token of a consumer's; < 0: none."""
        # Tokens are numbered from 0, the initial ones first: the last of firing k has the number (k
        # + 1) * consume - 1. Division rounds down, so that initial tokens give a negative firing.
        return ((firing + 1) * self.consume - self.initial - 1) // self.produce

    def freed_by(self, firing: int) -> int:
        """Return the consumer's firing that frees the last slot of a producer's; < 0: none."""
        # As many slots as must have come back by then; rounded up to whole firings of the consumer.
        freed = (firing + 1) * self.produce + self.initial - self.num_slots
        return -(-freed // self.consume) - 1


@dataclass(frozen=True, slots=True)
class MachineTable:
    """The actor graph in columns; index is the actor's id, or the edge's number in `edges`.

    `inputs[a]` are the edges of actor a's input ports in the order of its ports (without
    admission), `outputs[a]` all edges that it fills. `admission[a]` is the admission edge of a
    source without inputs, else None. `firings_per_step[a]` is how often an admitted source a fires
    per step (0 for other actors); `repetitions[a]` is the balance of actor a. A detached actor is
    run by a thread of its own.
    """

    names: tuple[str, ...]
    edges: tuple[Edge, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    admission: tuple[int | None, ...]
    is_flushed: tuple[bool, ...]
    is_detached: tuple[bool, ...]
    streams: tuple[int, ...]
    repetitions: tuple[int, ...]
    firings_per_step: tuple[int, ...]

    @property
    def num_actors(self) -> int:
        """Number of actors."""
        return len(self.names)

    @property
    def sources(self) -> tuple[int, ...]:
        """The actors with an admission edge, in order."""
        return tuple([a for a, edge in enumerate(self.admission) if edge is not None])

    def all_inputs(self, actor: int) -> tuple[int, ...]:
        """Return the edges that an actor consumes, admission last."""
        admission = self.admission[actor]
        return self.inputs[actor] if admission is None else (*self.inputs[actor], admission)

    @staticmethod
    def of(
        plan: Plan, initial: Mapping[str, int] = _NO_TOKENS, *, is_one_thread: bool = False
    ) -> MachineTable:
        """Return the table of a plan; `initial` are tokens ready at the start, by register name.

        With `is_one_thread` no actor has a thread of its own, whatever its stream has.

        Raises InternalError when the plan's edges cannot work (see `from_edges`), or when `initial`
        names anything but a CONTROL register.
        """
        _check_initial(plan, initial)
        makers = {port.register: (a, port.rate) for a in plan.actors for port in a.outputs}
        edges: list[Edge] = []
        for actor in plan.actors:
            for port in actor.inputs:
                register = plan.registers[port.register]
                if register.kind not in (RegisterKind.DATA, RegisterKind.CONTROL):
                    raise InternalError(
                        f"actor {actor.name!r} has an input port on register {register.name!r} of"
                        f" kind {register.kind.value}; only data and control registers are edges"
                    )
                if port.register not in makers:
                    raise InternalError(
                        f"actor {actor.name!r} consumes register {register.name!r}, which no actor"
                        " produces"
                    )
                producer, rate = makers[port.register]
                tokens = initial.get(register.name, 0)
                edges.append(
                    Edge(
                        register.name, producer.id, actor.id, rate, port.rate, register.num_slots,
                        tokens,
                    )
                )  # fmt: skip
        return MachineTable.from_edges(
            [actor.name for actor in plan.actors],
            edges,
            sources=[a.id for a in plan.actors if a.kind is ActorKind.SOURCE],
            flushed=[a.id for a in plan.actors if a.is_flushed],
            detached=() if is_one_thread else _detached(plan),
            streams=[a.stream for a in plan.actors],
        )

    @staticmethod
    def from_edges(
        names: Sequence[str],
        edges: Sequence[Edge],
        *,
        sources: Sequence[int],
        flushed: Sequence[int] = (),
        detached: Sequence[int] = (),
        streams: Sequence[int] | None = None,
    ) -> MachineTable:
        """Return the table of a graph; without `streams` every actor has a stream of its own.

        Raises InternalError when rates do not balance, an edge has too few slots ever to move a
        token or to hold its initial ones, an actor has no input, or a source is flushed that has
        none.
        """
        num_actors = len(names)
        actors = range(num_actors)
        is_flushed, is_detached = set(flushed), set(detached)
        for edge in edges:
            _check_slots(edge, names)
        inputs: list[list[int]] = [[] for _ in actors]
        outputs: list[list[int]] = [[] for _ in actors]
        for index, edge in enumerate(edges):
            inputs[edge.consumer].append(index)
            outputs[edge.producer].append(index)
        admitted = [source for source in sources if not inputs[source]]
        admission: list[int | None] = [None] * num_actors
        all_edges = list(edges)
        for source in admitted:
            admission[source] = len(all_edges)
            # After the register's edges, so that `inputs` and `outputs` index those alone.
            all_edges.append(Edge("admission", OUTSIDE, source, 1, 1, 0))
        for a in actors:
            if not inputs[a] and admission[a] is None:
                raise InternalError(
                    f"actor {names[a]!r} has no input and is no source: it never ends"
                )
            if admission[a] is not None and a in is_flushed:
                raise InternalError(f"source {names[a]!r} is marked to be flushed; it has no input")
        repetitions, firings_per_step = _balance(names, edges, admitted)
        return MachineTable(
            names=tuple(names),
            edges=tuple(all_edges),
            inputs=tuple([tuple(row) for row in inputs]),
            outputs=tuple([tuple(row) for row in outputs]),
            admission=tuple(admission),
            is_flushed=tuple([a in is_flushed for a in actors]),
            is_detached=tuple([a in is_detached for a in actors]),
            streams=tuple(actors if streams is None else streams),
            repetitions=repetitions,
            firings_per_step=firings_per_step,
        )


def fits_one_thread(plan: Plan) -> bool:
    """Whether threads gain nothing: one stream of the host computes, and only ports have others."""
    is_detached = set(_detached(plan))
    others = [a for a in plan.actors if a.kind not in PORTED]
    are_inline = not any([a.id in is_detached or a.kind is ActorKind.COMM for a in others])
    return are_inline and all([stream.device == HOST for stream in plan.streams])


def _detached(plan: Plan) -> list[int]:
    """Return the actors that threads run: those of a stream that has one.

    Where a plan computes on several streams, no actor of the host runs on the dispatcher's thread:
    messages would wait for it, and with them the other streams.

    Stages have no order of batches that all keep: one goes forward where another goes back. What is
    enqueued on a device has one, and stages that enqueued different ones would wait for each other.
    So there an actor between ranks has a thread, which waits until its work has ended.
    """
    on_host = [a for a in plan.actors if plan.streams[a.stream].device == HOST]
    computing = {a.stream for a in plan.actors if a.kind not in PORTED}
    awaited = [
        a
        for a in plan.actors
        if a.kind is ActorKind.COMM and a not in on_host and STAGE in plan.mesh.names
    ]
    if len(computing) > 1:
        return [a.id for a in (*on_host, *awaited)]
    return [a.id for a in (*[a for a in on_host if plan.streams[a.stream].has_thread], *awaited)]


def _check_initial(plan: Plan, initial: Mapping[str, int]) -> None:
    kinds = {register.name: register.kind for register in plan.registers}
    for name in initial:
        if name not in kinds:
            raise InternalError(
                f"initial tokens were given for register {name!r}, which plan {plan.name!r} has not"
            )
        if kinds[name] is not RegisterKind.CONTROL:
            raise InternalError(
                f"initial tokens were given for register {name!r} of kind {kinds[name].value};"
                " expected kind control, because the bytes of a token must come from a firing"
            )


def _check_slots(edge: Edge, names: Sequence[str]) -> None:
    between = f"register {edge.name!r} from {names[edge.producer]!r} to {names[edge.consumer]!r}"
    if edge.produce < 1 or edge.consume < 1:
        raise InternalError(f"{between} has rates {edge.produce} and {edge.consume}; expected >= 1")
    if not 0 <= edge.initial <= edge.num_slots:
        raise InternalError(
            f"{between} starts with {edge.initial} tokens; expected 0 to {edge.num_slots}"
        )
    common = gcd(edge.produce, edge.consume)
    # The number of tokens keeps its remainder: what exceeds whole multiples can never be consumed.
    least = edge.produce + edge.consume - common + edge.initial % common
    if edge.num_slots < least:
        after = f" after {edge.initial} initial tokens" if edge.initial else ""
        raise InternalError(
            f"{between} has {edge.num_slots} slots; rates {edge.produce} and {edge.consume} need"
            f" at least {least}{after}"
        )


def _balance(
    names: Sequence[str], edges: Sequence[Edge], sources: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return repetitions per actor, and per source its firings per step, as few as can be."""
    rates = [
        RateEdge(e.producer, e.consumer, e.produce, e.consume, e.num_slots, e.initial)
        for e in edges
    ]
    try:
        repetitions = repetition_vector(len(names), rates)
    except RatesError as error:
        edge = edges[error.edge]
        raise InternalError(
            f"the rates do not balance at register {edge.name!r} between"
            f" {names[edge.producer]!r} and {names[edge.consumer]!r}"
        ) from None
    per_step = [0] * len(names)
    # Parts that share no edge keep their own pace: one's steps say nothing of the other's.
    for part in _parts(len(names), edges):
        fed = [a for a in sources if a in part]
        if not fed:
            raise InternalError(f"no source feeds actor {names[min(part)]!r}: it can never fire")
        # A period may hold several steps: a step is the least in which all sources of a part keep
        # pace.
        step = gcd(*[repetitions[a] for a in fed])
        for a in fed:
            per_step[a] = repetitions[a] // step
    return repetitions, tuple(per_step)


def _parts(num_actors: int, edges: Sequence[Edge]) -> Iterable[set[int]]:
    """Return the connected parts of a graph."""
    part_of = [{a} for a in range(num_actors)]
    for edge in edges:
        one, other = part_of[edge.producer], part_of[edge.consumer]
        if one is not other:
            # The smaller into the larger: each actor moves at most log2(n) times.
            small, large = sorted((one, other), key=len)
            large |= small
            for actor in small:
                part_of[actor] = large
    # Actors of a part share one set object, so identity tells parts apart.
    return {id(part): part for part in part_of}.values()
