"""Registers as the edges of a synchronous dataflow graph: rates, slots, deadlock, order of firings.

Lee & Messerschmitt, "Synchronous data flow", Proc. IEEE 75(9), 1987. An actor produces and consumes
a fixed number of tokens per firing on each edge. Before anything runs, three questions have
answers: do the rates fit (the balance equations), how often does each actor fire in one period (the
repetition vector), and does a period complete within the slots there are (the token game).

A token occupies a slot from the start of the firing that writes it until the end of the one that
reads it. So an actor fires when each input has enough tokens and each output has enough free slots
*at the same time*. A register with several consumers is one edge per consumer, each with all its
slots: a slot is free when every consumer has freed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd, lcm

from memory.report import format_bytes

LONG_PERIOD = 200
"""Firings of one actor in a period from which on it pays to look for rounds."""


@dataclass(frozen=True, slots=True)
class RateEdge:
    """A register as one consumer sees it.

    produce, consume: tokens per firing of the producer and of the consumer, at least 1. num_slots:
    tokens it can hold. initial: tokens in it before the first firing.
    """

    producer: int
    consumer: int
    produce: int
    consume: int
    num_slots: int
    initial: int = 0


class RatesError(ValueError):
    """The balance equations have no solution: tokens would pile up on an edge, or run out.

    `edge` indexes the edge that contradicts the others.
    """

    def __init__(self, message: str, *, edge: int) -> None:
        super().__init__(message)
        self.edge = edge


@dataclass(frozen=True, slots=True)
class StuckActor:
    """Why a stuck actor cannot fire: an edge, and what is short there.

    is_for_slots: True where the actor waits for free slots, False where it waits for tokens. needed
    and available count those.
    """

    actor: int
    edge: int
    is_for_slots: bool
    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A period that cannot complete.

    waits: one reason per stuck actor, in actor order. cycle: indices into `waits`, each waiting for
    the actor of the next one, and the last for that of the first.
    """

    waits: tuple[StuckActor, ...]
    cycle: tuple[int, ...]

    @property
    def cycle_edges(self) -> tuple[int, ...]:
        """The edges along the cycle, one per actor in it."""
        return tuple(self.waits[i].edge for i in self.cycle)


def repetition_vector(num_actors: int, edges: Sequence[RateEdge]) -> tuple[int, ...]:
    """Return how often each actor fires in one period: the smallest such numbers per component.

    They solve the balance equations: on every edge, firings of the producer times its rate equal
    firings of the consumer times its rate. Actors without edges fire once. O(actors + edges)
    operations on fractions.

    Raises:
        RatesError: the equations have no positive solution.
        ValueError: an edge names a missing actor, or a rate is below 1.
    """
    touching = _edges_of(num_actors, edges)
    repetitions = [0] * num_actors
    for root in range(num_actors):
        if repetitions[root] == 0:
            firings = _relative_firings(root, edges, touching)
            # Exact fractions first, then the smallest whole numbers of the component.
            scale = lcm(*(f.denominator for f in firings.values()))
            counts = [int(f * scale) for f in firings.values()]
            divisor = gcd(*counts)
            for actor, count in zip(firings, counts, strict=True):
                repetitions[actor] = count // divisor
    return tuple(repetitions)


def _relative_firings(
    root: int, edges: Sequence[RateEdge], touching: Sequence[Sequence[int]]
) -> dict[int, Fraction]:
    """Return the firings of each actor in the component of `root` per firing of `root`."""
    firings = {root: Fraction(1)}
    component = [root]
    for actor in component:  # grows while it is walked
        for index in touching[actor]:
            edge = edges[index]
            is_producer = actor == edge.producer
            other = edge.consumer if is_producer else edge.producer
            ratio = Fraction(edge.produce, edge.consume)
            theirs = firings[actor] * ratio if is_producer else firings[actor] / ratio
            if other not in firings:
                firings[other] = theirs
                component.append(other)
            elif firings[other] != theirs:
                raise _rates_error(index, edge, firings[edge.consumer] / firings[edge.producer])
    return firings


def play_period(
    num_actors: int,
    edges: Sequence[RateEdge],
    repetitions: Sequence[int],
    visit: Callable[[int, int, int], None] | None = None,
    skip: Callable[[Sequence[int], int], None] | None = None,
    *,
    long_period: int = LONG_PERIOD,
) -> Deadlock | None:
    """Play one period of the token game; return None if it completes, else why it cannot.

    Every actor fires as often as `repetitions` says, whenever it can. The order does not matter: a
    firing never takes away what makes another actor ready (the class-S algorithms of Lee &
    Messerschmitt). Firings in a row are played at once, and so are rounds in a row
    (`RepeatedRounds`): an evaluation after a hundred thousand steps costs what one after a hundred
    does.

    Args:
        num_actors: actors are numbered from 0.
        edges: the edges between them.
        repetitions: firings of each actor in the period.
        visit: called with the actor, the number of its next firing, and how many it does in a row,
            in the order in which they are played.
        skip: called with the firings of each actor in a round, and how many rounds just like the
            one that was visited last come now without being visited; one more is always left. Of
            any two actors in a round, each has done the same share of its period.
        long_period: Rounds that repeat are played at once where an actor has more firings.

    Raises:
        ValueError: an edge names a missing actor, starts with more tokens than slots, or is not
            balanced by `repetitions`.
    """
    game = TokenGame(num_actors, edges, repetitions)
    rounds = RepeatedRounds(game, edges, repetitions, long_period=long_period)
    queue = deque(range(num_actors))
    is_queued = [True] * num_actors
    while queue:
        actor = queue.popleft()
        is_queued[actor] = False
        before = game.left[actor]
        if not game.fire(actor):
            continue
        if visit is not None:
            visit(actor, repetitions[actor] - before, before - game.left[actor])
        is_repeated = rounds.repeat(actor, skip)
        # A firing makes ready none but its neighbours; rounds that are left out, anyone.
        for other in range(num_actors) if is_repeated else game.neighbours[actor]:
            if not is_queued[other] and game.left[other]:
                is_queued[other] = True
                queue.append(other)
    return game.deadlock()


class TokenGame:
    """The state of the game: tokens on edges, firings left, and each actor's `neighbours`."""

    __slots__ = ("_edges", "_inputs", "_outputs", "left", "neighbours", "tokens")

    def __init__(
        self, num_actors: int, edges: Sequence[RateEdge], repetitions: Sequence[int]
    ) -> None:
        if len(repetitions) != num_actors:
            raise ValueError(f"expected {num_actors} repetitions, got {len(repetitions)}")
        touching = _edges_of(num_actors, edges)
        for index, edge in enumerate(edges):
            _check_playable(index, edge, repetitions)
        self._edges = edges
        self._inputs = [
            [i for i in indices if edges[i].consumer == a] for a, indices in enumerate(touching)
        ]
        self._outputs = [
            [i for i in indices if edges[i].producer == a] for a, indices in enumerate(touching)
        ]
        self.neighbours = [
            # The sum less one end is the other end; for an edge to itself, the same actor.
            tuple(dict.fromkeys(edges[i].producer + edges[i].consumer - a for i in indices))
            for a, indices in enumerate(touching)
        ]
        self.tokens = [edge.initial for edge in edges]
        self.left = list(repetitions)

    def ready(self, actor: int) -> int:
        """Return how often in a row an actor can fire now."""
        edges, tokens = self._edges, self.tokens
        times = self.left[actor]
        for i in self._inputs[actor]:
            times = min(times, tokens[i] // edges[i].consume)
        for i in self._outputs[actor]:
            times = min(times, (edges[i].num_slots - tokens[i]) // edges[i].produce)
        return times

    def fire(self, actor: int, at_most: int | None = None) -> bool:
        """Fire `actor` as often in a row as it can, and may; return whether it fired at all."""
        edges, tokens = self._edges, self.tokens
        times = self.ready(actor)
        if at_most is not None:
            times = min(times, at_most)
        if times <= 0:
            return False
        self.left[actor] -= times
        for i in self._inputs[actor]:
            tokens[i] -= times * edges[i].consume
        for i in self._outputs[actor]:
            tokens[i] += times * edges[i].produce
        return True

    def deadlock(self) -> Deadlock | None:
        """Return the stuck actors and why, once nothing can fire; None if the period is done."""
        waits = [self._wait(actor) for actor, firings_left in enumerate(self.left) if firings_left]
        if not waits:
            return None
        # By balance, whoever is waited for has firings left too; so the waits end in a cycle.
        place = {wait.actor: i for i, wait in enumerate(waits)}
        position: dict[int, int] = {}
        path: list[int] = []
        i = 0
        while i not in position:
            position[i] = len(path)
            path.append(i)
            edge = self._edges[waits[i].edge]
            i = place[edge.producer + edge.consumer - waits[i].actor]
        return Deadlock(tuple(waits), tuple(path[position[i] :]))

    def _wait(self, actor: int) -> StuckActor:
        for i in self._inputs[actor]:
            if self.tokens[i] < self._edges[i].consume:
                return StuckActor(actor, i, False, self._edges[i].consume, self.tokens[i])
        for i in self._outputs[actor]:
            free = self._edges[i].num_slots - self.tokens[i]
            if free < self._edges[i].produce:
                return StuckActor(actor, i, True, self._edges[i].produce, free)
        raise AssertionError(f"actor {actor} can fire, so nothing is stuck")


class RepeatedRounds:
    """Skips rounds of firings that repeat, and accounts for them at once.

    A round is what happened between two firings of one actor. It can follow itself as often as all
    firings last if it left the tokens as they were between actors that took part, and where only
    one end did, tokens or slots suffice: there they change in one direction, so that the last round
    says it for all. Nor may the other end become ready meanwhile, for who asks in which turn actors
    are ready. Which rounds are looked at has no bearing on that. One actor for each number of
    repetitions begins rounds, so that steps make an epoch, and epochs an evaluation; rounds of
    several firings are found by comparing with ever later ones (Brent, "An improved Monte Carlo
    factorization algorithm", 1980).
    """

    __slots__ = ("_count", "_edges", "_game", "_kept", "_repetitions", "_wait")

    def __init__(
        self,
        game: TokenGame,
        edges: Sequence[RateEdge],
        repetitions: Sequence[int],
        begins: Sequence[int] = (),
        *,
        long_period: int,
    ) -> None:
        """`begins`: of which actors one for each number of repetitions begins rounds, if given."""
        most = max(repetitions, default=0)
        # Reversed: of actors with equal repetitions the first one stays in the dict.
        first = {repetitions[a]: a for a in reversed(begins or range(len(repetitions)))}
        # A short period is played out sooner than its rounds are found.
        begins = list(first.values()) if most > long_period else []
        self._game = game
        self._edges = edges
        self._repetitions = repetitions
        self._kept: dict[int, tuple[list[int], list[int]] | None] = dict.fromkeys(begins)
        self._count = dict.fromkeys(begins, 0)
        self._wait = dict.fromkeys(begins, 1)

    def repeat(self, actor: int, skip: Callable[[Sequence[int], int], None] | None) -> bool:
        """Repeat the rounds that end with a firing of `actor`; return whether there were any."""
        if actor not in self._kept:
            return False
        snapshot, game = self._kept[actor], self._game
        times = 0
        if snapshot is not None:
            fired = [before - after for before, after in zip(snapshot[1], game.left, strict=True)]
            grown = [now - before for before, now in zip(snapshot[0], game.tokens, strict=True)]
            times = self._times(fired, grown)
            if times and skip is not None:
                skip(fired, times)
            game.left[:] = [n - times * f for n, f in zip(game.left, fired, strict=True)]
            game.tokens[:] = [n + times * g for n, g in zip(game.tokens, grown, strict=True)]
        self._count[actor] += 1
        # Brent: the state kept is replaced at doubling distances, which finds rounds of any length.
        if times or self._count[actor] >= self._wait[actor]:
            self._wait[actor] = 1 if times else 2 * self._wait[actor]
            self._count[actor] = 0
            self._kept[actor] = (list(game.tokens), list(game.left))
        return times > 0

    def _times(self, fired: Sequence[int], grown: Sequence[int]) -> int:
        """Return how often a round can follow, by what it fired and by how much edges grew."""
        game, every = self._game, self._repetitions
        # Unequal shares: one actor would be done with its period before the others.
        shares = {Fraction(f, n) for f, n in zip(fired, every, strict=True) if f}
        if len(shares) != 1:
            return 0
        # One round is left to be visited, as `play_period` says.
        times = min([num_left // f for num_left, f in zip(game.left, fired, strict=True) if f]) - 1
        for edge, growth, tokens in zip(self._edges, grown, game.tokens, strict=True):
            # Both took part, and tokens pile up or run out: the rounds are not alike.
            if growth and fired[edge.producer] and fired[edge.consumer]:
                return 0
            free = edge.num_slots - tokens
            if growth > 0:
                times = min(times, free // growth)
                # The consumer cannot fire now, and must not become ready in between.
                if tokens - growth < edge.consume:
                    times = min(times, (edge.consume - 1 - tokens) // growth)
            elif growth < 0:
                times = min(times, tokens // -growth)
                # Nor must the producer, which lacks slots now.
                if free + growth < edge.produce:
                    times = min(times, (edge.produce - 1 - free) // -growth)
        return max(times, 0)


def _edges_of(num_actors: int, edges: Sequence[RateEdge]) -> list[list[int]]:
    """Return the edges that touch each actor, once each, after checking them."""
    touching: list[list[int]] = [[] for _ in range(num_actors)]
    for index, edge in enumerate(edges):
        for actor in (edge.producer, edge.consumer):
            if not 0 <= actor < num_actors:
                raise ValueError(f"edge {index} names actor {actor}, but there are {num_actors}")
        if edge.produce < 1 or edge.consume < 1:
            raise ValueError(
                f"edge {index} has rates {edge.produce}:{edge.consume}; both must be at least 1"
            )
        touching[edge.producer].append(index)
        if edge.consumer != edge.producer:
            touching[edge.consumer].append(index)
    return touching


def _rates_error(index: int, edge: RateEdge, ratio: Fraction) -> RatesError:
    """`ratio`: firings of the consumer per firing of the producer, as the other edges demand."""
    own_ratio = Fraction(edge.produce, edge.consume)
    return RatesError(
        f"edge {index} (actor {edge.producer} -> actor {edge.consumer}) produces {edge.produce} "
        f"and consumes {edge.consume} tokens per firing: that is {own_ratio} firings of actor "
        f"{edge.consumer} per firing of actor {edge.producer}, but the other edges demand {ratio}; "
        "change a rate on one of them",
        edge=index,
    )


def _check_playable(index: int, edge: RateEdge, repetitions: Sequence[int]) -> None:
    if not 0 <= edge.initial <= edge.num_slots:
        raise ValueError(
            f"edge {index} starts with {edge.initial} tokens in {edge.num_slots} slots"
        )
    produced = repetitions[edge.producer] * edge.produce
    consumed = repetitions[edge.consumer] * edge.consume
    if produced != consumed:
        raise ValueError(
            f"edge {index} produces {produced} and consumes {consumed} tokens in a period; "
            "pass the repetition vector of these edges"
        )


def choose_slots(
    consume: int,
    producer_ns: float,
    consumer_ns: float,
    *,
    size_bytes: int,
    budget_bytes: int,
    most: int,
    latency_ns: float = 0.0,
    names: tuple[str, str] = ("producer", "consumer"),
) -> tuple[int, str]:
    """Return the number of slots for an edge, and the reason in words: "2: io overlaps compute".

    One token is written per firing, `consume` are read. Double buffering: one set of tokens is
    written while the other is read. More where latency demands it: a slot is taken for
    producer_ns + latency_ns + consumer_ns and tokens pass once per period, that of the slower side,
    so ceil(time / period) of them are under way. A power of two where tokens are read one by one,
    so that slots of several edges come round together.

    Args:
        consume: tokens per firing of the consumer; with fewer slots it would never fire.
        producer_ns: duration of a firing of the producer.
        consumer_ns: duration of a firing of the consumer.
        size_bytes: bytes of one slot.
        budget_bytes: the most bytes that all slots may take, but for the first `consume`.
        most: slots at most, where they are for latency.
        latency_ns: from the end of a producer's firing until the consumer can read (a wire, a
            jitter).
        names: of the two ends, for the reason.
    """
    double = 2 * consume
    period_ns = max(producer_ns, consumer_ns / consume)
    # Little's law: slots in use = time in use / time per token.
    under_way = ceil((producer_ns + latency_ns + consumer_ns) / period_ns) if period_ns > 0 else 0
    num_wanted = max(double, min(under_way, most))
    affordable = max(consume, budget_bytes // size_bytes) if size_bytes else num_wanted
    if consume == 1:
        num_wanted = _power_of_two(num_wanted)
        affordable = _power_of_two(affordable)
    count = min(num_wanted, affordable)
    if count < num_wanted:
        effect = "no overlap" if count == consume else "less overlap"
        budget = format_bytes(budget_bytes)
        return count, f"{count}: {effect}, the budget of {budget} holds no more than {count}"
    why = ", latency keeps that many under way" if num_wanted > double else ""
    return count, f"{count}: {names[0]} overlaps {names[1]}{why}"


def _power_of_two(count: int) -> int:
    """Round down to a power of two."""
    return 1 << count.bit_length() - 1


# Whether edges alone hold some actors of a dataflow graph to one order, and which.
#
# Actors that share what only one of them can have at a time (a stream, whose firings run in the
# order in which they were started) run in an order that the edges leave open, unless at no time two
# of them are ready. One game shows that: all others play as far as they can, and only then the one
# of them that is ready fires, once. A firing never takes away what makes another actor ready, so
# what is not ready then is not ready in any order of events before that firing has ended.
#
# Two periods are played: in the first no edge has come round yet, so that whatever may be out of
# turn later is there, too (as in `actors.race.race`).

_PERIODS = 2


@dataclass(frozen=True, slots=True)
class ForcedOrder:
    """The order of actors: `first` has each of them where it fires for the first time.

    `rivals` are two that may be ready at the same time, of which nothing says who is first; None
    where there are none.
    """

    first: tuple[int, ...]
    concurrent_pair: tuple[int, int] | None


def find_forced_order(
    num_actors: int,
    edges: Sequence[RateEdge],
    repetitions: Sequence[int],
    actors: Sequence[int],
    *,
    long_period: int = LONG_PERIOD,
) -> ForcedOrder:
    """Return the order in which some actors fire, up to two that are ready at once.

    Args:
        num_actors: Actors are numbered from 0.
        edges: The edges between them; a period completes (`play_period`).
        repetitions: Firings of each actor in a period.
        actors: Those that are asked about.
        long_period: As for `play_period`.

    Raises:
        ValueError: As `play_period`.
    """
    repetitions = [_PERIODS * count for count in repetitions]
    game = TokenGame(num_actors, edges, repetitions)
    # A round is left out only between two turns: there it is known who is ready.
    rounds = RepeatedRounds(game, edges, repetitions, actors, long_period=long_period)
    is_held = [False] * num_actors
    for actor in actors:
        is_held[actor] = True
    first: dict[int, None] = {}
    queue = deque([a for a in range(num_actors) if not is_held[a]])
    candidates = set(actors)
    while True:
        while queue:
            actor = queue.popleft()
            if game.fire(actor):
                _ask_next(game.neighbours[actor], game, is_held, queue, candidates)
        # Who is not ready has to be asked again only when a neighbour has fired.
        candidates = {a for a in candidates if game.ready(a) > 0}
        if len(candidates) != 1:
            rivals = sorted(candidates, key=actors.index)[:2]
            return ForcedOrder(tuple(first), (rivals[0], rivals[1]) if rivals else None)
        (actor,) = candidates
        first.setdefault(actor)
        game.fire(actor, 1)
        is_repeated = rounds.repeat(actor, None)
        others = range(num_actors) if is_repeated else game.neighbours[actor]
        _ask_next(others, game, is_held, queue, candidates)


def _ask_next(
    others: Iterable[int],
    game: TokenGame,
    is_held: Sequence[bool],
    queue: deque[int],
    asked: set[int],
) -> None:
    """Queue the actors that may be ready now; those held back go to `asked` instead."""
    for other in others:
        if is_held[other]:
            asked.add(other)
        elif game.left[other]:
            queue.append(other)
